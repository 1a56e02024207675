package semaphore

import "context"

// Group is a semaphore in the shape of a wait group, for work that is begun here and ended elsewhere: Add takes a place
// when there is one, and the id of the permit that it returns may be handed to another process, whose Done gives the place back. The place
// lives as long as the process that has added it renews it.
type Group struct{ s *Semaphore }

// NewGroup returns a group on a semaphore.
func NewGroup(s *Semaphore) *Group { return &Group{s} }

// Add waits until fewer places are taken than there are permits, and takes one: its ID is what Done wants, and its Context ends when
// the place is given back, by whatever process, or lost.
func (g *Group) Add(ctx context.Context) (*Permit, error) { return g.s.Acquire(ctx, 1) }

// Done gives a place back, of whatever process. It is [ErrNotHeld] if there is none of that id: it was given back before, has
// expired, or is another semaphore's.
func (g *Group) Done(ctx context.Context, id string) error {
	if id == "" || len(id) > maxName {
		return g.s.bad("id", id, "that of a permit")
	}
	return g.s.engine.releaseID(ctx, id)
}

// Wait waits until nobody in the fleet holds a place.
func (g *Group) Wait(ctx context.Context) error { return g.s.engine.idle(ctx) }
