package tokenbucket

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
)

// Reservation holds permits that were taken from the bucket, and may fall due later, or the refusal of them. The zero Reservation has
// passed without a bucket. Its methods are safe for concurrent use.
type Reservation struct {
	call       *engine.Call // nil if the call passed without a bucket: by the switch, FailOpen or a shadow
	refused    bool
	overruled  bool // a shadow let it pass, and nothing was granted
	retryAfter time.Duration
	level      *Level

	limiter *RateLimiter // whose Close waits for SettleLater; nil if the call passed without a bucket
	permits int64        // of the request
	quota   bool         // they are of a quota
}

// refusedReservation returns a reservation that is not OK and could be granted after micros.
func refusedReservation(micros int64, level *Level) *Reservation {
	return &Reservation{refused: true, retryAfter: time.Duration(max(0, micros)) * time.Microsecond, level: level}
}

var always = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// OK reports whether the permits were taken. After a refusal nothing was taken.
func (r *Reservation) OK() bool { return !r.refused }

// RetryAfter returns how long it takes until a refused request, with the same timeout, could be granted if there are no other requests. It
// returns 0 for a reservation that is OK.
func (r *Reservation) RetryAfter() time.Duration {
	if !r.refused {
		return 0
	}
	return r.retryAfter
}

// Delay returns the time from the reservation until the permits are due; 0 for a refusal. It shrinks when reservations ahead are cancelled.
// With many waiters for different numbers of permits, that takes effect soon after. Delay is cheap, however many callers wait.
func (r *Reservation) Delay() time.Duration {
	if r.call == nil || r.refused {
		return 0
	}
	return time.Duration(r.call.Coordinator().Delay(r.call)) * time.Microsecond
}

// Ready returns a channel that is closed when the permits are due. It is never closed for a refusal, or for a reservation that was
// cancelled before that time. If this process was stopped for more than 100 ms beyond the due time, the permits have lapsed. Then the store
// is asked for other permits, and Ready is closed when those are due. While the store is unavailable, that waits.
func (r *Reservation) Ready() <-chan struct{} {
	switch {
	case r.refused:
		return nil
	case r.call == nil:
		return always
	}
	return r.call.Ready()
}

// Level returns how full the bucket was after the decision, for a reply to a client. It returns false when the call passed without a
// bucket: while the switch is off, or by FailOpen or a shadow.
func (r *Reservation) Level() (Level, bool) {
	if r.level == nil {
		return Level{}, false
	}
	return *r.level, true
}

// Cancel gives the permits back if they are not due yet. Callers behind it in this process move up, and permits that no caller here wants
// go back to the store. If another process has taken permits behind them, they serve the next callers of this process. What is left of them when
// their time begins goes back as far as the bucket could have saved it up, and lapses otherwise. Permits that are due are used, so cancelling them does nothing. Nor does cancelling twice, or cancelling a
// refusal, or a reservation that was settled. Cancel waits for the store's reply as long as the context and the store's timeout allow ([WithStoreTimeout]). On an error the
// permits may be lost.
func (r *Reservation) Cancel(ctx context.Context) error {
	if r.call == nil || r.refused {
		return nil
	}
	return r.call.Coordinator().Cancel(ctx, r.call)
}

// Overruled reports whether the reservation is OK only because its limiter is a shadow ([WithShadow]): the bucket refused the request, or
// the store could not be asked.
func (r *Reservation) Overruled() bool { return r.overruled }

// Return is [Reservation.Cancel] for a call that another limit has refused before it began: it gives back permits that were due at once,
// too, as far as the bucket could have saved them up. Permits that fell due while the caller
// waited lapse, as with Cancel. Permits of a lease ([WithPrefetch]) go back into it, and lapse if the lease has ended.
func (r *Reservation) Return(ctx context.Context) error {
	if r.call == nil || r.refused {
		return nil
	}
	return r.call.Coordinator().Return(ctx, r.call)
}
