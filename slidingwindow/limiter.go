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

// Limiter admits at most a number of permits in any window of time: in this process, or with [WithRedis] in all processes together that use
// the same name, window and prefix. Requests are decided at once; only Wait and WaitN wait for permits. A permit that was admitted counts
// until it is out of the window, unless it is refunded (Take, Refund).
//
// A refusal is a result (false), a failure is an error. Most callers want Allow. All methods may be called by many goroutines at once. A
// Limiter need not be closed.
type Limiter struct {
	*window
	observer    *Observer
	coordinator *coordinator // nil if the counts are local
	counts      counts       // of permits that were admitted; only if the counts are local
}

func named(name string) *Limiter { return &Limiter{window: &window{name: name}} }

// New returns a limiter of at most limit permits (1 to 2^31) in any window. The window is counted in sub-intervals of the resolution: whole
// microseconds from 1 ms on, which must divide the window into at most 1440. A window is at most 101 years, so that all times are exact in
// Redis until 2150. A finer resolution is more exact, and costs memory. Without [WithRedis] each Limiter has counts of its own, even if another has the same name. A name is any string of
// 1 to 512 bytes.
func New(name string, limit int, window, resolution time.Duration, opts ...Option) (*Limiter, error) {
	l := named(name)
	if len(name) < 1 || len(name) > maxName {
		return nil, l.bad("name", fmt.Sprintf("%.40q of %d bytes", name, len(name)), "1 to 512 bytes")
	}
	return l.setUp("{"+script.EncodeName(name)+"}", limit, window, resolution, opts)
}

// NewKey is New for a resource with a number as its name. Its counts are not those of a limiter whose name is the number as text.
func NewKey(key uint64, limit int, window, resolution time.Duration, opts ...Option) (*Limiter, error) {
	l := named(strconv.FormatUint(key, 10))
	return l.setUp(fmt.Sprintf("key:{%016x}", key), limit, window, resolution, opts)
}

// maxName is the most bytes of a name.
const maxName = 512

// setUp configures a limiter that has a name. It returns nil with an error.
func (l *Limiter) setUp(key string, limit int, window, resolution time.Duration, opts []Option) (*Limiter, error) {
	if !validLimit(limit) {
		return nil, l.bad("limit", limit, limitRange)
	}
	switch {
	case window <= 0 || window > maxWindow:
		return nil, l.bad("window", window, fmt.Sprintf("a positive duration, at most %v", maxWindow))
	case resolution < finest || resolution%time.Microsecond != 0:
		return nil, l.bad("resolution", resolution, "whole microseconds from 1ms on")
	case window%resolution != 0:
		return nil, l.bad("resolution", resolution, fmt.Sprintf("a divisor of the window, %v", window))
	case window/resolution > maxParts:
		return nil, l.bad("resolution", resolution, fmt.Sprintf("at least the window / %d, %v", maxParts, window/maxParts))
	}
	o, err := l.options(opts)
	if err != nil {
		return nil, err
	}
	l.rule = rule{window.Microseconds(), resolution.Microseconds(), int64(window / resolution)}
	l.limit.Store(int64(limit))
	l.clock, l.observer = clock.New(o.clock), o.observer
	l.waiters.setUp(o)
	if o.client != nil {
		l.coordinator = newCoordinator(l.window, o, o.prefix+key+":"+window.String())
	}
	return l, nil
}

const (
	// finest is the shortest resolution. A shorter one would only cost: the time to live of a state is in milliseconds, and the first request
	// in each sub-interval asks Redis.
	finest = time.Millisecond
	// maxWindow is the longest window: 100 years, and what a caller such as package registry adds. A time to which a window and a sub-interval are added must be below 2^53 microseconds since 1970,
	// which is in 2255.
	maxWindow = 101 * 365 * 24 * time.Hour
)

// limitRange describes the limits that validLimit accepts.
const limitRange = "1 to 2^31"

func validLimit(n int) bool { return n >= 1 && int64(n) <= maxLimit }

// Allow is AllowN of one permit.
func (l *Limiter) Allow(ctx context.Context) (bool, error) { return l.AllowN(ctx, 1) }

// AllowN reports whether n permits may be used now, and counts them if so: all of them or none. More than the limit is an error, since it
// could never be allowed.
//
// With Redis, permits that are allowed have been counted there, in one round trip that concurrent callers of this process share. A refusal
// from the last reply costs no round trip; the first request in a sub-interval is never refused so. For outages of Redis, see
// [FailurePolicy]. AllowN returns when ctx ends, even if Redis hangs. Permits that Redis grants after that are refunded at once, unless the reply
// is lost; then they count until they are out of the window. See [WithRedis] for when AllowN notices a cancellation.
func (l *Limiter) AllowN(ctx context.Context, n int) (bool, error) {
	if l.observer == nil && ctx.Err() == nil && n >= 1 && int64(n) <= l.limit.Load() && l.isFull() {
		return false, nil // as decide does, which costs twice as much
	}
	v, err := l.observed(ctx, n, l.decide)
	return v.ok, err
}

// decide implements AllowN.
func (l *Limiter) decide(ctx context.Context, n int) (v verdict, _ time.Duration, err error) {
	if err := l.check(ctx, n); err != nil {
		return verdict{by: ByCheck}, 0, err
	}
	switch {
	case l.isFull():
		return verdict{by: BySnapshot}, 0, nil
	case l.coordinator != nil:
		v, err = l.coordinator.do(ctx, &call{n: int64(n)})
	default:
		v, err = l.allowLocal(int64(n))
	}
	return v, 0, err
}

// check returns the error of a call that cannot be made.
func (l *Limiter) check(ctx context.Context, n int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if n < 1 || int64(n) > l.limit.Load() {
		return l.checkPermits(ctx, n)
	}
	return nil
}

// checkPermits checks n. It asks for the limit in force if n seems to exceed it.
func (l *Limiter) checkPermits(ctx context.Context, n int) error {
	if c := l.coordinator; c != nil && n >= 1 && int64(n) <= maxLimit {
		if _, err := c.do(ctx, &call{kind: asks}); err != nil && ctx.Err() != nil {
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
	l.publish(span{})
	limit := l.limit.Load() // SetLimit may have ended the span
	at := l.counts.advance(&l.rule, l.now())
	used := l.counts.used(&l.rule, at)
	if used+n > limit {
		if used+1 > limit {
			l.publish(spanOf(l.now(), l.counts.until(&l.rule, at, limit-1)-at))
		}
		return v, nil
	}
	if !l.counts.add(&l.rule, n) {
		return v, fmt.Errorf("%w: limiter %.80q", ErrOverflow, l.name)
	}
	return verdict{true, ByStore, at - l.counts.shifted}, nil
}

// Remaining returns how many permits could be admitted now. With Redis it makes one round trip in a sub-interval, and uses the last reply
// in between. During an outage of Redis it returns the rest of this process's share ([LocalShare]), or an [ErrStoreUnavailable].
func (l *Limiter) Remaining(ctx context.Context) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if l.coordinator != nil {
		if _, err := l.coordinator.do(ctx, &call{kind: knows}); err != nil {
			return 0, err
		}
	}
	limit, used, _ := l.standing(1)
	return int(max(0, limit-used)), nil
}

// RetryAfter returns the least time until n permits can be admitted, according to the last reply: 0 if they might be admitted now. It makes
// no round trip. For more than the limit it returns the longest duration.
func (l *Limiter) RetryAfter(n int) time.Duration {
	limit, _, wait := l.standing(int64(n))
	if int64(n) > limit {
		return math.MaxInt64
	}
	return wait
}

// standing returns the limit, the permits that count against it now, and the time until n more can be admitted.
func (l *Limiter) standing(n int64) (limit, used int64, wait time.Duration) {
	if l.coordinator != nil {
		return l.coordinator.standing(n)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	at := max(l.now(), l.counts.seen)
	limit, used = l.limit.Load(), l.counts.used(&l.rule, at)
	return limit, used, l.counts.wait(&l.rule, at, limit, n)
}

// SetLimit changes the limit, with Redis for all processes: it becomes the next version, and the newest version is in force for every
// limiter of this name and window, whatever limit New was given. It is in force in Redis when SetLimit returns. Other processes adopt it
// with their next reply, at the latest with their first request in the next sub-interval. Until then they may refuse requests that a higher
// limit allows.
//
// Permits that were admitted stay counted: under a lower limit, none are admitted until enough of them are out of the window.
//
// The limit is part of the state in Redis, which lives for a window and about a minute after the last call that was allowed. After that,
// each process that knows the limit restores it with its next round trip. If none does, the limits of New are in force again: to change the
// limit for good, change it there, with a newer version ([WithVersion]).
//
// Without Redis it changes this limiter alone, at once. After an [ErrStoreUnavailable] it is unknown whether the limit was set.
func (l *Limiter) SetLimit(ctx context.Context, n int) error {
	if !validLimit(n) {
		return l.badPermits("limit", n, limitRange)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if l.coordinator != nil {
		_, err := l.coordinator.do(ctx, &call{kind: sets, limit: int64(n)})
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limit.Store(int64(n))
	l.publish(span{})
	l.waiters.wake()
	return nil
}

// Reconfigure adopts the limit of another limiter, with its version ([WithVersion]), and its [FailurePolicy]. The counts stay, including
// the permits that were admitted during an outage of Redis, which a limiter newly made by New would not know. It makes no round trip. The
// next one reports the limit to Redis, and the newest version is in force, as with New.
//
// It returns an ErrInvalidConfig if the other limiter counts something else: its name, window, resolution and key must be the same.
// The other limiter must not be used afterwards.
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
	if c := l.coordinator; c != nil {
		c.reconfigure(limit, version, policy.failure)
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limit.Store(limit)
	l.publish(span{})
	l.waiters.wake()
	return nil
}

// key returns the key in Redis; "" without Redis.
func (l *Limiter) key() string {
	if l.coordinator == nil {
		return ""
	}
	return l.coordinator.key
}

// Limit returns the limit in force.
func (l *Limiter) Limit() int { return int(l.limit.Load()) }

// Version returns the version of the limit in force; 0 if there is none, and in memory.
func (l *Limiter) Version() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.coordinator == nil {
		return 0
	}
	return l.coordinator.version
}

// Name returns the name of the limiter; for one made with [NewKey], the number.
func (l *Limiter) Name() string { return l.name }

// Window returns the length of the window.
func (l *Limiter) Window() time.Duration { return time.Duration(l.rule.window) * time.Microsecond }

// Resolution returns the length of a sub-interval.
func (l *Limiter) Resolution() time.Duration {
	return time.Duration(l.rule.resolution) * time.Microsecond
}
