package semaphore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"
)

// Errors, to be matched with errors.Is. What wraps them names the semaphore, the field and the value.
var (
	// ErrInvalid: a name, a number or an option is out of range.
	ErrInvalid = errors.New("semaphore: invalid argument")
	// ErrRefused: TryAcquire found no permits in time.
	ErrRefused = errors.New("semaphore: no permits in time")
	// ErrTooMany: more permits are wanted than there are in all. It also ends waits when the number is lowered.
	ErrTooMany = errors.New("semaphore: more permits wanted than there are")
	// ErrTooManyWaiters: so many callers of this process ask for the semaphore already (WithMaxWaiters).
	ErrTooManyWaiters = errors.New("semaphore: too many waiters")
	// ErrExpired: the lease of a permit has ended, or is about to, without having been renewed.
	ErrExpired = errors.New("semaphore: lease expired")
	// ErrLost: the backend no longer knows the permit: it was released by its id, or its state was lost.
	ErrLost = errors.New("semaphore: permit lost")
	// ErrReleased is why the context of a permit ends that was released.
	ErrReleased = errors.New("semaphore: permit released")
	// ErrNotHeld: no permit with this id is held.
	ErrNotHeld = errors.New("semaphore: not held")
	// ErrTimeout: the backend did not answer in time.
	ErrTimeout = errors.New("semaphore: backend timeout")
	// ErrCorrupt: what is stored under the semaphore's name is not what this release understands.
	ErrCorrupt = errors.New("semaphore: corrupt state")
)

// Semaphore limits how many permits are held at once: by the goroutines of this process (NewMemory), or by all processes
// of a fleet that use the same name (NewRedis). All methods may be called by many goroutines at once.
//
// Permits of a fleet are leases: they last as long as their process renews them, which it does by itself at a third of the
// lease, until they are released. A process that dies, or is stopped for longer, loses them. Whoever waits is served first
// come, first served across the fleet: in the order in which the requests arrived at the backend; a request for many permits
// is not passed by smaller ones.
//
// A semaphore of one permit is a mutex. As with every lock that expires, its holder may be stopped at any moment and go on
// when the permit is another's; give Permit.Fence to the resource, which refuses what is lower than it has seen.
type Semaphore struct {
	engine   engine
	name     string
	observer *Observer
}

// engine is one of the two ways that permits are kept: in this process, or by a Backend.
type engine interface {
	acquire(ctx context.Context, n int, wait time.Duration) (*Permit, error) // wait < 0: as long as it takes; nil, nil: refused
	release(ctx context.Context, p *Permit) error
	releaseID(ctx context.Context, id string) error
	setPermits(ctx context.Context, n int) error
	holders(ctx context.Context) ([]Holder, error)
	idle(ctx context.Context) error
	lock() *sync.Mutex
}

const maxPermits = 1 << 31

func crowded(name string, waiters int) error {
	return fmt.Errorf("%w: semaphore %.80q: %d wait already", ErrTooManyWaiters, name, waiters)
}

func (s *Semaphore) bad(field string, value any, want string) error {
	return fmt.Errorf("%w: semaphore %.80q: %s %v: want %s", ErrInvalid, s.name, field, value, want)
}

// Acquire waits for n permits as long as ctx lets it. Nothing is held when it returns an error.
func (s *Semaphore) Acquire(ctx context.Context, n int) (*Permit, error) {
	return s.acquire(ctx, n, -1)
}

// TryAcquire waits for n permits at most the timeout; 0 or less: not at all. It returns ErrRefused when there are none in
// time. However short the timeout, it waits for the backend's first answer (see WithTimeout; a deadline of ctx ends
// that, too): what is free is acquired.
func (s *Semaphore) TryAcquire(ctx context.Context, n int, timeout time.Duration) (*Permit, error) {
	return s.acquire(ctx, n, max(0, timeout))
}

// Do calls f with one permit held, waiting for it as Acquire does. The context of f ends when the permit is lost, with
// the reason as its cause. Do returns f's error; if that is nil, why the permit could not be released, or was lost before f
// had ended.
func (s *Semaphore) Do(ctx context.Context, f func(ctx context.Context) error) error {
	p, err := s.Acquire(ctx, 1)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	held := p.Context()
	unlink := context.AfterFunc(held, func() { cancel(context.Cause(held)) })
	done := false
	defer func() {
		if unlink(); !done { // f has panicked
			_ = p.Release(context.WithoutCancel(ctx))
		}
	}()
	err = f(ctx)
	unlink()
	done = true
	return errors.Join(err, p.Release(context.WithoutCancel(ctx)))
}

// SetPermits sets how many permits there are, for the whole fleet. More than that may be held until enough are released;
// who waits for more than n fails with ErrTooMany.
func (s *Semaphore) SetPermits(ctx context.Context, n int) error {
	if n < 1 || int64(n) > maxPermits {
		return s.bad("permits", n, "1 to 2^31")
	}
	return s.engine.setPermits(ctx, n)
}

// Holders lists who holds permits, the longest first. For operators: it takes time in proportion to their number.
func (s *Semaphore) Holders(ctx context.Context) ([]Holder, error) { return s.engine.holders(ctx) }

// Name of the semaphore; empty in memory.
func (s *Semaphore) Name() string { return s.name }

// Holder is somebody who holds permits.
type Holder struct {
	ID      string
	Permits int
	// Fence is the permit's number.
	Fence int64
	// Since when, and until when if it is not renewed; by the backend's clock. In memory there is no end.
	Since, Expires time.Time
	// Label of the process (WithLabel): by default its host and process id.
	Label string
}

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
	leaving  *leave        // Release has been called,
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

// ErrClosed: the semaphore was closed.
var ErrClosed = errors.New("semaphore: closed")

// Close releases what this process still holds of the semaphore: the contexts end (ErrClosed), and whoever waits fails with
// ErrClosed. It waits for the backend as long as ctx lets it. One in memory has nothing to close.
func (s *Semaphore) Close(ctx context.Context) error {
	if c, ok := s.engine.(*shared); ok {
		return c.close(ctx)
	}
	return nil
}
