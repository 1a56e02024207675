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
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Windows and concurrency of rows.

// backends are where windows are counted, and calls that are under way.
func (c *config) backends(client redis.UniversalClient) []registry.Option {
	if c.store == "memory" {
		return []registry.Option{registry.WithLocalWindows(), registry.WithLocalSemaphores()}
	}
	all := []registry.Option{
		registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			opts = append(opts, slidingwindow.WithRedis(client), slidingwindow.WithKeyPrefix(c.keyPrefix+"window:"), slidingwindow.WithTimeout(c.storeTimeout))
			if share := c.share(); share != nil {
				opts = append(opts, slidingwindow.WithShare(share(limit)))
			}
			return slidingwindow.New(name, limit, window, resolution, opts...)
		}),
		registry.WithSemaphores(func(name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
			const shortest = 10 * time.Millisecond
			return semaphore.NewRedis(client, name, permits, append(opts, semaphore.WithKeyPrefix(c.keyPrefix+"semaphore:"),
				semaphore.WithTimeout(max(shortest, c.storeTimeout)))...)
		}),
	}
	if share := c.share(); share != nil {
		all = append(all, registry.WithPlacesAway(share))
	}
	return all
}

// share is how much of a window or a concurrency this gateway has while Redis is away; nil: nothing.
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

// beginner is what the gate asks of a registry.
type beginner interface {
	Begin(ctx context.Context, name string) (*registry.Admission, error)
}

// Admit implements httplimit.Entrance.
func (g *gate) Admit(ctx context.Context, key string) (permit *tokenbucket.Reservation, leave func(), err error) {
	limits, ok := g.Gate.(beginner)
	if !ok {
		permit, err := g.Reserve(ctx, key)
		return permit, nil, err
	}
	a, err := limits.Begin(ctx, key)
	if err != nil {
		return nil, nil, err
	}
	if a.Holds() {
		leave = a.Leave
	}
	if !a.OK {
		g.metrics.refusals.WithLabelValues(g.metrics.label(key), a.By.String()).Inc()
	}
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		c.leave = leave
		if !a.OK {
			c.by = a.By
		}
	}
	return a.Reservation(), leave, nil
}

var _ httplimit.Entrance = (*gate)(nil)

// usages are how much is in use of the windows and concurrencies of the first rows that have them. Those that cannot be asked are left out.
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
		if l.Disabled || l.Window == 0 && l.Concurrent == 0 || m.label(l.Name) != l.Name {
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

// boundsOf is what /stats says of a row besides its rate.
type boundsOf struct {
	NoRate        bool           `json:"no_rate,omitempty"`
	WindowSeconds float64        `json:"window_seconds,omitempty"`
	WindowLimit   int            `json:"window_limit,omitempty"`
	Concurrent    int            `json:"concurrent,omitempty"`
	RefusedBy     map[string]int `json:"refused_by,omitempty"` // limit, window, concurrency and so on
	*inUse
}

// inUse is what is in use in the whole fleet, and in force.
type inUse struct {
	WindowUsed         int `json:"window_used"`
	WindowLimit        int `json:"window_limit_in_force"`
	ConcurrentUsed     int `json:"concurrent_used"`
	ConcurrentUsedHere int `json:"concurrent_used_here"`
	Concurrent         int `json:"concurrent_in_force"`
}

// boundsOf returns that of each row.
func (m *metrics) boundsOf(ctx context.Context) func(l *registry.Limit) boundsOf {
	usages, refused := m.usages(ctx, math.MaxInt), m.refusedBy()
	return func(l *registry.Limit) boundsOf {
		b := boundsOf{l.NoRate, l.Window.Seconds(), l.WindowLimit, l.Concurrent, refused[l.Name], nil}
		if u, ok := usages[l.Name]; ok {
			b.inUse = &inUse{u.WindowUsed, u.WindowLimit, u.Places, u.Inside, u.Concurrent}
		}
		return b
	}
}

// refusedBy is how many calls of each limit what has refused.
func (m *metrics) refusedBy() map[string]map[string]int {
	all := map[string]map[string]int{}
	families, _ := m.calls.Gather() // what could be gathered
	for _, family := range families {
		if family.GetName() != "tokenbucket_gateway_refusals_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			bucket, by := metric.GetLabel()[0].GetValue(), metric.GetLabel()[1].GetValue() // in the order of their names
			if all[bucket] == nil {
				all[bucket] = map[string]int{}
			}
			all[bucket][by] = int(metric.GetCounter().GetValue())
		}
	}
	return all
}

// tryBounds does with a window and a semaphore of its own what a gateway does.
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
