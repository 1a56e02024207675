package semaphore

import (
	"context"
	"strconv"
	"time"
)

// Permit is permits that are held. Its methods may be called by many goroutines at once.
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
	id     string
	ended  error // why it is no longer held; nil: it was released
	ctx    context.Context
	cancel context.CancelCauseFunc

	// Of a fleet's; both times see clock.Mono.
	deadline time.Duration // when its work must have stopped
	renewed  time.Duration // when the backend was asked for the lease in force
	leaving  *release      // Release has been called,
	lost     error         // and this was known then
}

// ID names the permit: unique in the fleet.
func (p *Permit) ID() string {
	if m, ok := p.engine.(*memory); ok {
		return m.process + "-" + strconv.FormatInt(p.fence, 36)
	}
	return p.more.id
}

// Permits is how many were acquired.
func (p *Permit) Permits() int { return p.permits }

// Fence is a number that is higher than that of every permit of this semaphore granted before: for a resource that
// refuses what is lower than it has seen.
func (p *Permit) Fence() int64 { return p.fence }

// Context ends when the permit is released (ErrReleased), or is lost (ErrExpired, ErrLost): a tenth of the lease before
// anybody else can be admitted in its place, by this process' monotonic clock. Give it to the work under the permit, and the
// work stops in time. See context.Cause.
func (p *Permit) Context() context.Context {
	mu := p.engine.lock()
	mu.Lock()
	defer mu.Unlock()
	if p.more == nil {
		p.more = new(more)
	}
	if p.more.ctx == nil {
		p.more.ctx, p.more.cancel = context.WithCancelCause(context.Background())
		if p.over {
			p.more.cancel(p.why())
		}
	}
	return p.more.ctx
}

// Release gives the permits back, to who waits for them first. It waits for the backend's answer as long as ctx lets it; on
// an error the lease ends by itself. Releasing a permit that was lost says so (ErrExpired, ErrLost). Releasing twice does
// nothing, and returns the same.
func (p *Permit) Release(ctx context.Context) error { return p.engine.release(ctx, p) }

// end notes why the permit is no longer held, if it was until now. The engine's lock is held.
func (p *Permit) end(why error) {
	if p.over {
		return
	}
	p.over = true
	if why == ErrReleased && p.more == nil {
		return
	}
	if p.more == nil {
		p.more = new(more)
	}
	p.more.ended = why
	if p.more.cancel != nil {
		p.more.cancel(why)
	}
}

// why the permit is over. The engine's lock is held.
func (p *Permit) why() error {
	if p.more == nil || p.more.ended == nil {
		return ErrReleased
	}
	return p.more.ended
}
