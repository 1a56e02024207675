package semaphore

import (
	"context"
	"strconv"
	"time"
)

// Permit is permits that are held. Its methods may be called by many goroutines at once. Those of a nil Permit tell that nothing is
// held.
type Permit struct {
	engine  engine
	permits int
	fence   int64
	over    bool // it is no longer held, see more.ended
	since   time.Duration

	// In memory the holders are a list, and most permits need no more.
	prev, next *Permit
	more       *more
}

// more is what not every permit needs. The engine's lock guards it.
type more struct {
	id, label string
	ended     error // why it is no longer held; nil: it was released
	ctx       *permitContext

	// Of a fleet's; both times see clock.Mono.
	deadline time.Duration // when its work must have stopped
	renewed  time.Duration // when the backend was asked for the lease in force
	leaving  *release      // Release has been called,
	lost     error         // and this was known then
}

// ID names the permit: unique in the fleet.
func (p *Permit) ID() string {
	if p == nil {
		return ""
	}
	if m, ok := p.engine.(*memory); ok {
		return m.process + "-" + strconv.FormatInt(p.fence, 36)
	}
	return p.more.id
}

// Permits is how many were acquired.
func (p *Permit) Permits() int {
	if p == nil {
		return 0
	}
	return p.permits
}

// Fence is a number that is higher than that of every permit of this semaphore granted before: for a resource that
// refuses what is lower than it has seen.
func (p *Permit) Fence() int64 {
	if p == nil {
		return 0
	}
	return p.fence
}

// Err is nil while the permit is held, and else why it is not: [ErrReleased], [ErrExpired], [ErrLost], [ErrClosed]. It compares this process'
// monotonic clock with the end of the lease: so it is never nil when somebody else may have been admitted, also in a process that
// was stopped for longer than a lease and has just gone on. (The monotonic clock of some systems stands still while the machine sleeps.)
func (p *Permit) Err() error {
	if p == nil {
		return ErrNotHeld
	}
	return p.engine.check(p)
}

// Context ends when the permit is released ([ErrReleased]), or is lost ([ErrExpired], [ErrLost]): a tenth of the lease before
// anybody else can be admitted in its place, by this process' monotonic clock. Give it to the work under the permit, and the
// work stops in time. See context.Cause. Each call of its methods compares the clock, as Err does; one that is derived from it may be
// told a moment later.
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

// Release gives the permits back, to who waits for them first. It waits for the backend's answer as long as ctx lets it, at most the
// timeout ([WithTimeout]); on an error the lease ends by itself. Releasing a permit that was lost says so ([ErrExpired], [ErrLost]).
// Releasing twice does nothing, and returns the same.
func (p *Permit) Release(ctx context.Context) error {
	if p == nil {
		return ErrNotHeld
	}
	return p.engine.release(ctx, p)
}

// end notes why the permit is no longer held, and tells whether it was until now. The engine's lock is held.
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

// why the permit is over. The engine's lock is held.
func (p *Permit) why() error {
	if p.more == nil || p.more.ended == nil {
		return ErrReleased
	}
	return p.more.ended
}

// permitContext is a context that ends with a permit at the latest. It is asked by its holder, who may have been stopped, before a timer
// has had its turn: so it compares the clock each time.
type permitContext struct {
	context.Context
	cancel context.CancelCauseFunc
	permit *Permit
}

func (p *Permit) under(parent context.Context) *permitContext {
	ctx, cancel := context.WithCancelCause(parent)
	return &permitContext{ctx, cancel, p}
}

// look ends the context if the permit's time has come.
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

// Value implements context.Context; context.Cause asks for one.
func (c *permitContext) Value(key any) any {
	c.look()
	return c.Context.Value(key)
}
