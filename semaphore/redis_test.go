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
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

func TestRedisStore(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	semaphoretest.Store(t, func(t *testing.T) semaphoretest.Fixture {
		name := fmt.Sprint("store ", names.Add(1), time.Now().UnixNano())
		return semaphoretest.Fixture{
			Process: func() store.Store {
				s, err := semaphore.NewRedis(client, name, 1)
				require.NoError(t, err)
				return semaphore.StoreOf(s)
			},
			SetBack: func(t *testing.T, d time.Duration) {
				setBackRedis(t, client, "semaphore:{"+strings.ReplaceAll(name, " ", "%20")+"}:", d.Microseconds())
			},
		}
	})
}

// setBackRedis moves the stored times as if the clock had been set back.
func setBackRedis(t *testing.T, client *redis.Client, key string, micros int64) {
	require.EqualValues(t, 1, client.Exists(ctx, key+"state").Val(), "%s", key)
	if q := quietOf(t, client, key+"state"); q != nil {
		q.shift(float64(micros))
		q.store(t, client, key+"state")
		return
	}
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
	if client.HExists(ctx, key+"state", "busy").Val() {
		require.NoError(t, client.HIncrBy(ctx, key+"state", "busy", micros).Err())
	}
}

// Every key expires one to two days after its last use, whichever script wrote it.
func TestKeysExpire(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	s := openRedis(t, client, 2)()
	for i := range 6 {
		label := ""
		if i >= 3 {
			label = spread
		}
		p, err := s.Labelled(label).Acquire(ctx, 1)
		require.NoError(t, err)
		state := keyOf(t, client, "state")
		for _, key := range client.Keys(ctx, strings.TrimSuffix(state, "state")+"*").Val() {
			left := client.PTTL(ctx, key).Val()
			require.Greater(t, left, 23*time.Hour, key)
			require.LessOrEqual(t, left, 48*time.Hour, key)
		}
		require.NoError(t, p.Release(ctx))
		now, err := client.Time(ctx).Result()
		require.NoError(t, err)
		require.NoError(t, client.PExpire(ctx, state, time.Hour).Err())
		q := quietOf(t, client, state)
		q.Lives = float64(now.Add(time.Hour).UnixMicro())
		q.store(t, client, state)
	}
}

// So do the keys that exist only while requests wait.
func TestKeysOfWaitersExpire(t *testing.T) {
	client := redistest.Start(t).Client(t)
	b := semaphore.StoreOf(openRedis(t, client, 1)())
	for i := range 3 {
		enter := []store.Entry{
			{ID: fmt.Sprint("holder", i), Permits: 1}, {ID: fmt.Sprint("waiter", i), Permits: 1, Wait: true}, {ID: "idle", Wait: true},
		}
		for _, batch := range []store.Batch{{PatienceMicros: 1e7, Enter: enter}, {Leave: []string{enter[0].ID, enter[1].ID, enter[2].ID}}} {
			batch.Process, batch.LeaseMicros, batch.AliveMicros, batch.Permits = "p", 1e7, 1e7, 1
			_, err := b.Apply(ctx, &batch)
			require.NoError(t, err)
			keys := client.Keys(ctx, "*").Val()
			if len(batch.Enter) > 0 {
				require.Len(t, keys, 6)
			}
			for _, key := range keys {
				require.Greater(t, client.PTTL(ctx, key).Val(), 23*time.Hour, key)
			}
		}
	}
}

// spread is a label that does not fit into the single field of a quiet semaphore, so the state has the keys of a busy one.
const spread = "two\nlines"

// Processes that were killed, or that waited and went silent, leave nothing behind for more than about an hour. Otherwise a semaphore that is
// used every day would keep them all, and the calls of lone callers would stay slow.
func TestDeadProcessesAreForgotten(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	s := openRedis(t, client, 2)()
	b := semaphore.StoreOf(s)
	apply := func(process string, patience time.Duration, e ...store.Entry) {
		t.Helper()
		_, err := b.Apply(ctx, &store.Batch{
			Process: process, LeaseMicros: 1000, PatienceMicros: patience.Microseconds(), AliveMicros: patience.Microseconds(), Permits: 2, Enter: e,
		})
		require.NoError(t, err)
	}
	apply("first", 0)
	state := keyOf(t, client, "state")
	procs := strings.TrimSuffix(state, "state") + "procs"
	const long = 61 * time.Minute
	soon := time.Now().Add(2 * time.Minute)
	for i := range 5 {
		for j := range 4 {
			name := fmt.Sprint("killed", i, j)
			apply(name, time.Minute, store.Entry{ID: name, Permits: 1, Wait: true})
			time.Sleep(3 * time.Millisecond) // until its lease has ended
		}
		q := quietOf(t, client, state)
		require.Len(t, q.Processes, 4)
		for _, p := range q.Processes {
			p.numbers[0] = float64(time.Now().Add(-long).UnixMicro())
		}
		for q.store(t, client, state); len(quietOf(t, client, state).Processes) > 0; {
			require.True(t, time.Now().Before(soon))
			apply("other", 0)
		}
	}
	apply("holder", 0, store.Entry{ID: "keeps it busy", Permits: 1, Label: spread})
	require.Nil(t, quietOf(t, client, state))
	for i := range 20 {
		name := fmt.Sprint("gone", i)
		apply(name, time.Minute)
		old := fmt.Sprint(time.Now().Add(-long).UnixMicro())
		require.NoError(t, client.HSet(ctx, procs, name, old+" 0 "+old).Err())
		apply("holder", 0, store.Entry{ID: "keeps it busy", Permits: 1, Label: spread})
	}
	for client.HLen(ctx, procs).Val() > 0 {
		require.True(t, time.Now().Before(soon))
		apply("alive", time.Minute, store.Entry{ID: "keeps it busy", Permits: 1, Label: spread})
		apply("alive", 0)
	}
}
