package semaphore

import (
	"context"
	"fmt"
)

// Group is a semaphore in the shape of a wait group, for work that begins in one process and ends in another. Add takes a place when one is
// free. The ID of its permit can be handed to another process, which returns the place with Done. The process that called Add renews the
// place, so it lasts as long as that process.
type Group struct{ s *Semaphore }

// NewGroup returns a group on a semaphore.
func NewGroup(s *Semaphore) *Group { return &Group{s} }

// Add waits until a place is free and takes it. The ID of the permit is the argument of Done. Its Context ends when any process has
// returned the place, or when the place is lost.
func (g *Group) Add(ctx context.Context) (*Permit, error) { return g.s.Acquire(ctx, 1) }

// Done returns a place that any process has taken. It returns [ErrNotHeld] if there is none with that id: it was returned before, has
// expired, or belongs to another semaphore.
func (g *Group) Done(ctx context.Context, id string) error {
	if id == "" || len(id) > maxName {
		return fmt.Errorf("%w: semaphore %.80q: id %.80q", ErrNotHeld, g.s.name, id)
	}
	return g.s.engine.releaseID(ctx, id)
}

// Wait waits until no process of the fleet holds a place.
func (g *Group) Wait(ctx context.Context) error { return g.s.engine.idle(ctx) }
