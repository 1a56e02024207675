package preview

import (
	"context"
	"math"
	"time"

	"github.com/jonboulle/clockwork"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// mostSimulated bounds the calls simulated, twice, which takes about a tenth of a second.
const mostSimulated = 50_000

// newest returns the newest points with at most mostSimulated calls.
func newest(points []Point) []Point {
	calls, first := int64(0), len(points)
	for first > 0 && calls+points[first-1].calls() <= mostSimulated {
		first--
		calls += points[first].calls()
	}
	return points[first:]
}

// simulable reports whether a limiter can be made of the limit.
func (l *limit) simulable() bool {
	_, err := newTrial(l)
	return err == nil
}

// simulate simulates seconds in two ways, and returns the shares of refused calls.
func (l *limit) simulate(seconds []Point) (least, most float64) {
	calls := float64(total(seconds))
	if calls == 0 || l.Disabled {
		return 0, 0
	}
	spread, atOnce := l.play(seconds, true)/calls, l.play(seconds, false)/calls
	return min(spread, atOnce), max(spread, atOnce)
}

// play returns the number of refused calls.
func (l *limit) play(seconds []Point, spread bool) (refused float64) {
	t, err := newTrial(l)
	if err != nil {
		return 0
	}
	for i := range seconds {
		start, n := time.Duration(i)*time.Second, seconds[i].calls()
		for k := range n {
			at := start
			if spread {
				// Limiters count whole microseconds. Rounding down could come before the permit is due.
				at += time.Duration(math.Ceil(float64(k)/float64(n)*1e6)) * time.Microsecond
			}
			if !t.call(at) {
				refused++
			}
		}
	}
	return refused
}

// trial applies a limit on a clock of its own.
type trial struct {
	limit   *limit
	limiter *tokenbucket.RateLimiter // nil without a rate
	clock   *clockwork.FakeClock
	now     time.Duration
	granted []time.Duration // due times of the grants within the window
}

func newTrial(l *limit) (*trial, error) {
	t := &trial{limit: l, clock: clockwork.NewFakeClock()}
	if l.Disabled || l.NoRate || l.Rate <= 0 {
		return t, nil
	}
	opts := []tokenbucket.Option{tokenbucket.WithStore(tokenbucket.NewMemoryStore()), tokenbucket.WithClock(t.clock)}
	var err error
	if l.Warmup > 0 {
		t.limiter, err = tokenbucket.NewSmoothWarmingUp("preview", l.Rate, l.Warmup, append(opts, tokenbucket.WithColdFactor(l.cold()))...)
		return t, err
	}
	// A caller that may wait gets a permit as long as the bucket's debt does not exceed the permits of that time. A bucket
	// that stores as many more permits, with callers that do not wait, decides the same, at once and 100 times as fast.
	size := l.size() + l.Rate*l.MaxWait.Seconds()
	t.limiter, err = tokenbucket.NewSmoothBursty("preview", l.Rate, append(opts, tokenbucket.WithMaxPermits(size), tokenbucket.WithInitialPermits(size))...)
	return t, err
}

// call reports whether a call is granted.
func (t *trial) call(at time.Duration) bool {
	l := t.limit
	if l.Rate <= 0 && !l.NoRate {
		return false
	}
	if l.windowed() {
		for len(t.granted) > 0 && t.granted[0] <= at-l.Window {
			t.granted = t.granted[1:]
		}
		if len(t.granted) >= l.WindowLimit {
			return false
		}
	}
	if t.limiter != nil {
		t.clock.Advance(at - t.now)
		t.now = at
		if !t.permit() {
			return false
		}
	}
	if l.windowed() {
		t.granted = append(t.granted, at)
	}
	return true
}

func (t *trial) permit() bool {
	ctx := context.Background()
	if t.limit.Warmup <= 0 {
		ok, err := t.limiter.TryAcquire(ctx, 1, 0)
		return ok && err == nil
	}
	r, err := t.limiter.TryReserve(ctx, 1, t.limit.wait())
	return err == nil && r.OK()
}

// wait returns how long a call may wait.
func (l *limit) wait() time.Duration {
	return l.MaxWait
}
