package matrix

import (
	"context"
	"errors"
	"sync"
	"time"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// spec is how the limiters of a cell are made.
type spec struct {
	cell               *cell
	opts               []tb.Option
	quota, row, places bool
	shadow             bool
	warmup             time.Duration
	version            int64
}

// build makes the limiter of one process, by a row if there is to be one.
func (s *spec) build(name string, perSecond float64, store tb.Store) (*tb.RateLimiter, error) {
	if s.row && name == s.cell.name {
		return s.cell.rows.open(store)
	}
	// A stall of the machine is no fault.
	opts := append([]tb.Option{tb.WithStore(store), tb.WithStoreTimeout(storeTimeout)}, s.opts...)
	if s.version > 0 {
		opts = append(opts, tb.WithVersion(s.version))
	}
	switch {
	case s.warmup > 0 && s.quota:
		//lint:ignore SA1019 it is the only way to ask for a quota that warms up, which is refused
		_, quota := tb.ForQuota(int(perSecond), time.Second, 0)
		return tb.NewSmoothWarmingUp(name, perSecond, s.warmup, append(opts, quota)...)
	case s.warmup > 0:
		return tb.NewSmoothWarmingUp(name, perSecond, s.warmup, opts...)
	case s.quota:
		return tb.NewQuota(name, int(perSecond), time.Second, 0, opts...)
	}
	return tb.NewSmoothBursty(name, perSecond, append(opts, tb.WithMaxPermits(burst), tb.WithInitialPermits(0))...)
}

const storeTimeout = 10 * time.Second

// rows is the table of a cell, and a registry of each of its processes.
type rows struct {
	spec       *spec
	registries []*registry.Registry
	mu         sync.Mutex
	row        registry.Limit
}

// open makes the registry of a process and returns the limiter of the row.
func (r *rows) open(store tb.Store) (*tb.RateLimiter, error) {
	s, size := r.spec, burst
	r.row = registry.Limit{Name: s.cell.name, Rate: rate, Burst: &size, Quota: s.quota, Warmup: s.warmup, Shadow: s.shadow,
		MaxWait: patience, Version: max(1, s.version)}
	if s.quota || s.warmup > 0 {
		r.row.Burst = nil
	}
	if s.places {
		r.row.Window, r.row.WindowLimit = time.Second, 100*rate
		r.row.Concurrent, r.row.ConcurrentWait = 2*callers, patience
	}
	opts := append([]tb.Option{tb.WithStoreTimeout(storeTimeout)}, s.opts...)
	if !s.quota && s.warmup == 0 {
		opts = append(opts, tb.WithInitialPermits(0))
	}
	made, err := registry.New(r, store, registry.WithInterval(time.Hour), registry.WithStrict(), registry.WithLocalWindows(),
		registry.WithLocalSemaphores(), registry.WithLimiterOptions(opts...))
	if err != nil {
		return nil, err
	}
	r.registries = append(r.registries, made)
	return made.Limiter(s.cell.name)
}

// Load implements registry.Source.
func (r *rows) Load(context.Context) (registry.Table, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return registry.Table{Limits: []registry.Limit{r.row}}, nil
}

// change raises the rate of the row, and lets every process load it.
func (r *rows) change(ctx context.Context) error {
	r.mu.Lock()
	r.row.Rate = faster
	r.row.Version++
	r.mu.Unlock()
	for _, each := range r.registries {
		if err := each.Reload(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *rows) close() {
	for _, each := range r.registries {
		each.Close()
	}
}

// target is what callers call.
type target interface {
	Acquire(ctx context.Context, permits int) error
	Try(ctx context.Context) (bool, error)
	TryAcquire(ctx context.Context, permits int, timeout time.Duration) (bool, error)
	Reserve(ctx context.Context, permits int) (reservation, error)
	TryReserve(ctx context.Context, permits int, timeout time.Duration) (reservation, error)
	TryAwait(ctx context.Context, permits int, timeout time.Duration) (reservation, error)
	Close(ctx context.Context) error
	registry() (*registry.Registry, error)
}

// reservation is one of a limiter or of a group.
type reservation interface {
	OK() bool
	Delay() time.Duration
	Ready() <-chan struct{}
	Cancel(ctx context.Context) error
	Return(ctx context.Context) error
	Settle(ctx context.Context, actual int) error
	SettleLater(actual int)
}

// errNoSuchVerb is of verbs that a target does not have: the compiler refuses them.
var errNoSuchVerb = errors.New("the type has no such method")

// as returns a reservation as the interface, or nil.
func as[R reservation](r R, err error) (reservation, error) {
	if err != nil {
		return nil, err
	}
	return r, nil
}

// one is a limiter alone.
type one struct {
	*tb.RateLimiter
	rows *registry.Registry
}

func (l one) Acquire(ctx context.Context, n int) error {
	_, err := l.RateLimiter.Acquire(ctx, n)
	return err
}
func (l one) Reserve(ctx context.Context, n int) (reservation, error) {
	return as(l.RateLimiter.Reserve(ctx, n))
}
func (l one) TryReserve(ctx context.Context, n int, d time.Duration) (reservation, error) {
	return as(l.RateLimiter.TryReserve(ctx, n, d))
}
func (l one) TryAwait(ctx context.Context, n int, d time.Duration) (reservation, error) {
	return as(l.RateLimiter.TryAwait(ctx, n, d))
}
func (l one) registry() (*registry.Registry, error) { return l.rows, nil }

// all is a group.
type all struct{ *tb.Group }

func (g all) Acquire(ctx context.Context, n int) error { _, err := g.Group.Acquire(ctx, n); return err }
func (g all) Reserve(ctx context.Context, n int) (reservation, error) {
	return as(g.Group.Reserve(ctx, n))
}
func (g all) TryReserve(ctx context.Context, n int, d time.Duration) (reservation, error) {
	return as(g.Group.TryReserve(ctx, n, d))
}
func (all) TryAwait(context.Context, int, time.Duration) (reservation, error) {
	return nil, errNoSuchVerb
}
func (all) registry() (*registry.Registry, error) { return nil, errNoSuchVerb }

// choice is an Any.
type choice struct{ *tb.Choice }

func (g choice) Acquire(ctx context.Context, n int) error {
	_, _, err := g.Choice.Acquire(ctx, n)
	return err
}
func (g choice) Try(ctx context.Context) (bool, error) {
	by, err := g.Choice.Try(ctx)
	return by != nil, err
}
func (g choice) TryAcquire(ctx context.Context, n int, d time.Duration) (bool, error) {
	by, err := g.Choice.TryAcquire(ctx, n, d)
	return by != nil, err
}
func (g choice) Reserve(ctx context.Context, n int) (reservation, error) {
	return as(g.Choice.Reserve(ctx, n))
}
func (g choice) TryReserve(ctx context.Context, n int, d time.Duration) (reservation, error) {
	return as(g.Choice.TryReserve(ctx, n, d))
}
func (choice) TryAwait(context.Context, int, time.Duration) (reservation, error) {
	return nil, errNoSuchVerb
}
func (choice) registry() (*registry.Registry, error) { return nil, errNoSuchVerb }
