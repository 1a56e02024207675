package gate

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

var (
	_ Limiter[*tokenbucket.GroupReservation] = (*tokenbucket.Group)(nil)
	_ Limiter[*tokenbucket.GroupReservation] = (*tokenbucket.Choice)(nil)
)

// levelOf returns the level of the bucket that decided, and sets Member if the limiter is several.
func (a *Admission) levelOf(r Reservation) (level tokenbucket.Level, known bool) {
	switch r := r.(type) {
	case *tokenbucket.Reservation:
		return r.Level()
	case *tokenbucket.GroupReservation:
		a.Member, level, known = decisive(r.Members(), r.RefusedBy())
	}
	return level, known
}

// decisive returns the name and the level of the member that decided: of a refusal refusedBy, of a grant the one of which the fewest permits of
// the group remain. The level is in these permits: a member of weight 3 that has 6 has 2 of them. A reservation does not show what was
// requested, so the lightest member is taken to have the weight 1.
func decisive(members []tokenbucket.MemberOutcome, refusedBy *tokenbucket.RateLimiter) (name string, level tokenbucket.Level, known bool) {
	if refusedBy != nil {
		name = refusedBy.Name()
	}
	least := math.MaxInt
	for i := range members {
		least = min(least, max(1, members[i].Permits))
	}
	for i := range members {
		m := &members[i]
		if refusedBy == nil && !m.Taken || refusedBy != nil && m.Limiter != refusedBy {
			continue
		}
		of, ok := levelIn(m, least)
		if refusedBy == nil && name != "" && (!ok || known && of.Remaining >= level.Remaining) {
			continue
		}
		name, level, known = m.Limiter.Name(), of, ok
	}
	return name, level, known
}

// levelIn returns a member's level in permits of which the request has the given number.
func levelIn(m *tokenbucket.MemberOutcome, requested int) (level tokenbucket.Level, known bool) {
	if level, known = m.Level(); known {
		weight := float64(m.Permits) / float64(requested)
		level.MaxPermits /= weight
		level.Rate /= weight
		level.Remaining /= weight
	}
	return level, known
}

// used returns the buckets of which the call has taken permits. It reports whether the limiter is several.
func (a *Admission) used() (used []*tokenbucket.RateLimiter, several bool) {
	if a == nil {
		return nil, false
	}
	r, several := a.reservation.(*tokenbucket.GroupReservation)
	if !several {
		return nil, false
	}
	members := r.Members()
	for i := range members {
		if members[i].Taken {
			used = append(used, members[i].Limiter)
		}
	}
	return used, true
}

// penalizeAll holds all limiters back. After an error it goes on with the others.
func penalizeAll(ctx context.Context, limiters []*tokenbucket.RateLimiter, d time.Duration) error {
	var errs []error
	for _, l := range limiters {
		errs = append(errs, l.Penalize(ctx, d))
	}
	return errors.Join(errs...)
}
