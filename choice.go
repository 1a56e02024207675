package tokenbucket

import (
	"context"
	"math"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Choice is several limits of which a call must pass one: several keys of an upstream, or a primary and a secondary one. Each call is one decision. It takes
// permits of the member that is due first, and of the first of the list if several are due at the same time. It takes nothing of the others. The caller
// receives that member.
//
// In all else a choice is a [Group]: it is a participant of its own in each bucket, and members of one store are decided on in one atomic step. Members on
// several stores or slots are asked one after the other until one is due at once. If none is, the one that is due first is kept, and the others get
// their permits back.
//
// A call is refused if all members refuse. That is an error if none of them could be asked, or none could ever grant it ([ErrNeverGranted]). A member that fails
// by itself counts as one that refuses: because its store needs a repair ([ErrStoreUnusable]), or because its bucket is of another kind ([ErrInvalidConfig]) or
// no bucket ([ErrCorruptState]). Its error, a [*MemberError], is returned if no other member grants the call.
type Choice struct {
	several
	lower lower[Choice]
}

// Any returns a choice of limits of which a call must pass one. Its errors are those of [All].
func Any(members ...Member) (*Choice, error) {
	c := new(Choice)
	if err := c.init(permit.Any, members); err != nil {
		return nil, err
	}
	return c, nil
}

// chosen returns the member that a call was granted by.
func (a *answer) chosen() *RateLimiter {
	if !a.granted {
		return nil
	}
	if a.call != nil {
		if at := a.p.Taken(a.call); at >= 0 {
			return a.asked.members[a.indexes[at]].member()
		}
	}
	if len(a.indexes) > 0 {
		return a.asked.members[a.indexes[max(0, a.member)]].member()
	}
	return a.asked.members[0].member() // its switch is off
}

// Try is [Choice.TryAcquire] of one permit with the shortest timeout that a member has for it ([WithMaxWait]).
func (c *Choice) Try(ctx context.Context) (*RateLimiter, error) {
	return c.TryAcquire(ctx, 1, c.patience())
}

// TryAcquire takes permits of the member that is due first, waits until they are due, and returns that member. It returns nil, and takes nothing, if no
// member is due within the timeout. In all else it is [RateLimiter.TryAcquire].
func (c *Choice) TryAcquire(ctx context.Context, permits int, timeout time.Duration) (*RateLimiter, error) {
	a, err := c.ask(ctx, acquire, permits, timeout)
	if err != nil {
		return nil, err
	}
	return a.chosen(), nil
}

// Acquire takes permits of the member that is due first, waits until they are due, however long that is, and returns that member and the time waited.
func (c *Choice) Acquire(ctx context.Context, permits int) (by *RateLimiter, waited time.Duration, err error) {
	a, err := c.ask(ctx, acquire, permits, math.MaxInt64)
	if err != nil {
		return nil, 0, err
	}
	return a.chosen(), a.wait, nil
}

// Reserve takes permits of the member that is due first, and returns at once. [GroupReservation.TakenFrom] returns that member. See [RateLimiter.Reserve].
func (c *Choice) Reserve(ctx context.Context, permits int) (*GroupReservation, error) {
	return c.reserve(ctx, permits, math.MaxInt64)
}

// TryReserve is Reserve if a member is due within the timeout. Otherwise the reservation is not OK.
func (c *Choice) TryReserve(ctx context.Context, permits int, timeout time.Duration) (*GroupReservation, error) {
	return c.reserve(ctx, permits, timeout)
}

// Members returns the limiters of the members, in the order in which they were listed.
func (c *Choice) Members() []*RateLimiter { return c.limiters() }

// Lost returns how many permits this choice has taken and could not give back. See [Group.Lost].
func (c *Choice) Lost() int64 {
	permits := c.lost.Load()
	c.lower.each(func(other *Choice) { permits += other.Lost() })
	return permits
}

// Close waits for the settlements of [GroupReservation.SettleLater] that have begun, as long as the context allows. It does not close the members.
func (c *Choice) Close(ctx context.Context) error { return c.close(ctx) }

// TakenFrom returns the member whose permits the reservation holds; nil unless it is OK and belongs to a [Choice].
func (r *GroupReservation) TakenFrom() *RateLimiter {
	if r.answer.asked == nil || r.answer.asked.choice != permit.Any {
		return nil
	}
	return r.answer.chosen()
}
