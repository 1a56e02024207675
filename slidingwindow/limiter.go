package slidingwindow

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// Limiter admits at most a number of permits in any window of time: in this process, or with [WithRedis] in all processes
// together that use the same name, window and prefix. A request is decided at once; only Wait and WaitN wait for permits. A permit that
// was admitted counts until it is out of the window, unless it is given back (Take, Refund).
//
// A refusal is an answer (false), a failure is an error. Most callers want Allow. All methods may be called by many goroutines
// at once. There is nothing to close.
type Limiter struct {
	*window
	observer    *Observer
	coordinator *coordinator // nil: counts are local
	counts      counts       // local: what was admitted
}

func named(name string) *Limiter { return &Limiter{window: &window{name: name}} }

// New returns a limiter of at most limit permits (1 to 2^31) in any window. The window is counted in sub-intervals of the
// resolution: whole microseconds from 1 ms to 24 h, which must divide the window into at most 1440. A finer resolution is more
// exact, and costs memory: see Exact and Approximate. Without [WithRedis] counts are this process' own; limiters of one name
// do not share them. A name is any string of 1 to 512 bytes.
func New(name string, limit int, window, resolution time.Duration, opts ...Option) (*Limiter, error) {
	l := named(name)
	if len(name) < 1 || len(name) > maxName {
		return nil, l.bad("name", fmt.Sprintf("%.40q of %d bytes", name, len(name)), "1 to 512 bytes")
	}
	return l, l.setUp("{"+script.EncodeName(name)+"}", limit, window, resolution, opts)
}

// NewKey is New for a resource that a number names. It shares nothing with a limiter whose name is that number as text.
func NewKey(key uint64, limit int, window, resolution time.Duration, opts ...Option) (*Limiter, error) {
	l := named(strconv.FormatUint(key, 10))
	return l, l.setUp(fmt.Sprintf("key:{%016x}", key), limit, window, resolution, opts)
}

// maxName is the most bytes that a name may have.
const maxName = 512

func (l *Limiter) setUp(key string, limit int, window, resolution time.Duration, opts []Option) (err error) {
	defer func() {
		if err != nil {
			*l = *named("")
		}
	}()
	if err := l.checkLimit(limit); err != nil {
		return err
	}
	const finest, coarsest = time.Millisecond, 24 * time.Hour
	switch {
	case window <= 0:
		return l.bad("window", window, "a positive duration")
	case resolution < finest || resolution > coarsest || resolution%time.Microsecond != 0:
		return l.bad("resolution", resolution, "whole microseconds from 1ms to 24h")
	case window%resolution != 0:
		return l.bad("resolution", resolution, fmt.Sprintf("a divisor of the window, %v", window))
	case window/resolution > maxParts:
		return l.bad("resolution", resolution, fmt.Sprintf("at least the window / %d, %v", maxParts, window/maxParts))
	}
	o, err := l.options(opts)
	if err != nil {
		return err
	}
	l.rule = rule{o.mode, window.Microseconds(), resolution.Microseconds(), int64(window / resolution)}
	l.limit.Store(int64(limit))
	l.clock, l.observer = clock.New(o.clock), o.observer
	l.line.setUp(o)
	if o.client != nil {
		l.coordinator = newCoordinator(l.window, o, o.prefix+key+":"+window.String())
	}
	return nil
}

func (l *Limiter) checkLimit(n int) error {
	if n < 1 || int64(n) > maxLimit {
		return l.bad("limit", n, "1 to 2^31")
	}
	return nil
}

// Allow is AllowN of one permit.
func (l *Limiter) Allow(ctx context.Context) (bool, error) { return l.AllowN(ctx, 1) }

// AllowN tells whether n permits may be used now, and counts them if so: all of them or none. More than the limit is an error,
// since it could never be allowed.
//
// With Redis, what is allowed has been counted there: one round trip, shared with the others of this process that ask
// meanwhile. What is refused by what this process knows costs none. While Redis is away, see [WithAway] and [WithShare]. It
// returns when ctx ends, even if Redis hangs; permits may have been counted then. See [WithRedis] for when it notices a cancellation.
func (l *Limiter) AllowN(ctx context.Context, n int) (bool, error) {
	if l.observer == nil && ctx.Err() == nil && n >= 1 && int64(n) <= l.limit.Load() && l.isFull() {
		return false, nil // decide does the same, at twice the price
	}
	v, err := l.observed(ctx, n, l.decide)
	return v.ok, err
}

// decide is AllowN.
func (l *Limiter) decide(ctx context.Context, n int) (v verdict, _ time.Duration, err error) {
	v.by = ByCheck
	if err := ctx.Err(); err != nil {
		return v, 0, err
	}
	if n < 1 || int64(n) > l.limit.Load() {
		if err := l.checkPermits(ctx, n); err != nil {
			return v, 0, err
		}
	}
	switch {
	case l.isFull():
		return verdict{by: BySnapshot}, 0, nil
	case l.coordinator != nil:
		v, err = l.coordinator.allow(ctx, int64(n))
	default:
		v, err = l.allowLocal(int64(n))
	}
	return v, 0, err
}

// checkPermits looks what the limit is by now if it seems to be less than what is asked for.
func (l *Limiter) checkPermits(ctx context.Context, n int) error {
	if c := l.coordinator; c != nil && n >= 1 && int64(n) <= maxLimit {
		if err := c.refresh(ctx); err != nil && ctx.Err() != nil {
			return err
		}
	}
	if limit := l.limit.Load(); n < 1 || int64(n) > limit {
		return l.tooMany(int64(n), limit)
	}
	return nil
}

func (l *Limiter) allowLocal(n int64) (v verdict, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopRefusing()
	limit := l.limit.Load() // SetLimit may have opened it
	at := l.counts.advance(&l.rule, l.now())
	used := l.counts.used(&l.rule, at)
	if used+n > limit {
		if used+1 > limit {
			l.refuseFor(l.counts.until(&l.rule, at, limit-1) - at)
		}
		return v, nil
	}
	if !l.counts.add(&l.rule, n) {
		return v, fmt.Errorf("%w: limiter %.80q", ErrOverflow, l.name)
	}
	return verdict{true, ByStore, at - l.counts.shifted}, nil
}

// Remaining is how many permits could be admitted now. With Redis it asks, once in a sub-interval, and goes by what this
// process knows in between; while Redis is away it is what this process may still admit by itself ([WithShare]), or an [ErrAway].
func (l *Limiter) Remaining(ctx context.Context) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if l.coordinator != nil {
		if err := l.coordinator.refresh(ctx); err != nil {
			return 0, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	limit, used, _ := l.standing()
	return int(max(0, limit-used)), nil
}

// RetryAfter is how long it takes at least until n permits can be admitted, as far as this process knows: 0 if they might be
// now. It asks nobody. More than the limit take for ever: the longest duration.
func (l *Limiter) RetryAfter(n int) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit, used, until := l.standing()
	switch {
	case int64(n) > limit:
		return math.MaxInt64
	case n < 1 || used+int64(n) <= limit:
		return 0
	}
	return time.Duration(until(limit-int64(n))) * time.Microsecond
}

// standing is what counts now against which limit, and a function that tells for how many microseconds more than so much of
// it will be used. mu is held.
func (l *Limiter) standing() (limit, used int64, until func(room int64) int64) {
	limit = l.limit.Load()
	if l.coordinator != nil {
		return l.coordinator.standing(limit)
	}
	at := max(l.now(), l.counts.seen)
	return limit, l.counts.used(&l.rule, at), func(room int64) int64 { return l.counts.until(&l.rule, at, room) - at }
}

// SetLimit changes the limit, with Redis of all processes: it becomes the next version, and the newest version is in force wherever a limiter
// of this name and window asks, whatever New was told. It is in force when SetLimit returns: Redis decides by it from then on.
// Other processes hear of it with their next answer, at the latest for a request in the next sub-interval; until then they may refuse what
// a higher limit allows, and with Approximate admit what a lower one does not.
//
// What was admitted stays counted: less than a lower limit is admitted only when it is out of the window.
//
// The limit is part of the state in Redis, which lives for a window and about a minute after the last call that was allowed. When it is
// gone, each process that has heard of the limit brings it back with its next round trip. If none has, the limits of New hold again:
// to change them for good, change them there, with a newer version ([WithVersion]).
//
// Without Redis it changes this limiter alone, at once. An [ErrAway]: Redis could not be asked, and the limit may have been set.
func (l *Limiter) SetLimit(ctx context.Context, n int) error {
	if err := l.checkLimit(n); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if l.coordinator != nil {
		return l.coordinator.setLimit(ctx, int64(n))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limit.Store(int64(n))
	l.stopRefusing()
	l.line.wake()
	return nil
}

// Reconfigure has the limiter go on as if New had been told what it was told of another: the limit with its version (WithVersion), WithAway
// and WithShare. What was counted stays counted, also what was admitted while Redis is away: a limiter that New makes anew knows
// nothing of that. Redis is not asked. It hears of the limit with the next round trip, and the newest version is in force, as with New.
//
// An ErrInvalid: the other counts something else. Its name, window, resolution, mode and key must be the same. It is used no more.
func (l *Limiter) Reconfigure(as *Limiter) error {
	if as == nil || as.name != l.name || as.rule != l.rule || as.key() != l.key() {
		return l.bad("other limiter", "of something else", "one that counts the same")
	}
	var version int64
	var policy policy
	as.mu.Lock()
	limit := as.limit.Load()
	if c := as.coordinator; c != nil {
		version, policy = c.version, c.policy
	}
	as.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.coordinator; c != nil {
		c.policy.away, c.policy.share = policy.away, policy.share
		limit, c.version = c.newest(limit, version)
	}
	l.limit.Store(limit)
	l.stopRefusing()
	l.line.wake()
	return nil
}

// key is where it is counted; "": in this process.
func (l *Limiter) key() string {
	if l.coordinator == nil {
		return ""
	}
	return l.coordinator.key
}

// Limit is the limit in force.
func (l *Limiter) Limit() int { return int(l.limit.Load()) }

// Name of the limiter; the number of one made with [NewKey].
func (l *Limiter) Name() string { return l.name }

// Window is the length of the window.
func (l *Limiter) Window() time.Duration { return time.Duration(l.rule.window) * time.Microsecond }

// Resolution is the length of a sub-interval.
func (l *Limiter) Resolution() time.Duration {
	return time.Duration(l.rule.resolution) * time.Microsecond
}
