package semaphore

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// scripts are those that Redis has run since the last call: how many, the processor time for each, and the longest, if it took more than
// a millisecond.
func scripts(t *testing.T, client *redis.Client, before *serverUse) (n int64, each, longest time.Duration) {
	t.Helper()
	now := usage(t, client)
	n = now.scripts - before.scripts
	each = (now.cpu - before.cpu) / time.Duration(n)
	*before = now
	all, err := client.SlowLogGet(ctx, -1).Result()
	require.NoError(t, err)
	require.NoError(t, client.Do(ctx, "SLOWLOG", "RESET").Err())
	for _, l := range all {
		if strings.HasPrefix(strings.ToLower(l.Args[0]), "eval") {
			longest = max(longest, l.Duration)
		}
	}
	return n, each, longest
}

// A hundred thousand wait, are refused for too few permits, are admitted, listed, and leave: no script takes long.
func TestNoScriptTakesLong(t *testing.T) {
	const many, step, name = 100_000, 500, "steps"
	_, client := server(t)
	require.NoError(t, client.ConfigSet(ctx, "slowlog-log-slower-than", "1000").Err())
	require.NoError(t, client.ConfigSet(ctx, "slowlog-max-len", "10000").Err())
	options := []semaphore.Option{semaphore.WithLease(5 * time.Minute), semaphore.WithStoreTimeout(time.Minute)}
	operator := open(t, client.Options().Addr, name, 2, options...)
	s := open(t, client.Options().Addr, name, 2, options...)
	held, err := operator.Acquire(ctx, 2)
	require.NoError(t, err)
	var use serverUse
	done := func(what string, least int64) {
		t.Helper()
		n, each, longest := scripts(t, client, &use)
		t.Logf("%s: %d scripts, of the processor %v each; the longest took %v", what, n, each, longest)
		require.GreaterOrEqual(t, n, least)
		require.Less(t, each, 50*time.Millisecond)
	}
	scripts(t, client, &use)

	var callers sync.WaitGroup
	var tooMany, granted atomic.Int64
	wait, stop := context.WithCancel(ctx)
	defer stop()
	for i := range many {
		callers.Go(func() {
			switch _, err := s.Acquire(wait, 1+i%2); {
			case err == nil:
				granted.Add(1)
			case errors.Is(err, semaphore.ErrTooMany):
				tooMany.Add(1)
			default:
				assert.ErrorIs(t, err, context.Canceled)
			}
		})
	}
	await := func(what func() bool) {
		t.Helper()
		require.Eventually(t, what, 5*time.Minute, 100*time.Millisecond)
	}
	waiting := func() int {
		stats, err := operator.Stats(ctx)
		require.NoError(t, err)
		return stats.Waiting
	}
	await(func() bool { return waiting() == many })
	done("100,000 begin to wait", many/512)
	await(func() bool { return usage(t, client).scripts >= use.scripts+many/512 })
	done("they ask again whether they still do", many/512)
	require.NoError(t, operator.SetPermits(ctx, 1))
	await(func() bool { return tooMany.Load() == many/2 && waiting() == many/2 })
	done("half of them want more than there are", many/step)
	require.NoError(t, operator.SetPermits(ctx, many))
	await(func() bool { return granted.Load() == many/2 })
	done("the others are admitted", many/2/step)
	all, err := operator.Holders(ctx)
	require.NoError(t, err)
	require.Len(t, all, many/2+1)
	done("they are listed", many/2/2000)
	require.NoError(t, s.Close(ctx))
	require.NoError(t, held.Release(ctx))
	stats, err := operator.Stats(ctx)
	require.NoError(t, err)
	require.Zero(t, stats.Used+stats.Waiting)
	done("they leave", many/2/512)
	stop()
	callers.Wait()
}
