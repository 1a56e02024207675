package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// everywhere runs a test in a bubble, where permits are kept in the process, and on a real server. open opens a process' semaphore;
// lose makes the place forget everything.
func everywhere(t *testing.T, test func(t *testing.T, open func(permits int, opts ...semaphore.Option) *semaphore.Semaphore, lose func())) {
	t.Run("bubble", func(t *testing.T) {
		inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
			test(t, func(permits int, opts ...semaphore.Option) *semaphore.Semaphore {
				return new(faulty).process(t, b, permits, opts...)
			}, func() { b.Do(func(m *semaphoremodel.Model) { m.Lose() }) })
		})
	})
	t.Run("redis", func(t *testing.T) {
		client := redistest.Shared(t).Client(t)
		name := fmt.Sprint("limit ", names.Add(1), time.Now().UnixNano())
		test(t, func(permits int, opts ...semaphore.Option) *semaphore.Semaphore {
			s, err := semaphore.NewRedis(client, name, permits, append([]semaphore.Option{patient}, opts...)...)
			require.NoError(t, err)
			t.Cleanup(func() { _ = s.Close(ctx) })
			return s
		}, func() {
			keys := client.Keys(ctx, "*"+strings.ReplaceAll(name, " ", "%20")+"*").Val()
			require.NotEmpty(t, keys)
			require.NoError(t, client.Del(ctx, keys...).Err())
		})
	})
}

// free is how many permits can be had.
func free(t *testing.T, s *semaphore.Semaphore) (n int) {
	t.Helper()
	var all []*semaphore.Permit
	for {
		p, err := s.TryAcquire(ctx, 1, 0)
		if errors.Is(err, semaphore.ErrRefused) {
			break
		}
		require.NoError(t, err)
		all = append(all, p)
	}
	for _, p := range all {
		require.NoError(t, p.Release(ctx))
	}
	return len(all)
}

// waits acquires in the background, and returns once it waits there.
func waits(t *testing.T, s *semaphore.Semaphore, n int) <-chan error {
	t.Helper()
	before, err := s.Stats(ctx)
	require.NoError(t, err)
	got := make(chan error, 1)
	go func() {
		p, err := s.Acquire(ctx, n)
		if err == nil {
			err = p.Release(ctx)
		}
		got <- err
	}()
	require.Eventually(t, func() bool {
		after, err := s.Stats(ctx)
		return err == nil && after.Waiting > before.Waiting
	}, 10*time.Second, time.Millisecond)
	return got
}

// Processes that are configured with other numbers, and no version, do not fail one another's waiters, and nobody is above its own.
func TestOwnNumbers(t *testing.T) {
	everywhere(t, func(t *testing.T, open func(int, ...semaphore.Option) *semaphore.Semaphore, _ func()) {
		five, two := open(5), open(2)
		held, err := five.Acquire(ctx, 3)
		require.NoError(t, err)
		four := waits(t, five, 4)
		require.Zero(t, free(t, two))
		one := waits(t, two, 1)
		for _, s := range []*semaphore.Semaphore{five, two, five} {
			require.Zero(t, free(t, s))
		}
		require.Empty(t, four)
		require.Empty(t, one, "3 are held of 2")
		require.NoError(t, held.Release(ctx))
		require.NoError(t, <-four)
		require.NoError(t, <-one)
	})
}

// The newest version is in force for all, and is known again after the place has lost it.
func TestVersions(t *testing.T) {
	everywhere(t, func(t *testing.T, open func(int, ...semaphore.Option) *semaphore.Semaphore, lose func()) {
		old, plain := open(5, semaphore.WithVersion(1)), open(7)
		require.Equal(t, 5, free(t, old))
		require.Equal(t, 5, free(t, plain))
		newer := open(2, semaphore.WithVersion(2))
		require.Equal(t, 2, free(t, newer))
		require.Equal(t, 2, free(t, old))
		lose()
		require.Equal(t, 2, free(t, old), "it has heard of it")
		require.NoError(t, old.SetPermits(ctx, 3))
		require.Equal(t, 3, free(t, newer))
		require.Equal(t, 3, newer.Permits(), "it has heard of it")
		require.Equal(t, 3, free(t, plain))
		lose()
		require.Equal(t, 3, free(t, plain), "it has heard of it, too")
		lose()
		late := open(2, semaphore.WithVersion(2))
		require.Equal(t, 2, free(t, late), "it has not heard of it, and is the first to come")
		require.Equal(t, 3, free(t, newer))
		require.Equal(t, 3, free(t, late))
		stats, err := plain.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, semaphore.Stats{Permits: 3, Version: 3}, stats)
		require.NoError(t, old.ResetPermits(ctx))
		require.Equal(t, 5, free(t, newer), "what the one was made with who has reset it")
		require.NoError(t, plain.ResetPermits(ctx))
		require.Equal(t, 7, free(t, plain))
		_, err = semaphore.NewMemory(1, semaphore.WithVersion(-1))
		require.ErrorIs(t, err, semaphore.ErrInvalidConfig)
	})
}

// A lower number of a newer version ends waits that it makes hopeless, wherever they stand.
func TestNewerVersionDismisses(t *testing.T) {
	everywhere(t, func(t *testing.T, open func(int, ...semaphore.Option) *semaphore.Semaphore, _ func()) {
		five := open(5, semaphore.WithVersion(1))
		held, err := five.Acquire(ctx, 4)
		require.NoError(t, err)
		two, four := waits(t, five, 2), waits(t, five, 4)
		require.Zero(t, free(t, open(3, semaphore.WithVersion(2))))
		require.ErrorIs(t, <-four, semaphore.ErrTooMany)
		require.Empty(t, two)
		require.NoError(t, held.Release(ctx))
		require.NoError(t, <-two)
	})
}

// A waiter whose process has died keeps the others waiting for three and a half heartbeats if the process was silent for one when its turn
// came; else for a lease and that heartbeat.
func TestDeadWaiter(t *testing.T) {
	const lease, heartbeat = 10 * time.Second, time.Second
	for _, c := range []struct {
		died, bound time.Duration // before its turn; the others' wait after that
	}{{0, lease + 50*time.Millisecond}, {heartbeat, 2*heartbeat + heartbeat/2 + 50*time.Millisecond}, {5 * heartbeat, 0}} {
		inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
			var dead atomic.Bool
			dies := &faulty{apply: func(ctx context.Context, _ *store.Batch) error {
				if dead.Load() {
					return errors.New("dead")
				}
				return nil
			}, told: func(g *store.Grant) {
				if dead.Load() {
					g.ID = "nobody hears of it"
				}
			}}
			a, b, d := new(faulty).process(t, place, 1), new(faulty).process(t, place, 1), dies.process(t, place, 1)
			held, err := a.Acquire(ctx, 1)
			require.NoError(t, err)
			c2, cancel := context.WithCancel(ctx)
			defer cancel()
			go func() { _, _ = d.Acquire(c2, 1) }()
			synctest.Wait()
			got := make(chan *semaphore.Permit, 1)
			go func() {
				p, err := b.Acquire(ctx, 1)
				assert.NoError(t, err)
				got <- p
			}()
			synctest.Wait()
			time.Sleep(10*heartbeat + heartbeat/2 - heartbeat/16)
			dead.Store(true)
			time.Sleep(c.died)
			began := time.Now()
			require.NoError(t, held.Release(ctx))
			p := <-got
			t.Log("dead for ", c.died, ", waited for ", time.Since(began))
			require.LessOrEqual(t, time.Since(began), c.bound)
			require.NoError(t, p.Release(ctx))
		})
	}
}
