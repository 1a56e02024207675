package tokenbucket

import (
	"context"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// GroupReservation holds the permits that a [Group] has taken of all its members, or a [Choice] of one, or the refusal of them. Its methods are safe for
// concurrent use. The zero GroupReservation is a refusal by no member.
type GroupReservation struct {
	answer     answer
	permits    int64 // of the request
	retryAfter time.Duration
}

// MemberOutcome is what was decided about one member's part of a request.
type MemberOutcome struct {
	// Limiter is the member as it was listed.
	Limiter *RateLimiter
	// Permits of the member that the request needs.
	Permits int
	// Taken reports whether they were taken, and Refused whether the member could not grant them in time. After a refusal by another member both
	// are false.
	Taken, Refused bool
	// Wait is how long the permits take: until they are due, or would have been due. 0 if the member was not asked.
	Wait time.Duration

	level *Level
}

// Level returns how full the member's bucket was after the decision. It returns false if no reply has shown it.
func (o *MemberOutcome) Level() (Level, bool) {
	if o.level == nil {
		return Level{}, false
	}
	return *o.level, true
}

// OK reports whether the permits were taken. After a refusal nothing was taken.
func (r *GroupReservation) OK() bool { return r.answer.granted }

// RetryAfter returns how long it takes until a refused request, with the same timeout, could be granted if there are no other requests. It returns 0
// for a reservation that is OK.
func (r *GroupReservation) RetryAfter() time.Duration { return r.retryAfter }

// RefusedBy returns the member that refused the request; nil if the reservation is OK. If several have, it is the one with the longest wait of a group, the
// one with the shortest of a choice.
func (r *GroupReservation) RefusedBy() *RateLimiter {
	if r.answer.granted || r.answer.asked == nil || r.answer.refused < 0 {
		return nil
	}
	return r.answer.asked.members[r.answer.refused].member()
}

// Members returns the outcome of each member that was asked, in the order in which they were listed. There are none if the call passed without a bucket.
func (r *GroupReservation) Members() []MemberOutcome {
	a := &r.answer
	taken := -1
	if a.call != nil && a.asked.choice == permit.Any {
		taken = a.p.Taken(a.call)
	}
	var all []MemberOutcome
	for at, o := range a.members {
		w := a.asked.members[a.indexes[at]]
		if taken >= 0 {
			o.Taken = at == taken
		}
		all = append(all, MemberOutcome{
			Limiter: w.member(), Permits: int(r.permits * w.permits), Taken: a.granted && o.Taken, Refused: !a.granted && o.Refused,
			Wait: time.Duration(o.Wait) * time.Microsecond, level: levelOf(o.Seen),
		})
	}
	return all
}

// Delay returns the time from the reservation until the last of its permits is due; 0 for a refusal. See [Reservation.Delay].
func (r *GroupReservation) Delay() time.Duration {
	if r.answer.call == nil {
		return 0
	}
	return time.Duration(r.answer.p.Delay(r.answer.call)) * time.Microsecond
}

// Ready returns a channel that is closed when all permits are due. It is never closed for a refusal or after Cancel. See [Reservation.Ready].
func (r *GroupReservation) Ready() <-chan struct{} {
	switch {
	case !r.answer.granted:
		return nil
	case r.answer.call == nil:
		return always
	}
	return r.answer.call.Ready()
}

// Cancel gives the permits of all members back if the last of them is not due yet. A caller of this group behind it that wants as many takes them.
// Otherwise they go back to the members. Behind permits of other processes a member takes back what it could have saved up, and the rest is lost ([Group.Lost]). In all else it is [Reservation.Cancel].
func (r *GroupReservation) Cancel(ctx context.Context) error {
	if r.answer.call == nil {
		return nil
	}
	return r.answer.p.Cancel(ctx, r.answer.call)
}

// Return is [GroupReservation.Cancel] for a call that another limit has refused before it began: permits that were due at once go back, too.
func (r *GroupReservation) Return(ctx context.Context) error {
	if r.answer.call == nil {
		return nil
	}
	return r.answer.p.Return(ctx, r.answer.call)
}

// Settle replaces the number of permits by the number that the call has used, in all members, each times its weight. See [Reservation.Settle]. Members of
// one store are settled together. If a store fails, the estimate may count in its members.
func (r *GroupReservation) Settle(ctx context.Context, actual int) error {
	if err := r.settleable(actual); err != nil || r.answer.call == nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if !r.answer.p.Claim(r.answer.call) {
		return nil
	}
	return r.settle(ctx, actual)
}

// settleable returns the error of a number of permits that cannot be settled.
func (r *GroupReservation) settleable(actual int) error {
	if err := checkSettled(actual); err != nil || r.answer.call == nil {
		return err
	}
	more := int64(actual) - r.permits
	for _, w := range r.charged() {
		if more > maxExact/w.permits {
			return &MemberError{Bucket: w.limiter.Name(), Err: w.limiter.limiter.Overflow(more)}
		}
	}
	return nil
}

// charged returns the members that the reservation has permits of.
func (r *GroupReservation) charged() (members []weighted) {
	a := &r.answer
	taken := a.p.Taken(a.call) // of a choice
	for at, i := range a.indexes {
		if a.asked.choice == permit.All || at == taken {
			members = append(members, a.asked.members[i])
		}
	}
	return members
}

// settle sends the settlement. The reservation has ended.
func (r *GroupReservation) settle(ctx context.Context, actual int) error {
	more := int64(actual) - r.permits
	if more == 0 || more < 0 && slices.ContainsFunc(r.charged(), func(w weighted) bool { return w.limiter.quota != nil }) {
		return nil
	}
	p := r.answer.p
	q := p.NewSettlement(r.answer.call, more, deadlineOf(ctx))
	return p.Wait(ctx, q, p.Submit(ctx, q)).Err
}

// SettleLater is [GroupReservation.Settle] in the background. [Group.Close] waits for it, and so does [RateLimiter.Close] of the first member. An error is
// logged ([WithLogger]).
func (r *GroupReservation) SettleLater(actual int) {
	if r.answer.call == nil {
		return
	}
	first := r.answer.asked.members[r.answer.indexes[0]].member()
	if err := r.settleable(actual); err != nil {
		first.notSettled(r.permits, actual, err)
	} else if r.answer.p.Claim(r.answer.call) {
		first.settleLater(r.permits, actual, r.settle)
	}
}
