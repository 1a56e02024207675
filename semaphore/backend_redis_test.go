package semaphore_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/semaphoretest"
)

func TestRedisBackend(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	semaphoretest.Backend(t, func(t *testing.T) semaphoretest.Place {
		name := fmt.Sprint("backend ", names.Add(1), time.Now().UnixNano())
		return semaphoretest.Place{
			Process: func() semaphore.Backend {
				s, err := semaphore.NewRedis(client, name, 1)
				require.NoError(t, err)
				return semaphore.BackendOf(s)
			},
			SetBack: func(t *testing.T, d time.Duration) {
				setBackRedis(t, client, "semaphore:{"+strings.ReplaceAll(name, " ", "%20")+"}:", d.Microseconds())
			},
		}
	})
}

// setBackRedis moves the times stored as if the clock had been set back.
func setBackRedis(t *testing.T, client *redis.Client, key string, micros int64) {
	require.EqualValues(t, 1, client.Exists(ctx, key+"state").Val(), "%s", key)
	require.NoError(t, client.HIncrBy(ctx, key+"state", "seen", micros).Err())
	for _, id := range client.ZRange(ctx, key+"held", 0, -1).Val() {
		require.NoError(t, client.ZIncrBy(ctx, key+"held", float64(micros), id).Err())
	}
	moved := func(text string) string { // 'until told alive'
		var until, told, alive int64
		_, err := fmt.Sscan(text, &until, &told, &alive)
		require.NoError(t, err)
		return fmt.Sprint(until+micros, " ", told, " ", alive+micros)
	}
	for process, text := range client.HGetAll(ctx, key+"procs").Val() {
		require.NoError(t, client.HSet(ctx, key+"procs", process, moved(text)).Err())
	}
	if text := client.HGet(ctx, key+"state", "solo").Val(); text != "" {
		var times [3]int64
		var process string
		_, err := fmt.Sscan(text, &times[0], &process, &times[1], &times[2])
		require.NoError(t, err)
		for i := range times[:2] {
			if times[i] != 0 {
				times[i] += micros
			}
		}
		require.NoError(t, client.HSet(ctx, key+"state", "solo", fmt.Sprint(times[0], " ", process, " ", times[1], " ", times[2])).Err())
	}
}

// All keys live for one day at least from when they were used last, and for two at most, whoever made them.
func TestKeysExpire(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	s := openRedis(t, client, 2)()
	for i := range 6 { // the first is no lone caller's, for there is nothing yet
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		state := keyOf(t, client, "state")
		for _, key := range client.Keys(ctx, strings.TrimSuffix(state, "state")+"*").Val() {
			left := client.PTTL(ctx, key).Val()
			require.Greater(t, left, 23*time.Hour, key)
			require.LessOrEqual(t, left, 48*time.Hour, key)
		}
		require.NoError(t, p.Release(ctx))
		if i%2 == 1 {
			now, err := client.Time(ctx).Result()
			require.NoError(t, err)
			require.NoError(t, client.HSet(ctx, state, "lives", now.Add(time.Hour).UnixMicro()).Err())
		}
	}
}

// Processes that were killed leave nothing behind for more than an hour or so, nor do those that have waited for nothing and are never heard
// of again: a semaphore that is used every day would keep them all, and serve no lone caller quickly any more.
func TestDeadProcessesAreForgotten(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	s := openRedis(t, client, 2)()
	b := semaphore.BackendOf(s)
	apply := func(process string, patience time.Duration, e ...semaphore.Entry) {
		t.Helper()
		_, err := b.Apply(ctx, &semaphore.Batch{
			Process: process, LeaseMicros: 1000, PatienceMicros: patience.Microseconds(), AliveMicros: patience.Microseconds(), Permits: 2, Enter: e,
		})
		require.NoError(t, err)
	}
	apply("first", 0)
	state := keyOf(t, client, "state")
	procs := strings.TrimSuffix(state, "state") + "procs"
	const long = 61 * time.Minute
	for i := range 20 {
		name := fmt.Sprint("killed", i)
		apply(name, time.Minute, semaphore.Entry{ID: name, Permits: 1, Wait: true})
		solo := strings.Fields(client.HGet(ctx, state, "solo").Val()) // 'earliest process until told'
		require.Len(t, solo, 4, "%d: a lone caller is served quickly", i)
		require.Equal(t, name, solo[1])
		solo[2] = fmt.Sprint(time.Now().Add(-long).UnixMicro())
		require.NoError(t, client.HSet(ctx, state, "solo", strings.Join(solo, " ")).Err())
		time.Sleep(3 * time.Millisecond) // its lease is over
		apply("other", 0)
		require.Zero(t, client.HLen(ctx, procs).Val())
	}
	for i := range 20 {
		name := fmt.Sprint("gone", i)
		apply(name, time.Minute, semaphore.Entry{ID: name})
		old := fmt.Sprint(time.Now().Add(-long).UnixMicro())
		require.NoError(t, client.HSet(ctx, procs, name, old+" 0 "+old).Err())
	}
	for end := time.Now().Add(30 * time.Second); client.HLen(ctx, procs).Val() > 0; {
		require.True(t, time.Now().Before(end))
		apply("alive", time.Minute)
		apply("alive", 0)
	}
	require.NotEmpty(t, client.HGet(ctx, state, "solo").Val(), "a lone caller is served quickly")
}
