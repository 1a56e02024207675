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

// everywhere runs a test in a bubble, with the permits in the process, and on a real server. open opens the semaphore of another process;
// lose loses the state.
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

// free returns how many permits are free.
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

// waits acquires in another goroutine, and returns when the request is queued in the store.
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

// Processes with different numbers of permits and without a version do not fail each other's waiters, and none exceeds its own number.
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
		require.Empty(t, one, "3 of 2 are held")
		require.NoError(t, held.Release(ctx))
		require.NoError(t, <-four)
		require.NoError(t, <-one)
	})
}

// The newest version is in force for all processes, and again after the state was lost.
func TestVersions(t *testing.T) {
	everywhere(t, func(t *testing.T, open func(int, ...semaphore.Option) *semaphore.Semaphore, lose func()) {
		old, plain := open(5, semaphore.WithVersion(1)), open(7)
		require.Equal(t, 5, free(t, old))
		require.Equal(t, 5, free(t, plain))
		newer := open(2, semaphore.WithVersion(2))
		require.Equal(t, 2, free(t, newer))
		require.Equal(t, 2, free(t, old))
		lose()
		require.Equal(t, 2, free(t, old), "from a report")
		require.NoError(t, old.SetPermits(ctx, 3))
		require.Equal(t, 3, free(t, newer))
		require.Equal(t, 3, newer.Permits(), "from a report")
		require.Equal(t, 3, free(t, plain))
		lose()
		require.Equal(t, 3, free(t, plain), "the process without a version has it from a report")
		lose()
		late := open(2, semaphore.WithVersion(2))
		require.Equal(t, 2, free(t, late), "the first process after the loss, which has had no report")
		require.Equal(t, 3, free(t, newer))
		require.Equal(t, 3, free(t, late))
		stats, err := plain.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, semaphore.Stats{Permits: 3, Version: 3}, stats)
		require.NoError(t, old.ResetPermits(ctx))
		require.Equal(t, 5, free(t, newer), "the number of the process that has reset it")
		require.NoError(t, plain.ResetPermits(ctx))
		require.Equal(t, 7, free(t, plain))
		_, err = semaphore.NewMemory(1, semaphore.WithVersion(-1))
		require.ErrorIs(t, err, semaphore.ErrInvalidConfig)
	})
}

// When a newer version lowers the number of permits, waiters that want more fail, wherever they are in the queue.
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

// A waiter of a dead process blocks the others for three and a half heartbeats if the process had been silent for one heartbeat at the
// waiter's turn. Otherwise it blocks them for a lease and that heartbeat.
func TestDeadWaiter(t *testing.T) {
	const lease, heartbeat = 10 * time.Second, time.Second
	for _, c := range []struct {
		died, bound time.Duration // died: before its turn; bound: of the others' wait after that
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
