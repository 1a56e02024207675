package tokenbucket

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
)

// Reservation is permits that were taken from the bucket, and may fall due later; or the refusal of them. The zero Reservation passes
// without a bucket. Its methods may be called by many goroutines at once.
type Reservation struct {
	call       *engine.Call // nil: no bucket was asked: the switch was off, or FailOpen or a shadow let it pass
	refused    bool
	overruled  bool // a shadow let it pass, and nothing was granted
	retryAfter time.Duration
	level      *Level
}

// refusedReservation returns a reservation that is not OK. It could be granted after micros.
func refusedReservation(micros int64, level *Level) *Reservation {
	return &Reservation{refused: true, retryAfter: time.Duration(max(0, micros)) * time.Microsecond, level: level}
}

var always = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// OK is false if the reservation was refused: nothing was taken.
func (r *Reservation) OK() bool { return !r.refused }

// RetryAfter is, for a refusal, how long it takes until such a request, with the same timeout, could be granted if nobody else asks;
// else 0.
func (r *Reservation) RetryAfter() time.Duration {
	if !r.refused {
		return 0
	}
	return r.retryAfter
}

// Delay is the time from the reservation until the permits are due. It shrinks when reservations before it are
// cancelled; soon after that if many wait, for different numbers of permits. A look costs little, however many wait. 0 for a refusal.
func (r *Reservation) Delay() time.Duration {
	if r.call == nil || r.refused {
		return 0
	}
	return time.Duration(r.call.Coordinator().Delay(r.call)) * time.Microsecond
}

// Ready is closed when the permits are due. It is never closed for a refusal, or a reservation that was cancelled before its time. If
// this process was stopped for more than 100 ms beyond that time, the permits have lapsed. The bucket is then asked for others, and
// Ready is closed when those are due; while the store is away, that waits.
func (r *Reservation) Ready() <-chan struct{} {
	switch {
	case r.refused:
		return nil
	case r.call == nil:
		return always
	}
	return r.call.Ready()
}

// Level is how full the bucket was after the decision, for telling a client. It is false when no bucket was asked: when the
// switch is off, or FailOpen or a shadow let it pass.
func (r *Reservation) Level() (Level, bool) {
	if r.level == nil {
		return Level{}, false
	}
	return *r.level, true
}

// Cancel gives the permits back if their time has not come. Callers who wait behind it in this process move up, and what nobody here
// wants goes back to the store. If another process has taken permits behind it, they cannot go back: they serve whoever comes next in
// this process, or lapse at their time. Permits whose time has come are used: cancelling them does nothing. Cancelling twice, or a
// refusal, does nothing either. Cancel waits for the store's answer as long as the context and the store's timeout let it
// ([WithStoreTimeout]); on an error the permits may be lost.
func (r *Reservation) Cancel(ctx context.Context) error {
	if r.call == nil || r.refused {
		return nil
	}
	return r.call.Coordinator().Cancel(ctx, r.call)
}

// Overruled reports whether the reservation is OK only because its limiter is a shadow ([WithShadow]): the bucket refused the request, or
// could not be asked.
func (r *Reservation) Overruled() bool { return r.overruled }

// Return is [Reservation.Cancel] for a call that another limit has refused before it began: it gives back permits that were due at once, too.
// They cannot go back if other processes have taken permits behind them that are not due yet. Permits that fell due while the caller waited
// lapse, as with Cancel.
func (r *Reservation) Return(ctx context.Context) error {
	if r.call == nil || r.refused {
		return nil
	}
	return r.call.Coordinator().Return(ctx, r.call)
}
