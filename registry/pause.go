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
)

// pause is the penalty of a row without a rate (Registry.Penalize). The store keeps the penalty for the fleet in the row's bucket, which such a
// row uses for nothing else, and each load reads it. So a penalty outlasts a change of the row that adds or removes a rate.
type pause struct {
	until atomic.Int64 // when the penalty ends, by clock.Mono, since the wall clock may be set; 0 if there is none

	mu      sync.Mutex
	keeper  *tokenbucket.RateLimiter // the limiter of the bucket; nil until it is needed
	warm    bool                     // whether keeper is of the warm-up kind
	shadow  bool                     // whether keeper is the bucket of the shadow
	changes int                      // number of penalties begun and ended here; a state that was read before a change is outdated
	unsent  int64                    // end of the longest penalty that the store has not acknowledged, by clock.Mono
}

// left returns the time until the penalty ends.
func (p *pause) left() time.Duration {
	until := time.Duration(p.until.Load())
	if until == 0 {
		return 0
	}
	return max(0, until-clock.Mono())
}

// begins extends the penalty to the given time.
func (p *pause) begins(until int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	p.unsent = max(p.unsent, until)
	p.until.Store(max(p.until.Load(), until))
}

// stored records that the store keeps a penalty until the given time.
func (p *pause) stored(until int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	if p.unsent <= until {
		p.unsent = 0
	}
}

// ended records that the penalty was ended in the store.
func (p *pause) ended() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	p.unsent = 0
	p.until.Store(0)
}

// asking returns the number of changes before the store is read, for learned.
func (p *pause) asking() (changes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changes
}

// learned takes over the rest of the penalty from the store's reply, unless the penalty has changed here since the store was read.
func (p *pause) learned(left time.Duration, changes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if changes != p.changes {
		return
	}
	until := p.unsent
	if left > 0 {
		until = max(until, int64(clock.Mono()+left))
	}
	p.until.Store(until)
}

// keeperOf returns the limiter of the bucket that keeps a row's penalty, which is the bucket of the row's rate if the row gets one. wrong is
// an earlier result that turned out to be of the other kind, or nil.
func (r *Registry) keeperOf(e *entry, wrong *tokenbucket.RateLimiter) (l *tokenbucket.RateLimiter, err error) {
	p, shadow := &e.slot.pause, r.shadows(&e.limit)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.keeper != nil && p.shadow == shadow && p.keeper != wrong {
		return p.keeper, nil
	}
	if p.shadow != shadow { // the shadow's bucket has penalties of its own
		p.unsent = 0
		p.until.Store(0)
	}
	warm := p.warm != (wrong != nil)
	if l, err = r.visitor(&e.limit, warm); err != nil {
		return nil, err
	}
	p.keeper, p.shadow, p.warm = l, shadow, warm
	return l, nil
}

// visitor returns a limiter of one kind for the penalty of a row's bucket. It has no version, so the bucket's configuration stays in force.
func (r *Registry) visitor(c *Limit, warm bool) (l *tokenbucket.RateLimiter, err error) {
	opts := append(r.limiterOptions(), tokenbucket.WithObserver(tokenbucket.Observer{})) // it decides no call
	if r.shadows(c) {
		opts = append(opts, tokenbucket.WithShadow())
	}
	if warm {
		l, err = tokenbucket.NewSmoothWarmingUp(c.Name, 1, time.Second, opts...)
	} else {
		l, err = tokenbucket.NewSmoothBursty(c.Name, 1, opts...)
	}
	if err != nil {
		return nil, fmt.Errorf("registry: bucket %.80q: %w", c.Name, err)
	}
	return l, nil
}

// heldFor returns the rest of a bucket's penalty.
func heldFor(ctx context.Context, l *tokenbucket.RateLimiter) (time.Duration, error) {
	b, err := l.State(ctx)
	if err != nil || b.HeldUntilMicros == 0 {
		return 0, err
	}
	return max(0, time.Duration(b.HeldUntilMicros-b.SeenMicros)*time.Microsecond), nil
}

// renew resets a bucket that is of the other kind than its row, and restores its penalty. Between the two steps there is no penalty.
func (r *Registry) renew(ctx context.Context, l *tokenbucket.RateLimiter, c *Limit) error {
	before, err := r.visitor(c, c.Warmup == 0)
	if err != nil {
		return err
	}
	held, err := heldFor(ctx, before)
	switch {
	case errors.Is(err, tokenbucket.ErrInvalidConfig): // another process has reset it
		return nil
	case err != nil:
		return err
	}
	if err = l.Reset(ctx); err != nil || held == 0 {
		return err
	}
	return l.Penalize(ctx, held)
}

// ofKeeper calls do with the limiter of the bucket that keeps a row's penalty, of either kind.
func (r *Registry) ofKeeper(e *entry, do func(keeper *tokenbucket.RateLimiter) error) error {
	l, err := r.keeperOf(e, nil)
	if err != nil {
		return err
	}
	if err = do(l); !errors.Is(err, tokenbucket.ErrInvalidConfig) {
		return err
	}
	if l, err = r.keeperOf(e, l); err != nil {
		return err
	}
	return do(l)
}

// pause begins a penalty of a row without a rate, in this process at once, even if the store is unavailable.
func (r *Registry) pause(ctx context.Context, e *entry, d time.Duration) error {
	l, err := r.keeperOf(e, nil)
	if err != nil {
		return err
	}
	if d <= 0 || d > time.Hour {
		return l.Penalize(ctx, d) // returns the error
	}
	p, until := &e.slot.pause, int64(clock.Mono()+d)
	p.begins(until)
	if err = r.ofKeeper(e, func(l *tokenbucket.RateLimiter) error { return l.Penalize(ctx, d) }); err == nil {
		p.stored(until)
	}
	return err
}

// unpause ends the penalty of a row without a rate, for the whole fleet.
func (r *Registry) unpause(ctx context.Context, e *entry) error {
	err := r.ofKeeper(e, func(l *tokenbucket.RateLimiter) error { return l.Reset(ctx) })
	if err == nil {
		e.slot.pause.ended()
	}
	return err
}

// learnPause reads the penalty of a row without a rate from the store, as other processes may have begun or ended it.
func (r *Registry) learnPause(ctx context.Context, e *entry) error {
	changes := e.slot.pause.asking()
	var left time.Duration
	err := r.ofKeeper(e, func(l *tokenbucket.RateLimiter) (err error) {
		left, err = heldFor(ctx, l)
		return err
	})
	if err != nil {
		return err
	}
	e.slot.pause.learned(left, changes)
	return nil
}
