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
	"github.com/go-tokenbucket/tokenbucket/registry/internal/admission"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
)

var (
	// ErrNotLoaded: the limits could not be loaded, and none were loaded before.
	ErrNotLoaded = errors.New("registry: limits not loaded")
	// ErrBadRows: the first load has bad rows, and WithStrict allows none. It wraps a *RowError for each of them.
	ErrBadRows = errors.New("registry: bad rows")
)

// Registry limits calls by name, each by the row of its name in a table, and follows the table while it runs. A limiter is made by the
// first call of its name. All methods are safe for concurrent use. Close a Registry that is no longer used.
//
// Most callers need Enter only. A Registry is a gate.Gate, so packages httplimit and contrib/grpc accept it.
type Registry struct {
	settings

	limits  atomic.Pointer[book]
	unnamed cache // limiters of names without a row
	keys    cache // limiters of the keys of rows (Limit.PerKey)

	unlisted watch // of names without an entry: rows are new
	off      watch // of all names: the switch is on again

	callers callers
	slots   map[string]*admission.Slot // of rows with more than a rate, removed ones included; guarded by turn

	machine    machine   // decides which rows are in force
	lossUnread time.Time // when unreadable confirmations were last logged; used by mind only

	turn    chan struct{} // a lock for loads
	kinds   chan struct{} // a lock for the reset of buckets of the other kind
	ctx     context.Context
	close   context.CancelFunc
	polling sync.WaitGroup

	notes  notes
	hooked hooked
	faults faults
	slow   atomic.Bool // the last load was logged as slow
}

// settings are the values of the options.
type settings struct {
	source         Source
	store          tokenbucket.Store
	sw             Switch
	unknown        Otherwise
	badRows        Otherwise
	maxUnknown     int
	maxKeyLimiters int
	lossPolicy     rows.Policy
	confirmations  Confirmations // nil if confirmations count in this process only
	maxKeys        int
	strict         bool
	unmatched      func(row string) (why string) // nil if calls may have any name
	parts          bool
	shadow         bool
	interval       time.Duration
	timeout        time.Duration
	wait           context.Context
	options        []tokenbucket.Option
	hook           func(Load)
	bypass         func(name string, by gate.Decider, pass bool)
	log            *slog.Logger
	admissions     admission.Env           // its log and hook are set by New
	settlements    tokenbucket.Settlements // of all limiters
}

// machine decides which rows are in force.
type machine struct {
	mu sync.Mutex // guards the switch and losses; only one load at a time changes rules
	*rows.Machine[content]
}

// entry is one row in force.
type entry struct {
	limit     Limit   // its Name is that of the bucket
	name      string  // that calls have, if the bucket has another: without a row, or of a row that never was valid (Default)
	content   content // of a valid row
	version   int64   // version of the limiter's configuration, at least the row's own
	wait      time.Duration
	bad       bool                                    // no version of the row was valid, so WithBadRows decides
	limiter   atomic.Pointer[tokenbucket.RateLimiter] // nil until the first call
	follower  atomic.Pointer[tokenbucket.RateLimiter] // of the row's name; nil before it is given away
	crowd     crowd                                   // the calls of Enter that wait; see waiting
	with      *crowd                                  // the crowd of an earlier entry with the same limiter; nil if there is none
	moving    atomic.Pointer[chan struct{}]           // closed when the calls of another entry have asked this one; nil if none do
	watch     watch                                   // while no limiter is in force
	over      atomic.Bool                             // another is in force in place of it, or a cache has dropped it: it is never found again
	slot      *admission.Slot                         // nil if the row has a rate only
	replaced  time.Time                               // when a bucket of the other kind was last reset; guarded by kinds
	of        *entry                                  // the entry of the row, for a key of a row; else nil
	unmatched *RowError                               // why the row matches no call; nil if it may match one
	unnamed   bool                                    // made for a name without a row (Default)
	asked     *tokenbucket.RateLimiter                // the last limiter whose kind renewShadows checked; guarded by turn
}

// New loads the limits and keeps them up to date until Close. If they cannot be loaded, it fails with [ErrNotLoaded], or waits
// ([WithWait]). Bad rows are an error only with [WithStrict].
func New(source Source, store tokenbucket.Store, opts ...Option) (*Registry, error) {
	r := &Registry{slots: map[string]*admission.Slot{}, turn: make(chan struct{}, 1), kinds: make(chan struct{}, 1)}
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
	r.machine.Machine = rows.New[content](r.lossPolicy)
	r.admissions.Log, r.admissions.Bypassed = r.log, r.bypass
	r.unnamed.most, r.keys.most = r.maxUnknown, r.maxKeyLimiters
	r.unnamed.dropped, r.keys.dropped = r.drop, r.drop
	r.callers = callers{most: r.maxKeys, seed: maphash.MakeSeed(), log: r.log}
	if r.unnamed.name = bucketName; r.parts {
		r.unnamed.name = unique
	}
	r.ctx, r.close = context.WithCancel(context.Background())
	if err := r.start(); err != nil {
		r.close()
		return nil, err
	}
	r.polling.Go(r.poll)
	r.polling.Go(r.mind)
	if r.sw != nil {
		r.lookAtSwitch()
		r.polling.Go(r.watchSwitch)
	}
	return r, nil
}

// fits returns an error if the limit of a Default cannot be put in force.
func (s *settings) fits(o *Otherwise) error {
	if o.limit == nil {
		return nil
	}
	sample := *o.limit
	sample.Name = "default"
	if sample.bounded() { // their counts would be lost with the limiter
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

// start runs the first load.
func (r *Registry) start() error {
	ctx := r.ctx
	if r.wait != nil {
		ctx = r.wait
	}
	var cause error // the last error that is not due to the end of ctx
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

// strictly returns an error for the bad rows of the first load if WithStrict is set.
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

// over reports whether a context has ended, or is past its deadline. An error may then be due to that, whatever its text.
func over(ctx context.Context) bool {
	end, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(end)
}

// poll loads at every interval until Close.
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

// Close ends the loading. The limiters keep the configuration that they have. Close waits for the settlements in the background that have begun
// (gate.Admission.SettleLater), of all limiters that the registry has made. Their store timeouts bound that (tokenbucket.WithStoreTimeout).
// It does not wait for a hook that is running ([WithHook]), so the hook may call Close; no call of the hook begins after it.
func (r *Registry) Close() {
	r.close()
	r.polling.Wait()
	_ = r.settlements.Wait(context.Background())
}

// Penalize holds the name's bucket back for the whole fleet, see tokenbucket.RateLimiter.Penalize. Calls of a row without a rate
// (Limit.NoRate) are refused until the penalty ends (ByPenalty), in this process at once, in others from their next load on.
// If no limit is in force for the name, Penalize does nothing.
func (r *Registry) Penalize(ctx context.Context, name string, d time.Duration) error {
	f, err := r.find(name)
	switch {
	case err != nil:
		return err
	case f.limiter != nil:
		return f.limiter.Penalize(ctx, d)
	case f.bounded():
		return f.entry.slot.Pause.Begin(ctx, r.keeperOf(f.entry), d)
	}
	return nil
}

// Reset resets the name's bucket for the whole fleet, see tokenbucket.RateLimiter.Reset. It ends a penalty: for a row without a rate in this
// process at once, in others with their next load. Counts of windows and calls in flight stay. If no limit is in force for the name, Reset
// fails.
func (r *Registry) Reset(ctx context.Context, name string) error {
	f, err := r.find(name)
	switch {
	case err != nil:
		return err
	case f.limiter != nil:
		return f.limiter.Reset(ctx)
	case f.bounded():
		return f.entry.slot.Pause.End(ctx, r.keeperOf(f.entry))
	}
	return fmt.Errorf("registry: reset %.80q: no limit with a bucket is in force for the name", name)
}

// found has the limit that decides about the calls of a name.
type found struct {
	book    *book
	entry   *entry // nil if the name has neither a row nor a limit by Default
	limiter *tokenbucket.RateLimiter
	by      gate.Decider
	pass    bool // whether calls pass if limiter is nil
}

// find returns the limit that decides about the calls of a name, and makes its limiter if there is none yet. Calls that wait by it are told when
// another one is in force.
func (r *Registry) find(name string) (found, error) {
	for {
		b := r.limits.Load()
		f, err := r.findIn(b, name)
		if f.book = b; err != nil || r.isInForce(&f) {
			return f, err
		}
	}
}

// isInForce reports whether no load has ended since find, and the entry is not dropped. From then on, a change ends the waits of its calls.
func (r *Registry) isInForce(f *found) bool {
	return r.limits.Load() == f.book && (f.entry == nil || !f.entry.over.Load())
}

// findIn implements find for the rows of a load.
func (r *Registry) findIn(b *book, name string) (found, error) {
	if r.sw != nil && !r.sw.Enabled() {
		return found{by: gate.BySwitch, pass: true}, nil
	}
	by, otherwise := gate.ByLimit, (*Otherwise)(nil)
	e := r.entryOf(b, name)
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
		e = r.unnamed.get(name, r.unknown.limit)
	}
	switch {
	case e.limit.Disabled:
		return found{entry: e, by: gate.ByDisabled, pass: true}, nil
	case e.limit.NoRate:
		return found{entry: e, by: gate.ByLimit}, nil
	case e.limit.Rate == 0:
		return r.inShadow(found{entry: e, by: gate.ByZero}), nil
	}
	l, err := r.limiterOf(e)
	if err != nil {
		return found{}, err
	}
	return found{entry: e, limiter: l, by: by}, nil
}

// try returns an error if a limit cannot be put in force.
func (s *settings) try(c *Limit, version int64) *RowError {
	if err := c.check(); err != nil || c.Disabled {
		return err
	}
	sample := *c
	if sample.Rate == 0 { // nothing passes, but the other fields must be valid
		sample.Rate = 1
	}
	l, err := s.limiter(&sample, version)
	if err != nil {
		return &RowError{Row: c.Row, Name: c.Name, Err: err}
	}
	if least := l.LeastWait(); c.Rate != 0 && least > c.MaxWait {
		return &RowError{Row: c.Row, Name: c.Name, Field: "max_wait", Value: c.MaxWait.String(),
			Want: fmt.Sprintf("at least %v: its bucket saves up less than a permit, so every call waits for so long", least)}
	}
	return s.tryBounds(c, version)
}

// limiterOptions returns the options of every limiter, in a new slice.
func (s *settings) limiterOptions() []tokenbucket.Option {
	return append(slices.Clone(s.options), tokenbucket.WithStore(s.store), tokenbucket.WithSettlements(&s.settlements))
}

// label returns the name under which the metrics of a limiter are counted: for a key the name of its row, since clients choose keys. It is
// empty for the bucket of a row itself.
func (e *entry) label() string {
	if e.of == nil {
		return e.name
	}
	return e.of.limit.Name
}

// chosenByCaller reports whether callers choose the bucket's name, because it is a key of a row or a name without a row.
func (e *entry) chosenByCaller() bool { return e.of != nil || e.unnamed }

// limiterOptions returns the options that the entry adds for its limiter. Callers can choose many names, so a store drops their buckets
// once they are full.
func (e *entry) limiterOptions() []tokenbucket.Option {
	opts := []tokenbucket.Option{tokenbucket.WithLabel(e.label())}
	if e.chosenByCaller() {
		opts = append(opts, tokenbucket.WithTransientState())
	}
	return opts
}

// limiter returns a new limiter for a row. Limiters of one name share the bucket's queue, so waiting callers keep their order when a new
// limiter replaces the old one.
func (s *settings) limiter(c *Limit, version int64, more ...tokenbucket.Option) (*tokenbucket.RateLimiter, error) {
	opts := append(s.limiterOptions(), tokenbucket.WithVersion(version), tokenbucket.WithMaxWait(c.MaxWait))
	if c.Priority != tokenbucket.Normal {
		opts = append(opts, tokenbucket.WithPriority(c.Priority))
	}
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
	if c.Quota {
		return tokenbucket.NewQuota(c.Name, int(c.Rate), time.Second, c.Jitter, opts...)
	}
	if c.Burst != nil {
		opts = append(opts, tokenbucket.WithMaxPermits(c.size()))
	}
	return tokenbucket.NewSmoothBursty(c.Name, c.Rate, opts...)
}

// replace handles a bucket of the other kind, bursty or warm-up, than its row. If this process has an old row, a load brings the new
// one. Otherwise the bucket is old, and is reset. A reset cancels the bucket's debt, at most once per interval and process.
func (r *Registry) replace(ctx context.Context, name string, f found, cause error) (found, error) {
	select {
	case r.kinds <- struct{}{}:
		defer func() { <-r.kinds }()
	case <-ctx.Done():
		return f, ctx.Err()
	}
	if r.notes.age() > r.interval/10 {
		soon, cancel := context.WithTimeout(ctx, slowLoad)
		_ = r.Reload(soon) // after an error the present row decides
		cancel()
	}
	if newer, err := r.find(name); err != nil || newer.entry != f.entry {
		return newer, err
	}
	if _, err := f.limiter.State(ctx); !errors.Is(err, tokenbucket.ErrInvalidConfig) {
		return f, err // another process has reset it
	}
	if now := time.Now(); now.Sub(f.entry.replaced) >= r.interval {
		f.entry.replaced = now
		r.log.Warn("registry: the bucket is of another kind than its row; it is reset", "bucket", name, "row", f.entry.limit.Row)
		return f, r.renew(ctx, f.limiter, &f.entry.limit)
	}
	return f, cause
}
