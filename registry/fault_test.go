package registry_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	semaphorestore "github.com/go-tokenbucket/tokenbucket/semaphore/store"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// A key of the wrong type under a rate, a window or a concurrency makes the calls of its row fail until it is repaired: Stats has it,
// and the log, until a call passes again.
func TestFaults(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := fmt.Sprint("/fault/", rand.Uint64())
	for by, row := range map[gate.Decider]registry.Limit{
		gate.ByLimit:       {Name: name + "/rate", Row: "7", Rate: 1000},
		gate.ByWindow:      {Name: name + "/window", Row: "8", NoRate: true, Window: time.Hour, WindowLimit: 1000},
		gate.ByConcurrency: {Name: name + "/places", Row: "9", Rate: 1000, Concurrent: 1000},
	} {
		t.Run(by.String(), func(t *testing.T) {
			log := new(logged)
			r := open(t, registry.Static{row, {Name: "/other", Rate: 5}}, tokenbucket.NewRedisScriptStore(client), log.option(), registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(20*time.Second)), // a slow machine is no fault
				registry.WithWindows(func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
					return slidingwindow.New(name, limit, window, resolution, append(opts, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(20*time.Second))...)
				}),
				registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
					return semaphore.NewRedis(client, name, n, append(opts, semaphore.WithStoreTimeout(20*time.Second))...)
				}))
			a := enter(t, r, row.Name)
			require.True(t, a.OK)
			require.Empty(t, r.Stats().Faults)
			a.Leave()
			keys, err := client.Keys(ctx, "*"+name[len("/fault/"):]+"*").Result()
			require.NoError(t, err)
			require.NotEmpty(t, keys)
			for _, key := range keys {
				if by != gate.ByConcurrency || strings.HasPrefix(key, "semaphore") {
					require.NoError(t, client.Del(ctx, key).Err())
					require.NoError(t, client.RPush(ctx, key, "what another program has written").Err())
				}
			}
			var failed error
			require.Eventually(t, func() bool {
				_, failed = r.Enter(ctx, row.Name)
				return failed != nil
			}, 20*time.Second, time.Millisecond)
			_, err = r.Enter(ctx, row.Name)
			require.Error(t, err)
			s := r.Stats()
			require.Len(t, s.Faults, 1)
			f := s.Faults[0]
			require.Equal(t, row.Name, f.Name)
			require.Equal(t, by, f.By)
			require.Equal(t, 2, f.Calls)
			require.Equal(t, 2, s.Faulty)
			require.ErrorContains(t, f.Err, "corrupt state")
			require.WithinDuration(t, time.Now(), f.Since, time.Minute)
			const line = "calls of a row fail until its bucket, window or concurrency is repaired"
			require.Eventually(t, func() bool { return strings.Count(log.String(), line) == 1 }, 30*time.Second, 10*time.Millisecond)
			require.Contains(t, log.String(), "by="+by.String())

			require.NoError(t, client.Del(ctx, keys...).Err())
			require.Eventually(t, func() bool {
				a, err := r.Enter(ctx, row.Name)
				return err == nil && a.OK
			}, 20*time.Second, time.Millisecond)
			s = r.Stats()
			require.Empty(t, s.Faults)
			require.GreaterOrEqual(t, s.Faulty, 2, "it counts all there were")
		})
	}
}

// Outages, and errors that are the caller's own, are no faults.
func TestNoFaults(t *testing.T) {
	store := tokenbuckettest.NewStore()
	r := open(t, registry.Static{{Name: "/a", Rate: 5, Concurrent: 1}}, store, registry.WithLocalSemaphores())
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err := r.Enter(ended, "/a")
	require.ErrorIs(t, err, context.Canceled)
	require.Empty(t, r.Stats().Faults)
	r = open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 1}}, store,
		registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
			nobody := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
			t.Cleanup(func() { _ = nobody.Close() })
			return semaphore.NewRedis(nobody, name, n, opts...)
		}))
	_, err = r.Enter(ctx, "/a")
	require.Error(t, err)
	require.Empty(t, r.Stats().Faults, "an outage")
}

// faulty is a store whose states are none while it is broken.
type faulty struct {
	tokenbucket.Store
	broken atomic.Bool
}

func (s *faulty) Apply(ctx context.Context, b *tokenbucket.Batch) error {
	if s.broken.Load() {
		return tokenbucket.ErrCorruptState
	}
	return s.Store.Apply(ctx, b)
}

// A fault of a row without further calls ends within two minutes of its repair, and not before.
func TestFaultEndsWithoutCalls(t *testing.T) {
	for name, row := range map[string]registry.Limit{"/a": {Name: "/a", Rate: 5}, "/a|k": {Name: "/a", Rate: 5, PerKey: true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &faulty{Store: tokenbucket.NewMemoryStore()}
				log := new(logged)
				r := open(t, registry.Static{row}, store, registry.WithParts(), log.option())
				store.broken.Store(true)
				_, err := r.Enter(ctx, name)
				require.ErrorIs(t, err, tokenbucket.ErrCorruptState)
				time.Sleep(5 * time.Minute)
				require.Len(t, r.Stats().Faults, 1, "not repaired")
				require.Equal(t, 1, r.Stats().Faulty, "a look at the state is no call")
				store.broken.Store(false)
				time.Sleep(2 * time.Minute)
				require.Empty(t, r.Stats().Faults)
				lines := strings.Count(log.String(), "until its bucket")
				time.Sleep(5 * time.Minute)
				require.Equal(t, lines, strings.Count(log.String(), "until its bucket"))
			})
		})
	}
}

// faultyPlaces is a store of places whose states are none while it is broken. It is for reading.
type faultyPlaces struct{ broken atomic.Bool }

func (s *faultyPlaces) Apply(context.Context, *semaphorestore.Batch) (*semaphorestore.Report, error) {
	if s.broken.Load() {
		return nil, semaphore.ErrCorruptState
	}
	return new(semaphorestore.Report), nil
}

func (s *faultyPlaces) Listen(ctx context.Context, _ string, _ func(), _ func(semaphorestore.Grant)) error {
	<-ctx.Done()
	return ctx.Err()
}

func (s *faultyPlaces) Holders(context.Context) ([]semaphorestore.Holder, error) { return nil, nil }

func (s *faultyPlaces) Stats(context.Context) (semaphorestore.Stats, error) {
	if s.broken.Load() {
		return semaphorestore.Stats{}, semaphore.ErrCorruptState
	}
	return semaphorestore.Stats{Permits: 1}, nil
}

// The same of a concurrency.
func TestFaultOfPlacesEndsWithoutCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		places := new(faultyPlaces)
		r := open(t, registry.Static{{Name: "/a", NoRate: true, Concurrent: 1}}, tokenbucket.NewMemoryStore(),
			registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
				return semaphore.New(places, name, n, opts...)
			}))
		places.broken.Store(true)
		_, err := r.Enter(ctx, "/a")
		require.Error(t, err)
		time.Sleep(5 * time.Minute)
		require.Len(t, r.Stats().Faults, 1, "not repaired")
		places.broken.Store(false)
		time.Sleep(2 * time.Minute)
		require.Empty(t, r.Stats().Faults)
	})
}
