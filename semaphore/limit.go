package semaphore

import (
	"context"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// SetPermits sets the number of permits for the whole fleet, as the next version (see [WithVersion]). If more permits are held, none is
// granted until enough are released. Waiters that want more than n fail with [ErrTooMany], wherever they are in the queue.
func (s *Semaphore) SetPermits(ctx context.Context, n int) error {
	if n < 1 || int64(n) > maxPermits {
		return s.badPermits("permits", n, "1 to 2^31")
	}
	return s.engine.changePermits(ctx, change{set: n})
}

// AddPermits adds delta, which may be negative, to the number of permits in force, for the whole fleet. It serves callers that adjust the
// number step by step. It fails with [ErrInvalidPermits] if the sum is below 1 or above 2^31. After any other error it is unknown whether
// the number was changed.
func (s *Semaphore) AddPermits(ctx context.Context, delta int) error {
	if int64(delta) > maxPermits || int64(delta) < -maxPermits {
		return s.badPermits("permits to add", delta, "-2^31 to 2^31")
	}
	if delta == 0 {
		return nil
	}
	return s.engine.changePermits(ctx, change{add: delta})
}

// ResetPermits undoes SetPermits and AddPermits for the whole fleet, so that the configured numbers are in force again. If this Semaphore
// has a version ([WithVersion]), the number that it was made with becomes the next version. Otherwise each process uses its own number.
func (s *Semaphore) ResetPermits(ctx context.Context) error {
	return s.engine.changePermits(ctx, change{set: store.OwnPermits})
}

// Stats is the use of a semaphore.
type Stats struct {
	// Permits in force for this process, and their version. The version is 0 if none was set; in memory there are no versions.
	Permits int
	Version int64
	// Used is the number of permits that the whole fleet holds.
	Used int
	// Waiting is the number of requests in the queue of the whole fleet.
	Waiting int
}

// Stats returns the use of the semaphore. Except in memory, it asks the store, and changes nothing there.
func (s *Semaphore) Stats(ctx context.Context) (Stats, error) { return s.engine.stats(ctx) }

// Permits returns the number in force for this process according to the last reply. It makes no round trip.
func (s *Semaphore) Permits() int { return s.engine.limitInForce().Permits }

// Version returns the version of the number of permits in force according to the last reply, or this Semaphore's own if that is newer; 0 if there is
// none, and in memory. It makes no round trip.
func (s *Semaphore) Version() int64 { return s.engine.limitInForce().Version }

func (c *coordinator) limitInForce() store.Limit {
	c.mu.Lock()
	defer c.mu.Unlock()
	return store.Limit{Permits: c.view.permits, Version: c.view.limit.Version}
}

func (c *coordinator) changePermits(ctx context.Context, change change) error {
	if change.set == store.OwnPermits && c.version > 0 {
		change.set = c.permits
	}
	c.mu.Lock()
	if err := c.health.away(); err != nil {
		c.mu.Unlock()
		return err
	}
	now := clock.Mono()
	l := c.limits.add(change, now)
	c.deadlines.expect(now)
	c.mu.Unlock()
	c.transport.take(ctx)
	return l.wait(ctx)
}

func (c *coordinator) stats(ctx context.Context) (Stats, error) {
	used, err := ask(ctx, c, c.transport.store.Stats)
	if err == nil && used.Permits == 0 {
		used.Permits = c.permits
	}
	return Stats(used), err
}
