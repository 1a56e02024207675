package registry

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// crowd has the calls of Enter that wait by one entry. When another row is in force, they give back what they hold, and ask again in the order in which
// they came, before the calls that come meanwhile. The zero value is ready for use.
type crowd struct {
	mu      sync.Mutex
	changes int // number of calls of end
	waiting map[*visit]struct{}
}

// visit is a call of Enter. Its goroutine alone uses began and came.
type visit struct {
	began time.Time // when the call came
	came  int       // changes of the crowd when the call found its row

	number int64 // of its first wait: later ones are higher; 0 before

	reservation *tokenbucket.Reservation // of a row with a rate only; else nil
	give        context.CancelCauseFunc  // lets a call of another row give back what it holds; else nil
	gave        chan struct{}            // closed when that has ended, or the call begins
	moved       chan struct{}            // closed when it is the call's turn to ask again; nil while it does not wait

	ended atomic.Bool                   // end has let the call give back what it holds
	asked atomic.Pointer[chan struct{}] // closed when it has asked again, by whoever takes it out; nil if nothing waits for that
}

// waits counts the calls of all registries that have waited.
var waits atomic.Int64

// waited returns how long the call has waited.
func (v *visit) waited() time.Duration { return time.Since(v.began) }

// awaitTurn waits until all calls of another row have given back what they hold.
func (v *visit) awaitTurn(ctx context.Context) {
	if ended := v.ended.Swap(false); v.give == nil || !ended {
		return
	}
	select {
	case <-v.moved:
	case <-ctx.Done():
	}
}

// awaitOthers holds a call back that has just come, as long as those ask that have waited by another row. It reports whether there were any.
func (v *visit) awaitOthers(ctx context.Context, e *entry) (some bool) {
	if e == nil || v.number != 0 {
		return false
	}
	asked := e.moving.Load()
	if asked == nil {
		return false
	}
	v.number = waits.Add(1)
	most := time.NewTimer(mostOrdered)
	defer most.Stop()
	select {
	case <-*asked:
	case <-most.C: // the store may be slow, or gone
	case <-ctx.Done():
	}
	return true
}

// passOn lets the next call ask.
func (v *visit) passOn() { v.passTo(nil) }

// passTo is passOn, and then the next call waits for another channel.
func (v *visit) passTo(next *chan struct{}) {
	if asked := v.asked.Swap(next); asked != nil {
		close(*asked)
	}
}

// find notes that a call has found its row.
func (c *crowd) find(v *visit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v.came = c.changes
}

// join adds a call that waits. It reports false if another row is in force since the call found its own.
func (c *crowd) join(v *visit) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if v.came != c.changes {
		return false
	}
	if c.waiting == nil {
		c.waiting = map[*visit]struct{}{}
	}
	if v.number == 0 {
		v.number = waits.Add(1)
	}
	v.moved, v.gave = make(chan struct{}), make(chan struct{})
	c.waiting[v] = struct{}{}
	return true
}

// leave removes a call.
func (c *crowd) leave(v *visit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, v)
}

// mostOrdered bounds how long the calls of a row that has changed ask one after the other. Each may take a round trip, and a load waits for them.
const mostOrdered = 100 * time.Millisecond

// mover is a call that waited when another row came in force. A call that leaves meanwhile may change its own fields.
type mover struct {
	began       time.Time
	number      int64
	reservation *tokenbucket.Reservation
	give        context.CancelCauseFunc
	gave, moved chan struct{}
	asks        chan struct{} // asked, of that time
}

// empty reports whether no call waits.
func (c *crowd) empty() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.waiting) == 0
}

// end lets all calls that wait give back what they hold, because another row may be in force. resume lets them ask again.
func (c *crowd) end(ctx context.Context) (resume func()) {
	c.mu.Lock()
	c.changes++
	movers := make([]mover, 0, len(c.waiting))
	for v := range c.waiting {
		asks := make(chan struct{})
		v.ended.Store(true)
		v.passTo(&asks)
		movers = append(movers, mover{v.began, v.number, v.reservation, v.give, v.gave, v.moved, asks})
	}
	c.waiting = nil
	c.mu.Unlock()
	if len(movers) == 0 {
		return func() {}
	}
	slices.SortFunc(movers, func(a, b mover) int { return cmp.Or(a.began.Compare(b.began), cmp.Compare(a.number, b.number)) })
	var giving sync.WaitGroup
	for _, v := range slices.Backward(movers) {
		if v.give != nil {
			v.give(tokenbucket.ErrSuperseded)
			giving.Go(func() { <-v.gave })
		} else {
			giving.Go(func() { _ = v.reservation.Cancel(ctx) }) // the limiter logs an unavailable store
		}
	}
	giving.Wait() // a call that asked earlier would get the permits of the others
	return func() {
		ordered := time.NewTimer(mostOrdered)
		defer ordered.Stop()
		late := false
		for _, v := range movers {
			if close(v.moved); late {
				continue
			}
			select {
			case <-v.asks:
			case <-ordered.C:
				late = true
			}
		}
	}
}

// await blocks until the permits of a reservation are due. It returns tokenbucket.ErrSuperseded if another row is in force, and the permits are given back.
func (c *crowd) await(ctx context.Context, v *visit) (*gate.Admission, error) {
	r := v.reservation
	if !c.join(v) {
		_ = r.Cancel(ctx)
		if isReady(r) {
			return gate.Wait(ctx, r)
		}
		return nil, tokenbucket.ErrSuperseded
	}
	defer c.leave(v)
	select {
	case <-r.Ready():
	case <-ctx.Done():
	case <-v.moved:
		if !isReady(r) { // permits that were due are used
			return nil, tokenbucket.ErrSuperseded
		}
	}
	return gate.Wait(ctx, r)
}

// isReady reports whether the permits of a reservation are due.
func isReady(r *tokenbucket.Reservation) bool {
	select {
	case <-r.Ready():
		return true
	default:
		return false
	}
}
