package admission

// A call begins when its rate, its concurrency and its window all grant it. They are asked one after the other, so the order decides what
// a refusal by one costs in the others:
//
//	step                 when                             a refusal gives back         what other calls see until then
//	1. local state       at once, without a round trip    nothing                      nothing
//	2. rate              at once; then the call waits     nothing                      nothing
//	3. concurrency       a lead before the permits are    the permits                  the bucket without the permits
//	                     due
//	4. window            right after that                 the permits and the place    the same, and one place fewer
//
// A waiting call holds its permits and nothing else, so others can use the place and the count. The window comes last because a count costs
// others most: it refuses them for the whole length of the window. A place is held in vain only while the window is full, and then every
// other call is refused as well.
//
// Permits are refunded while they are not due. Permits that were due at once are refunded, too, unless others have taken permits behind them
// that are not due yet. If asking the concurrency and the window takes longer than the lead, the permits fall due meanwhile,
// and lapse if they refuse.
//
// A row may let its calls wait for a place (Call.PlaceWait). If step 3 finds none, the call gives its permits back, waits in the semaphore's
// queue, and then begins again at step 2 with its place. So a call waits for a place with empty hands: permits that fall due in the
// meantime would lapse, or let the calls that got places together begin together, beyond the rate. Three things keep the places in use:
//
//   - The bucket of a row with a concurrency saves up at least one permit (size in registry/words.go), so a place does not wait for an interval
//     in which no call has begun. One permit of the bucket does for a fleet what a permit in the hands of each process would do beyond the rate.
//   - When a place of a fleet is released, the first call of this process that waits for one reserves its permits at the same time (line). It
//     has both after one round trip. If another process gets the place, the permits go back.
//   - Once a call has found no place, those of this process that wait for their permits in step 2 queue, too (approach). Otherwise their
//     permits would fall due, one by one, for places that are not free, and a call with a place would wait behind them.
//
// Two other orders were considered:
//
//   - The place first, always: calls that wait for the rate would hold places. With 100/s, a wait of half a second and 20 places, the first
//     20 callers hold all places, and fewer calls run than the row allows.
//   - Permits and place held while waiting for the other: each refusal by the concurrency would cost its permits.
//
// What remains is that a call that has queued holds its place while it waits for its permits, which is at most its wait for the rate. As a
// full concurrency slows calls down, the permits are usually there by then.

// step is the next thing that a call does to begin.
type step uint8

const (
	toQueue    step = iota // wait for a place, holding nothing
	toReserve              // ask the rate
	toApproach             // wait until a lead before the permits are due
	toTake                 // ask for a place, if the call has none, and to be counted in the window
	toAwait                // wait until the permits are due
	toBegin                // begin
)

// String returns one word.
func (s step) String() string {
	return [...]string{"queue", "reserve", "approach", "take", "await", "begin"}[s]
}

// permits is what a call has of the rate.
type permits uint8

const (
	wanted permits = iota // none yet
	ahead                 // due later
	near                  // due within the lead
	due                   // due; also if the row has no rate
)

// places is what a call has of the concurrency.
type places uint8

const (
	untried places = iota // it has not asked yet
	full                  // no place is free, and the call may wait for one
	taken                 // it has one; also if the row has no concurrency
)

// counts is what a call has of the window.
type counts uint8

const (
	uncounted counts = iota
	inWindow         // it is counted; also if the row has no window
)

// progress is what a call has of the limits of its row. It decides nothing but the next step.
type progress struct {
	permits permits
	place   places
	count   counts
}

// next returns the next step. With a full concurrency the call must have given its permits back.
func (p progress) next() step {
	switch {
	case p.place == full:
		return toQueue
	case p.permits == wanted:
		return toReserve
	case p.permits == ahead:
		return toApproach
	case p.place == untried || p.count == uncounted:
		return toTake
	case p.permits == near:
		return toAwait
	}
	return toBegin
}
