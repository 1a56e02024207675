package state

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// D1: a server is killed and starts again without data, twenty times. Each time there is a new bucket: the debt is forgiven, and one permit
// is added; never a full bucket. Calls pass again soon after the server replies.
func TestD1RestartEmpty(t *testing.T) {
	books, late := newLedger(), faultlab.MeasureLateness(t)
	node := faultlab.StartNode(t)
	books.watch(t, node.Addr)
	fleets := map[string]*fleet{}
	for _, kind := range faultlab.Kinds {
		fleets[kind] = startFleet(t, kind, node.Client(t), node.Client(t))
	}
	const times = 20
	back := map[string]time.Duration{}
	before, during := 0, 0
	for range times {
		for _, f := range fleets {
			f.awaitGrants(t, 30)
			before += 30
			during -= int(f.calls.Load())
		}
		node.Kill()
		time.Sleep(30 * time.Millisecond) // the time without the server
		for _, f := range fleets {
			during += int(f.calls.Load())
		}
		node.Restart(t)
		answers := time.Now()
		for kind, f := range fleets {
			back[kind] = max(back[kind], f.after(t, answers, 20*time.Second))
		}
	}
	faultlab.Bit(t, before, during)
	for _, kind := range faultlab.Kinds {
		a := fleets[kind].check(t, books, late, false, true)
		t.Logf("%s: began with %.3f; gained %.1f", kind, a.begun, a.gained)
		faultlab.Figure(t, "first permit after the server answered", back[kind])
		assert.LessOrEqual(t, len(a.gained), times)
		require.GreaterOrEqual(t, len(a.gained), times*3/4, "MONITOR may see too little of a life")
		faultlab.Figure(t, fmt.Sprintf("permits gained by a loss, of %v", debt+1), slices.Max(a.gained))
		for _, g := range a.gained {
			assert.LessOrEqual(t, g, debt+1+permitsIn(late.Most()), "who was woken late asks again")
		}
		// What flows until MONITOR sees a new life counts as its beginning.
		const seen = 50 * time.Millisecond
		for _, b := range a.begun {
			assert.LessOrEqual(t, b, 1+permitsIn(seen+late.Most()), "one permit, never a full bucket")
		}
		slices.Sort(a.begun)
		assert.LessOrEqual(t, a.begun[len(a.begun)/2], 1+permitsIn(seen), "most of them, however late the machine was once")
		assert.LessOrEqual(t, back[kind], 2*time.Second+10*late.Most(), "a second, and what the machine takes")
	}
	faultlab.CleanUp(t, node.Client(t), "tokenbucket:")
}

// D2: a server loses keys, again and again, while it runs: by FLUSHALL, by DEL of the bucket, by eviction. No call fails, and each loss
// forgives the debt, and adds one permit.
func TestD2Forgotten(t *testing.T) {
	every := func(pause time.Duration, do func(client *redis.Client, fleets []*fleet) error) func(*testing.T, *redis.Client, []*fleet) {
		return func(t *testing.T, client *redis.Client, fleets []*fleet) {
			for began := time.Now(); time.Since(began) < faultlab.Lasting(4*time.Second, 30*time.Second); time.Sleep(pause) {
				require.NoError(t, do(client, fleets))
			}
		}
	}
	for name, lose := range map[string]func(*testing.T, *redis.Client, []*fleet){
		"FLUSHALL": every(200*time.Millisecond, func(client *redis.Client, _ []*fleet) error {
			return client.FlushAll(background).Err()
		}),
		"DEL": every(150*time.Millisecond, func(client *redis.Client, fleets []*fleet) error {
			for _, f := range fleets {
				if err := client.Del(background, key(f.name)).Err(); err != nil {
					return err
				}
			}
			return nil
		}),
		"evicted": evict,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			books, late := newLedger(), faultlab.MeasureLateness(t)
			server := redistest.Start(t)
			books.watch(t, server.Addr)
			var fleets []*fleet
			before := 0
			for _, kind := range faultlab.Kinds {
				fleets = append(fleets, startPatient(t, kind, server.Client(t), server.Client(t)))
			}
			for _, f := range fleets {
				f.awaitGrants(t, 50)
				before += 50
			}
			lose(t, server.Client(t), fleets)
			for _, f := range fleets {
				a := f.check(t, books, late, false, false)
				f.unnoticed(t, late)
				faultlab.Bit(t, before, len(a.gained))
				t.Logf("gained %.1f", a.gained)
				faultlab.Figure(t, "losses", len(a.gained))
				faultlab.Figure(t, fmt.Sprintf("permits gained by one, of %v", debt+1), slices.Max(a.gained))
				for i, g := range a.gained {
					assert.LessOrEqual(t, g, debt+1+permitsIn(late.Most()), "who was woken late asks again")
					assert.InDelta(t, 1, a.begun[i], 1e-3, "one permit, never a full bucket")
				}
			}
			faultlab.CleanUp(t, server.Client(t), "tokenbucket:")
		})
	}
}

// evict has the server throw away keys at random: so few fit that the buckets' are often among them.
func evict(t *testing.T, client *redis.Client, fleets []*fleet) {
	memory, err := client.Info(background, "memory").Result()
	require.NoError(t, err)
	_, rest, _ := strings.Cut(memory, "used_memory:")
	text, _, _ := strings.Cut(rest, "\r")
	used, err := strconv.Atoi(text)
	require.NoError(t, err)
	require.NoError(t, client.ConfigSet(background, "maxmemory-policy", "allkeys-random").Err())
	require.NoError(t, client.ConfigSet(background, "maxmemory", strconv.Itoa(used+1<<20)).Err())
	value := strings.Repeat("x", 60<<10)
	const least = 300 // to throw away a bucket about twenty times, on a slow machine too
	for began, i := time.Now(), 0; i < least || time.Since(began) < faultlab.Lasting(4*time.Second, 30*time.Second); i++ {
		require.NoError(t, client.Set(background, fmt.Sprint("ballast:", i%100), value, time.Hour).Err())
		time.Sleep(5 * time.Millisecond)
	}
	require.NoError(t, client.ConfigSet(background, "maxmemory", "0").Err())
}

// D2: calls that a snapshot of a deep debt refuses are granted soon after the server has lost the bucket.
func TestD2RefusalsEnd(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	late := faultlab.MeasureLateness(t)
	for _, kind := range faultlab.Kinds {
		l, err := tokenbucket.NewSmoothBursty("deep "+kind, rate, tokenbucket.WithStore(faultlab.Stores[kind](client)))
		require.NoError(t, err)
		_, err = l.Reserve(background, 60*rate)
		require.NoError(t, err)
		try := func() bool {
			ok, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			return ok
		}
		refused := 0
		for began := time.Now(); time.Since(began) < 300*time.Millisecond; refused++ {
			require.False(t, try())
		}
		require.NoError(t, client.FlushAll(background).Err())
		forgot := time.Now()
		require.Eventually(t, try, 20*time.Second, time.Millisecond)
		took := time.Since(forgot)
		t.Logf("%s: %d refusals before the loss", kind, refused)
		faultlab.Figure(t, "who was refused without asking passed after", took)
		faultlab.Bit(t, refused, 1)
		assert.LessOrEqual(t, took, time.Second+10*late.Most())
	}
}

// calls is how often a command was run, and how often it failed.
func calls(t *testing.T, client *redis.Client, command string) (all, failed int) {
	t.Helper()
	stats, err := client.Info(background, "commandstats").Result()
	require.NoError(t, err)
	if _, rest, ok := strings.Cut(stats, "cmdstat_"+command+":"); ok {
		line, _, _ := strings.Cut(rest, "\r")
		for field := range strings.SplitSeq(line, ",") {
			name, value, _ := strings.Cut(field, "=")
			n, _ := strconv.Atoi(value)
			switch name {
			case "calls":
				all = n
			case "failed_calls":
				failed = n
			}
		}
	}
	return all, failed
}

// D3: a server loses its scripts before every call: no caller gets an error, and each script that it does not know is sent once more, so
// that a call takes two trips instead of one (with the lock: six instead of three).
func TestD3ScriptFlushTrips(t *testing.T) {
	for _, kind := range faultlab.Kinds {
		t.Run(kind, func(t *testing.T) {
			server := redistest.Start(t)
			client := server.Client(t)
			l, err := tokenbucket.NewSmoothBursty("x", 1e6, tokenbucket.WithInitialPermits(1e6), tokenbucket.WithStore(faultlab.Stores[kind](client)))
			require.NoError(t, err)
			const n = 100
			for range n {
				require.NoError(t, client.ScriptFlush(background).Err())
				ok, err := l.TryAcquire(background, 1, time.Second)
				require.NoError(t, err)
				require.True(t, ok)
			}
			hashed, unknown := calls(t, client, "evalsha")
			sent, _ := calls(t, client, "eval")
			b, err := l.State(background)
			require.NoError(t, err)
			t.Logf("%d calls: %d scripts by hash, of which %d were unknown, and %d with their source", n, hashed, unknown, sent)
			faultlab.Figure(t, fmt.Sprintf("scripts sent for %d calls that each found none", n), hashed+sent)
			faultlab.Bit(t, n, unknown)
			assert.EqualValues(t, n+1, b.Seq, "each took its permit, and once")
			assert.Equal(t, unknown, sent)
			steps := 1
			if kind == "lock" {
				steps = 3
			}
			// A guess that is older than 100 ms on a slow machine is made again.
			assert.LessOrEqual(t, hashed, n*steps*6/5)
		})
	}
}

// D3: the same every 50 ms under load, also with a client whose batches travel in pipelines, where a script that is unknown
// cannot be sent again in place.
func TestD3ScriptFlushUnderLoad(t *testing.T) {
	ring := func(t *testing.T, server *redistest.Server) tokenbucket.RedisClient {
		r := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": server.Addr}})
		t.Cleanup(func() { _ = r.Close() })
		return r
	}
	for name, open := range map[string]func(*testing.T, *redistest.Server) tokenbucket.RedisClient{
		"client":    func(t *testing.T, server *redistest.Server) tokenbucket.RedisClient { return server.Client(t) },
		"pipelines": ring,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			books, late := newLedger(), faultlab.MeasureLateness(t)
			server := redistest.Start(t)
			client := server.Client(t)
			books.watch(t, server.Addr)
			var fleets []*fleet
			for _, kind := range faultlab.Kinds {
				fleets = append(fleets, startPatient(t, kind, open(t, server), open(t, server)))
			}
			for _, f := range fleets {
				f.awaitGrants(t, 50)
			}
			_, unknownBefore := calls(t, client, "evalsha")
			for began := time.Now(); time.Since(began) < faultlab.Lasting(3*time.Second, 20*time.Second); time.Sleep(50 * time.Millisecond) {
				require.NoError(t, client.ScriptFlush(background).Err())
			}
			_, unknown := calls(t, client, "evalsha")
			for _, f := range fleets {
				a := f.check(t, books, late, false, false)
				faultlab.Bit(t, 50, unknown-unknownBefore)
				f.unnoticed(t, late)
				assert.Zero(t, a.extra())
			}
			faultlab.CleanUp(t, client, "tokenbucket:")
		})
	}
}
