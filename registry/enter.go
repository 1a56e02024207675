package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/seam"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// attempt is a call that wants to begin, and what it holds.
type attempt struct {
	*bounds
	registry    *Registry
	name        string
	slot        *slot
	limiter     *tokenbucket.RateLimiter // nil: no rate
	wait        time.Duration            // how long it may wait for that
	counted     slidingwindow.Result     // in the window, if it was allowed
	countedAt   time.Time
	place       *place
	reservation *tokenbucket.Reservation
	reserved    time.Time
}

// enter is Enter for a row that names more than a rate.
func (r *Registry) enter(ctx context.Context, name string, f *found) (*Admission, error) {
	b, err := f.entry.slot.get(&r.backends, f.entry, r.countedAs(&f.entry.limit))
	if err != nil {
		return nil, err
	}
	a := &attempt{bounds: b, registry: r, name: name, slot: f.entry.slot, limiter: f.limiter, wait: f.entry.wait}
	refused, err := a.run(ctx)
	if refused == nil && err == nil {
		refused, err = a.recount(ctx)
	}
	if refused == nil && err == nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if r.shadows(&f.entry.limit) && ctx.Err() == nil {
		return a.passed(refused, err), nil
	}
	if refused != nil || err != nil {
		a.giveBack()
		a.cancel()
	}
	switch {
	case err != nil:
		return nil, err
	case refused != nil:
		if refused.By != ByLimit {
			a.tell(refused.By, false)
		}
		return refused, nil
	case f.limiter != nil:
		return &Admission{OK: true, By: ByLimit, reservation: a.reservation, place: a.place}, nil
	}
	by := a.tellPassed()
	return &Admission{OK: true, By: by, place: a.place}, nil
}

// tellPassed tells the hook that a row without a rate lets a call pass, which no observer is told.
func (a *attempt) tellPassed() (by Decider) {
	if by = ByWindow; a.window == nil {
		by = ByConcurrency
	}
	a.tell(by, true)
	return by
}

// passed is the answer of a row in shadow: the call passes, and the hook hears if the window or the concurrency would refuse it, or, of a
// row without a rate, would let it pass.
// What refuses it leaves no trace, as without shadow.
func (a *attempt) passed(refused *Admission, err error) *Admission {
	switch {
	case err != nil:
		a.registry.log.Debug("registry: what is in shadow was not counted", "bucket", a.name, "error", err)
	case refused != nil:
		a.giveBack()
		a.tell(ByShadow, true)
	case a.limiter == nil:
		a.tellPassed()
	}
	return &Admission{OK: true, By: ByShadow, reservation: a.reservation, place: a.place}
}

// tell tells the hook of what no bucket has decided.
func (a *attempt) tell(by Decider, pass bool) {
	if a.registry.bypass != nil {
		a.registry.bypass(a.name, by, pass)
	}
}

// run returns nil, nil when the call may begin.
func (a *attempt) run(ctx context.Context) (refused *Admission, err error) {
	if a.limiter == nil {
		if left := a.slot.pause.left(); left > 0 {
			return &Admission{By: ByPenalty, RetryAfter: left}, nil
		}
		return a.take(ctx)
	}
	if !seam.Hopeless(a.limiter, min(a.lead, a.wait)) { // else the bucket refuses at the least cost, or it will be waited for
		if refused, err = a.take(ctx); refused != nil || err != nil {
			return refused, err
		}
	}
	a.reservation, err = a.limiter.TryReserve(ctx, 1, a.wait)
	a.reserved = time.Now()
	switch {
	case err != nil:
		return nil, err
	case !a.reservation.OK():
		return &Admission{By: ByLimit, RetryAfter: a.reservation.RetryAfter(), reservation: a.reservation}, nil
	}
	return a.await(ctx)
}

// await waits until the permit of the rate is due. More than the lead before that the call holds nothing else.
func (a *attempt) await(ctx context.Context) (refused *Admission, err error) {
	for due := false; !due; {
		ahead := a.reservation.Delay() - time.Since(a.reserved)
		switch {
		case isClosed(a.reservation.Ready()):
			ahead = 0
		case ahead > a.lead:
			a.giveBack()
			due, err = a.sleep(ctx, ahead-a.lead)
			if err == nil && !due {
				continue
			}
		}
		if err == nil && !a.holds() {
			refused, err = a.take(ctx)
		}
		if err == nil && refused == nil {
			due, err = a.sleep(ctx, max(ahead, a.lead))
		}
		if err != nil || refused != nil {
			return refused, err
		}
	}
	return nil, nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// sleep waits so long, or until the permit of the rate is due.
func (a *attempt) sleep(ctx context.Context, d time.Duration) (due bool, err error) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-a.reservation.Ready():
		return true, nil
	case <-timer.C:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// take has the call counted in the window, and gives it a place: at once or not at all.
func (a *attempt) take(ctx context.Context) (refused *Admission, err error) {
	full := &Admission{By: ByConcurrency, RetryAfter: time.Second}
	if a.places != nil && a.slot.inside.Load() >= int64(a.most) {
		return full, nil
	}
	if refused, err := a.count(ctx); refused != nil || err != nil {
		return refused, err
	}
	if a.places != nil {
		if a.place, err = a.slot.enter(ctx, a.registry.backends.away, a.bounds); err != nil {
			return nil, fmt.Errorf("registry: bucket %.80q: concurrency: %w", a.name, err)
		}
		if a.place == nil {
			return full, nil
		}
		a.place.lost = a.lost
	}
	return nil, nil
}

// count has the call counted in the window, if there is one.
func (a *attempt) count(ctx context.Context) (refused *Admission, err error) {
	if a.window == nil {
		return nil, nil
	}
	asked := time.Now()
	counted, err := a.window.Take(ctx, 1)
	if err != nil {
		return nil, fmt.Errorf("registry: bucket %.80q: window: %w", a.name, err)
	}
	if !counted.Allowed {
		return &Admission{By: ByWindow, RetryAfter: counted.RetryAfter}, nil
	}
	a.counted, a.countedAt = counted, asked // it may be told long after it was counted
	return nil, nil
}

// recount counts a call anew that was counted much earlier than it can begin: the rest of its answers took long.
func (a *attempt) recount(ctx context.Context) (refused *Admission, err error) {
	if !a.counted.Allowed || time.Since(a.countedAt) <= latest(a.lead) {
		return nil, nil
	}
	a.uncount()
	return a.count(ctx)
}

func (a *attempt) uncount() {
	if a.counted.Allowed { // on an error it counts until it is out of the window
		_ = aside(func(ctx context.Context) error { return a.window.Refund(ctx, a.counted, 1) })
	}
	a.counted = slidingwindow.Result{}
}

func (a *attempt) holds() bool { return a.counted.Allowed || a.place != nil }

// giveBack undoes take.
func (a *attempt) giveBack() {
	var leaving sync.WaitGroup
	if a.place != nil {
		leaving.Go(a.place.leave)
	}
	a.uncount()
	leaving.Wait()
	a.place = nil
}

// cancel gives the permit of the rate back.
func (a *attempt) cancel() {
	if a.reservation == nil {
		return
	}
	if err := aside(a.reservation.Cancel); err != nil {
		a.registry.log.Debug("registry: a permit may be lost", "bucket", a.name, "error", err)
	}
}

// lost tells that a call was no longer counted while it was under way.
func (a *attempt) lost(err error) {
	now, told := int64(clock.Mono()), a.slot.told.Load()
	if told != 0 && now-told < int64(again) || !a.slot.told.CompareAndSwap(told, now) {
		return
	}
	a.registry.log.Warn("registry: the place of a call was lost before it ended: more may have been under way than its row says",
		"bucket", a.name, "error", err)
}

// place is one among the calls that are under way.
type place struct {
	slot   *slot
	permit *semaphore.Permit // nil: the backend is away
	lost   func(error)
	left   atomic.Bool
}

func (p *place) leave() {
	if p.left.Swap(true) {
		return
	}
	var err error
	if p.permit != nil {
		err = aside(p.permit.Release)
	}
	p.slot.inside.Add(-1)
	if errors.Is(err, semaphore.ErrExpired) || errors.Is(err, semaphore.ErrLost) {
		p.lost(err)
	}
}

// enter returns a place, or nil if there is none.
func (s *slot) enter(ctx context.Context, away func(int) int, b *bounds) (*place, error) {
	n := s.inside.Add(1)
	if n > int64(b.most) {
		s.inside.Add(-1)
		return nil, nil
	}
	permit, err := s.acquire(ctx, b)
	switch {
	case err == nil:
		return &place{slot: s, permit: permit}, nil
	case errors.Is(err, semaphore.ErrRefused):
		err = nil
	case isOutage(ctx, err) && away != nil:
		if err = nil; n <= int64(away(b.most)) {
			return &place{slot: s}, nil
		}
	}
	s.inside.Add(-1)
	return nil, err
}

// acquire asks for a permit, unless its backend was away a moment ago.
func (s *slot) acquire(ctx context.Context, b *bounds) (*semaphore.Permit, error) {
	if err := s.outage.known(); err != nil {
		return nil, err
	}
	permit, err := b.places.TryAcquire(ctx, 1, 0)
	if err != nil && isOutage(ctx, err) {
		s.outage.began(err)
	} else if ctx.Err() == nil {
		s.outage.ended()
	}
	return permit, err
}
