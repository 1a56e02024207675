package slidingwindow

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// passes returns how many permits a limiter admits now, one by one.
func passes(t *testing.T, l *Limiter) (n int) {
	t.Helper()
	for {
		ok, err := l.Allow(ctx)
		require.NoError(t, err)
		if !ok {
			return n
		}
		n++
	}
}

// A limit that was set is in force for all processes at once, and for processes that start later. After a FLUSHALL the first process that has
// adopted it restores it.
func TestSetLimitOfFleet(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := unique(t)
	open := func(limit int, opts ...Option) *Limiter {
		l, err := New(name, limit, time.Hour, time.Minute, append(opts, WithRedis(client), patient)...)
		require.NoError(t, err)
		return l
	}
	a, b := open(10), open(10)
	for _, l := range []*Limiter{a, b} {
		_, err := l.Remaining(ctx)
		require.NoError(t, err)
	}
	require.NoError(t, a.SetLimit(ctx, 4))
	require.Equal(t, 4, a.Limit())
	ok, err := b.Allow(ctx)
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, 4, b.Limit(), "from the reply")
	require.Equal(t, 3, passes(t, b))
	require.Zero(t, passes(t, open(10)))

	require.NoError(t, client.Del(ctx, a.machine.key).Err())
	c := open(10) // it has not adopted the limit
	_, err = c.Remaining(ctx)
	require.NoError(t, err)
	require.Equal(t, 10, c.Limit())
	_, err = b.refreshed(t)
	require.NoError(t, err)
	_, err = c.refreshed(t)
	require.NoError(t, err)
	require.Equal(t, 4, c.Limit())

	require.NoError(t, c.SetLimit(ctx, 20))
	_, err = a.AllowN(ctx, 21)
	require.ErrorIs(t, err, ErrInvalidPermits)
	_, err = a.AllowN(ctx, 12)
	require.NoError(t, err, "more than its own limit, so it makes a round trip first")
	require.Equal(t, 20, a.Limit())
}

// The newest version is in force; of two limits of one version the lower; and a limit without a version only if there is no other.
func TestWithVersion(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := unique(t)
	inForce := func(limit int, opts ...Option) int {
		l, err := New(name, limit, time.Hour, time.Minute, append(opts, WithRedis(client), patient)...)
		require.NoError(t, err)
		_, err = l.Remaining(ctx)
		require.NoError(t, err)
		return l.Limit()
	}
	require.Equal(t, 5, inForce(5))
	require.Equal(t, 7, inForce(7), "each has its own limit")
	require.Equal(t, 9, inForce(9, WithVersion(3)))
	require.Equal(t, 9, inForce(5))
	require.Equal(t, 9, inForce(6, WithVersion(2)))
	require.Equal(t, 9, inForce(10, WithVersion(3)))
	require.Equal(t, 8, inForce(8, WithVersion(3)))
	require.Equal(t, 8, inForce(9, WithVersion(3)))
	require.Equal(t, 30, inForce(30, WithVersion(4)))
	l, err := New(name, 5, time.Hour, time.Minute, WithRedis(client), patient)
	require.NoError(t, err)
	require.NoError(t, l.SetLimit(ctx, 6))
	require.Equal(t, 6, inForce(30, WithVersion(4)))
	require.Equal(t, 7, inForce(7, WithVersion(6)), "SetLimit made it 5")
	for _, v := range []int64{-1, maxInteger + 1} {
		_, err = New(name, 5, time.Hour, time.Minute, WithVersion(v))
		require.ErrorIs(t, err, ErrInvalidConfig)
	}
}

// During an outage the limit cannot be set and does not change.
func TestSetLimitAway(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		l, err := New("x", 5, time.Hour, time.Minute, WithRedis(client), WithFailurePolicy(FailOpen))
		require.NoError(t, err)
		client.by(failing(refused))
		for range 2 {
			require.ErrorIs(t, l.SetLimit(ctx, 7), ErrStoreUnavailable)
		}
		require.Equal(t, 5, l.Limit())
		client.by(nil)
		time.Sleep(2 * maxPause)
		require.NoError(t, l.SetLimit(ctx, 7))
		require.Equal(t, 7, l.Limit())
		synctest.Wait()
	})
}

// A local share is bounded by the limit in force: after that was lowered, no process admits more than it by itself.
func TestShareOfALoweredLimit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client), WithFailurePolicy(LocalShare(10)))
		require.NoError(t, err)
		require.NoError(t, l.SetLimit(ctx, 3))
		client.by(failing(refused))
		require.Equal(t, 3, passes(t, l))
		left, err := l.Remaining(ctx)
		require.NoError(t, err)
		require.Zero(t, left)
		synctest.Wait()
	})
}

// Reconfigure keeps the counts and makes no round trip.
func TestReconfigure(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		open := func(limit int, opts ...Option) *Limiter {
			l, err := New("x", limit, time.Hour, time.Minute, opts...)
			require.NoError(t, err)
			return l
		}
		for name, made := range map[string]func(limit int, share int, version int64) *Limiter{
			"here": func(limit, _ int, _ int64) *Limiter { return open(limit) },
			"Redis away": func(limit, share int, version int64) *Limiter {
				return open(limit, WithRedis(client), WithFailurePolicy(LocalShare(share)), WithVersion(version))
			},
		} {
			client.by(failing(refused))
			l := made(4, 4, 1)
			require.Equal(t, 4, passes(t, l), name)
			waits := make(chan error)
			go func() { waits <- l.Wait(ctx) }()
			synctest.Wait()
			require.NoError(t, l.Reconfigure(made(7, 7, 2)), name)
			require.NoError(t, <-waits, "%s: the waiter is admitted", name)
			require.Equal(t, 2, passes(t, l), name)
			require.NoError(t, l.Reconfigure(made(3, 3, 3)), name)
			require.Zero(t, passes(t, l), name)
			require.Equal(t, 3, l.Limit(), name)
			require.NoError(t, l.Reconfigure(l), name)
			require.NoError(t, l.Reconfigure(made(9, 1, 4)), name)
			require.Equal(t, 9, l.Limit(), name)
			other, err := New("y", 9, time.Hour, time.Minute)
			require.NoError(t, err)
			for _, no := range []*Limiter{nil, other, open(9, WithRedis(client), WithKeyPrefix("p:"))} {
				require.ErrorIs(t, l.Reconfigure(no), ErrInvalidConfig, name)
			}
			if name == "here" {
				require.Equal(t, 2, passes(t, l))
				continue
			}
			require.Zero(t, passes(t, l), "its share is 1")
			require.NoError(t, l.Reconfigure(made(8, 8, 3)))
			require.Equal(t, 9, l.Limit(), "an older version")
			client.by(nil)
			time.Sleep(2 * maxPause)
			_, err = l.Remaining(ctx) // a round trip
			require.NoError(t, err)
			synctest.Wait()
			left, err := l.Remaining(ctx)
			require.NoError(t, err)
			require.Equal(t, 2, left, "the seven permits were reported")
			again := open(5, WithRedis(client))
			_, err = again.Remaining(ctx)
			require.NoError(t, err)
			require.Equal(t, 9, again.Limit(), "and the limit was")
			synctest.Wait()
		}
	})
}
