package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
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
			return nil, fmt.Errorf("registry: the limit for names without a row: %w", bad(err.Field, err.Value, err.Want))
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
	if e.limit.Disabled {
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
// order when another takes over.
func (r *Registry) limiter(c *Limit, version int64) (*tokenbucket.RateLimiter, error) {
	opts := append(slices.Clone(r.options), tokenbucket.WithStore(r.store), tokenbucket.WithVersion(version),
		tokenbucket.WithMaxWait(c.wait()))
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
