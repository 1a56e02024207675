package registry

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

var (
	// ErrNotLoaded: the limits could not be loaded, and there are none from before.
	ErrNotLoaded = errors.New("registry: limits not loaded")
	// ErrBadRows: New has found bad rows, which WithStrict does not allow. Their *RowErrors are wrapped.
	ErrBadRows = errors.New("registry: bad rows")
)

// Registry keeps one limiter for each name that its Source knows, made when it is asked for first, and follows the Source
// while it runs. All methods may be called by many goroutines at once. Close it when it is no longer used.
//
// Most callers want Enter, or Allow where no row has a concurrency. The packages httplimit and contrib/grpc take a Registry as it is.
type Registry struct {
	settings

	limits  atomic.Pointer[book]
	strange cache // limiters of names without a row
	keys    cache // limiters of the keys of rows (Limit.PerKey)
	callers callers
	past    past
	slots   map[string]*slot // of rows with more than a rate, also of those that are gone; whoever has turn

	lost       losses
	lossUnread time.Time // when it was last logged that confirmations cannot be read; mind's

	turn    chan struct{} // holds the right to load
	kinds   chan struct{} // holds the right to replace a bucket of the other kind
	ctx     context.Context
	close   context.CancelFunc
	polling sync.WaitGroup

	notes  notes
	faults faults
	slow   atomic.Bool // the log has that loads take long
}

// settings are what the options say.
type settings struct {
	source         Source
	store          tokenbucket.Store
	sw             Switch
	unknown        Otherwise
	badRows        Otherwise
	maxUnknown     int
	maxKeyLimiters int
	lossPolicy     lossPolicy
	confirmations  Confirmations // nil: of this process alone
	maxKeys        int
	strict         bool
	unmatched      func(row string) (why string) // nil: any name may be one of a call
	parts          bool
	shadow         bool
	interval       time.Duration
	timeout        time.Duration
	wait           context.Context
	options        []tokenbucket.Option
	hook           func(Load)
	bypass         func(name string, by gate.Decider, pass bool)
	log            *slog.Logger
	backends       backends
}

// entry is one row in force.
type entry struct {
	limit     Limit
	version   int64 // of the limiter's configuration; not below the row's own
	wait      time.Duration
	bad       bool                                    // the row never was good: WithBadRows decides
	limiter   atomic.Pointer[tokenbucket.RateLimiter] // nil: not asked for yet
	slot      *slot                                   // nil: the row names nothing but a rate
	disputed  int                                     // so many loads in a row found something else in force in the bucket
	replaced  time.Time                               // when a bucket of the other kind was; whoever has kinds
	of        *entry                                  // of a row's key: the row's own
	unmatched *RowError                               // why it holds for no call; nil: it may
	strange   bool                                    // of a name without a row (Default)
	asked     *tokenbucket.RateLimiter                // that was asked for its kind (renewShadows); whoever loads
}

// New loads the limits and keeps them up to date until Close. It fails when they cannot be loaded ([ErrNotLoaded]), or waits
// ([WithWait]). Bad rows are no error, unless [WithStrict] says so.
func New(source Source, store tokenbucket.Store, opts ...Option) (*Registry, error) {
	r := &Registry{slots: map[string]*slot{}, turn: make(chan struct{}, 1), kinds: make(chan struct{}, 1)}
	r.settings = settings{
		source: source, store: store, badRows: Refuse(), maxUnknown: 10_000, maxKeyLimiters: 10_000, maxKeys: 10_000, interval: 10 * time.Second, timeout: time.Minute, log: slog.Default(),
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
	r.lost.policy = r.lossPolicy
	r.strange.most, r.keys.most = r.maxUnknown, r.maxKeyLimiters
	r.callers = callers{most: r.maxKeys, seed: maphash.MakeSeed(), log: r.log}
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
		return bad("window or concurrency", sample.boundsText(), "none but in a row")
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
			return r.strictly()
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

// strictly returns an error for the bad rows of the first load, if there may be none.
func (r *Registry) strictly() error {
	rejected := r.Stats().Rejected
	if !r.strict || len(rejected) == 0 {
		return nil
	}
	errs := make([]error, len(rejected))
	for i := range rejected {
		errs[i] = &rejected[i]
	}
	return fmt.Errorf("%w: %w", ErrBadRows, errors.Join(errs...))
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
	by      gate.Decider
	pass    bool // without a limiter: all calls pass, or all are refused
}

func (r *Registry) find(name string) (found, error) {
	if r.sw != nil && !r.sw.Enabled() {
		return found{by: gate.BySwitch, pass: true}, nil
	}
	by, otherwise := gate.ByLimit, (*Otherwise)(nil)
	e := r.entryOf(name)
	switch {
	case e == nil:
		by, otherwise = gate.ByUnknown, &r.unknown
	case e.bad:
		by, otherwise = gate.ByBadRow, &r.badRows
	}
	if otherwise != nil && otherwise.limit == nil {
		return r.inShadow(found{entry: e, by: by, pass: !otherwise.refuse}), nil
	}
	if e == nil {
		if !r.callers.own("", name, time.Now()) {
			name = othersMark
		}
		e = r.strange.get(name, r.unknown.limit)
	}
	switch {
	case e.limit.Disabled:
		return found{entry: e, by: gate.ByDisabled, pass: true}, nil
	case e.limit.NoRate:
		return found{entry: e, by: gate.ByLimit}, nil
	case e.limit.Rate == 0:
		return r.inShadow(found{entry: e, by: gate.ByZero}), nil
	}
	l := e.limiter.Load()
	if l == nil {
		var err error
		if l, err = r.limiter(&e.limit, e.version, e.limiterOptions()...); err != nil {
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
	l, err := s.limiter(&sample, version)
	if err != nil {
		return &RowError{Row: c.Row, Name: c.Name, Err: err}
	}
	if least := l.LeastWait(); c.Rate != 0 && least > c.wait() {
		return &RowError{Row: c.Row, Name: c.Name, Field: "cache", Value: fmt.Sprint(c.WaitShare),
			Want: fmt.Sprintf("at least %v: its bucket saves up less than a permit, so every call waits for so long", least.Seconds())}
	}
	return s.backends.try(c, version)
}

// limiterOptions returns those of every limiter, in a slice of its own.
func (s *settings) limiterOptions() []tokenbucket.Option {
	return append(slices.Clone(s.options), tokenbucket.WithStore(s.store))
}

// label is what the metrics of a limiter are counted under: its row, rather than one of the keys that clients bring along; empty of a row's
// own bucket.
func (e *entry) label() string {
	if e.of == nil {
		return ""
	}
	return e.of.limit.Name
}

// chosenByCaller reports whether callers choose the bucket's name: it is a key of a row, or a name without a row.
func (e *entry) chosenByCaller() bool { return e.of != nil || e.strange }

// limiterOptions returns what the entry adds to the options of its limiter. Buckets whose names callers choose may be many, so each is
// dropped once it is full.
func (e *entry) limiterOptions() []tokenbucket.Option {
	opts := []tokenbucket.Option{tokenbucket.WithLabel(e.label())}
	if e.chosenByCaller() {
		opts = append(opts, tokenbucket.WithTransientState())
	}
	return opts
}

// limiter returns a new limiter for a row. Limiters of one name share their bucket's queue, so callers that wait keep their
// order when another takes over.
func (s *settings) limiter(c *Limit, version int64, more ...tokenbucket.Option) (*tokenbucket.RateLimiter, error) {
	opts := append(s.limiterOptions(), tokenbucket.WithVersion(version), tokenbucket.WithMaxWait(c.wait()))
	opts = append(opts, more...)
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
		soon, cancel := context.WithTimeout(ctx, slowLoad)
		_ = r.Reload(soon) // on an error, with what there is
		cancel()
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
