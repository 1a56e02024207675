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

// pause is until when no call of a row without a rate may begin (Registry.Penalize). Its bucket, which such a row has for nothing else, keeps
// the penalty for the fleet, and processes look at it with each load. So a row that gets a rate is still held back, and one that loses
// its rate, too.
type pause struct {
	until atomic.Int64 // see clock.Mono: the wall clock may be set; 0: it does not last

	mu      sync.Mutex
	keeper  *tokenbucket.RateLimiter // nil: not looked at yet
	warm    bool                     // the bucket is one with a warm-up
	shadow  bool                     // the keeper's is the bucket of the shadow
	changes int                      // begun and ended here: what the store has said meanwhile is no news
	untold  int64                    // until when it lasts by what the store was not told; see clock.Mono
}

// left is how long it lasts.
func (p *pause) left() time.Duration {
	until := time.Duration(p.until.Load())
	if until == 0 {
		return 0
	}
	return max(0, until-clock.Mono())
}

// begins makes it last until then at least.
func (p *pause) begins(until int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	p.untold = max(p.untold, until)
	p.until.Store(max(p.until.Load(), until))
}

// told notes that the store was told of one until then.
func (p *pause) told(until int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	if p.untold <= until {
		p.untold = 0
	}
}

// ended notes that it was ended in the store.
func (p *pause) ended() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	p.untold = 0
	p.until.Store(0)
}

// asks returns what learned wants to know of the time before the store is asked.
func (p *pause) asks() (changes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changes
}

// learned takes over how long it lasts by what the store said. At no moment calls find less than before and after.
func (p *pause) learned(left time.Duration, changes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if changes != p.changes {
		return
	}
	until := p.untold
	if left > 0 {
		until = max(until, int64(clock.Mono()+left))
	}
	p.until.Store(until)
}

// keeperOf returns the bucket that keeps a row's penalty: that of its rate, if it had one. wrong is one that was returned before, and the
// bucket is of the other kind; nil: none.
func (r *Registry) keeperOf(e *entry, wrong *tokenbucket.RateLimiter) (l *tokenbucket.RateLimiter, err error) {
	p, shadow := &e.slot.pause, r.shadows(&e.limit)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.keeper != nil && p.shadow == shadow && p.keeper != wrong {
		return p.keeper, nil
	}
	if p.shadow != shadow { // a penalty in shadow holds nobody else back, and the other way round
		p.untold = 0
		p.until.Store(0)
	}
	warm := p.warm != (wrong != nil)
	if l, err = r.visitor(&e.limit, warm); err != nil {
		return nil, err
	}
	p.keeper, p.shadow, p.warm = l, shadow, warm
	return l, nil
}

// visitor looks after the penalty of a row's bucket, of the one kind or the other, and leaves in force what the bucket has: it has no
// version.
func (r *Registry) visitor(c *Limit, warm bool) (l *tokenbucket.RateLimiter, err error) {
	opts := append(r.limiterOptions(), tokenbucket.WithObserver(tokenbucket.Observer{})) // no call is decided there
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

// heldFor is how long a bucket is held back yet.
func heldFor(ctx context.Context, l *tokenbucket.RateLimiter) (time.Duration, error) {
	b, err := l.State(ctx)
	if err != nil || b.HeldUntilMicros == 0 {
		return 0, err
	}
	return max(0, time.Duration(b.HeldUntilMicros-b.SeenMicros)*time.Microsecond), nil
}

// renew begins a bucket anew that is of the other kind than its row says. A penalty goes on; whoever asks between the two steps does not
// find it.
func (r *Registry) renew(ctx context.Context, l *tokenbucket.RateLimiter, c *Limit) error {
	before, err := r.visitor(c, c.Warmup == 0)
	if err != nil {
		return err
	}
	held, err := heldFor(ctx, before)
	switch {
	case errors.Is(err, tokenbucket.ErrInvalidConfig): // somebody else was faster
		return nil
	case err != nil:
		return err
	}
	if err = l.Reset(ctx); err != nil || held == 0 {
		return err
	}
	return l.Penalize(ctx, held)
}

// ofKeeper asks or changes the bucket that keeps a row's penalty, of whatever kind it is.
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

// pause holds a row without a rate back: in this process at once, though its store may be away.
func (r *Registry) pause(ctx context.Context, e *entry, d time.Duration) error {
	l, err := r.keeperOf(e, nil)
	if err != nil {
		return err
	}
	if d <= 0 || d > time.Hour {
		return l.Penalize(ctx, d) // which says what is wrong
	}
	p, until := &e.slot.pause, int64(clock.Mono()+d)
	p.begins(until)
	if err = r.ofKeeper(e, func(l *tokenbucket.RateLimiter) error { return l.Penalize(ctx, d) }); err == nil {
		p.told(until)
	}
	return err
}

// unpause ends that, for the whole fleet.
func (r *Registry) unpause(ctx context.Context, e *entry) error {
	err := r.ofKeeper(e, func(l *tokenbucket.RateLimiter) error { return l.Reset(ctx) })
	if err == nil {
		e.slot.pause.ended()
	}
	return err
}

// learnPause looks whether another process has held a row without a rate back, or has ended that.
func (r *Registry) learnPause(ctx context.Context, e *entry) error {
	changes := e.slot.pause.asks()
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
