package tokenbucket

import (
	"fmt"
	"log/slog"
	"reflect"
	"time"
	"unicode/utf8"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// Option configures a limiter. An option with a bad value makes the constructor fail.
type Option func(*options)

const (
	defaultMaxWait      = 500 * time.Millisecond
	defaultStoreTimeout = time.Second
	defaultMaxWaiters   = 1 << 17
)

type options struct {
	config     config
	maxPermits *float64
	initial    *float64
	maxWait    time.Duration
	prefetch   *time.Duration
	timeout    time.Duration
	enabled    func() bool
	store      Store
	clock      clockwork.Clock
	policy     FailurePolicy
	observer   *Observer
	logger     *slog.Logger
	shadow     bool
	maxWaiters int
	label      string
	priority   Priority
	floor      float64
	fairness   fairness
	clip       bool // initial permits beyond max permits are clipped
	transient  bool // see WithTransientState
	quota      *quota
	slot       string // see WithSlot
	settles    []*Settlements
	err        error
}

// apply sets and checks the options of a limiter, and returns the initial permits.
func (o *options) apply(name string, opts []Option) (initial float64, err error) {
	if len(name) < 1 || len(name) > maxName || !utf8.ValidString(name) {
		o.fail("name", fmt.Sprintf("%.40q of %d bytes", name, len(name)), "1 to 512 bytes of UTF-8")
	}
	for _, opt := range opts {
		if opt == nil {
			o.fail("option", "nil", "no nil options")
			break
		}
		opt(o)
	}
	if o.err == nil && o.store == nil {
		o.store = NewMemoryStore()
	}
	initial = o.finish()
	if o.err == nil && o.quota != nil {
		o.err = o.quota.check(o)
	}
	if o.err == nil && o.slot != "" && len(o.slot)+len(name) > maxSlotted {
		o.fail("slot", fmt.Sprintf("%.40q of %d bytes", o.slot, len(o.slot)), "at most 500 bytes together with the name")
	}
	if o.err == nil {
		o.err = o.config.validate()
	}
	if o.err == nil {
		o.checkPrefetch()
	}
	if o.err == nil {
		o.checkSeams()
	}
	if o.err == nil {
		o.checkFairness()
	}
	if o.err != nil {
		return 0, invalid(fmt.Sprintf("%.40s", name), o.err)
	}
	return initial, nil
}

func (o *options) fail(field string, value any, want string) {
	if o.err == nil {
		o.err = wanted(field, value, want)
	}
}

// only rejects an option of the other kind of limiter.
func (o *options) only(kind kind, field string, value float64) {
	switch {
	case o.config.Kind == kind:
	case kind == bursty:
		o.fail(field, value, "none for a limiter that warms up")
	default:
		o.fail(field, value, "none for a bursty limiter")
	}
}

// WithStore sets the store that keeps the bucket. Default: a [MemoryStore] of the limiter's own.
func WithStore(s Store) Option {
	return func(o *options) {
		if isNil(s) {
			o.fail("store", "nil", "a store")
		}
		o.store = s
	}
}

// WithMaxPermits sets how many permits a bursty bucket stores at most. Default: one second's worth, at least 1. 0 allows no burst at all,
// so callers wait for every permit.
func WithMaxPermits(n float64) Option {
	return func(o *options) {
		o.only(bursty, "max permits", n)
		o.maxPermits = &n
	}
}

// WithInitialPermits sets how many permits a bursty bucket holds when it is new, or when its store has lost it. Default 1 (0 when max
// permits is 0). So the first call passes at once, and a store that has lost everything does not allow a full burst.
func WithInitialPermits(n float64) Option {
	return func(o *options) {
		o.only(bursty, "initial permits", n)
		o.initial, o.clip = &n, false
	}
}

// WithInitialPermitsUpTo is [WithInitialPermits] for limiters of different sizes: a bucket that holds less than n permits starts full, and a
// limiter that warms up ignores it.
func WithInitialPermitsUpTo(n float64) Option {
	return func(o *options) { o.initial, o.clip = &n, true }
}

// WithMaxWait sets how long [RateLimiter.Try] may wait for its permit. Default 500 ms. With 0 it never waits.
func WithMaxWait(d time.Duration) Option {
	return func(o *options) {
		if d < 0 {
			o.fail("max wait", d, "a duration that is not negative")
		}
		o.maxWait = d
	}
}

// WithColdFactor sets how many times longer the interval between permits is when a warm-up bucket is cold. Above 1,
// default 3. The longer interval is at most 1e9 s.
func WithColdFactor(f float64) Option {
	return func(o *options) {
		o.only(warmingUp, "cold factor", f)
		o.config.ColdFactor = f
	}
}

// WithPayment sets which caller waits for the permits of a request. Default: [PayNow] for a bursty limiter, [PayLater] for one that warms
// up.
func WithPayment(p Payment) Option {
	return func(o *options) {
		if p > PayLater {
			o.fail("payment", uint8(p), "PayNow or PayLater")
		}
		o.config.Payment = p
	}
}

// WithSwitch sets a function that is called with every call. If it returns false, the call passes at once and does not use the store. The
// function must be fast and safe for concurrent use.
func WithSwitch(enabled func() bool) Option {
	return func(o *options) {
		if enabled == nil {
			o.fail("switch", "nil", "a function")
		}
		o.enabled = enabled
	}
}

// WithVersion makes the newest configuration win for the whole fleet: a limiter with an older one receives it with its next reply. 0, the
// default, means unversioned: until some limiter sets a version, each limiter's configuration applies to its own calls. At most 2^53.
func WithVersion(v int64) Option {
	return func(o *options) { o.config.Version = v }
}

// WithStoreTimeout bounds how long a call waits for the store's reply. 1 ms to 1 hour, default 1 s.
func WithStoreTimeout(d time.Duration) Option {
	return func(o *options) {
		if d < time.Millisecond || d > time.Hour {
			o.fail("store timeout", d, "1ms to 1h")
		}
		o.timeout = d
	}
}

// WithMaxWaiters bounds how many callers of a process may wait for a bucket at a time, including reservations that are not due yet. Each
// takes up to 2 KB, besides its goroutine. A call beyond that gets [ErrTooManyWaiters] at once. At least 1, default 131,072. With
// [WithFairness] one tenant has half of that at most.
func WithMaxWaiters(n int) Option {
	return func(o *options) {
		if n < 1 {
			o.fail("max waiters", n, "at least 1")
		}
		o.maxWaiters = n
	}
}

// WithClock sets the clock by which callers sleep, and by which a [MemoryStore] or a store [WithLocalTime] decides. Default: the system's
// monotonic clock. The limiter uses the clock's Since, not its Now. If its Since is monotonic, its wall time may be set.
func WithClock(c clockwork.Clock) Option {
	return func(o *options) {
		if isNil(c) {
			o.fail("clock", "nil", "a clock")
		}
		o.clock = c
	}
}

// WithPrefetch lets this process lease a block of stored permits for a short time, and grant them without a round trip. It is for upstreams
// so fast that a round trip for each call, even a shared one, is too much. The size of a block follows recent demand, and is never more
// than d × rate permits. Unused permits go back when demand falls, or with [RateLimiter.Close]; they are lost when the process dies. After
// d a block is worthless, whatever happened to the process in between. All its permits were due when it was taken, so none is granted
// early, and none twice.
//
// The cost: a leased permit may be used up to d later than it was taken, when the bucket has filled up again. So in any window of T seconds
// at most
//
//	max(max permits, largest request) + rate × (T + 1 µs) + processes × d × rate
//
// permits are used. A process may be refused permits that others hold unused, at most processes × d × rate permits for d. While the bucket
// is empty there is nothing to lease, and every permit needs the store.
//
// d is 1 ms to 10 s. The option is only for a bursty limiter with [PayNow], on a store behind a network, whose bucket can hold a block (max
// permits ≥ d × rate ≥ 2). A lease would exceed a quota or a bucket without bursts. For a limiter that warms up it would count unused
// permits as used. With a priority below [Normal] it would hold back stored permits from callers of a higher one.
func WithPrefetch(d time.Duration) Option {
	return func(o *options) {
		o.prefetch = &d
	}
}

// WithFailurePolicy sets the result of calls while the store is unavailable. Default [FailClosed].
func WithFailurePolicy(p FailurePolicy) Option {
	return func(o *options) {
		if n, shares := p.Instances(); shares && n < 1 {
			o.fail("failure policy", p, "a local share of at least 1 instance")
		}
		o.policy = p
	}
}

// WithTransientState is for a bucket whose name a caller chooses, and whose configuration every process reads from the same table. Stores
// keep such a bucket until a minute after it is full, whatever its version and its penalties. A limiter that finds none creates it with its
// own configuration, and full unless [WithInitialPermits] sets another number. A bucket whose configuration in force is not its limiter's
// own ([RateLimiter.SetRate]) is kept for a day, as others are.
func WithTransientState() Option {
	return func(o *options) { o.transient = true }
}

// WithLabel sets the name under which metrics count the limiter's decisions ([Decision].Label). Default: the limiter's name. Use it where
// callers choose the names of buckets, so that they cannot create series at will.
func WithLabel(label string) Option {
	return func(o *options) { o.label = label }
}

// WithSettlements makes s count the limiter's settlements in the background. Default: none. Several such options count in each. [RateLimiter.Close]
// waits for the limiter's own settlements in any case.
func WithSettlements(s *Settlements) Option {
	return func(o *options) {
		if s == nil {
			o.fail("settlements", "nil", "a counter")
			return
		}
		o.settles = append(o.settles, s)
	}
}

// WithObserver sets the observer of the limiter's decisions and of its store. Default: none.
func WithObserver(o Observer) Option {
	return func(opts *options) { opts.observer = &o }
}

// WithShadow is for trying a limit in production. Every call is decided and reported to the observer ([WithObserver]). Then it passes, at
// once and without an error, whatever the decision was. That costs the time of the decision, at most the store's timeout. A call that would
// have waited for longer than a second, or the time of four permits if that is longer, counts as refused.
//
// The decisions are made on a separate bucket, which all shadows of this name share. So nothing changes for limiters of the same name that
// are in force.
func WithShadow() Option {
	return func(o *options) { o.shadow = true }
}

// WithLogger sets the logger. The limiter logs at Warn that an outage of its store has begun, that the instances of a [LocalShare] cannot be
// counted, and that two configurations have the same version. It logs at Info that an outage has ended. Each message is logged when the
// condition begins, not with every call; that of an outage, which names the failure policy, every minute while it lasts. Limiters of one store share its outages and its count, which are logged once, by the logger that
// was set last. While a handler blocks on the message of an outage, the store is not probed. Default: slog.Default() at the time of
// logging.
func WithLogger(l *slog.Logger) Option {
	return func(o *options) {
		if l == nil {
			o.fail("logger", "nil", "a logger")
		}
		o.logger = l
	}
}

// checkPrefetch rejects leases where they make no sense.
func (o *options) checkPrefetch() {
	if o.prefetch == nil {
		return
	}
	d := *o.prefetch
	block := d.Seconds() * o.config.Rate
	switch {
	case d < time.Millisecond || d > 10*time.Second:
		o.fail("prefetch", d, "1ms to 10s")
	case o.config.Kind == warmingUp:
		o.fail("prefetch", d, "none for a limiter that warms up: it would count permits as used that nobody has used yet")
	case o.config.Payment == PayLater:
		o.fail("prefetch", d, "payment PayNow: permits taken ahead must be paid for by who takes them")
	case o.priority != Normal:
		o.fail("prefetch", d, fmt.Sprintf("none with priority %v: a lease would hold back stored permits from callers of a higher priority", o.priority))
	case traitsOf(o.store).memory != nil:
		o.fail("prefetch", d, "none for a MemoryStore: there is no network to save")
	case block < 2:
		o.fail("prefetch", d, fmt.Sprintf("at least 2 permits' worth at %v/s", o.config.Rate))
	case block > max(o.config.Size, o.config.Floor):
		o.fail("prefetch", d, fmt.Sprintf("a block of d × rate = %.6g permits to fit into max permits, %v: used late, it would be a burst that the bucket forbids",
			block, max(o.config.Size, o.config.Floor)))
	}
}

// checkSeams rejects stores and clocks that cannot work.
func (o *options) checkSeams() {
	o.err = traitsOf(o.store).err
	if _, shares := o.policy.Instances(); shares && !reflect.ValueOf(o.store).Comparable() {
		o.fail("failure policy", o.policy, fmt.Sprintf("a store that limiters can share, as pointers can be: %T", o.store))
	}
	if by := clock.New(o.clock); !by.InRange() {
		o.fail("clock", o.clock.Now(), "a time within 292 years of now")
	}
}

// finish settles the sizes that depend on one another and returns the initial permits.
func (o *options) finish() float64 {
	if o.config.Kind == warmingUp {
		return 0
	}
	o.config.Size, o.config.Floor = o.config.Rate, 1
	if o.quota != nil {
		o.config.Size = 1
	}
	if o.maxPermits != nil {
		o.config.setMaxPermits(*o.maxPermits)
	}
	most := max(o.config.Size, o.config.Floor)
	switch {
	case o.initial == nil && o.transient:
		return most
	case o.initial == nil:
		return min(1, most)
	}
	if n := *o.initial; o.clip && n > most {
		return most
	} else if !(n >= 0 && n <= most) {
		o.fail("initial permits", n, fmt.Sprintf("0 to max permits, %v", most))
	}
	return unsigned(*o.initial)
}
