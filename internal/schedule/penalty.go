package schedule

// Penalty tracks the penalties of one bucket by the replies of the store. The zero value is a bucket without penalties.
//
// A reply carries the total time for which the bucket was paused, and the end of the last penalty. A smaller total than before means that
// the bucket was reset or its state was lost, which ends a current penalty. Totals from before and after cannot be compared, and the new
// one may already be larger. So a later end shows a new penalty too. [Schedule.Pause] then lets no permit fall due before that end, whatever
// the difference of the totals.
type Penalty struct {
	paused int64 // total time of all penalties, in microseconds
	until  int64 // end of the last penalty, by the store's clock
}

// Observe records a reply received at now by the store's clock. It returns by how much the previous penalty ended early, the least duration
// of a new penalty, and whether there is a new penalty.
func (p *Penalty) Observe(paused, until, now int64) (shorter, longer int64, held bool) {
	longer = paused - p.paused
	if longer < 0 {
		shorter = max(0, p.until-now)
		p.until = now
	}
	held = longer > 0 || until > p.until
	p.paused, p.until = paused, until
	return shorter, max(0, longer), held
}
