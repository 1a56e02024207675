package slidingwindow

// view is what the last reply showed, and the offset of the clock that decides. now is always the coordinator's clock. The coordinator's mu
// guards it.
//
// A refusal by the view uses the latest time that the server's clock may show: by then as many permits as possible are out of the window.
// An admission by the view uses the earliest, and is counted at the latest.
type view struct {
	valid       bool // the counts are those of the last reply
	counts      counts
	epoch, back int64 // of the state that the counts are from
	offset      clockOffset
}

// latest and earliest return the bounds of the server's time.
func (v *view) latest(now int64) int64 { return max(v.counts.seen, now+v.offset.most) }

func (v *view) earliest(now int64) int64 { return max(v.counts.seen, now+v.offset.least) }

// bounds returns both bounds. Before the first reply they are the process's own time.
func (v *view) bounds(now int64) (earliest, latest int64) {
	if v.offset.measured {
		return v.earliest(now), v.latest(now)
	}
	return now, now
}

// stale reports whether, at a time of the server's clock, a sub-interval has begun since the last reply.
func (v *view) stale(r *rule, at int64) bool { return r.index(at) != r.index(v.counts.seen) }

// clockOffset estimates how far a server's clock is ahead of the coordinator's, in microseconds. The server reads its clock after a batch
// was sent and before its reply is received. So each reply gives bounds, as far apart as its round trip was long. The bounds of all replies
// together are as narrow as the fastest ways there and back. The last reply alone is not enough: after each slow round trip followed by a
// fast one, the server would be asked for permits that it cannot admit yet.
type clockOffset struct {
	measured, fresh bool // measured: there was a reply; fresh: the coordinator's clock was not set back since
	least, most     int64
	at              int64 // when the last reply was received
}

// drift is how fast two clocks may move apart: 1 µs in 2^drift µs.
const drift = 13

// update narrows the bounds by a reply. If they contradict the earlier ones, a clock was set, and the new ones replace them.
func (e *clockOffset) update(clock, sent, received int64) {
	least, most := clock-received, clock-sent
	if e.fresh {
		apart := (received-e.at)>>drift + 1
		l, m := max(least, e.least-apart), min(most, e.most+apart)
		if l <= m {
			least, most = l, m
		}
	}
	*e = clockOffset{true, true, least, most, received}
}
