package slidingwindow

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

// Limiter admits at most a number of permits in any window of time: in this process, or with [WithRedis] in all processes together that use
// the same name, window and prefix. Requests are decided at once; only Wait and WaitN wait for permits. A permit that was admitted counts
// until it is out of the window, unless it is refunded (Take, Refund).
//
// A refusal is a result (false), a failure is an error. Most callers want Allow. All methods may be called by many goroutines at once. A
// Limiter need not be closed.
type Limiter struct {
	process *waiting.Process[*call, *flight, []string]
	machine machine // process.Mu guards it
}

// New returns a limiter of at most limit permits (1 to 2^31) in any window. The window is counted in sub-intervals of the resolution: whole
// microseconds from 1 ms on, which must divide the window into at most 1440. A window is at most 101 years, so that all times are exact in
// Redis until 2150. A finer resolution is more exact, and costs memory. Without [WithRedis] each Limiter has counts of its own, even if another has the same name. A name is any string of
// 1 to 512 bytes.
func New(name string, limit int, window, resolution time.Duration, opts ...Option) (*Limiter, error) {
	if len(name) < 1 || len(name) > maxName {
		return nil, named(name).bad("name", fmt.Sprintf("%.40q of %d bytes", name, len(name)), "1 to 512 bytes")
	}
	return named(name).newLimiter("{"+script.EncodeName(name)+"}", limit, window, resolution, opts)
}

// NewKey is New for a resource with a number as its name. Its counts are not those of a limiter whose name is the number as text.
func NewKey(key uint64, limit int, window, resolution time.Duration, opts ...Option) (*Limiter, error) {
	return named(strconv.FormatUint(key, 10)).newLimiter(fmt.Sprintf("key:{%016x}", key), limit, window, resolution, opts)
}

// maxName is the most bytes of a name.
const maxName = 512

// newLimiter returns a limiter of the name.
func (n named) newLimiter(key string, limit int, window, resolution time.Duration, opts []Option) (*Limiter, error) {
	if !validLimit(limit) {
		return nil, n.bad("limit", limit, limitRange)
	}
	switch {
	case window <= 0 || window > maxWindow:
		return nil, n.bad("window", window, fmt.Sprintf("a positive duration, at most %v", maxWindow))
	case resolution < finest || resolution%time.Microsecond != 0:
		return nil, n.bad("resolution", resolution, "whole microseconds from 1ms on")
	case window%resolution != 0:
		return nil, n.bad("resolution", resolution, fmt.Sprintf("a divisor of the window, %v", window))
	case window/resolution > maxParts:
		return nil, n.bad("resolution", resolution, fmt.Sprintf("at least the window / %d, %v", maxParts, window/maxParts))
	}
	o, err := n.options(opts)
	if err != nil {
		return nil, err
	}
	l := &Limiter{machine: machine{
		config: config{
			name: n, rule: rule{window.Microseconds(), resolution.Microseconds(), int64(window / resolution)}, server: o.server, observer: o.observer,
			policy: policy{o.waiters, o.timeout, o.policy, o.local},
		},
		limit: int64(limit), random: *rand.NewPCG(rand.Uint64(), rand.Uint64()),
	}}
	l.machine.published.set(l.machine.limit, span{})
	p := waiting.Config[*call, *flight, []string]{Machine: &l.machine, Clock: o.clock, Timeout: o.timeout}
	if o.client != nil {
		l.machine.key, l.machine.version, l.machine.sender = o.prefix+key+":"+window.String(), o.version, strconv.FormatUint(rand.Uint64(), 36)
		p.Send, p.Failure = l.send(o.client), l.machine.failure
		if bounded := script.Bounded(o.client); bounded != nil {
			p.Direct = l.send(bounded)
		}
	}
	l.process = waiting.New(p)
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
	if l.machine.observer == nil && ctx.Err() == nil && n >= 1 && n <= l.Limit() && l.isFull() {
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
	case l.machine.key != "":
		v, err = l.do(ctx, &call{n: int64(n)})
	default:
		v, err = l.allowHere(int64(n), false)
	}
	return v, 0, err
}

// check returns the error of a call that cannot be made. It asks for the limit in force if n seems to exceed it.
func (l *Limiter) check(ctx context.Context, n int) error {
	if err := ctx.Err(); err != nil || n >= 1 && n <= l.Limit() {
		return err
	}
	if n >= 1 && int64(n) <= maxLimit {
		if _, err := l.do(ctx, &call{kind: asks}); err != nil && ctx.Err() != nil {
			return err
		}
	}
	if limit := l.Limit(); n < 1 || n > limit {
		return l.machine.name.tooMany(int64(n), int64(limit))
	}
	return nil
}

// do makes a call.
func (l *Limiter) do(ctx context.Context, c *call) (verdict, error) {
	if err := l.process.Do(ctx, c); err != nil {
		return verdict{}, err
	}
	return c.verdict, c.err
}

// allowHere decides a request without Redis. It makes no step, which costs more. A call that waits is not decided while others wait.
func (l *Limiter) allowHere(n int64, waits bool) (v verdict, err error) {
	m := &l.machine
	l.process.Mu.Lock()
	defer l.process.Mu.Unlock()
	if !waits || m.waiting() == 0 {
		v, err = m.here(n, l.process.Local())
		m.published.set(m.limit, m.full)
	}
	return v, err
}

// isFull reports whether no permit can be admitted now.
func (l *Limiter) isFull() bool {
	c := l.machine.published.full.Load()
	if c == nil {
		return false
	}
	now := l.process.Local()
	return now < c.until && now >= c.from
}

// Remaining returns how many permits could be admitted now. With Redis it makes one round trip in a sub-interval, and uses the last reply
// in between. During an outage of Redis it returns the rest of this process's share ([LocalShare]), or an [ErrStoreUnavailable].
func (l *Limiter) Remaining(ctx context.Context) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if _, err := l.do(ctx, &call{kind: knows}); err != nil {
		return 0, err
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
	now, out := l.process.Begin()
	defer l.process.End(now, out)
	return l.machine.standing(n, now)
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
		return l.machine.name.badPermits("limit", n, limitRange)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := l.do(ctx, &call{kind: sets, limit: int64(n)})
	return err
}

// Reconfigure adopts the limit of another limiter, with its version ([WithVersion]), and its [FailurePolicy]. The counts stay, including
// the permits that were admitted during an outage of Redis, which a limiter newly made by New would not know. It makes no round trip. The
// next one reports the limit to Redis, and the newest version is in force, as with New.
//
// It returns an ErrInvalidConfig if the other limiter counts something else: its name, window, resolution and key must be the same.
// The other limiter must not be used afterwards.
func (l *Limiter) Reconfigure(as *Limiter) error {
	m := &l.machine
	if as == nil || as.machine.name != m.name || as.machine.rule != m.rule || as.machine.key != m.key {
		return l.machine.name.bad("other limiter", "of something else", "one that counts the same")
	}
	as.process.Mu.Lock()
	limit, version, failure := as.machine.limit, as.machine.version, as.machine.policy.failure
	as.process.Mu.Unlock()
	now, out := l.process.Begin()
	defer l.process.End(now, out)
	m.policy.failure, m.full, m.lookAt = failure, span{}, 0
	m.limit, m.version = m.newest(limit, version)
	return nil
}

// Limit returns the limit in force.
func (l *Limiter) Limit() int { return int(l.machine.published.limit.Load()) }

// Version returns the version of the limit in force; 0 if there is none, and in memory.
func (l *Limiter) Version() int64 {
	l.process.Mu.Lock()
	defer l.process.Mu.Unlock()
	return l.machine.version
}

// Name returns the name of the limiter; for one made with [NewKey], the number.
func (l *Limiter) Name() string { return string(l.machine.name) }

// Window returns the length of the window.
func (l *Limiter) Window() time.Duration {
	return time.Duration(l.machine.rule.window) * time.Microsecond
}

// Resolution returns the length of a sub-interval.
func (l *Limiter) Resolution() time.Duration {
	return time.Duration(l.machine.rule.resolution) * time.Microsecond
}
