package semaphore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// Errors, to be matched with errors.Is. An error that wraps one of them names the semaphore, the field and the value.
var (
	// ErrInvalidConfig: a name, a label, a number of permits or an option of a constructor is out of range.
	ErrInvalidConfig = errors.New("semaphore: invalid configuration")
	// ErrInvalidPermits: the number of permits of a call is out of range.
	ErrInvalidPermits = errors.New("semaphore: invalid permits")
	// ErrRefused: TryAcquire found no permits in time.
	ErrRefused = errors.New("semaphore: no permits in time")
	// ErrTooMany: a request wants more permits than the semaphore has. A waiter gets it, too, when the number is lowered.
	ErrTooMany = errors.New("semaphore: more permits requested than there are")
	// ErrTooManyWaiters: as many callers of this process are waiting as [WithMaxWaiters] allows.
	ErrTooManyWaiters = errors.New("semaphore: too many waiters")
	// ErrExpired: the lease of a permit ended, or was about to end, before it was renewed.
	ErrExpired = errors.New("semaphore: lease expired")
	// ErrLost: the store no longer has the permit. It was released by its id, or the state was lost.
	ErrLost = errors.New("semaphore: permit lost")
	// ErrReleased is the cause of the context of a permit that was released.
	ErrReleased = errors.New("semaphore: permit released")
	// ErrNotHeld: no permit with this id is held, or the Permit is nil.
	ErrNotHeld = errors.New("semaphore: not held")
	// ErrClosed: the semaphore was closed.
	ErrClosed = errors.New("semaphore: closed")
	// ErrStoreUnavailable: the store cannot be reached, did not reply in time, or replied that it cannot serve now: it is loading, a replica
	// or full. Or it failed just now and has not replied since, so it was not asked. The error wraps the failure. A store wraps
	// ErrStoreUnavailable in the errors that mean this.
	ErrStoreUnavailable = errors.New("semaphore: store unavailable")
	// ErrStoreUnusable: the store can only be used after a repair. Examples are a wrong password, missing rights, a certificate that is not
	// trusted, a missing script or function, a closed client. The error wraps the failure. No [FailurePolicy] applies.
	ErrStoreUnusable = errors.New("semaphore: store unusable")
	// ErrStoreTimeout: the store did not reply in time ([WithStoreTimeout]). It comes wrapped in an ErrStoreUnavailable.
	ErrStoreTimeout = errors.New("semaphore: store timeout")
	// ErrCorruptState: the store holds a state under the semaphore's name that this release does not understand.
	ErrCorruptState = errors.New("semaphore: corrupt state")
)

// Semaphore limits how many permits are held at once: by the goroutines of this process ([NewMemory]), or by all processes of a fleet that
// use the same name ([NewRedis]). All methods may be called by many goroutines at once.
//
// The permits of a fleet are leases. Their process renews them at a third of the lease until they are released. A process that dies, or is
// stopped for longer, loses them. Waiters are served first come, first served across the fleet, in the order in which their requests
// reached the store. A request for many permits is not passed by smaller ones.
//
// A semaphore of one permit is a mutex. As with every lock that expires, its holder may be stopped at any moment and go on when another
// holds the permit. To guard against that, give Permit.Fence to the resource, which then refuses callers whose fence is lower than the
// highest it has received.
type Semaphore struct {
	engine   engine
	name     string
	label    string // of its permits; "" for the label of the process
	observer *Observer
}

// engine keeps the permits: in this process, or in a store.
type engine interface {
	// acquire returns nil, nil for a refusal. wait < 0 means without a timeout, label "" the label of the process.
	acquire(ctx context.Context, n int, wait time.Duration, label string) (*Permit, error)
	check(p *Permit) error
	release(ctx context.Context, p *Permit) error
	releaseID(ctx context.Context, id string) error
	changePermits(ctx context.Context, change change) error
	stats(ctx context.Context) (Stats, error)
	limitInForce() store.Limit
	holders(ctx context.Context) ([]Holder, error)
	idle(ctx context.Context) error
	lock() *sync.Mutex
}

const maxPermits = 1 << 31

// crowded returns the error of a call for which there is no room to wait.
func crowded(name string, waiters int) error {
	return fmt.Errorf("%w: semaphore %.80q: %d are waiting", ErrTooManyWaiters, name, waiters)
}

// bad returns an ErrInvalidConfig.
func (s *Semaphore) bad(field string, value any, want string) error {
	return s.invalid(ErrInvalidConfig, field, value, want)
}

// badPermits returns an ErrInvalidPermits.
func (s *Semaphore) badPermits(field string, value any, want string) error {
	return s.invalid(ErrInvalidPermits, field, value, want)
}

func (s *Semaphore) invalid(reason error, field string, value any, want string) error {
	return fmt.Errorf("%w: semaphore %.80q: %s %v: want %s", reason, s.name, field, value, want)
}

// Acquire waits until n permits are granted or ctx ends. After an error no permit is held. The error is ctx's, or one that matches
// [ErrInvalidPermits] (n is below 1), [ErrTooMany] (n is more than the semaphore has), [ErrTooManyWaiters], [ErrStoreUnavailable] (see
// [FailurePolicy]), [ErrStoreUnusable], [ErrCorruptState] or [ErrClosed].
func (s *Semaphore) Acquire(ctx context.Context, n int) (*Permit, error) {
	return s.acquire(ctx, n, -1)
}

// TryAcquire waits for n permits, at most for the timeout; if it is 0 or less, it does not wait for a place. It returns [ErrRefused] if no
// permits were free in time. However short the timeout, it waits for the store's first reply (see [WithStoreTimeout]), unless ctx ends:
// free permits are always granted.
func (s *Semaphore) TryAcquire(ctx context.Context, n int, timeout time.Duration) (*Permit, error) {
	return s.acquire(ctx, n, max(0, timeout))
}

// Do acquires a permit as Acquire does, calls f and releases the permit. The context of f ends when the permit is lost, with the reason as
// its cause. Do returns f's error, joined with the error of the release or, if the permit was lost before f returned, with the reason.
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
		if unlink(); !done { // f panicked
			_ = p.Release(context.WithoutCancel(ctx))
		}
	}()
	err = f(under)
	unlink()
	done = true
	return errors.Join(err, p.Release(context.WithoutCancel(ctx)))
}

// Holders returns the holders of permits, the oldest first. It is meant for operators: it takes time in proportion to their number. In
// Redis more than a thousand holders are read in parts, so a permit that is granted or released meanwhile may be missing or listed.
func (s *Semaphore) Holders(ctx context.Context) ([]Holder, error) { return s.engine.holders(ctx) }

// Labelled returns the same semaphore with another label for its permits in Holders, in place of the label of the process ([WithLabel]): up
// to 200 bytes of UTF-8. It shares everything else, and costs nothing to make.
func (s *Semaphore) Labelled(label string) *Semaphore {
	labelled := *s
	labelled.label = label
	return &labelled
}

// Name returns the name of the semaphore; "" in memory.
func (s *Semaphore) Name() string { return s.name }

// Holder is one permit that is held.
type Holder struct {
	ID      string
	Permits int
	// Fence is the permit's fence.
	Fence int64
	// Since is when the permit was granted, and Expires is when it ends if it is not renewed, both by the store's clock. In memory Expires
	// is zero.
	Since, Expires time.Time
	// Label of the permit (Semaphore.Labelled) or, if it has none, of its process (WithLabel).
	Label string
}

// Close releases all permits that this process holds of the semaphore: their contexts end ([ErrClosed]), and its waiters fail with
// ErrClosed. It waits for the store until ctx ends. A semaphore in memory has nothing to close.
func (s *Semaphore) Close(ctx context.Context) error {
	if c, ok := s.engine.(*coordinator); ok {
		return c.close(ctx)
	}
	return nil
}
