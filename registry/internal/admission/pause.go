package admission

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// Pause is the penalty of a row without a rate (Registry.Penalize). The store keeps the penalty for the fleet in the row's bucket, which such a
// row uses for nothing else, and each load reads it. So a penalty outlasts a change of the row that adds or removes a rate.
type Pause struct {
	until atomic.Int64 // when the penalty ends, by clock.Mono, since the wall clock may be set; 0 if there is none

	mu      sync.Mutex
	keeper  *tokenbucket.RateLimiter // the limiter of the bucket; nil until it is needed
	warm    bool                     // whether keeper is of the warm-up kind
	shadow  bool                     // whether keeper is the bucket of the shadow
	changes int                      // number of penalties begun and ended here; a state that was read before a change is outdated
	unsent  int64                    // end of the longest penalty that the store has not acknowledged, by clock.Mono
}

// Left returns the time until the penalty ends.
func (p *Pause) Left() time.Duration {
	until := time.Duration(p.until.Load())
	if until == 0 {
		return 0
	}
	return max(0, until-clock.Mono())
}

// begins extends the penalty to the given time.
func (p *Pause) begins(until int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	p.unsent = max(p.unsent, until)
	p.until.Store(max(p.until.Load(), until))
}

// stored records that the store keeps a penalty until the given time.
func (p *Pause) stored(until int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	if p.unsent <= until {
		p.unsent = 0
	}
}

// ended records that the penalty was ended in the store.
func (p *Pause) ended() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changes++
	p.unsent = 0
	p.until.Store(0)
}

// asking returns the number of changes before the store is read, for learned.
func (p *Pause) asking() (changes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changes
}

// learned takes over the rest of the penalty from the store's reply, unless the penalty has changed here since the store was read.
func (p *Pause) learned(left time.Duration, changes int) {
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

// Bucket is the bucket that keeps a row's penalty, which is the bucket of the row's rate if the row gets one.
type Bucket struct {
	Shadow  bool                                              // whether it is the bucket of the shadow
	Limiter func(warm bool) (*tokenbucket.RateLimiter, error) // makes a limiter of one kind, bursty or warm-up
}

// keeperOf returns the limiter of the bucket. wrong is an earlier result that turned out to be of the other kind, or nil.
func (p *Pause) keeperOf(b Bucket, wrong *tokenbucket.RateLimiter) (l *tokenbucket.RateLimiter, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.keeper != nil && p.shadow == b.Shadow && p.keeper != wrong {
		return p.keeper, nil
	}
	if p.shadow != b.Shadow { // the shadow's bucket has penalties of its own
		p.unsent = 0
		p.until.Store(0)
	}
	warm := p.warm != (wrong != nil)
	if l, err = b.Limiter(warm); err != nil {
		return nil, err
	}
	p.keeper, p.shadow, p.warm = l, b.Shadow, warm
	return l, nil
}

// ofKeeper calls do with the limiter of the bucket, of either kind.
func (p *Pause) ofKeeper(b Bucket, do func(keeper *tokenbucket.RateLimiter) error) error {
	l, err := p.keeperOf(b, nil)
	if err != nil {
		return err
	}
	if err = do(l); !errors.Is(err, tokenbucket.ErrInvalidConfig) {
		return err
	}
	if l, err = p.keeperOf(b, l); err != nil {
		return err
	}
	return do(l)
}

// Begin begins a penalty, in this process at once, even if the store is unavailable.
func (p *Pause) Begin(ctx context.Context, b Bucket, d time.Duration) error {
	l, err := p.keeperOf(b, nil)
	if err != nil {
		return err
	}
	if d <= 0 || d > time.Hour {
		return l.Penalize(ctx, d) // returns the error
	}
	until := int64(clock.Mono() + d)
	p.begins(until)
	if err = p.ofKeeper(b, func(l *tokenbucket.RateLimiter) error { return l.Penalize(ctx, d) }); err == nil {
		p.stored(until)
	}
	return err
}

// End ends the penalty for the whole fleet.
func (p *Pause) End(ctx context.Context, b Bucket) error {
	err := p.ofKeeper(b, func(l *tokenbucket.RateLimiter) error { return l.Reset(ctx) })
	if err == nil {
		p.ended()
	}
	return err
}

// Learn reads the penalty from the store, as other processes may have begun or ended it.
func (p *Pause) Learn(ctx context.Context, b Bucket) error {
	changes := p.asking()
	var left time.Duration
	err := p.ofKeeper(b, func(l *tokenbucket.RateLimiter) (err error) {
		left, err = HeldFor(ctx, l)
		return err
	})
	if err != nil {
		return err
	}
	p.learned(left, changes)
	return nil
}

// HeldFor returns the rest of a bucket's penalty.
func HeldFor(ctx context.Context, l *tokenbucket.RateLimiter) (time.Duration, error) {
	b, err := l.State(ctx)
	if err != nil || b.HeldUntilMicros == 0 {
		return 0, err
	}
	return max(0, time.Duration(b.HeldUntilMicros-b.SeenMicros)*time.Microsecond), nil
}
