package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/seam"
)

// ErrNotLoaded: the limits could not be loaded, and there are none from before.
var ErrNotLoaded = errors.New("registry: limits not loaded")

// Registry keeps one limiter for each name that its Source knows, made when it is asked for first, and follows the Source
// while it runs. All methods may be called by many goroutines at once. Close it when it is no longer used.
//
// Most callers want Enter, or Allow where no row has a concurrency. The packages httplimit and contrib/grpc take a Registry as it is.
type Registry struct {
	settings

	limits  atomic.Pointer[book]
	strange cache // limiters of names without a row
	keys    cache // limiters of the keys of rows (Limit.PerKey)
	past    past
	slots   map[string]*slot // of rows with more than a rate, also of those that are gone; whoever has turn

	believed int // names of the last table that was not doubted
	losses   int // so many loads in a row have lost more than half of them

	turn    chan struct{} // holds the right to load
	kinds   chan struct{} // holds the right to replace a bucket of the other kind
	ctx     context.Context
	close   context.CancelFunc
	polling sync.WaitGroup

	notes notes
}

// settings are what the options say.
type settings struct {
	source     Source
	store      tokenbucket.Store
	sw         Switch
	unknown    Otherwise
	badRows    Otherwise
	maxUnknown int
	allowEmpty bool
	parts      bool
	shadow     bool
	interval   time.Duration
	timeout    time.Duration
	wait       context.Context
	options    []tokenbucket.Option
	hook       func(Load)
	bypass     func(name string, by Decider, pass bool)
	log        *slog.Logger
	backends   backends
}

// entry is one row in force.
type entry struct {
	limit    Limit
	version  int64 // of the limiter's configuration; not below the row's own
	wait     time.Duration
	bad      bool                                    // the row never was good: WithBadRows decides
	limiter  atomic.Pointer[tokenbucket.RateLimiter] // nil: not asked for yet
	slot     *slot                                   // nil: the row names nothing but a rate
	disputed int                                     // so many loads in a row found something else in force in the bucket
	replaced time.Time                               // when a bucket of the other kind was; whoever has kinds
	of       *entry                                  // of a row's key: the row's own
	asked    *tokenbucket.RateLimiter                // that was asked for its kind (renewShadows); whoever loads
}

// New loads the limits and keeps them up to date until Close. It fails when they cannot be loaded ([ErrNotLoaded]), or waits
// ([WithWait]).
func New(source Source, store tokenbucket.Store, opts ...Option) (*Registry, error) {
	r := &Registry{slots: map[string]*slot{}, turn: make(chan struct{}, 1), kinds: make(chan struct{}, 1)}
	r.settings = settings{
		source: source, store: store, badRows: Refuse(), maxUnknown: 10_000, interval: 10 * time.Second, timeout: 5 * time.Second, log: slog.Default(),
	}
	if source == nil {
		return nil, bad("source", "nil", "a source")
	}
	if store == nil {
		return nil, bad("store", "nil", "a store")
	}
	for _, opt := range opts {
		if opt == nil {
			return nil, bad("option", "nil", "no nil options")
		}
		if err := opt(&r.settings); err != nil {
			return nil, err
		}
	}
	for whose, o := range map[string]*Otherwise{"names without a row": &r.unknown, "bad rows": &r.badRows} {
		if err := r.fits(o); err != nil {
			return nil, fmt.Errorf("registry: the limit for %s: %w", whose, err)
		}
	}
	r.strange.most, r.keys.most = r.maxUnknown, r.maxUnknown
	if r.strange.name = bucketName; r.parts {
		r.strange.name = unique
	}
	r.ctx, r.close = context.WithCancel(context.Background())
	if err := r.start(); err != nil {
		r.close()
		return nil, err
	}
	r.watchSwitch()
	r.polling.Go(r.poll)
	r.polling.Go(r.mind)
	return r, nil
}

// fits tells what is wrong with the limit of a Default.
func (s *settings) fits(o *Otherwise) error {
	if o.limit == nil {
		return nil
	}
	sample := *o.limit
	sample.Name = "default"
	if sample.bounded() { // they would be forgotten with the limiter
		return bad("window or concurrency", strings.TrimPrefix(sample.boundsText(), ", "), "none but in a row")
	}
	err := s.try(&sample, sample.Version)
	if err != nil && err.Err == nil {
		return bad(err.Field, err.Value, err.Want)
	}
	if err != nil {
		return err.Err
	}
	return nil
}

// start loads for the first time.
func (r *Registry) start() error {
	ctx := r.ctx
	if r.wait != nil {
		ctx = r.wait
	}
	var cause error // rather than that the time to wait is over, which ends the last attempt
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, r.interval) {
		err := r.Reload(ctx)
		if err == nil {
			return nil
		}
		if cause == nil || !over(ctx) {
			cause = err
		}
		if r.wait == nil || ctx.Err() != nil {
			return fmt.Errorf("%w: %w", ErrNotLoaded, cause)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration((0.5 + rand.Float64()/2) * float64(pause))):
		}
	}
}

// over tells whether a context has ended or is about to. What fails then may have failed because of that, whatever the error says.
func over(ctx context.Context) bool {
	end, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(end)
}

// poll follows the source.
func (r *Registry) poll() {
	for {
		timer := time.NewTimer(time.Duration((0.8 + 0.2*rand.Float64()) * float64(r.interval)))
		select {
		case <-timer.C:
			_ = r.Reload(r.ctx)
		case <-r.ctx.Done():
			timer.Stop()
			return
		}
	}
}

// Close stops following the source. The limiters go on with what they have.
func (r *Registry) Close() {
	r.close()
	r.polling.Wait()
}

// Allow asks for one permit for a call of that name, and waits for it at most as long as the row's cache says. It is false
// when there is none in time: the call is refused. While the switch is off, the row is disabled, or there is none and the
// policy says so ([WithUnknown]), the call passes at once. A row with a concurrency needs Enter: Allow fails with [ErrNeedsEnter].
func (r *Registry) Allow(ctx context.Context, name string) (bool, error) {
	f, err := r.find(name)
	if err == nil && f.bounded() {
		return r.allowBounded(ctx, name, &f)
	}
	if err != nil || f.limiter == nil {
		return r.bypassed(name, &f, err)
	}
	ok, err := f.limiter.TryAcquire(ctx, 1, f.entry.wait)
	if err != nil && errors.Is(err, tokenbucket.ErrInvalidConfig) {
		if f, err = r.replace(ctx, name, f, err); err == nil && f.bounded() {
			return r.allowBounded(ctx, name, &f)
		}
		if err != nil || f.limiter == nil {
			return r.bypassed(name, &f, err)
		}
		return f.limiter.TryAcquire(ctx, 1, f.entry.wait)
	}
	return ok, err
}

// Reserve is Allow for callers that wait by themselves, or may have to give the permit back: the reservation is OK if its
// permit falls due within the row's cache. A row with a window or a concurrency needs Enter: Reserve fails with [ErrNeedsEnter].
func (r *Registry) Reserve(ctx context.Context, name string) (*tokenbucket.Reservation, error) {
	f, err := r.find(name)
	if err == nil && f.bounded() {
		return nil, needsEnter(name, &f.entry.limit)
	}
	return r.reserve(ctx, name, f, err)
}

// reserve is Reserve for a row that names nothing but a rate, as far as was found.
func (r *Registry) reserve(ctx context.Context, name string, f found, err error) (*tokenbucket.Reservation, error) {
	if err == nil && f.limiter != nil {
		var place *tokenbucket.Reservation
		place, err = f.limiter.TryReserve(ctx, 1, f.entry.wait)
		if err == nil || !errors.Is(err, tokenbucket.ErrInvalidConfig) {
			return place, err
		}
		if f, err = r.replace(ctx, name, f, err); err == nil && f.bounded() {
			return nil, needsEnter(name, &f.entry.limit)
		}
		if err == nil && f.limiter != nil {
			return f.limiter.TryReserve(ctx, 1, f.entry.wait)
		}
	}
	switch pass, err := r.bypassed(name, &f, err); {
	case err != nil:
		return nil, err
	case pass:
		return &tokenbucket.Reservation{}, nil
	}
	return seam.Refused(0).(*tokenbucket.Reservation), nil
}

// bypassed is the answer to a call without a bucket, or to none.
func (r *Registry) bypassed(name string, f *found, err error) (bool, error) {
	if err == nil && r.bypass != nil {
		r.bypass(name, f.by, f.pass)
	}
	return f.pass && err == nil, err
}

// Penalize holds the bucket of that name back for the whole fleet, see tokenbucket.RateLimiter.Penalize. Calls of a row without a rate
// (Limit.NoRate) are refused until the penalty is over (ByPenalty): in this process from now on, in others from their next load on.
// Without a limit in force it does nothing.
func (r *Registry) Penalize(ctx context.Context, name string, d time.Duration) error {
	f, err := r.find(name)
	switch {
	case err != nil:
		return err
	case f.limiter != nil:
		return f.limiter.Penalize(ctx, d)
	case f.bounded():
		return r.pause(ctx, f.entry, d)
	}
	return nil
}

// Reset begins the bucket of that name anew for the whole fleet, see tokenbucket.RateLimiter.Reset. It ends a penalty, also that of a row
// without a rate: in this process at once, in others with their next load. What counts in a window, and who is under way, stays. It is an
// error if no limit is in force.
func (r *Registry) Reset(ctx context.Context, name string) error {
	f, err := r.find(name)
	switch {
	case err != nil:
		return err
	case f.limiter != nil:
		return f.limiter.Reset(ctx)
	case f.bounded():
		return r.unpause(ctx, f.entry)
	}
	return fmt.Errorf("registry: %.80q has no bucket: nothing limits it by one now", name)
}

// Limiter returns the limiter that calls of that name use now; nil if they pass or are refused without one. It does not
// follow later changes.
func (r *Registry) Limiter(name string) (*tokenbucket.RateLimiter, error) {
	f, err := r.find(name)
	return f.limiter, err
}

// found is what decides about the calls of a name.
type found struct {
	entry   *entry // nil: no row and no limit of its own
	limiter *tokenbucket.RateLimiter
	by      Decider
	pass    bool // without a limiter: all calls pass, or all are refused
}

func (r *Registry) find(name string) (found, error) {
	if r.sw != nil && !r.sw.Enabled() {
		return found{by: BySwitch, pass: true}, nil
	}
	by, otherwise := ByLimit, (*Otherwise)(nil)
	e := r.entryOf(name)
	switch {
	case e == nil:
		by, otherwise = ByUnknown, &r.unknown
	case e.bad:
		by, otherwise = ByBadRow, &r.badRows
	}
	if otherwise != nil && otherwise.limit == nil {
		return r.inShadow(found{entry: e, by: by, pass: !otherwise.refuse}), nil
	}
	if e == nil {
		e = r.strange.get(name, r.unknown.limit)
	}
	switch {
	case e.limit.Disabled:
		return found{entry: e, by: ByDisabled, pass: true}, nil
	case e.limit.NoRate:
		return found{entry: e, by: ByLimit}, nil
	case e.limit.Rate == 0:
		return r.inShadow(found{entry: e, by: ByZero}), nil
	}
	l := e.limiter.Load()
	if l == nil {
		var err error
		if l, err = r.limiter(&e.limit, e.version); err != nil {
			return found{}, err
		}
		if !e.limiter.CompareAndSwap(nil, l) {
			l = e.limiter.Load()
		}
	}
	return found{entry: e, limiter: l, by: by}, nil
}

// try tells why a limit cannot be put in force.
func (s *settings) try(c *Limit, version int64) *RowError {
	if err := c.check(); err != nil || c.Disabled {
		return err
	}
	sample := *c
	if sample.Rate == 0 { // nothing passes; the rest of it must be right all the same
		sample.Rate = 1
	}
	if _, err := s.limiter(&sample, version); err != nil {
		return &RowError{Row: c.Row, Name: c.Name, Err: err}
	}
	return s.backends.try(c, version)
}

// limiter makes the limiter of a row. Limiters of one name share their bucket's queue, so callers that wait keep their
// order when another takes over.
func (s *settings) limiter(c *Limit, version int64) (*tokenbucket.RateLimiter, error) {
	opts := append(slices.Clone(s.options), tokenbucket.WithStore(s.store), tokenbucket.WithVersion(version),
		tokenbucket.WithMaxWait(c.wait()))
	if s.shadows(c) {
		opts = append(opts, tokenbucket.WithShadow())
	}
	if c.Warmup != 0 {
		if c.ColdFactor != 0 {
			opts = append(opts, tokenbucket.WithColdFactor(c.ColdFactor))
		}
		return tokenbucket.NewSmoothWarmingUp(c.Name, c.Rate, c.Warmup, opts...)
	}
	rate := c.Rate
	if c.Quota {
		var quota tokenbucket.Option
		rate, quota = tokenbucket.ForQuota(int(c.Rate), time.Second, c.Jitter)
		opts = append(opts, quota)
	} else if c.MaxPermits != nil {
		opts = append(opts, tokenbucket.WithMaxPermits(*c.MaxPermits))
	}
	return tokenbucket.NewSmoothBursty(c.Name, rate, opts...)
}

// replace deals with a bucket of another kind: a row that changed between bursty and warm-up. Either this process has not
// heard of the change, and the table says so, or the bucket is still the old one and begins anew: the price is its debt, at
// most once in an interval and process.
func (r *Registry) replace(ctx context.Context, name string, f found, cause error) (found, error) {
	select {
	case r.kinds <- struct{}{}:
		defer func() { <-r.kinds }()
	case <-ctx.Done():
		return f, ctx.Err()
	}
	if r.notes.age() > r.interval/10 {
		_ = r.Reload(ctx) // on an error, with what there is
	}
	if newer, err := r.find(name); err != nil || newer.entry != f.entry {
		return newer, err
	}
	if _, err := f.limiter.State(ctx); !errors.Is(err, tokenbucket.ErrInvalidConfig) {
		return f, err // somebody else was faster
	}
	if now := time.Now(); now.Sub(f.entry.replaced) >= r.interval {
		f.entry.replaced = now
		r.log.Warn("registry: the bucket is of another kind than its row says; it begins anew", "bucket", name, "row", f.entry.limit.Row)
		return f, r.renew(ctx, f.limiter, &f.entry.limit)
	}
	return f, cause
}
