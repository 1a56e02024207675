package tokenbucket

import (
	"context"
	"fmt"
	"sync"
)

// Settle replaces the number of permits of the reservation by the number that the call has used, for calls whose cost is known only afterwards:
// tokens of a language model, bytes of a reply. If fewer were used, the others go back: the bucket's debt shrinks, and what is left is
// stored as far as there is room. Waiters and reservations of this process move up by as much. If more were used, they are charged, and later
// requests wait for them.
//
//	r, err := limiter.Reserve(ctx, estimate)
//	<-r.Ready() // and then the call
//	err = r.Settle(ctx, actual)
//
// Before its permits are due, a reservation keeps its place in the queue with fewer permits. With none it is cancelled.
//
// A reservation is settled once: a second Settle does nothing, whatever its number, and so does one after Cancel or Return has given the permits
// back. A reservation that is never settled counts as its estimate, also if the process ends. Settling a refusal does nothing. actual is
// at least 0, else the error is [ErrInvalidPermits]; so it is if the charge would leave the range of exact times.
//
// The settlement is sent once, even if its reply is lost. On an error the difference may not be settled, and then the estimate counts.
//
// Permits that go back may be granted again, before permits that were taken later are due. So the calls of any window of T
// seconds use at most the bound of [PayNow] or [PayLater], plus the permits given back since the first of them was granted, plus what they
// used beyond their estimates. A bursty bucket is charged exactly what was used, unless it was full since the grant, or is when permits go
// back. Nothing goes back to a bucket that has forgotten the grant, because it was reset or its store has lost it. A limiter that
// warms up only shrinks its debt. A quota ([NewQuota]) gives nothing back, since more calls than it allows would fall into a window.
func (r *Reservation) Settle(ctx context.Context, actual int) error {
	if err := checkSettled(actual); err != nil || r.call == nil || r.refused {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if !r.call.Coordinator().Claim(r.call) {
		return nil
	}
	return r.settle(ctx, actual)
}

// checkSettled returns the error of a number of permits that no call can have used.
func checkSettled(actual int) error {
	if actual < 0 || int64(actual) > maxExact {
		return fmt.Errorf("%w: settled permits %d: want 0 to 2^53", ErrInvalidPermits, actual)
	}
	return nil
}

// settle sends the settlement, which the caller has claimed.
func (r *Reservation) settle(ctx context.Context, actual int) error {
	more, c := int64(actual)-r.permits, r.call.Coordinator()
	if more == 0 || more < 0 && r.quota {
		return nil
	}
	got := c.Settle(ctx, r.call, r.permits, int64(actual), deadlineOf(ctx))
	if got.Err == nil && !got.Granted && more > 0 {
		return r.call.Limiter().Overflow(more)
	}
	return got.Err
}

// SettleLater is [Reservation.Settle] in the background, for a call that must not wait for the store. [RateLimiter.Close] waits for it. An error
// is logged ([WithLogger]).
func (r *Reservation) SettleLater(actual int) {
	if r.limiter == nil || r.call == nil || r.refused {
		return
	}
	if err := checkSettled(actual); err != nil {
		r.limiter.notSettled(r.permits, actual, err)
	} else if r.call.Coordinator().Claim(r.call) { // at once, so a Cancel that follows does nothing
		r.limiter.settleLater(r.permits, actual, r.settle)
	}
}

// settleLater calls settle in the background, and logs its error. [RateLimiter.Close] waits for it.
func (l *RateLimiter) settleLater(estimate int64, actual int, settle func(ctx context.Context, actual int) error) {
	ends := []func(){l.settling.begin()}
	counts := l.settles
	if now := l.inUse(); now != nil {
		counts = now.settles // those of a limiter of Following are its rule's
	}
	for _, s := range counts {
		ends = append(ends, s.begin())
	}
	go func() {
		for _, end := range ends {
			defer end()
		}
		defer l.limiter.Logger.Recovered()
		if err := settle(context.Background(), actual); err != nil {
			l.notSettled(estimate, actual, err)
		}
	}()
}

// notSettled logs that a settlement has failed.
func (l *RateLimiter) notSettled(estimate int64, actual int, err error) {
	log := l.limiter.Logger.Get()
	if now := l.inUse(); now != nil {
		log = now.limiter.Logger.Get()
	}
	log.Warn("tokenbucket: a reservation was not settled, its estimate may count", "bucket", l.Name(), "estimate", estimate,
		"used", actual, "error", err)
}

// Settlements counts settlements in the background ([Reservation.SettleLater], [GroupReservation.SettleLater]) of all limiters that have it
// ([WithSettlements]). It is for a program that replaces limiters while it runs, and cannot close all that it has made. The zero value has none.
// It is safe for concurrent use.
type Settlements struct {
	mu      sync.Mutex
	open    int
	current *sync.WaitGroup // of those that have begun since the last wait, and of that wait; nil before the first
}

// begin counts a settlement until the returned function is called.
func (s *Settlements) begin() (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open++
	if s.current == nil {
		s.current = new(sync.WaitGroup)
	}
	current := s.current
	current.Add(1)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open--
		current.Done()
	}
}

// Wait waits for the settlements that have begun, as long as the context allows. The store timeouts of the limiters bound that, too. Wait does not
// wait for those that begin meanwhile.
func (s *Settlements) Wait(ctx context.Context) error {
	s.mu.Lock()
	if s.open == 0 {
		s.mu.Unlock()
		return nil
	}
	begun, later, none := s.current, new(sync.WaitGroup), make(chan struct{})
	later.Add(1) // a later wait waits for these, too
	s.current = later
	s.mu.Unlock()
	go func() {
		begun.Wait()
		later.Done()
		close(none)
	}()
	select {
	case <-none:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// settled waits for the settlements of the limiter that have begun, and for those of the limiters of ForPriority.
func (l *RateLimiter) settled(ctx context.Context) error {
	if k := l.kin.Load(); k != nil {
		for i := range k {
			if other := k[i].Load(); other != nil && other != l {
				if err := other.settling.Wait(ctx); err != nil {
					return err
				}
			}
		}
	}
	return l.settling.Wait(ctx)
}
