package semaphore_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// faulty is a backend to which something happens.
type faulty struct {
	semaphore.Backend
	apply func(ctx context.Context, b *semaphore.Batch) error // before it decides
	told  func(g *semaphore.Grant)                            // before a waiter hears of it
}

func (f *faulty) Apply(ctx context.Context, b *semaphore.Batch) (*semaphore.Report, error) {
	if f.apply != nil {
		if err := f.apply(ctx, b); err != nil {
			return nil, err
		}
	}
	return f.Backend.Apply(ctx, b)
}

func (f *faulty) Listen(ctx context.Context, process string, ready func(), wake func(semaphore.Grant)) error {
	return f.Backend.Listen(ctx, process, ready, func(g semaphore.Grant) {
		if f.told != nil {
			f.told(&g)
		}
		wake(g)
	})
}

// process is another process' semaphore on the same keys, through a faulty backend.
func (f *faulty) process(t *testing.T, like *semaphore.Semaphore, permits int, opts ...semaphore.Option) *semaphore.Semaphore {
	f.Backend = semaphore.BackendOf(like)
	s, err := semaphore.New(f, "x", permits, opts...)
	require.NoError(t, err)
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_ = s.Close(c)
	})
	return s
}

// A permit that is held quietly outlives renewals that fail, as long as some succeed within its lease.
func TestRenewalsThatFail(t *testing.T) {
	const lease = 600 * time.Millisecond
	other := openRedis(t, redistest.Shared(t).Client(t), 1)()
	var failed atomic.Int64
	f := &faulty{apply: func(_ context.Context, b *semaphore.Batch) error {
		if len(b.Renew) > 0 && failed.Add(1)%2 == 1 {
			return errors.New("connection reset")
		}
		return nil
	}}
	s := f.process(t, other, 1, semaphore.WithLease(lease))
	p, err := s.Acquire(ctx, 1)
	require.NoError(t, err)
	select {
	case <-p.Context().Done():
		t.Fatal(context.Cause(p.Context()))
	case <-time.After(4 * lease):
	}
	require.Greater(t, failed.Load(), int64(3))
	none, err := other.TryAcquire(ctx, 1, 0)
	require.NoError(t, err)
	require.Nil(t, none)
	require.NoError(t, p.Release(ctx))
}

// In memory a number that is too large is too large, whatever is held.
func TestMemoryOverflow(t *testing.T) {
	s, err := semaphore.NewMemory(2)
	require.NoError(t, err)
	_, err = s.Acquire(ctx, 1)
	require.NoError(t, err)
	_, err = s.Acquire(ctx, math.MaxInt)
	require.ErrorIs(t, err, semaphore.ErrTooMany)
	_, err = s.TryAcquire(ctx, 2, 0)
	require.NoError(t, err)
	p, err := s.TryAcquire(ctx, 2, 0)
	require.NoError(t, err)
	require.Nil(t, p)
}

func keyOf(t *testing.T, client *redis.Client, part string) string {
	keys, err := client.Keys(ctx, "*"+strings.ReplaceAll(t.Name(), " ", "?")+"*:"+part).Result()
	require.NoError(t, err)
	require.Len(t, keys, 1)
	return keys[0]
}

// Should Redis evict one of the keys, what is held is counted anew: neither is more than there is admitted, nor is the
// semaphore shut for good.
func TestEvictedKeys(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for _, part := range []string{"state", "held", "info"} {
		t.Run(part, func(t *testing.T) {
			process := openRedis(t, client, 3, semaphore.WithLease(500*time.Millisecond))
			a, b := process(), process()
			for range 2 {
				_, err := a.Acquire(ctx, 1)
				require.NoError(t, err)
			}
			require.NoError(t, client.Del(ctx, keyOf(t, client, part)).Err())
			two, err := b.TryAcquire(ctx, 2, 0)
			require.NoError(t, err)
			require.Equal(t, part == "held", two != nil)
			if two != nil {
				require.NoError(t, two.Release(ctx))
			}
			c, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			require.NoError(t, a.Close(c))
			all, err := b.Acquire(c, 3)
			require.NoError(t, err)
			require.NoError(t, all.Release(ctx))
		})
	}
}

// Without the right to publish calls fail, but what is held stays counted.
func TestNoRightToPublish(t *testing.T) {
	server := redistest.Start(t)
	admin := server.Client(t)
	require.NoError(t, admin.Do(ctx, "ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "resetchannels").Err())
	mute := server.Client(t, func(o *redis.Options) { o.Username, o.Password = "mute", "secret" })
	name := t.Name()
	open := func(client semaphore.RedisClient) *semaphore.Semaphore {
		s, err := semaphore.NewRedis(client, name, 2, semaphore.WithLease(500*time.Millisecond))
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.Close(ctx) })
		return s
	}
	a, b := open(mute), open(admin)
	p, err := a.Acquire(ctx, 1)
	require.NoError(t, err)
	waits := make(chan *semaphore.Permit)
	go func() {
		p, err := b.Acquire(ctx, 2)
		if err != nil {
			t.Error(err)
		}
		waits <- p
	}()
	queue := strings.TrimSuffix(keyOf(t, admin, "held"), "held") + "queue"
	require.Eventually(t, func() bool { return admin.ZCard(ctx, queue).Val() == 1 }, 10*time.Second, time.Millisecond)
	require.ErrorContains(t, p.Release(ctx), "publish")
	q := <-waits // it finds out by itself
	require.Equal(t, "2", admin.HGet(ctx, keyOf(t, admin, "state"), "used").Val())
	none, err := b.TryAcquire(ctx, 1, 0)
	require.NoError(t, err)
	require.Nil(t, none)
	require.NoError(t, q.Release(ctx))
}

// What callers leave behind while the backend is away is bounded.
func TestLeavesAreBounded(t *testing.T) {
	other := openRedis(t, redistest.Shared(t).Client(t), 1)()
	f := &faulty{apply: func(context.Context, *semaphore.Batch) error { return errors.New("connection refused") }}
	s := f.process(t, other, 1, semaphore.WithLease(time.Hour))
	var calls sync.WaitGroup
	for range 64 {
		calls.Go(func() {
			for range 2 * semaphore.MaxLeaves / 64 {
				_, err := s.TryAcquire(ctx, 1, 0)
				require.Error(t, err)
			}
		})
	}
	calls.Wait()
	require.LessOrEqual(t, semaphore.LeavesOf(s), semaphore.MaxLeaves)
	require.Greater(t, semaphore.LeavesOf(s), semaphore.MaxLeaves/2)
}

// When the backend hangs, who stands behind many others is told as soon as they are.
func TestHungBackend(t *testing.T) {
	const timeout, callers = 200 * time.Millisecond, 20_000
	other := openRedis(t, redistest.Shared(t).Client(t), 1)()
	f := &faulty{apply: func(ctx context.Context, _ *semaphore.Batch) error { <-ctx.Done(); return ctx.Err() }}
	s := f.process(t, other, 1, semaphore.WithTimeout(timeout))
	var calls sync.WaitGroup
	began := time.Now()
	for range callers {
		calls.Go(func() {
			_, err := s.TryAcquire(ctx, 1, 0)
			if !errors.Is(err, semaphore.ErrTimeout) {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	t.Logf("%d callers were told within %v", callers, time.Since(began))
	require.Less(t, time.Since(began), callers/512/2*timeout, "one batch after another would take twice as long")
}

// Who has given up does not count among those who wait.
func TestWaitersThatHaveGone(t *testing.T) {
	other := openRedis(t, redistest.Shared(t).Client(t), 1)()
	release := make(chan struct{})
	f := &faulty{apply: func(ctx context.Context, _ *semaphore.Batch) error {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil
	}}
	s := f.process(t, other, 1, semaphore.WithTimeout(time.Minute), semaphore.WithMaxWaiters(5))
	for range 20 {
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		_, err := s.Acquire(short, 1)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	time.AfterFunc(20*time.Millisecond, func() { close(release) })
	p, err := s.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, p.Release(ctx))
}

// A grant of a backend whose clock has leapt since it was heard last is renewed at once: how long it lasts is not known.
func TestGrantAfterALeap(t *testing.T) {
	const lease = 500 * time.Millisecond
	process := openRedis(t, redistest.Shared(t).Client(t), 1, semaphore.WithLease(lease))
	a, b := process(), process()
	var leapt atomic.Bool
	f := &faulty{told: func(g *semaphore.Grant) {
		g.Expires += time.Hour.Microseconds()
		leapt.Store(true)
	}}
	c := f.process(t, b, 1, semaphore.WithLease(lease))
	p, err := a.Acquire(ctx, 1)
	require.NoError(t, err)
	waits := make(chan *semaphore.Permit)
	go func() {
		p, err := c.Acquire(ctx, 1)
		if err != nil {
			t.Error(err)
		}
		waits <- p
	}()
	client := redistest.Shared(t).Client(t)
	queue := strings.TrimSuffix(keyOf(t, client, "held"), "held") + "queue"
	require.Eventually(t, func() bool { return client.ZCard(ctx, queue).Val() == 1 }, 10*time.Second, time.Millisecond)
	time.Sleep(lease / 5) // until it listens
	require.NoError(t, p.Release(ctx))
	q := <-waits
	require.True(t, leapt.Load())
	none, err := b.TryAcquire(ctx, 1, 3*lease)
	require.NoError(t, err)
	require.Nil(t, none, "renewed")
	require.NoError(t, q.Release(ctx))
}

// Permits may be released while the semaphore closes.
func TestCloseBesideReleases(t *testing.T) {
	other := openRedis(t, redistest.Shared(t).Client(t), 100)()
	for range 200 {
		s := (&faulty{}).process(t, other, 100)
		var calls sync.WaitGroup
		for range 4 {
			p, err := s.Acquire(ctx, 1)
			require.NoError(t, err)
			calls.Go(func() {
				<-p.Context().Done()
				_ = p.Release(ctx)
				_ = s.SetPermits(ctx, 100)
			})
		}
		require.NoError(t, s.Close(ctx))
		calls.Wait()
	}
}
