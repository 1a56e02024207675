package semaphore

import (
	"context"
	"fmt"
)

// change is what becomes of the number of permits: one of its fields is not 0.
type change struct {
	set int // OwnPermits: as configured
	add int
}

// limitChange is one that somebody waits for.
type limitChange struct {
	answer
	change
}

// SetPermits sets how many permits there are, for the whole fleet: it is the next version (see [WithVersion]). More than that may be held
// until enough are released; who waits for more than n fails with [ErrTooMany], wherever it stands.
func (s *Semaphore) SetPermits(ctx context.Context, n int) error {
	if n < 1 || int64(n) > maxPermits {
		return s.bad("permits", n, "1 to 2^31")
	}
	return s.engine.changePermits(ctx, change{set: n})
}

// AddPermits changes how many permits there are, for the whole fleet, by delta, which may be negative, from the number that is in force
// then: for those who adjust it step by step. It fails with [ErrInvalid] if it would be below 1 or above 2^31. On any other error it is
// unknown whether it was done.
func (s *Semaphore) AddPermits(ctx context.Context, delta int) error {
	if int64(delta) > maxPermits || int64(delta) < -maxPermits {
		return s.bad("permits to add", delta, "-2^31 to 2^31")
	}
	if delta == 0 {
		return nil
	}
	return s.engine.changePermits(ctx, change{add: delta})
}

// ResetPermits undoes SetPermits and AddPermits, for the whole fleet: what is configured counts again. If this Semaphore has a version
// ([WithVersion]) it sets the number that it was made with, as the next version. If not, each process has its own again.
func (s *Semaphore) ResetPermits(ctx context.Context) error {
	return s.engine.changePermits(ctx, change{set: OwnPermits})
}

// Stats is how a semaphore is used.
type Stats struct {
	// Permits in force, for this process, and their version; 0: nobody has set one. In memory there is none.
	Permits int
	Version int64
	// Used are the permits that are held, in the whole fleet.
	Used int
	// Waiting is how many requests for permits wait, in the whole fleet.
	Waiting int
}

// Stats tells how the semaphore is used now. Unless it is in memory, it asks the backend, and changes nothing there.
func (s *Semaphore) Stats(ctx context.Context) (Stats, error) { return s.engine.stats(ctx) }

// Permits is the number in force for this process, as far as it has heard: it asks nobody.
func (s *Semaphore) Permits() int { return s.engine.known() }

func (c *coordinator) known() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.heard.permits
}

func (c *coordinator) changePermits(ctx context.Context, change change) error {
	if change.set == OwnPermits && c.version > 0 {
		change.set = c.permits
	}
	l := c.submitChange(change)
	c.transport.take(ctx, c)
	return l.wait(ctx)
}

func (c *coordinator) stats(ctx context.Context) (Stats, error) {
	stats, err := ask(ctx, c, c.transport.backend.Stats)
	if err == nil && stats.Permits == 0 {
		stats.Permits = c.permits
	}
	return stats, err
}

// outOfRange is why AddPermits was not possible.
func outOfRange(name string, permits, add int) error {
	return fmt.Errorf("%w: semaphore %.80q: permits %d + %d: want 1 to 2^31", ErrInvalid, name, permits, add)
}
