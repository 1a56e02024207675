package gateway

import (
	"context"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// Windows and concurrency of rows.

// backends returns the options that place windows and semaphores in Redis, or in memory with --store memory.
func (c *config) backends(client redis.UniversalClient) []registry.Option {
	if c.store == "memory" {
		return []registry.Option{registry.WithLocalWindows(), registry.WithLocalSemaphores()}
	}
	all := []registry.Option{
		registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			opts = append(opts, slidingwindow.WithRedis(client), slidingwindow.WithKeyPrefix(c.keyPrefix+"window:"), slidingwindow.WithStoreTimeout(c.storeTimeout))
			if share := c.share(); share != nil {
				opts = append(opts, slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(share(limit))))
			}
			return slidingwindow.New(name, limit, window, resolution, opts...)
		}),
		registry.WithSemaphores(func(name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
			const shortest = 10 * time.Millisecond
			return semaphore.NewRedis(client, name, permits, append(opts, semaphore.WithKeyPrefix(c.keyPrefix+"semaphore:"),
				semaphore.WithStoreTimeout(max(shortest, c.storeTimeout)))...)
		}),
	}
	return append(all, registry.WithSemaphoreFailurePolicy(c.policy))
}

// share returns the function that computes this gateway's local share of a window during an outage of Redis, or nil if calls are refused then.
func (c *config) share() func(of int) int {
	if c.policy == tokenbucket.FailOpen {
		return func(int) int { return math.MaxInt32 }
	}
	text, ok := strings.CutPrefix(c.fail, "share:")
	instances, err := strconv.Atoi(text)
	if !ok || err != nil {
		return nil
	}
	return func(of int) int { return max(1, of/instances) }
}

// usages returns the usage of windows and concurrencies, by row name, of at most most rows that have them. Rows whose usage cannot be read
// are omitted.
func (m *metrics) usages(ctx context.Context, most int) map[string]registry.Usage {
	limits := m.limits.Load()
	if limits == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var mu sync.Mutex
	all := map[string]registry.Usage{}
	var asking sync.WaitGroup
	for _, l := range limits.Limits() {
		if l.Disabled || l.Window == 0 && l.Concurrent == 0 || !m.hasSeries(l.Name) {
			continue
		}
		if most--; most < 0 {
			break
		}
		asking.Go(func() {
			u, ok, err := limits.Usage(ctx, l.Name)
			if !ok || err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			all[l.Name] = u
		})
	}
	asking.Wait()
	return all
}

// boundsOf is the part of /stats that describes a row's window and concurrency.
type boundsOf struct {
	NoRate         bool           `json:"no_rate,omitempty"`
	Window         float64        `json:"window,omitempty"`
	WindowLimit    int            `json:"window_limit,omitempty"`
	Concurrent     int            `json:"concurrent,omitempty"`
	ConcurrentWait float64        `json:"concurrent_wait,omitempty"`
	RefusedBy      map[string]int `json:"refused_by,omitempty"` // limit, window, concurrency and so on
	*inUse
}

// inUse is the usage in the whole fleet, and the bounds in force.
type inUse struct {
	WindowUsed         int `json:"window_used"`
	WindowLimit        int `json:"window_limit_in_force"`
	ConcurrentUsed     int `json:"concurrent_used"`
	ConcurrentUsedHere int `json:"concurrent_used_here"`
	Concurrent         int `json:"concurrent_in_force"`
}

// boundsOf returns a function that builds the boundsOf of a row. Usages and refusals are read once, here.
func (m *metrics) boundsOf(ctx context.Context) func(l *registry.Limit) boundsOf {
	usages, refused := m.usages(ctx, math.MaxInt), m.refusedBy()
	return func(l *registry.Limit) boundsOf {
		b := boundsOf{l.NoRate, l.Window.Seconds(), l.WindowLimit, l.Concurrent, l.ConcurrentWait.Seconds(), refused[telemetry.Named(l.Name)], nil}
		if u, ok := usages[l.Name]; ok {
			b.inUse = &inUse{u.WindowUsed, u.WindowLimit, u.Places, u.Inside, u.Concurrent}
		}
		return b
	}
}

// refusedBy returns the refused calls of each limit, by the bound that refused them.
func (m *metrics) refusedBy() map[string]map[string]int {
	all := map[string]map[string]int{}
	families, _ := m.calls.Gather() // on an error, the families that could be gathered
	for _, family := range families {
		if family.GetName() != "tokenbucket_gateway_refusals_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			bucket, by := metric.GetLabel()[0].GetValue(), metric.GetLabel()[1].GetValue() // labels are sorted by name
			if all[bucket] == nil {
				all[bucket] = map[string]int{}
			}
			all[bucket][by] = int(metric.GetCounter().GetValue())
		}
	}
	return all
}

// tryBounds runs a gateway's operations on a window and a semaphore of its own, to check the rights in Redis.
func (k *checker) tryBounds(ctx context.Context, client redis.UniversalClient) error {
	own := *k.config
	own.keyPrefix += "check:"
	row := registry.Limit{Name: "check", NoRate: true, Window: time.Second, WindowLimit: 1000, Concurrent: 1000}
	limits, err := registry.New(registry.Static{row}, tokenbucket.NewMemoryStore(), append(own.backends(client), registry.WithLogger(silent))...)
	if err != nil {
		return err
	}
	defer limits.Close()
	a, err := limits.Enter(ctx, row.Name)
	if err != nil {
		return err
	}
	a.Leave()
	_, _, err = limits.Usage(ctx, row.Name)
	return err
}
