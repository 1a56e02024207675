package tokenbucket

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/instances"
)

// RateLimiter hands out permits at a steady rate from a bucket that it shares with all limiters of the same name on
// the same store: in other goroutines, other processes, on other machines. Its configuration is its own, the bucket's
// state ([PermitBucket]) is the store's.
//
// Rates are in permits per second; times are decided by the store's clock, and callers sleep by the limiter's
// ([WithClock]). Callers of one process are served first come, first served. All methods may be called by many
// goroutines at once. There is nothing to close, but for [WithLease].
//
// Most callers want [RateLimiter.Try], [RateLimiter.TryAcquire] or [RateLimiter.Acquire]. A refusal is an answer (false), a
// failure is an error: what a failed store means for the call behind the limiter is the caller's decision.
//
// Every call returns when its context ends. Without a deadline, a call returns within its timeout plus the store's
// ([WithStoreTimeout], default 1 s), even when the store hangs; [RateLimiter.Acquire] within its wait plus the store's. With a
// failure policy that lets calls pass, those that notice an outage also wait for a probe (see [FailurePolicy]).
type RateLimiter struct {
	line    *line
	own     setting
	initial float64
	maxWait time.Duration // of Try
	horizon int64
	enabled func() bool
	lease   int64 // microseconds; 0: none
	closed  atomic.Bool

	plain      bool // neither a policy, an observer nor a shadow
	policy     FailurePolicy
	member     *instances.Member // of those that a LocalShare is divided by
	share      atomic.Pointer[share]
	observer   *Observer
	logger     logger
	shadow     bool
	maxWaiters int
}

// realClock is shared, so that all limiters without a clock of their own are recognised as having the same.
var realClock = clockwork.NewRealClock()

func newLimiter(name string, c Config, opts []Option) (*RateLimiter, error) {
	o := options{config: c, maxWait: defaultMaxWait, horizon: defaultHorizon, timeout: defaultStoreTimeout, clock: realClock,
		maxWaiters: defaultMaxWaiters}
	if len(name) < 1 || len(name) > maxName || !utf8.ValidString(name) {
		o.fail("name", fmt.Sprintf("%.40q of %d bytes", name, len(name)), "1 to 512 bytes of UTF-8")
	}
	for _, opt := range opts {
		if opt == nil {
			o.fail("option", "nil", "no nil options")
			break
		}
		opt(&o)
	}
	if o.err == nil && o.store == nil {
		o.store = NewMemoryStore()
	}
	initial := o.finish()
	if o.err == nil {
		o.err = o.config.validate()
	}
	if o.err == nil {
		o.checkLease()
	}
	if o.err == nil {
		o.checkSeams()
	}
	if o.err != nil {
		return nil, invalid(fmt.Sprintf("%.40s", name), o.err)
	}
	if o.shadow {
		name = shadowMark + name
	}
	l := &RateLimiter{
		line:    lineOf(o.store, name, o.clock, o.timeout),
		own:     newSetting(o.config),
		initial: initial,
		maxWait: o.maxWait,
		horizon: o.horizon.Microseconds(),
		enabled: o.enabled,

		plain:  o.policy == FailClosed && o.observer == nil && !o.shadow,
		policy: o.policy, observer: o.observer, shadow: o.shadow, maxWaiters: o.maxWaiters,
	}
	t := traitsOf(o.store)
	if _, shares := o.policy.instances(); shares && t.join != nil {
		l.member = t.join()
	}
	l.logger.set(o.logger)
	if t.logger != nil {
		t.logger.set(o.logger)
	}
	if l.line.health != nil {
		l.line.health.logger.set(o.logger)
	}
	if o.observer != nil && o.observer.Health != nil && l.line.health != nil {
		l.line.health.watch(l)
	}
	if o.lease != nil && !o.shadow { // a shadow reserves, and who reserves has no use for a lease
		l.lease = o.lease.Microseconds()
	}
	return l, nil
}

// effective is the configuration in force, as far as this process has heard.
func (l *RateLimiter) effective() *setting {
	if known := l.line.known.Load(); known != nil && known.Version >= l.own.Version {
		return known
	}
	return &l.own
}

// agrees tells whether requests of two limiters may travel in one batch.
func (l *RateLimiter) agrees(o *RateLimiter) bool {
	return l == o || l.own.Config == o.own.Config && l.initial == o.initial
}

// Name of the limiter and its bucket.
func (l *RateLimiter) Name() string { return l.line.label() }

// Config is the limiter's own configuration.
func (l *RateLimiter) Config() Config { return l.own.Config }

// InForce is the configuration in force as far as this process has heard: the fleet's newest, or the limiter's own.
func (l *RateLimiter) InForce() Config { return l.effective().Config }

// Rate is the configured permits per second, or what the fleet's newest configuration says once an answer brought it.
func (l *RateLimiter) Rate() float64 { return l.effective().Rate }

// Try is [RateLimiter.TryAcquire] of one permit that waits at most as long as [WithMaxWait] says: half a second by default.
func (l *RateLimiter) Try(ctx context.Context) (bool, error) {
	return l.TryAcquire(ctx, 1, l.maxWait)
}

// TryAcquire takes permits and waits until they are due, if that is within the timeout; else it returns false at once
// and takes nothing. A timeout of 0 or less means that the permits must be due now.
//
// A context that ends while waiting gives the permits back and is returned as the error. A wait that cannot end before
// the context does is a [*WaitError] at once, and so is a request that no state of the bucket could grant within the
// timeout ([ErrNeverGranted]).
func (l *RateLimiter) TryAcquire(ctx context.Context, permits int, timeout time.Duration) (bool, error) {
	if l.plain {
		v, err := l.tryAcquire(ctx, permits, timeout)
		return v.granted, err
	}
	v, err := l.observed(ctx, permits, timeout, func(l *RateLimiter, timeout time.Duration) (verdict, error) {
		return l.tryAcquire(ctx, permits, timeout)
	})
	return v.granted, err
}

// verdict is what a call has come to.
type verdict struct {
	granted bool
	by      Decider
	wait    time.Duration // as Decision.Wait
}

func (l *RateLimiter) tryAcquire(ctx context.Context, permits int, timeout time.Duration) (verdict, error) {
	off, err := l.check(ctx, permits)
	if off || err != nil {
		return passedBy(off), err
	}
	n := int64(permits)
	maxWait, never := l.longest(n, timeout)
	if never != nil {
		if l.heardLately() {
			return verdict{by: ByCheck}, never
		}
	} else if l.line.memory != nil {
		if granted, decided := l.line.takeNow(l, n, maxWait); decided {
			return verdict{granted: granted}, nil
		}
	} else if l.line.fromLease(l, n) {
		return verdict{granted: true, by: ByLease}, nil
	} else if wait, refused := l.line.refuses(l, n, maxWait); refused {
		return verdict{by: BySight, wait: time.Duration(wait) * time.Microsecond}, nil
	}
	c := l.newCall(ctx, n)
	c.maxWait = maxWait
	l.line.submit(ctx, c)
	switch err := l.wait(ctx, c); {
	case never != nil && away(err):
		return verdict{by: ByCheck}, never
	case err != nil:
		return verdict{}, err
	}
	v, err := c.verdict(), l.hopeless(c, timeout)
	c.free()
	return v, err
}

// passedBy is the verdict on a call for which no bucket is asked: the switch is off, or it is invalid.
func passedBy(off bool) verdict {
	if off {
		return verdict{granted: true, by: BySwitch}
	}
	return verdict{by: ByCheck}
}

// verdict is what a call that was answered has come to.
func (c *call) verdict() verdict {
	if c.refused {
		return verdict{wait: time.Duration(c.wait) * time.Microsecond}
	}
	began := c.decided
	if c.parked0 != 0 {
		began = c.parked0
	}
	return verdict{granted: true, wait: time.Duration(max(0, c.due-began)) * time.Microsecond}
}

// Acquire takes permits and waits until they are due, however long that is, and returns the time waited for them. See
// [WithHorizon] for waits longer than ten seconds. Errors as [RateLimiter.TryAcquire].
func (l *RateLimiter) Acquire(ctx context.Context, permits int) (waited time.Duration, err error) {
	if l.plain {
		v, err := l.acquire(ctx, permits)
		return v.waited(), err
	}
	v, err := l.observed(ctx, permits, math.MaxInt64, func(l *RateLimiter, _ time.Duration) (verdict, error) { return l.acquire(ctx, permits) })
	return v.waited(), err
}

func (v verdict) waited() time.Duration {
	if !v.granted {
		return 0
	}
	return v.wait
}

func (l *RateLimiter) acquire(ctx context.Context, permits int) (verdict, error) {
	off, err := l.check(ctx, permits)
	if off || err != nil {
		return passedBy(off), err
	}
	if l.line.memory != nil {
		if granted, _ := l.line.takeNow(l, int64(permits), 0); granted {
			return verdict{granted: true}, nil
		}
	} else if l.line.fromLease(l, int64(permits)) {
		return verdict{granted: true, by: ByLease}, nil
	}
	c := l.newCall(ctx, int64(permits))
	c.acquire, c.maxWait = true, l.reach(c.permits)
	l.line.submit(ctx, c)
	if err := l.wait(ctx, c); err != nil {
		return verdict{}, err
	}
	v := c.verdict()
	if c.refused {
		return v, l.hopeless(c, math.MaxInt64)
	}
	c.free()
	return v, nil
}

// Reserve takes permits, whenever they fall due, and returns at once. The caller waits for [Reservation.Ready] or
// [Reservation.Delay], or gives the permits back with [Reservation.Cancel].
func (l *RateLimiter) Reserve(ctx context.Context, permits int) (*Reservation, error) {
	return l.TryReserve(ctx, permits, math.MaxInt64)
}

// TryReserve takes permits if they fall due within the timeout, and returns at once. If not, the reservation is not OK
// and says when to try again.
func (l *RateLimiter) TryReserve(ctx context.Context, permits int, timeout time.Duration) (*Reservation, error) {
	if l.plain {
		r, _, err := l.tryReserve(ctx, permits, timeout)
		return r, err
	}
	var r *Reservation
	v, err := l.observed(ctx, permits, timeout, func(l *RateLimiter, timeout time.Duration) (v verdict, err error) {
		r, v, err = l.tryReserve(ctx, permits, timeout)
		return v, err
	})
	switch {
	case err != nil:
		return nil, err
	case r != nil:
		return r, nil
	case v.granted:
		return &Reservation{}, nil
	}
	return Refused(v.wait - timeout), nil
}

func (l *RateLimiter) tryReserve(ctx context.Context, permits int, timeout time.Duration) (*Reservation, verdict, error) {
	off, err := l.check(ctx, permits)
	if err != nil {
		return nil, passedBy(false), err
	}
	if off {
		return &Reservation{}, passedBy(true), nil
	}
	maxWait, never := l.longest(int64(permits), timeout)
	if never != nil {
		if l.heardLately() {
			return nil, passedBy(false), never
		}
	} else if wait, refused := l.line.refuses(l, int64(permits), maxWait); refused {
		return &Reservation{refused: true, retryAfter: time.Duration(wait-maxWait) * time.Microsecond, level: l.line.seen()},
			verdict{by: BySight, wait: time.Duration(wait) * time.Microsecond}, nil
	}
	c := l.newCall(ctx, int64(permits))
	c.maxWait = maxWait
	answer := make(chan struct{})
	c.reserved, c.answer = true, answer // it is the caller's from now on, and never reused
	l.line.submit(ctx, c)
	select {
	case <-answer:
	case <-ctx.Done():
		if l.line.leave(c, ctx.Err()) {
			return nil, verdict{}, ctx.Err()
		}
	}
	l.line.mu.Lock() // it may be asking again already, see startOver
	defer l.line.mu.Unlock()
	switch {
	case never != nil && away(c.err):
		return nil, passedBy(false), never
	case c.err != nil:
		return nil, verdict{}, c.err
	}
	v := c.verdict()
	if err := l.hopeless(c, timeout); err != nil {
		return nil, v, err
	}
	return &Reservation{
		call: c, refused: c.refused, retryAfter: time.Duration(max(0, c.wait-c.maxWait)) * time.Microsecond, level: c.level,
	}, v, nil
}

// SetRate changes the rate for the whole fleet: it becomes the bucket's next version, and others learn it with their
// next answer. Max permits keep their size in seconds, stored permits their share of it, and debt stays as it is: a bucket of
// one permit at 0.01/s is one of 10,000 at 100/s. [RateLimiter.SetRateAndBurst] sets both.
func (l *RateLimiter) SetRate(ctx context.Context, permitsPerSecond float64) error {
	next := l.effective().Config
	next.Size = float64(next.Size*permitsPerSecond) / next.Rate
	next.Rate = permitsPerSecond
	if err := next.validate(); err != nil {
		return invalid(l.Name(), err)
	}
	c := &call{op: OpSetRate, rate: permitsPerSecond}
	if err := l.order(ctx, c); err != nil {
		return err
	}
	if c.refused {
		return invalid(l.Name(), wanted("permits per second", permitsPerSecond, "a rate that fits the configuration in force"))
	}
	return nil
}

// SetRateAndBurst changes the rate and max permits of a bursty bucket for the whole fleet, as [RateLimiter.SetRate] does, but
// neither follows from the other. permitsPerSecond is as for [NewSmoothBursty], maxPermits as for [WithMaxPermits]: 0 allows
// no burst. Debt stays as it is. So do stored permits, as far as there is room for them: no change fills a bucket.
//
// A limiter that warms up gets [ErrInvalidConfig]: its max permits follow from its warm-up period.
func (l *RateLimiter) SetRateAndBurst(ctx context.Context, permitsPerSecond, maxPermits float64) error {
	next := l.effective().Config
	if next.Kind != Bursty {
		return invalid(l.Name(), wanted("max permits", maxPermits, "a bursty limiter; one that warms up has SetRate"))
	}
	next.Rate = permitsPerSecond
	next.setMaxPermits(maxPermits)
	if err := next.validate(); err != nil {
		return invalid(l.Name(), err)
	}
	c := &call{op: OpSetRateAndBurst, rate: permitsPerSecond, most: maxPermits}
	if err := l.order(ctx, c); err != nil {
		return err
	}
	if c.refused {
		return invalid(l.Name(), wanted("version", l.effective().Version, "one below 2^53: there is no next one"))
	}
	return nil
}

// maxPenalty bounds Penalize, so that no upstream can shut a fleet out for long by one answer.
const maxPenalty = time.Hour

// Penalize holds the bucket back for the whole fleet: nothing falls due before d from now has passed by the store's clock.
// It is for an upstream that says so (429 with Retry-After). Whoever waits already, in whatever process, waits that much
// longer; permits saved up are dropped. Others learn it with their next answer, and while they have anybody waiting within
// half a second; whom they let go before that is gone. Of several calls the one that ends last counts. d is above 0 and at
// most an hour; [RateLimiter.Reset] ends it at once. While the switch is off ([WithSwitch]) it does nothing.
func (l *RateLimiter) Penalize(ctx context.Context, d time.Duration) error {
	if d <= 0 || d > maxPenalty {
		return invalid(l.Name(), wanted("penalty", d, fmt.Sprintf("more than 0, at most %v", maxPenalty)))
	}
	if l.enabled != nil && !l.enabled() {
		return ctx.Err()
	}
	return l.order(ctx, &call{op: OpHold, hold: int64((d + time.Microsecond - 1) / time.Microsecond)})
}

// State returns the bucket as it is now, and changes nothing.
func (l *RateLimiter) State(ctx context.Context) (PermitBucket, error) {
	c := &call{read: true}
	if err := l.order(ctx, c); err != nil {
		return PermitBucket{}, err
	}
	return *c.bucket, nil
}

// Reset begins the bucket anew with this limiter's own configuration: debt, penalty, version and what [RateLimiter.SetRate] set
// are dropped, and a bucket of the other kind is replaced.
// Reservations made before keep their times, and are not given back to the new bucket.
func (l *RateLimiter) Reset(ctx context.Context) error {
	return l.order(ctx, &call{op: OpReset})
}

// order sends a request that takes nothing.
func (l *RateLimiter) order(ctx context.Context, c *call) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.limiter, c.ready = l, make(chan struct{})
	c.deadline, _ = ctx.Deadline()
	l.line.submit(ctx, c)
	return l.wait(ctx, c)
}

// check refuses what cannot be asked for. It tells when the switch is off: the request passes at once.
func (l *RateLimiter) check(ctx context.Context, permits int) (off bool, err error) {
	if permits <= 0 {
		return false, fmt.Errorf("%w: bucket %q: permits %d: want at least 1", ErrInvalidPermits, l.Name(), permits)
	}
	if int64(permits) > maxExact {
		return false, l.overflow(int64(permits))
	}
	if permits > 1 { // the constructor has seen to one
		if _, ok := l.effective().after(l.own.Kind, mark{}, int64(permits)); !ok && l.heardLately() {
			return false, l.overflow(int64(permits))
		}
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	return l.enabled != nil && !l.enabled(), nil
}

func (l *RateLimiter) newCall(ctx context.Context, permits int64) *call {
	c := calls.Get().(*call)
	c.limiter, c.permits, c.ready = l, permits, make(chan struct{})
	c.deadline, _ = ctx.Deadline()
	return c
}

func (l *RateLimiter) crowded() error {
	return fmt.Errorf("%w: bucket %q: %d wait already", ErrTooManyWaiters, l.Name(), l.maxWaiters)
}

func (l *RateLimiter) overflow(permits int64) error {
	return fmt.Errorf("%w: bucket %q: permits %d: want fewer: the debt would exceed 2^53 µs", ErrInvalidPermits, l.Name(), permits)
}

// heardLately tells whether the configuration that this process knows is at most sightAge old, or the store is away and cannot tell
// of a newer one.
func (l *RateLimiter) heardLately() bool {
	line := l.line
	if line.down() != nil {
		return true
	}
	line.mu.Lock()
	defer line.mu.Unlock()
	return line.listened != 0 && line.now()-line.listened < sightAge.Microseconds()
}

// longest is a timeout as the longest wait in microseconds. The error tells that no state of the bucket could grant the request
// within it, by the configuration that this process knows: if it has not heard from the store lately, another may be in force.
func (l *RateLimiter) longest(permits int64, timeout time.Duration) (maxWait int64, never error) {
	maxWait = min(max(0, timeout.Microseconds()), maxExact)
	s := l.effective()
	if s.Kind == Bursty && float64(permits) <= s.max {
		return maxWait, nil
	}
	if least := s.leastWait(&s.curve, permits); least > maxWait {
		return maxWait, &WaitError{l.Name(), int(permits), time.Duration(least) * time.Microsecond, ErrNeverGranted}
	}
	return maxWait, nil
}

// reach is the longest wait that Acquire reserves: the horizon, and beyond it only what the request itself costs more
// than one permit, so that a large one does not starve behind small ones.
func (l *RateLimiter) reach(permits int64) int64 {
	s := l.effective()
	if s.Payment == PayLater {
		return l.horizon
	}
	one, _ := s.cost(s.Kind, 0, 1)
	own, _ := s.cost(s.Kind, 0, float64(permits))
	if s.Kind == WarmingUp { // from cold
		own += s.storedCost(s.max, min(s.max, float64(permits)))
	}
	return int64(math.Ceil(min(own+max(0, float64(l.horizon)-one), maxExact)))
}

// wait blocks until the call is answered and its permits are due, or the context ends.
func (l *RateLimiter) wait(ctx context.Context, c *call) error {
	done := ctx.Done()
	if done == nil {
		<-c.ready
		return c.err
	}
	select {
	case <-c.ready:
		return c.err
	default:
	}
	select {
	case <-c.ready:
		return c.err
	case <-done:
		if l.line.leave(c, ctx.Err()) {
			return ctx.Err()
		}
		return c.err // answered in the same instant
	}
}

// hopeless turns two refusals into errors: of what can never be granted by the configuration that the answer brought, and of a
// wait that only the context was too short for.
func (l *RateLimiter) hopeless(c *call, timeout time.Duration) error {
	if !c.refused {
		return nil
	}
	if _, never := l.longest(c.permits, timeout); never != nil {
		return never
	}
	if wait := time.Duration(c.wait) * time.Microsecond; !c.deadline.IsZero() && wait <= timeout {
		return &WaitError{l.Name(), int(c.permits), wait, context.DeadlineExceeded}
	}
	return nil
}
