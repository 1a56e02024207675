// Package limiter tests limiters with servers that are killed, hang, or are cut off, with clusters and rings, and with processes.
package limiter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) {
	redis.SetLogger(silent{})
	worker.Main(workerEnv, work) // this may be one of the processes that TestProcesses starts
	faultlab.Parallel(6)
	redistest.Main(m)
}

// silent is a log of the Redis client, which says of every connection that it breaks.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

var background = context.Background()

// redisStores are both, on a client.
func redisStores(client tb.RedisClient, opts ...tb.RedisOption) map[string]tb.Store {
	return map[string]tb.Store{"lock": tb.NewRedisStore(client, opts...), "script": tb.NewRedisScriptStore(client, opts...)}
}

// testLog writes to a test's log as long as it runs.
type testLog struct {
	mu   sync.Mutex
	t    testing.TB
	over bool
}

func (l *testLog) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.t.Log(strings.TrimSpace(string(line)))
	}
	return len(line), nil
}

// open makes a limiter that logs to its test.
func open(t testing.TB, name string, rate float64, store tb.Store, opts ...tb.Option) *tb.RateLimiter {
	t.Helper()
	log := &testLog{t: t}
	t.Cleanup(func() {
		log.mu.Lock()
		defer log.mu.Unlock()
		log.over = true
	})
	opts = append([]tb.Option{tb.WithStore(store), tb.WithLogger(slog.New(slog.NewTextHandler(log, nil)))}, opts...)
	l, err := tb.NewSmoothBursty(name, rate, opts...)
	require.NoError(t, err)
	return l
}

// Store timeouts of limiters that must not mistake a slow machine for a fault: a stall of a second or two is none. With patient, only the
// client's own errors are faults; with the other, a call waits out a server that hangs.
const (
	patient   = 20 * time.Second
	unhurried = 5 * time.Second
)

// told records what a limiter's observer reports of its store.
type told struct {
	mu    sync.Mutex
	downs int
	ups   int
	last  tb.Health
}

// option returns an option that makes a limiter report to w.
func (w *told) option() tb.Option {
	return tb.WithObserver(tb.Observer{Health: func(h tb.Health) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.last = h
		if h.Down {
			w.downs++
		} else {
			w.ups++
		}
	}})
}

// counts are how often the store went, and how often it came back.
func (w *told) counts() (downs, ups int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.downs, w.ups
}

// away waits until the store is known to be away, or back, and returns how long that took.
func (w *told) away(t testing.TB, want bool) time.Duration {
	t.Helper()
	began := time.Now()
	require.Eventually(t, func() bool {
		downs, ups := w.counts()
		return (downs > ups) == want
	}, 20*time.Second, time.Millisecond, "away: %v", want)
	return time.Since(began)
}

// once makes a client try to connect once: a client that tries again returns the refusals from before the server was back.
func once(o *redis.Options) { o.DialerRetries = 1 }

// served waits until a call is, after a server is back.
func served(t testing.TB, call func() error) {
	t.Helper()
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		err := call()
		if !errors.Is(err, tb.ErrStoreUnavailable) {
			require.NoError(t, err)
		}
		return err
	}))
}

// beaten waits until there are the given instances, and each has sent the given number of further heartbeats. By then it has the replies to
// all but the last.
func beaten(t testing.TB, client *redis.Client, instances, times int) {
	t.Helper()
	signs := func() []redis.Z { return client.ZRangeWithScores(background, "tokenbucket:instances", 0, -1).Val() }
	require.Eventually(t, func() bool { return len(signs()) == instances }, 20*time.Second, time.Millisecond)
	before := map[any]float64{}
	for range times + 1 {
		require.Eventually(t, func() bool {
			all := signs()
			return len(all) == instances && !slices.ContainsFunc(all, func(z redis.Z) bool { return z.Score <= before[z.Member] })
		}, 20*time.Second, time.Millisecond)
		for _, z := range signs() {
			before[z.Member] = z.Score
		}
	}
}

// evalshas counts the calls of scripts that a server has got.
func evalshas(t testing.TB, client *redis.Client) int {
	return counted(t, client, "commandstats", "cmdstat_evalsha:calls=")
}

// counted returns the number that follows a text in a section of a server's INFO; 0 if the text is not there.
func counted(t testing.TB, client *redis.Client, section, text string) int {
	info, err := client.Info(background, section).Result()
	require.NoError(t, err)
	_, after, found := strings.Cut(info, text)
	if !found {
		return 0
	}
	n := 0
	_, err = fmt.Sscanf(after, "%d", &n)
	require.NoError(t, err)
	return n
}
