package registry_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// An upstream's Retry-After holds a row without a rate back: in the process that heard of it at once, in others with their next load.
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
			require.Equal(t, registry.ByPenalty, a.By)
			require.Equal(t, left, a.RetryAfter.Round(time.Millisecond))
		}
		refused(here, "/a", 30*time.Second)
		refused(here, "/b", 30*time.Second)
		ok, err := here.Allow(ctx, "/b")
		require.NoError(t, err)
		require.False(t, ok)
		require.Equal(t, registry.ByShadow, enter(t, here, "/shadow").By)
		require.True(t, enter(t, there, "/a").OK, "it has not heard of it")
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

// A client that names itself like the bucket that keeps a penalty gets a bucket of its own, and no row has such a name.
func TestNobodyElsesPenalty(t *testing.T) {
	for _, parts := range []bool{false, true} {
		store := tokenbucket.NewMemoryStore()
		options := []registry.Option{registry.WithLocalWindows(), registry.WithLocalSemaphores(), registry.WithInterval(20 * time.Millisecond),
			registry.WithUnknown(registry.Default(registry.Limit{Rate: 100}))}
		if parts {
			options = append(options, registry.WithParts())
		}
		r := open(t, registry.Static{{Name: "gold", NoRate: true, Concurrent: 2}}, store, options...)
		enter(t, r, "gold").Leave()
		for _, name := range []string{"%penalty:gold", "?penalty:gold"} {
			require.NoError(t, r.Penalize(ctx, name, time.Hour))
		}
		require.NoError(t, r.Reload(ctx))
		a := enter(t, r, "gold")
		require.True(t, a.OK)
		a.Leave()
		require.NoError(t, r.Penalize(ctx, "gold", time.Hour))
		require.False(t, enter(t, r, "gold").OK)
		r.Close()
	}
	row := registry.Limit{Name: "%penalty:gold", Rate: 1}
	var bad *registry.RowError
	require.ErrorAs(t, row.Check(), &bad)
	require.Equal(t, "name", bad.Field)
}

// broken is a store that is away.
type broken struct{ tokenbucket.Store }

func (broken) Apply(context.Context, *tokenbucket.Batch) error { return errors.New("away") }

// While the store is away the process that heard of a penalty keeps to it, and says that the others do not.
func TestPenaltyWithoutStore(t *testing.T) {
	r := open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 2}}, broken{tokenbucket.NewMemoryStore()}, registry.WithLocalSemaphores())
	require.ErrorContains(t, r.Penalize(ctx, "/a", time.Minute), "away")
	require.Equal(t, registry.ByPenalty, enter(t, r, "/a").By)
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
			return semaphore.NewRedis(client, name, most, opts...)
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
