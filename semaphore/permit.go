package semaphore

import (
	"context"
	"strconv"
	"time"
)

// Permit is a number of permits that a caller holds. Its methods may be called by many goroutines at once. The methods of a nil Permit
// behave as those of one that is not held.
type Permit struct {
	engine  engine
	permits int
	fence   int64
	over    bool          // no longer held; more.ended tells why
	since   time.Duration // when it was granted; see clock.Mono

	// Neighbours in the list of holders; only in memory.
	prev, next *Permit
	more       *more
}

// more is the part of a Permit that most permits in memory do not need. The engine's lock guards it.
type more struct {
	id, label string
	ended     error // why the permit is no longer held; nil if it was released
	ctx       *permitContext

	// Only of a fleet's permits. Times are those of clock.Mono.
	deadline time.Duration // when work under the permit must have stopped
	renewed  time.Duration // when the batch was sent that granted or renewed the lease
	leaving  *release      // set by the first call of Release,
	lost     error         // with the reason if the permit was lost before that call
	passed   bool          // granted by FailOpen; the store does not have it
}

// ID returns the name of the permit, which is unique in the fleet.
func (p *Permit) ID() string {
	if p == nil {
		return ""
	}
	if m, ok := p.engine.(*memory); ok {
		return m.process + "-" + strconv.FormatInt(p.fence, 36)
	}
	return p.more.id
}

// Permits returns how many permits were acquired.
func (p *Permit) Permits() int {
	if p == nil {
		return 0
	}
	return p.permits
}

// Fence returns a number that is higher than that of every permit of this semaphore granted before. A resource can refuse callers whose
// fence is lower than the highest it has received.
func (p *Permit) Fence() int64 {
	if p == nil {
		return 0
	}
	return p.fence
}

// Passed reports whether the permit was granted by [FailOpen], during an outage of the store. Such a permit has no lease, no other process
// counts it, and its Fence is 0.
func (p *Permit) Passed() bool { return p != nil && p.more != nil && p.more.passed }

// Err returns nil while the permit is held, and otherwise why it is not: [ErrReleased], [ErrExpired], [ErrLost], [ErrClosed]. It compares
// this process's monotonic clock with the end of the lease. So it is not nil whenever another request may have been granted in the permit's
// place, even in a process that was stopped for longer than a lease and has just gone on. (The monotonic clock of some systems stands still
// while the machine sleeps.)
func (p *Permit) Err() error {
	if p == nil {
		return ErrNotHeld
	}
	return p.engine.check(p)
}

// Context returns a context that ends when the permit is released ([ErrReleased]) or lost ([ErrExpired], [ErrLost]); see context.Cause. It
// ends a tenth of the lease before another request can be granted in the permit's place, by this process's monotonic clock. Work that heeds
// it stops in time. Each call of its methods compares the clock, as Err does; a context derived from it may end a moment later.
func (p *Permit) Context() context.Context {
	if p == nil {
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(ErrNotHeld)
		return ctx
	}
	mu := p.engine.lock()
	mu.Lock()
	defer mu.Unlock()
	if p.more == nil {
		p.more = new(more)
	}
	if p.more.ctx == nil {
		p.more.ctx = p.under(context.Background())
		if p.over {
			p.more.ctx.cancel(p.why())
		}
	}
	return p.more.ctx
}

// Release returns the permits, and the oldest waiter gets them first. It waits for the store's reply until ctx ends, at most the timeout
// ([WithStoreTimeout]). After an error the lease ends by itself. Releasing a permit that was lost returns [ErrExpired] or [ErrLost]. A
// second Release has no effect, and returns the same.
func (p *Permit) Release(ctx context.Context) error {
	if p == nil {
		return ErrNotHeld
	}
	return p.engine.release(ctx, p)
}

// end marks the permit as over, and reports whether it was held until now. The engine's lock must be held.
func (p *Permit) end(why error) bool {
	if p.over {
		return false
	}
	p.over = true
	if why == ErrReleased && p.more == nil {
		return true
	}
	if p.more == nil {
		p.more = new(more)
	}
	p.more.ended = why
	if p.more.ctx != nil {
		p.more.ctx.cancel(why)
	}
	return true
}

// why returns the reason why the permit is over. The engine's lock must be held.
func (p *Permit) why() error {
	if p.more == nil || p.more.ended == nil {
		return ErrReleased
	}
	return p.more.ended
}

// permitContext is a context that ends with a permit at the latest. A process that was stopped may use it before its timers have fired, so
// its methods compare the clock each time.
type permitContext struct {
	context.Context
	cancel context.CancelCauseFunc
	permit *Permit
}

// under returns a permitContext derived from parent.
func (p *Permit) under(parent context.Context) *permitContext {
	ctx, cancel := context.WithCancelCause(parent)
	return &permitContext{ctx, cancel, p}
}

// look ends the context if the permit is over.
func (c *permitContext) look() {
	if err := c.permit.Err(); err != nil {
		c.cancel(err)
	}
}

// Done implements context.Context.
func (c *permitContext) Done() <-chan struct{} {
	c.look()
	return c.Context.Done()
}

// Err implements context.Context.
func (c *permitContext) Err() error {
	c.look()
	return c.Context.Err()
}

// Value implements context.Context. It looks because context.Cause uses it.
func (c *permitContext) Value(key any) any {
	c.look()
	return c.Context.Value(key)
}
