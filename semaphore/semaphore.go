package semaphore

import (
	"context"
	"errors"
	"fmt"
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
	// ErrTooManyWaiters: as many callers of this process as WithMaxWaiters allows ask for the semaphore already.
	ErrTooManyWaiters = errors.New("semaphore: too many waiters")
	// ErrExpired: the lease of a permit has ended, or is about to, without having been renewed.
	ErrExpired = errors.New("semaphore: lease expired")
	// ErrLost: the backend no longer knows the permit: it was released by its id, or its state was lost.
	ErrLost = errors.New("semaphore: permit lost")
	// ErrReleased is why the context of a permit ends that was released.
	ErrReleased = errors.New("semaphore: permit released")
	// ErrNotHeld: no permit with this id is held, or the Permit is nil.
	ErrNotHeld = errors.New("semaphore: not held")
	// ErrTimeout: the backend did not answer in time.
	ErrTimeout = errors.New("semaphore: backend timeout")
	// ErrCorrupt: what is stored under the semaphore's name is not what this release understands.
	ErrCorrupt = errors.New("semaphore: corrupt state")
)

// Semaphore limits how many permits are held at once: by the goroutines of this process ([NewMemory]), or by all processes
// of a fleet that use the same name ([NewRedis]). All methods may be called by many goroutines at once.
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
	label    string // of its permits; empty: of the process
	observer *Observer
}

// engine is one of the two ways that permits are kept: in this process, or by a Backend.
type engine interface {
	// acquire returns nil, nil if it refuses; wait < 0: as long as it takes; label "": the semaphore's.
	acquire(ctx context.Context, n int, wait time.Duration, label string) (*Permit, error)
	check(p *Permit) error
	release(ctx context.Context, p *Permit) error
	releaseID(ctx context.Context, id string) error
	changePermits(ctx context.Context, change change) error
	stats(ctx context.Context) (Stats, error)
	known() int
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

// Acquire waits for n permits as long as ctx lets it. Nothing is held when it returns an error: ctx's, the backend's, or one that matches
// [ErrTooMany] (n is more than there are), [ErrTooManyWaiters], [ErrTimeout] (the backend does not answer), [ErrCorrupt], [ErrClosed] or, if n
// is below 1, [ErrInvalid].
func (s *Semaphore) Acquire(ctx context.Context, n int) (*Permit, error) {
	return s.acquire(ctx, n, -1)
}

// TryAcquire waits for n permits at most the timeout; 0 or less: not at all. It returns [ErrRefused] when there are none in
// time. However short the timeout, it waits for the backend's first answer (see [WithTimeout]; a deadline of ctx ends
// that, too): what is free is acquired.
func (s *Semaphore) TryAcquire(ctx context.Context, n int, timeout time.Duration) (*Permit, error) {
	return s.acquire(ctx, n, max(0, timeout))
}

// Do calls f with one permit held, waiting for it as Acquire does. The context of f ends when the permit is lost, with
// the reason as its cause. Do returns f's error, joined with why the permit could not be released, or was lost before f had ended.
func (s *Semaphore) Do(ctx context.Context, f func(ctx context.Context) error) error {
	p, err := s.Acquire(ctx, 1)
	if err != nil {
		return err
	}
	under := p.under(ctx)
	defer under.cancel(nil)
	held := p.Context()
	unlink := context.AfterFunc(held, func() { under.cancel(context.Cause(held)) })
	done := false
	defer func() {
		if unlink(); !done { // f has panicked
			_ = p.Release(context.WithoutCancel(ctx))
		}
	}()
	err = f(under)
	unlink()
	done = true
	return errors.Join(err, p.Release(context.WithoutCancel(ctx)))
}

// Holders lists who holds permits, the longest first. For operators: it takes time in proportion to their number. In Redis more than a
// thousand are listed in parts, so whoever begins or ends meanwhile may be in the list or not.
func (s *Semaphore) Holders(ctx context.Context) ([]Holder, error) { return s.engine.holders(ctx) }

// Labelled returns the same semaphore, whose permits Holders shows with this label rather than that of the process ([WithLabel]): up
// to 200 bytes of UTF-8. It shares everything else, and costs nothing to make.
func (s *Semaphore) Labelled(label string) *Semaphore {
	labelled := *s
	labelled.label = label
	return &labelled
}

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
	// Label of the permit (Semaphore.Labelled) or of its process (WithLabel): by default its host and process id.
	Label string
}

// ErrClosed: the semaphore was closed.
var ErrClosed = errors.New("semaphore: closed")

// Close releases what this process still holds of the semaphore: the contexts end ([ErrClosed]), and whoever waits fails with
// ErrClosed. It waits for the backend as long as ctx lets it. One in memory has nothing to close.
func (s *Semaphore) Close(ctx context.Context) error {
	if c, ok := s.engine.(*coordinator); ok {
		return c.close(ctx)
	}
	return nil
}
