package registry

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// penalties is what the names of buckets that keep penalties begin with. No row and no caller's key has such a name: an upstream's answer
// to a client's call would hold another row back.
const penalties = "%penalty:"

// foreign is a name that somebody else has chosen.
func foreign(s string) string {
	if strings.HasPrefix(s, penalties) {
		return "?" + s[1:]
	}
	return s
}

// pause is until when no call of a row without a rate may begin (Registry.Penalize). A row with a rate has a bucket that is held back. One
// without has none that each call asks, so an empty bucket keeps the penalty for the fleet, and processes look at it with each load.
type pause struct {
	until  atomic.Int64 // see clock.Mono: the wall clock may be set
	mu     sync.Mutex
	keeper *tokenbucket.RateLimiter // nil: not looked at yet
}

// left is how long it lasts.
func (p *pause) left() time.Duration {
	until := time.Duration(p.until.Load())
	if until == 0 {
		return 0
	}
	return max(0, until-clock.Mono())
}

// lasts makes it last so long at least.
func (p *pause) lasts(d time.Duration) {
	until := int64(clock.Mono() + d)
	for old := p.until.Load(); old < until && !p.until.CompareAndSwap(old, until); old = p.until.Load() {
	}
}

// keeperOf returns the bucket that keeps a row's penalty.
func (r *Registry) keeperOf(e *entry) (*tokenbucket.RateLimiter, error) {
	p, name := &e.slot.pause, penalties[:1]+unique(penalties[1:]+r.countedAs(&e.limit))
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.keeper == nil || p.keeper.Name() != name {
		l, err := tokenbucket.NewSmoothBursty(name, 1, append(slices.Clone(r.options), tokenbucket.WithStore(r.store),
			tokenbucket.WithObserver(tokenbucket.Observer{}))...) // no call is decided there
		if err != nil {
			return nil, fmt.Errorf("registry: bucket %.80q: %w", e.limit.Name, err)
		}
		p.keeper = l
	}
	return p.keeper, nil
}

// pause holds a row without a rate back: in this process at once, though its store may be away.
func (r *Registry) pause(ctx context.Context, e *entry, d time.Duration) error {
	l, err := r.keeperOf(e)
	if err != nil {
		return err
	}
	if d > 0 && d <= time.Hour { // else it is an error
		e.slot.pause.lasts(d)
	}
	return l.Penalize(ctx, d)
}

// learnPause looks whether another process has held a row without a rate back.
func (r *Registry) learnPause(ctx context.Context, e *entry) error {
	l, err := r.keeperOf(e)
	if err != nil {
		return err
	}
	b, err := l.State(ctx)
	if left := b.HeldUntilMicros - b.SeenMicros; err == nil && b.HeldUntilMicros > 0 && left > 0 {
		e.slot.pause.lasts(time.Duration(left) * time.Microsecond)
	}
	return err
}
