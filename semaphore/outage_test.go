package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// cut is a store that replies within a millisecond, or not at all.
type cut struct {
	store.Store
	off     atomic.Bool
	sent    atomic.Int64
	batches atomic.Int64 // among the calls sent
}

func (c *cut) way(ctx context.Context) error {
	c.sent.Add(1)
	if c.off.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	time.Sleep(time.Millisecond)
	return nil
}

func (c *cut) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	c.batches.Add(1)
	if err := c.way(ctx); err != nil {
		return nil, err
	}
	return c.Store.Apply(ctx, b)
}

func (c *cut) Stats(ctx context.Context) (store.Stats, error) {
	if err := c.way(ctx); err != nil {
		return store.Stats{}, err
	}
	return c.Store.Stats(ctx)
}

func (c *cut) Holders(ctx context.Context) ([]store.Holder, error) {
	if err := c.way(ctx); err != nil {
		return nil, err
	}
	return c.Store.Holders(ctx)
}

// open returns the semaphore of a process that uses this store.
func (c *cut) open(t *testing.T, at store.Store, permits int, opts ...semaphore.Option) *semaphore.Semaphore {
	c.Store = at
	s, err := semaphore.New(c, "x", permits, opts...)
	require.NoError(t, err)
	return s
}

// noticed cuts the store off, and returns when the process has detected the outage.
func (c *cut) noticed(t *testing.T, s *semaphore.Semaphore) {
	t.Helper()
	c.off.Store(true)
	_, err := s.Stats(ctx)
	require.ErrorIs(t, err, semaphore.ErrStoreUnavailable)
	require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
	time.Sleep(time.Second)
}

// back ends that, and returns when the process has detected the end of the outage.
func (c *cut) back() {
	c.off.Store(false)
	time.Sleep(time.Second)
}

// atOnce runs a call that must return without a round trip.
func atOnce(t *testing.T, call func() error) error {
	t.Helper()
	began := time.Now()
	err := call()
	require.Zero(t, time.Since(began))
	return err
}

// The first call waits for the timeout. Once the outage is detected, calls fail at once, and permits that are released are released in the
// store at its end.
func TestAwayAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		var way cut
		s := way.open(t, place, 2)
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		way.off.Store(true)
		began := time.Now()
		_, err = s.Acquire(ctx, 1)
		require.ErrorIs(t, err, semaphore.ErrStoreUnavailable)
		require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
		require.InDelta(t, time.Second, time.Since(began), float64(2*time.Millisecond))
		began = time.Now()
		_, err = s.Acquire(ctx, 1) // in flight when the probe fails
		require.ErrorIs(t, err, semaphore.ErrStoreUnavailable)
		require.InDelta(t, 250*time.Millisecond, time.Since(began), float64(2*time.Millisecond))
		time.Sleep(2 * time.Second) // until nothing is in flight
		batches := way.batches.Load()
		for name, call := range map[string]func() error{
			"acquire": func() error { _, err := s.Acquire(ctx, 1); return err },
			"try":     func() error { _, err := s.TryAcquire(ctx, 1, time.Hour); return err },
			"do":      func() error { return s.Do(ctx, func(context.Context) error { panic("never") }) },
			"wait":    func() error { return semaphore.NewGroup(s).Wait(ctx) },
			"set":     func() error { return s.SetPermits(ctx, 3) },
			"add":     func() error { return s.AddPermits(ctx, 3) },
			"reset":   func() error { return s.ResetPermits(ctx) },
			"stats":   func() error { _, err := s.Stats(ctx); return err },
			"holders": func() error { _, err := s.Holders(ctx); return err },
			"done":    func() error { return semaphore.NewGroup(s).Done(ctx, "another's") },
			"release": func() error { return p.Release(ctx) },
			"again":   func() error { return p.Release(ctx) },
		} {
			require.ErrorIs(t, atOnce(t, call), semaphore.ErrStoreUnavailable, name)
		}
		require.ErrorIs(t, p.Err(), semaphore.ErrReleased)
		way.sent.Store(0)
		time.Sleep(10 * time.Second)
		require.InDelta(t, 30, way.sent.Load(), 15, "only probes are sent, and each takes 250 ms")
		require.Equal(t, batches, way.batches.Load())
		way.back()
		stats, err := s.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, semaphore.Stats{Permits: 2}, stats)
		way.noticed(t, s)
		require.NoError(t, atOnce(t, func() error { return s.Close(ctx) }))
		time.Sleep(time.Minute)
		synctest.Wait()
	})
}

// A permit that is held is renewed as soon as an outage ends. If its lease ends first, its context has ended before.
func TestHeldThroughAnOutage(t *testing.T) {
	const lease = 9 * time.Second
	for outage, want := range map[time.Duration]error{6 * time.Second: nil, 12 * time.Second: semaphore.ErrExpired} {
		inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
			var way, other cut
			s := way.open(t, place, 1, semaphore.WithLease(lease))
			p, err := s.Acquire(ctx, 1)
			require.NoError(t, err)
			way.noticed(t, s)
			time.Sleep(outage - 2*time.Second)
			way.back()
			require.ErrorIs(t, p.Err(), want)
			time.Sleep(lease)
			require.ErrorIs(t, p.Err(), want)
			second := other.open(t, place, 1)
			q, err := second.TryAcquire(ctx, 1, 0)
			if want == nil {
				require.ErrorIs(t, err, semaphore.ErrRefused)
			} else {
				require.NoError(t, err)
				require.NoError(t, q.Release(ctx))
			}
			require.ErrorIs(t, p.Release(ctx), want)
			for _, s := range []*semaphore.Semaphore{s, second} {
				require.NoError(t, s.Close(ctx))
			}
		})
	}
}

// Waiters keep their places through an outage. Under FailOpen they are granted permits at once.
func TestWaitersThroughAnOutage(t *testing.T) {
	for _, policy := range []semaphore.FailurePolicy{semaphore.FailClosed, semaphore.FailOpen} {
		inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
			var way, other cut
			holder := other.open(t, place, 1)
			p, err := holder.Acquire(ctx, 1)
			require.NoError(t, err)
			s := way.open(t, place, 1, semaphore.WithFailurePolicy(policy))
			got := make(chan *semaphore.Permit, 2)
			for range 2 {
				go func() {
					q, err := s.Acquire(ctx, 1)
					if err != nil {
						t.Error(err)
					}
					got <- q
				}()
				time.Sleep(10 * time.Millisecond)
			}
			way.noticed(t, s)
			if policy == semaphore.FailOpen {
				for range 2 {
					q := <-got
					require.True(t, q.Passed())
					require.NoError(t, q.Release(ctx))
				}
				way.back()
				stats, err := s.Stats(ctx)
				require.NoError(t, err)
				require.Equal(t, semaphore.Stats{Permits: 1, Used: 1}, stats, "they left their places")
				require.NoError(t, p.Release(ctx))
			} else {
				require.Empty(t, got)
				way.back()
				require.NoError(t, p.Release(ctx))
				for range 2 {
					q := <-got
					require.False(t, q.Passed())
					require.NoError(t, q.Release(ctx))
				}
			}
			for _, s := range []*semaphore.Semaphore{s, holder} {
				require.NoError(t, s.Close(ctx))
			}
		})
	}
}

// Under FailOpen calls get permits that the store does not have, from the first failed call on.
func TestPass(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		var way, other cut
		s := way.open(t, place, 2, semaphore.WithFailurePolicy(semaphore.FailOpen))
		group := semaphore.NewGroup(s)
		leased, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		require.False(t, leased.Passed())
		way.off.Store(true)
		p, err := s.TryAcquire(ctx, 2, 0)
		require.NoError(t, err)
		require.True(t, p.Passed())
		time.Sleep(time.Second)
		ids := map[string]bool{leased.ID(): true}
		var held []*semaphore.Permit
		for range 5 {
			require.NoError(t, atOnce(t, func() error {
				p, err := s.Acquire(ctx, 1)
				held = append(held, p)
				return err
			}))
		}
		for _, p := range held {
			require.NoError(t, p.Err())
			require.True(t, p.Passed())
			require.Zero(t, p.Fence())
			require.False(t, ids[p.ID()])
			ids[p.ID()] = true
		}
		_, err = s.Acquire(ctx, 3)
		require.ErrorIs(t, err, semaphore.ErrTooMany)
		_, err = s.Acquire(ctx, 0)
		require.ErrorIs(t, err, semaphore.ErrInvalidPermits)
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		_, err = s.Acquire(cancelled, 1)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, group.Wait(ctx), semaphore.ErrStoreUnavailable)
		require.NoError(t, atOnce(t, func() error {
			return s.Do(ctx, func(ctx context.Context) error { return ctx.Err() })
		}))
		under := held[0].Context()
		require.NoError(t, held[0].Release(ctx))
		require.NoError(t, held[0].Release(ctx))
		require.ErrorIs(t, context.Cause(under), semaphore.ErrReleased)
		require.NoError(t, group.Done(ctx, held[1].ID()))
		require.ErrorIs(t, held[1].Err(), semaphore.ErrLost)
		require.ErrorIs(t, leased.Release(ctx), semaphore.ErrStoreUnavailable)
		way.back()
		for _, p := range held[2:] {
			require.NoError(t, p.Err(), "it stays held")
		}
		stats, err := s.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, semaphore.Stats{Permits: 2}, stats)
		q, err := s.Acquire(ctx, 2)
		require.NoError(t, err)
		require.False(t, q.Passed())
		time.Sleep(time.Minute) // many renewals are due
		require.NoError(t, q.Err())
		require.NoError(t, held[2].Err())
		require.NoError(t, held[2].Release(ctx))
		under = held[3].Context()
		require.NoError(t, s.Close(ctx))
		require.ErrorIs(t, context.Cause(under), semaphore.ErrClosed)
		require.ErrorIs(t, held[4].Err(), semaphore.ErrClosed)

		fixed := other.open(t, place, 2, semaphore.WithFailurePolicy(semaphore.FailOpen), semaphore.WithFixedLease(10*time.Second))
		other.noticed(t, fixed)
		p, err = fixed.Acquire(ctx, 1)
		require.NoError(t, err)
		time.Sleep(9*time.Second - 1)
		require.NoError(t, p.Err())
		<-p.Context().Done()
		require.ErrorIs(t, p.Err(), semaphore.ErrExpired)
		other.back()
		require.NoError(t, fixed.Close(ctx))
	})
}

// A failure that needs a repair is no outage: each call is sent to the store, and FailOpen does not apply.
func TestUnusable(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		broken := errors.New("NOPERM")
		f := &faulty{apply: func(context.Context, *store.Batch) error { return broken }, asked: func() error { return broken }}
		var w watcher
		s := f.process(t, place, 1, semaphore.WithFailurePolicy(semaphore.FailOpen), w.option())
		for range 3 {
			_, err := s.Acquire(ctx, 1)
			require.ErrorIs(t, err, semaphore.ErrStoreUnusable)
			require.ErrorIs(t, err, broken)
			require.NotErrorIs(t, err, semaphore.ErrStoreUnavailable)
			_, err = s.Stats(ctx)
			require.ErrorIs(t, err, semaphore.ErrStoreUnusable)
			time.Sleep(time.Second)
		}
		synctest.Wait()
		require.Empty(t, healthOf(w.take()))
	})
}

// Failures of a real server: which are outages, which need a repair, and which mean that the state is corrupt.
func TestErrorsOfRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	admin := server.Client(t)
	open := func(o redis.Options, opts ...semaphore.Option) *semaphore.Semaphore {
		o.Addr = server.Addr
		client := redis.NewClient(&o)
		t.Cleanup(func() { _ = client.Close() })
		s, err := semaphore.NewRedis(client, fmt.Sprint("errors", names.Add(1)), 1, append(opts, semaphore.WithStoreTimeout(5*time.Second))...)
		require.NoError(t, err)
		return s
	}
	fails := func(s *semaphore.Semaphore, want error) {
		t.Helper()
		_, err := s.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, want)
		for _, other := range []error{semaphore.ErrStoreUnavailable, semaphore.ErrStoreUnusable, semaphore.ErrCorruptState} {
			if other != want {
				require.NotErrorIs(t, err, other)
			}
		}
		require.ErrorContains(t, err, "errors")
	}
	closed := redis.NewClient(&redis.Options{Addr: server.Addr})
	require.NoError(t, closed.Close())
	s, err := semaphore.NewRedis(closed, "errors", 1, semaphore.WithFailurePolicy(semaphore.FailOpen))
	require.NoError(t, err)
	fails(s, semaphore.ErrStoreUnusable)
	fails(open(redis.Options{Username: "nobody", Password: "wrong"}, semaphore.WithFailurePolicy(semaphore.FailOpen)), semaphore.ErrStoreUnusable)
	require.NoError(t, admin.Do(ctx, "ACL", "SETUSER", "poor", "on", ">right", "+ping").Err())
	fails(open(redis.Options{Username: "poor", Password: "right"}, semaphore.WithFailurePolicy(semaphore.FailOpen)), semaphore.ErrStoreUnusable)
	well := open(redis.Options{})
	p, err := well.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, p.Release(ctx))
	require.NoError(t, admin.ConfigSet(ctx, "min-replicas-to-write", "1").Err())
	fails(well, semaphore.ErrStoreUnavailable)
	p, err = open(redis.Options{}, semaphore.WithFailurePolicy(semaphore.FailOpen)).TryAcquire(ctx, 1, 0)
	require.NoError(t, err)
	require.True(t, p.Passed())
	require.NoError(t, admin.ConfigSet(ctx, "min-replicas-to-write", "0").Err())
	require.NoError(t, admin.ConfigSet(ctx, "requirepass", "secret").Err())
	require.NoError(t, admin.Do(ctx, "ACL", "SETUSER", "default", "resetpass", ">secret").Err())
	fails(open(redis.Options{}, semaphore.WithFailurePolicy(semaphore.FailOpen)), semaphore.ErrStoreUnusable) // a batch is too long for one without a password
}

// A server that replies to reads and refuses writes is an outage, too: calls fail at once.
func TestAwayForWrites(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	admin := server.Client(t)
	s, err := semaphore.NewRedis(server.Client(t), "writes", 1, patient)
	require.NoError(t, err)
	p, err := s.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, p.Release(ctx))
	require.NoError(t, admin.ConfigSet(ctx, "min-replicas-to-write", "1").Err())
	atOnce := func() bool {
		began := time.Now()
		_, err := s.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, semaphore.ErrStoreUnavailable)
		return time.Since(began) < 500*time.Millisecond
	}
	require.Eventually(t, atOnce, time.Minute, 10*time.Millisecond)
	require.NoError(t, admin.ConfigSet(ctx, "min-replicas-to-write", "0").Err())
	back := func() bool {
		p, err := s.TryAcquire(ctx, 1, 0)
		return err == nil && p != nil
	}
	require.Eventually(t, back, time.Minute, 10*time.Millisecond)
}

// panicking is a store whose batches fail and whose Stats panics.
type panicking struct {
	store.Store
	asked atomic.Int64
}

func (p *panicking) Apply(context.Context, *store.Batch) (*store.Report, error) {
	return nil, context.DeadlineExceeded
}

func (p *panicking) Stats(context.Context) (store.Stats, error) {
	p.asked.Add(1)
	panic("of a hook")
}

// A panic in a probe does not end the process, and does not begin an outage. Each panic is logged with its stack, which the test discards.
func TestPanicOfAProbe(t *testing.T) {
	logger := slog.Default()
	slog.SetDefault(slog.New(slog.DiscardHandler))
	t.Cleanup(func() { slog.SetDefault(logger) })
	synctest.Test(t, func(t *testing.T) {
		panics := new(panicking)
		s, err := semaphore.New(panics, "x", 1)
		require.NoError(t, err)
		for i := range 3 {
			_, err = s.TryAcquire(ctx, 1, 0)
			require.ErrorIs(t, err, semaphore.ErrStoreUnavailable)
			time.Sleep(time.Second)
			require.GreaterOrEqual(t, panics.asked.Load(), int64(1+i))
		}
		require.NoError(t, s.Close(ctx))
	})
}
