package registry_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// An upstream's Retry-After holds a row without a rate back: in the process that received it at once, in others with their next load.
func TestPenaltyWithoutRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := tokenbucket.NewMemoryStore()
		process := func() *registry.Registry {
			return open(t, registry.Static{
				{Name: "/a", NoRate: true, Concurrent: 2},
				{Name: "/b", NoRate: true, Window: time.Minute, WindowLimit: 100},
				{Name: "/shadow", NoRate: true, Concurrent: 2, Shadow: true},
				{Name: "/never", NoRate: true, Concurrent: 2},
			}, store, registry.WithLocalWindows(), registry.WithLocalSemaphores(), registry.WithInterval(10*time.Second))
		}
		here, there := process(), process()
		for _, name := range []string{"/a", "/b", "/shadow"} {
			enter(t, there, name).Leave()
			require.NoError(t, here.Penalize(ctx, name, 30*time.Second))
			require.NoError(t, here.Penalize(ctx, name, time.Second), "of two the one that ends last counts")
		}
		require.NoError(t, here.Penalize(ctx, "/never", 30*time.Second))
		refused := func(r *registry.Registry, name string, left time.Duration) {
			t.Helper()
			a := enter(t, r, name)
			require.False(t, a.OK)
			require.Equal(t, gate.ByPenalty, a.By)
			require.Equal(t, left, a.RetryAfter.Round(time.Millisecond))
		}
		refused(here, "/a", 30*time.Second)
		refused(here, "/b", 30*time.Second)
		ok, err := allow(ctx, here, "/b")
		require.NoError(t, err)
		require.False(t, ok)
		require.Equal(t, gate.ByShadow, enter(t, here, "/shadow").By)
		require.True(t, enter(t, there, "/a").OK, "it has not loaded since")
		time.Sleep(10 * time.Second)
		refused(there, "/a", 20*time.Second)
		refused(there, "/never", 20*time.Second) // by its first call
		refused(there, "/b", 20*time.Second)
		time.Sleep(20*time.Second - 2*time.Millisecond)
		refused(here, "/a", 2*time.Millisecond)
		refused(there, "/b", 2*time.Millisecond)
		time.Sleep(3 * time.Millisecond)
		for _, r := range []*registry.Registry{here, there} {
			require.True(t, enter(t, r, "/a").OK)
			require.True(t, enter(t, r, "/b").OK)
		}
		for _, d := range []time.Duration{-1, 0, time.Hour + 1} {
			require.ErrorIs(t, here.Penalize(ctx, "/a", d), tokenbucket.ErrInvalidConfig)
		}
		require.True(t, enter(t, here, "/a").OK)
		here.Close()
		there.Close()
	})
}

// Reset ends a penalty: in this process at once, in others with their next load. A penalty that did not reach the store stays in its process.
func TestResetEndsPenalty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := tokenbuckettest.NewStore()
		process := func() *registry.Registry {
			return open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 2}, {Name: "/rated", Rate: 1}, {Name: "/off", Rate: 1, Disabled: true}}, store,
				registry.WithLocalSemaphores(), registry.WithInterval(10*time.Second))
		}
		here, there := process(), process()
		held := func(r *registry.Registry) time.Duration {
			t.Helper()
			left := r.Held("/a")
			a := enter(t, r, "/a")
			require.Equal(t, left == 0, a.OK)
			a.Leave()
			return left.Round(time.Millisecond)
		}
		enter(t, here, "/a").Leave()
		enter(t, there, "/a").Leave()
		require.NoError(t, there.Penalize(ctx, "/a", time.Hour))
		require.Equal(t, time.Hour, held(there))
		time.Sleep(10 * time.Second)
		require.Equal(t, time.Hour-10*time.Second, held(here))
		require.NoError(t, here.Reset(ctx, "/a"))
		require.Zero(t, held(here))
		require.NotZero(t, held(there), "it has not loaded since")
		time.Sleep(10 * time.Second)
		require.Zero(t, held(there))

		store.Fail(tokenbuckettest.Error(errors.New("away")))
		require.Error(t, here.Penalize(ctx, "/a", time.Minute))
		require.Error(t, here.Reset(ctx, "/a"))
		store.Restore()
		time.Sleep(10 * time.Second)
		require.NotZero(t, held(here))
		require.Zero(t, held(there))
		require.NoError(t, here.Reset(ctx, "/a"))
		require.Zero(t, held(here))

		require.NoError(t, here.Penalize(ctx, "/rated", time.Hour))
		require.Zero(t, pass(t, there, "/rated", 1))
		require.NoError(t, here.Reset(ctx, "/rated"))
		require.Equal(t, 1, pass(t, there, "/rated", 1))
		for _, name := range []string{"/off", "/unknown"} {
			require.ErrorContains(t, here.Reset(ctx, name), name)
		}
		here.Close()
		there.Close()
	})
}

// A row that gets a rate, or loses it, is held back as before, in every process.
func TestPenaltyFollowsRow(t *testing.T) {
	free := registry.Limit{Name: "/a", NoRate: true, Concurrent: 2, Version: 1}
	rated := registry.Limit{Name: "/a", Rate: 100, Version: 2}
	both := registry.Limit{Name: "/a", Rate: 0.5, Concurrent: 2, Version: 2}
	warm := registry.Limit{Name: "/a", Rate: 100, Warmup: time.Second, Version: 2}
	for name, c := range map[string]struct{ before, after registry.Limit }{
		"gets a rate":       {free, rated},
		"gets a slow rate":  {free, both},
		"loses a rate":      {rated, free},
		"loses a slow rate": {both, free},
		"loses a warm-up":   {warm, free},
		"gets a warm-up":    {rated, warm},
		"only its warm-up":  {warm, rated},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source, store := new(fake), tokenbucket.NewMemoryStore()
				c.after.Version = c.before.Version + 1
				source.set(c.before)
				process := func() *registry.Registry {
					return open(t, source, store, registry.WithLocalSemaphores(), registry.WithInterval(10*time.Second))
				}
				here, there := process(), process()
				enter(t, here, "/a").Leave()
				enter(t, there, "/a").Leave()
				require.NoError(t, here.Penalize(ctx, "/a", time.Minute))
				source.set(c.after)
				time.Sleep(10 * time.Second)
				fresh := process()
				for _, r := range []*registry.Registry{here, there, fresh} {
					a := enter(t, r, "/a")
					require.False(t, a.OK)
					require.GreaterOrEqual(t, a.RetryAfter, 50*time.Second)
				}
				time.Sleep(53 * time.Second)
				a := enter(t, fresh, "/a")
				require.True(t, a.OK, "%v", a.RetryAfter)
				a.Leave()
				l, err := fresh.Limiter("/a")
				require.NoError(t, err)
				if l != nil {
					require.Equal(t, c.after.Rate, l.Rate())
				}
				for _, r := range []*registry.Registry{here, there, fresh} {
					r.Close()
				}
			})
		})
	}
}

// A penalty of a row in shadow has no effect after the row leaves the shadow, as for a row with a rate.
func TestPenaltyStaysInShadow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		row := registry.Limit{Name: "/a", NoRate: true, Concurrent: 2, Shadow: true}
		source := new(fake)
		source.set(row)
		r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(), registry.WithInterval(10*time.Second))
		enter(t, r, "/a").Leave()
		require.NoError(t, r.Penalize(ctx, "/a", time.Hour))
		row.Shadow = false
		source.set(row)
		time.Sleep(10 * time.Second)
		require.True(t, enter(t, r, "/a").OK)
		r.Close()
	})
}

// A penalty that did not reach the store lasts, also if shorter ones reach it later. A penalty that another process ends is over, also if
// a shorter one did not reach the store.
func TestPenaltyUntold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := tokenbuckettest.NewStore()
		process := func() *registry.Registry {
			return open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 2}}, store, registry.WithLocalSemaphores(), registry.WithInterval(10*time.Second))
		}
		here, there := process(), process()
		store.Fail(tokenbuckettest.Error(errors.New("away")))
		require.Error(t, here.Penalize(ctx, "/a", time.Hour))
		store.Restore()
		require.NoError(t, here.Penalize(ctx, "/a", time.Second), "an answer to a call that was under way")
		time.Sleep(10 * time.Second)
		require.Equal(t, time.Hour-10*time.Second, here.Held("/a").Round(time.Millisecond))
		require.NoError(t, here.Reset(ctx, "/a"))

		require.NoError(t, here.Penalize(ctx, "/a", time.Hour))
		store.Fail(tokenbuckettest.Error(errors.New("away")))
		require.Error(t, here.Penalize(ctx, "/a", time.Minute))
		store.Restore()
		require.NoError(t, there.Reset(ctx, "/a"))
		time.Sleep(10 * time.Second)
		require.Equal(t, 50*time.Second, here.Held("/a").Round(time.Millisecond))
		here.Close()
		there.Close()
	})
}

// Many calls find at once that the bucket is one with a warm-up.
func TestPenaltiesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := tokenbucket.NewMemoryStore()
		r := open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 2}}, &distant{store}, registry.WithLocalSemaphores(), registry.WithInterval(time.Hour))
		other, err := tokenbucket.NewSmoothWarmingUp("/a", 10, time.Second, tokenbucket.WithStore(store))
		require.NoError(t, err)
		require.NoError(t, other.Penalize(ctx, time.Second))
		defer r.Close()
		var calls sync.WaitGroup
		for range 4 {
			calls.Go(func() { assert.NoError(t, r.Penalize(ctx, "/a", time.Minute)) })
		}
		calls.Wait()
	})
}

// No call passes while a load looks at a penalty.
func TestPenaltyLastsThroughLoads(t *testing.T) {
	r := open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 2}}, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(), registry.WithInterval(time.Hour))
	defer r.Close()
	require.NoError(t, r.Penalize(ctx, "/a", time.Hour))
	var over, passed atomic.Bool
	var looks sync.WaitGroup
	looks.Go(func() {
		for !over.Load() {
			if r.Held("/a") == 0 {
				passed.Store(true)
			}
		}
	})
	for range 2000 {
		assert.NoError(t, r.Reload(ctx))
	}
	over.Store(true)
	looks.Wait()
	require.False(t, passed.Load())
}

// distant is a store that takes its time.
type distant struct{ tokenbucket.Store }

func (s *distant) Apply(ctx context.Context, b *tokenbucket.Batch) error {
	time.Sleep(time.Millisecond)
	return s.Store.Apply(ctx, b)
}

// During an outage of the store, the process that received a penalty keeps it, and returns an error because the others do not.
func TestPenaltyWithoutStore(t *testing.T) {
	store := tokenbuckettest.NewStore()
	store.Fail(tokenbuckettest.Error(errors.New("away")))
	r := open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 2}}, store, registry.WithLocalSemaphores())
	require.ErrorContains(t, r.Penalize(ctx, "/a", time.Minute), "away")
	require.Equal(t, gate.ByPenalty, enter(t, r, "/a").By)
}

// trips counts round trips.
type trips struct{ atomic.Int64 }

func (*trips) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (n *trips) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		n.Add(1)
		return next(ctx, cmd)
	}
}

func (n *trips) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		n.Add(1)
		return next(ctx, cmds)
	}
}

// What a load asks of Redis is a few trips, however many rows are in use.
func TestTripsOfLoad(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	var n trips
	client.AddHook(&n)
	var rows registry.Static
	for i := range 300 {
		rows = append(rows, registry.Limit{Name: fmt.Sprint("/trips/", rand.Uint64(), "/", i), NoRate: true, Concurrent: 3})
	}
	r := open(t, rows, tokenbucket.NewRedisScriptStore(client), registry.WithInterval(time.Hour),
		registry.WithSemaphores(func(name string, most int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
			return semaphore.NewRedis(client, name, most, append(opts, semaphore.WithStoreTimeout(20*time.Second))...)
		}))
	for _, row := range rows {
		entered(t, r, row.Name).Leave()
	}
	for _, row := range rows {
		require.NoError(t, redistest.Poll(time.Minute, func() error {
			if u, _, err := r.Usage(ctx, row.Name); err != nil || u.Places > 0 {
				return fmt.Errorf("%d places are taken: %w", u.Places, err)
			}
			return nil
		}))
	}
	before := n.Load()
	require.NoError(t, r.Reload(ctx))
	t.Log(n.Load()-before, "trips")
	require.Less(t, n.Load()-before, int64(150))
}
