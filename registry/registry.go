package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// ErrNotLoaded: the limits could not be loaded, and there are none from before.
var ErrNotLoaded = errors.New("registry: limits not loaded")

// Registry keeps one limiter for each name that its Source knows, made when it is asked for first, and follows the Source
// while it runs. All methods may be called by many goroutines at once. Close it when it is no longer used.
//
// Most callers want Allow; package httplimit wants Reserve and Penalize, and takes a Registry as it is.
type Registry struct {
	source   Source
	store    tokenbucket.Store
	sw       Switch
	unknown  Unknown
	interval time.Duration
	timeout  time.Duration
	options  []tokenbucket.Option
	hook     func(Load)
	log      *slog.Logger

	limits  atomic.Pointer[map[string]*entry]
	strange cache            // limiters of names without a row
	past    map[string]int64 // versions of limits that are gone, for the case that they come back

	wait    context.Context // of WithWait
	turn    chan struct{}   // holds the right to load
	kinds   chan struct{}   // holds the right to replace a bucket of the other kind
	ctx     context.Context
	close   context.CancelFunc
	polling sync.WaitGroup

	mu       sync.Mutex
	stats    Stats
	began    time.Time // of the last load
	reported map[string]bool
	failing  bool
}

// entry is one row in force.
type entry struct {
	limit    Limit
	version  int64 // of the limiter's configuration; not below the row's own
	wait     time.Duration
	limiter  atomic.Pointer[tokenbucket.RateLimiter] // nil: not asked for yet
	disputed int                                     // so many loads in a row found something else in force in the bucket
	replaced time.Time                               // when a bucket of the other kind was; whoever has kinds
}

// Unknown says what happens to a call for a name without a row.
type Unknown struct {
	refuse bool
	limit  *Limit
}

// Pass lets calls for names without a row pass at once. It is the default.
func Pass() Unknown { return Unknown{} }

// Refuse refuses calls for names without a row.
func Refuse() Unknown { return Unknown{refuse: true} }

// Default gives each name without a row a bucket of its own, by this limit; its Name is ignored. So many limiters are kept as
// WithMaxUnknown says; the bucket of one that was dropped is in the store, and goes on when the name comes back. Any string
// will do for a name: what is no UTF-8 in it counts as "?", and so does an empty one; what is beyond 512 bytes does not count.
func Default(limit Limit) Unknown { return Unknown{limit: &limit} }

// Option configures a Registry. An option with a bad value makes New fail.
type Option func(*Registry) error

func bad(field string, value any, want string) error {
	return fmt.Errorf("%w: registry: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
}

// WithInterval sets how often the source is asked: each time after a random time between four fifths of d and d, so that a
// fleet does not ask in step. At least 10 ms, default 10 s.
func WithInterval(d time.Duration) Option {
	return func(r *Registry) error {
		if d < 10*time.Millisecond {
			return bad("interval", d, "at least 10ms")
		}
		r.interval = d
		return nil
	}
}

// WithTimeout bounds one load. At least 1 ms, default 5 s.
func WithTimeout(d time.Duration) Option {
	return func(r *Registry) error {
		if d < time.Millisecond {
			return bad("timeout", d, "at least 1ms")
		}
		r.timeout = d
		return nil
	}
}

// WithWait lets New wait for a source that cannot be read yet, until ctx is done. Without it New fails at once.
func WithWait(ctx context.Context) Option {
	return func(r *Registry) error {
		if ctx == nil {
			return bad("wait", "nil", "a context")
		}
		r.wait = ctx
		return nil
	}
}

// WithUnknown sets what happens to names without a row. Default: Pass.
func WithUnknown(u Unknown) Option {
	return func(r *Registry) error {
		r.unknown = u
		return nil
	}
}

// WithMaxUnknown bounds how many limiters are kept for names without a row (Default). At least 2, default 10,000.
func WithMaxUnknown(n int) Option {
	return func(r *Registry) error {
		if n < 2 {
			return bad("max unknown", n, "at least 2")
		}
		r.strange.most = n
		return nil
	}
}

// WithSwitch sets the global switch: while it is off every call passes, and no store is touched.
func WithSwitch(s Switch) Option {
	return func(r *Registry) error {
		if s == nil {
			return bad("switch", "nil", "a switch")
		}
		r.sw = s
		return nil
	}
}

// WithLimiterOptions adds options to every limiter, such as WithHorizon or WithLease. A row that they do not fit is
// rejected.
func WithLimiterOptions(opts ...tokenbucket.Option) Option {
	return func(r *Registry) error {
		r.options = append(r.options, opts...)
		return nil
	}
}

// WithHook sets a function that is told of every load, by the goroutine that loads.
func WithHook(f func(Load)) Option {
	return func(r *Registry) error {
		r.hook = f
		return nil
	}
}

// WithLogger sets where changes, rejected rows and outages are logged, each once. Default slog.Default().
func WithLogger(l *slog.Logger) Option {
	return func(r *Registry) error {
		if l == nil {
			return bad("logger", "nil", "a logger")
		}
		r.log = l
		return nil
	}
}

// New loads the limits and keeps them up to date until Close. It fails when they cannot be loaded (ErrNotLoaded), or waits
// (WithWait).
func New(source Source, store tokenbucket.Store, opts ...Option) (*Registry, error) {
	r := &Registry{
		source: source, store: store, interval: 10 * time.Second, timeout: 5 * time.Second,
		log: slog.Default(), past: map[string]int64{}, turn: make(chan struct{}, 1), kinds: make(chan struct{}, 1), reported: map[string]bool{},
	}
	r.strange.most = 10_000
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
		if err := opt(r); err != nil {
			return nil, err
		}
	}
	if u := r.unknown.limit; u != nil {
		sample := *u
		sample.Name = "default"
		if _, err := r.limiter(&sample, sample.Version); err != nil {
			return nil, fmt.Errorf("registry: the limit for names without a row: %w", err)
		}
		if err := sample.check(); err != nil {
			return nil, fmt.Errorf("%w: the limit for names without a row: %w", tokenbucket.ErrInvalidConfig, err)
		}
	}
	r.ctx, r.close = context.WithCancel(context.Background())
	if err := r.start(); err != nil {
		r.close()
		return nil, err
	}
	r.polling.Go(r.poll)
	return r, nil
}

// start loads for the first time.
func (r *Registry) start() error {
	ctx := r.ctx
	if r.wait != nil {
		ctx = r.wait
	}
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, r.interval) {
		err := r.Reload(ctx)
		if err == nil {
			return nil
		}
		if r.wait == nil || ctx.Err() != nil {
			return fmt.Errorf("%w: %w", ErrNotLoaded, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration((0.5 + rand.Float64()/2) * float64(pause))):
		}
	}
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
// policy says so (WithUnknown), the call passes at once.
func (r *Registry) Allow(ctx context.Context, name string) (bool, error) {
	e, l, err := r.find(name)
	switch {
	case err != nil:
		return false, err
	case e == nil:
		return true, nil
	case l == nil:
		return false, nil
	}
	ok, err := l.TryAcquire(ctx, 1, e.wait)
	if err != nil && errors.Is(err, tokenbucket.ErrInvalidConfig) {
		if e, l, err = r.replace(ctx, name, e, l, err); err == nil && l != nil {
			return l.TryAcquire(ctx, 1, e.wait)
		}
		return e == nil && err == nil, err
	}
	return ok, err
}

// Reserve is Allow for callers that wait by themselves, or may have to give the permit back: the reservation is OK if its
// permit falls due within the row's cache.
func (r *Registry) Reserve(ctx context.Context, name string) (*tokenbucket.Reservation, error) {
	e, l, err := r.find(name)
	if err == nil && l != nil {
		var place *tokenbucket.Reservation
		place, err = l.TryReserve(ctx, 1, e.wait)
		if err == nil || !errors.Is(err, tokenbucket.ErrInvalidConfig) {
			return place, err
		}
		if e, l, err = r.replace(ctx, name, e, l, err); err == nil && l != nil {
			return l.TryReserve(ctx, 1, e.wait)
		}
	}
	switch {
	case err != nil:
		return nil, err
	case e == nil:
		return &tokenbucket.Reservation{}, nil
	}
	return tokenbucket.Refused(0), nil
}

// Penalize holds the bucket of that name back for the whole fleet, see tokenbucket.RateLimiter.Penalize. Without a limit in
// force it does nothing.
func (r *Registry) Penalize(ctx context.Context, name string, d time.Duration) error {
	_, l, err := r.find(name)
	if err != nil || l == nil {
		return err
	}
	return l.Penalize(ctx, d)
}

// Limiter returns the limiter that calls of that name use now; nil if they pass or are refused without one. It does not
// follow later changes.
func (r *Registry) Limiter(name string) (*tokenbucket.RateLimiter, error) {
	_, l, err := r.find(name)
	return l, err
}

// find returns what decides about a name: nothing (it passes), an entry without a limiter (it is refused), or both.
func (r *Registry) find(name string) (*entry, *tokenbucket.RateLimiter, error) {
	if r.sw != nil && !r.sw.Enabled() {
		return nil, nil, nil
	}
	e := (*r.limits.Load())[name]
	if e == nil {
		switch {
		case r.unknown.refuse:
			return &refused, nil, nil
		case r.unknown.limit == nil:
			return nil, nil, nil
		}
		e = r.strange.get(name, r.unknown.limit)
	}
	if !e.limit.Enabled {
		return nil, nil, nil
	}
	l := e.limiter.Load()
	if l == nil {
		var err error
		if l, err = r.limiter(&e.limit, e.version); err != nil {
			return nil, nil, err
		}
		if !e.limiter.CompareAndSwap(nil, l) {
			l = e.limiter.Load()
		}
	}
	return e, l, nil
}

var refused entry

// limiter makes the limiter of a row. Limiters of one name share their bucket's queue, so callers that wait keep their
// places when another takes over.
func (r *Registry) limiter(c *Limit, version int64) (*tokenbucket.RateLimiter, error) {
	opts := append(slices.Clone(r.options), tokenbucket.WithStore(r.store), tokenbucket.WithVersion(version))
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
func (r *Registry) replace(ctx context.Context, name string, e *entry, l *tokenbucket.RateLimiter, cause error) (*entry, *tokenbucket.RateLimiter, error) {
	select {
	case r.kinds <- struct{}{}:
		defer func() { <-r.kinds }()
	case <-ctx.Done():
		return e, l, ctx.Err()
	}
	r.mu.Lock()
	age := time.Since(r.began)
	r.mu.Unlock()
	if age > r.interval/10 {
		_ = r.Reload(ctx) // on an error, with what there is
	}
	if newer, limiter, err := r.find(name); err != nil || newer != e {
		return newer, limiter, err
	}
	if _, err := l.State(ctx); !errors.Is(err, tokenbucket.ErrInvalidConfig) {
		return e, l, err // somebody else was faster
	}
	if now := time.Now(); now.Sub(e.replaced) >= r.interval {
		e.replaced = now
		r.log.Warn("registry: the bucket is of another kind than its row says; it begins anew", "bucket", name, "row", e.limit.Row)
		return e, l, l.Reset(ctx)
	}
	return e, l, cause
}

// Reload asks the source now. Many callers share a load. On an error everything stays as it was.
func (r *Registry) Reload(ctx context.Context) error {
	asked := time.Now()
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	r.mu.Lock()
	if r.began.After(asked) {
		defer r.mu.Unlock()
		return r.stats.Err
	}
	r.began = time.Now()
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	began := time.Now()
	table, err := r.source.Load(ctx)
	load := Load{Took: time.Since(began), Err: err}
	if err == nil {
		r.apply(table, &load)
	} else if r.ctx.Err() != nil {
		return err // closed
	}
	r.note(&load)
	return err
}

// apply puts a table in force.
func (r *Registry) apply(table Table, load *Load) {
	old := r.limits.Load()
	first := old == nil
	if first {
		old = &map[string]*entry{}
	}
	next := make(map[string]*entry, len(table.Limits))
	load.Rejected = slices.Clone(table.Rejected)
	for i := range table.Limits {
		c := &table.Limits[i]
		if _, twice := next[c.Name]; twice {
			load.Rejected = append(load.Rejected, RowError{Row: c.Row, Name: c.Name, Field: "name", Value: fmt.Sprintf("%q", c.Name), Want: "a name of its own"})
			continue
		}
		was := (*old)[c.Name]
		e, err := r.follow(was, c)
		if err != nil {
			load.Rejected = append(load.Rejected, *err)
			continue
		}
		next[c.Name] = e
		switch {
		case e == was:
		case was != nil:
			load.Changed++
			r.log.Info("registry: a limit changed", "bucket", c.Name, "row", c.Row, "from", was.limit.describe(), "to", c.describe(), "version", e.version)
		default:
			if load.Added++; !first {
				r.log.Info("registry: a limit is new", "bucket", c.Name, "row", c.Row, "limit", c.describe(), "version", e.version)
			}
		}
	}
	load.Rows = len(table.Limits) + len(table.Rejected)
	r.keep(*old, next, load)
	r.limits.Store(&next)
	load.Limits = len(next)
}

// follow returns the entry for a row: what was, if nothing of it changed.
func (r *Registry) follow(was *entry, c *Limit) (*entry, *RowError) {
	e := &entry{limit: *c, version: c.Version, wait: c.wait()}
	if was != nil {
		if was.limit.sameLimiter(c) {
			e.version = r.dispute(was)
			if e.version == was.version {
				if c.Enabled == was.limit.Enabled && c.Cache == was.limit.Cache && c.Row == was.limit.Row {
					return was, nil
				}
				e.limiter.Store(was.limiter.Load())
			}
		} else { // whatever its time says: seconds are coarse, and clocks change
			e.version = max(c.Version, was.version+1)
		}
	} else if version, ok := r.past[c.Name]; ok {
		e.version = max(c.Version, version+1)
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	if c.Enabled {
		if _, err := r.limiter(c, e.version); err != nil {
			return nil, &RowError{Row: c.Row, Name: c.Name, Err: err}
		}
	}
	return e, nil
}

// dispute returns the version that an unchanged row should have. Something else may be in force in the bucket for good: the
// row was changed within a second, or in the hour that a clock repeats, and nobody is left who saw it. What two loads in a
// row find so is settled by the table.
func (r *Registry) dispute(e *entry) int64 {
	l := e.limiter.Load()
	if l == nil {
		return e.version
	}
	own, there := l.Config(), l.InForce()
	if own.Version = there.Version; own == there {
		e.disputed = 0
		return e.version
	}
	if e.disputed++; e.disputed < 2 {
		return e.version
	}
	r.log.Warn("registry: the bucket follows something else than its row; the row wins", "bucket", e.limit.Name, "row", e.limit.Row,
		"bucket's rate", there.Rate, "row's", own.Rate, "version", there.Version+1)
	return there.Version + 1
}

// keep keeps the last good limit of rows that are bad now, and counts those that are gone.
func (r *Registry) keep(old, next map[string]*entry, load *Load) {
	names, rows := map[string]bool{}, map[string]bool{}
	for i := range load.Rejected {
		names[load.Rejected[i].Name] = true
		if row := load.Rejected[i].Row; row != "" {
			rows[row] = true
		}
	}
	for name, e := range old {
		if next[name] != nil {
			continue
		}
		if names[name] || rows[e.limit.Row] {
			next[name] = e
			load.Kept++
			continue
		}
		load.Removed++
		r.past[name] = e.version
		r.log.Info("registry: a limit is gone", "bucket", name, "row", e.limit.Row)
	}
}

// note keeps the figures of a load and tells of it, of each trouble once.
func (r *Registry) note(load *Load) {
	r.mu.Lock()
	now := time.Now()
	r.stats.Loads++
	r.stats.LastLoad, r.stats.Err = now, load.Err
	failed, recovered := load.Err != nil && !r.failing, load.Err == nil && r.failing
	r.failing = load.Err != nil
	if load.Err != nil {
		r.stats.Failures++
	} else {
		r.stats.LastGood = now
		r.stats.Limits, r.stats.Rejected = load.Limits, load.Rejected
	}
	var fresh []RowError
	if load.Err == nil {
		seen := map[string]bool{}
		for _, e := range load.Rejected {
			seen[e.Error()] = true
			if !r.reported[e.Error()] {
				fresh = append(fresh, e)
			}
		}
		r.reported = seen
	}
	r.mu.Unlock()
	if failed {
		r.log.Error("registry: limits could not be loaded; what was before stays in force", "error", load.Err)
	}
	if recovered {
		r.log.Info("registry: limits are loaded again", "limits", load.Limits)
	}
	for i := range fresh {
		r.log.Error("registry: a row was rejected; what was before stays in force", "error", &fresh[i])
	}
	if r.hook != nil {
		r.hook(*load)
	}
}

// Load tells how one load went.
type Load struct {
	// Err of the source; nothing changed then.
	Err error
	// Took is how long the source took.
	Took time.Duration
	// Rows that there were, Limits in force afterwards; of these Added, Changed, and Kept though their row is bad now; Removed
	// ones are no longer in force.
	Rows, Limits, Added, Changed, Kept, Removed int
	// Rejected rows.
	Rejected []RowError
}

// Stats are the figures of a Registry.
type Stats struct {
	// Loads were tried, Failures of them failed; Err is the last one's error, nil if it succeeded.
	Loads, Failures int
	Err             error
	// LastLoad was tried then; LastGood succeeded, and is so old.
	LastLoad, LastGood time.Time
	Age                time.Duration
	// Limits in force; Limiters of them have been asked for. Unknown names have a limiter by default.
	Limits, Limiters, Unknown int
	// Rejected rows of the last good load.
	Rejected []RowError
}

// Stats returns the figures as of now.
func (r *Registry) Stats() Stats {
	r.mu.Lock()
	s := r.stats
	r.mu.Unlock()
	s.Rejected = slices.Clone(s.Rejected)
	s.Age = time.Since(s.LastGood)
	for _, e := range *r.limits.Load() {
		if e.limiter.Load() != nil {
			s.Limiters++
		}
	}
	s.Unknown = r.strange.len()
	return s
}

// Limits returns what is in force, by name.
func (r *Registry) Limits() []Limit {
	var all []Limit
	for e := range maps.Values(*r.limits.Load()) {
		all = append(all, e.limit)
	}
	slices.SortFunc(all, func(a, b Limit) int { return strings.Compare(a.Name, b.Name) })
	return all
}
