package semaphore

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// openRedis is a semaphore of the test's own; each call of what it returns is another process.
func openRedis(t *testing.T, client semaphore.RedisClient, permits int, opts ...semaphore.Option) func() *semaphore.Semaphore {
	return func() *semaphore.Semaphore {
		s, err := semaphore.NewRedis(client, t.Name(), permits, append([]semaphore.Option{semaphore.WithStoreTimeout(patient)}, opts...)...)
		require.NoError(t, err)
		t.Cleanup(func() {
			c, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			_ = s.Close(c)
		})
		return s
	}
}

// A permit is renewed as long as it is held, and no longer: what its process leaves behind expires.
func TestLease(t *testing.T) {
	t.Parallel()
	const lease = 3 * time.Second // renewed in time, however slow the machine
	client := redistest.Shared(t).Client(t)
	process := openRedis(t, client, 1, semaphore.WithLease(lease))
	a, b := process(), process()
	p, err := a.Acquire(ctx, 1)
	require.NoError(t, err)
	none, err := b.TryAcquire(ctx, 1, lease*4/3)
	require.ErrorIs(t, err, semaphore.ErrRefused)
	require.Nil(t, none, "renewed")
	require.NoError(t, p.Context().Err())
	require.NoError(t, p.Release(ctx))
	q, err := b.TryAcquire(ctx, 1, 0)
	require.NoError(t, err)
	require.NotNil(t, q)

	keys, err := client.Keys(ctx, "*"+strings.ReplaceAll(t.Name(), " ", "?")+"*:*").Result()
	require.NoError(t, err)
	require.NotEmpty(t, keys)
	require.NoError(t, client.Del(ctx, keys...).Err())
	<-q.Context().Done()
	require.ErrorIs(t, context.Cause(q.Context()), semaphore.ErrLost)
	err = q.Release(ctx)
	require.ErrorIs(t, err, semaphore.ErrLost)
	require.ErrorContains(t, err, q.ID())
	require.ErrorIs(t, q.Release(ctx), semaphore.ErrLost, "the same answer twice")
}

// When Redis is unavailable, the context of the work ends before its lease does; calls fail by their deadline.
func TestRedisAway(t *testing.T) {
	t.Parallel()
	const lease, timeout = 6 * time.Second, 2 * time.Second
	late := faultlab.MeasureLateness(t)
	server := redistest.Start(t)
	process := openRedis(t, server.Client(t), 1, semaphore.WithLease(lease), semaphore.WithStoreTimeout(timeout))
	a, b := process(), process()
	p, err := a.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, server.Stop())
	stopped := time.Now()
	<-p.Context().Done()
	require.ErrorIs(t, context.Cause(p.Context()), semaphore.ErrExpired)
	require.Less(t, time.Since(stopped), lease-lease/10+lease/20+3*late.Most())
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err = b.Acquire(short, 1)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(began), timeout/2+5*late.Most())
	_, err = b.Acquire(ctx, 1)
	require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
	require.ErrorIs(t, p.Release(ctx), semaphore.ErrExpired)
	require.NoError(t, server.Continue())
	q, err := b.TryAcquire(ctx, 1, 20*time.Second)
	for ; errors.Is(err, semaphore.ErrStoreTimeout); q, err = b.TryAcquire(ctx, 1, 20*time.Second) { // it takes a moment
	}
	require.NoError(t, err)
	require.NotNil(t, q)
	if err := q.Release(ctx); !errors.Is(err, semaphore.ErrStoreTimeout) {
		require.NoError(t, err)
	}
}
