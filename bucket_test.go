package tokenbucket_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) {
	redis.SetLogger(silent{})
	redistest.Main(m)
}

// silent is a log of the Redis client, which says of a proxy that it breaks connections.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// ctx is for calls that need no deadline.
var ctx = context.Background()

// storeCase is a kind of store. Each call of open returns another store object on the same buckets: another process.
type storeCase struct {
	name string
	open func(t testing.TB) func(local bool) tb.Store
}

// stores are all there are; the Redis ones are on a real redis-server.
var stores = []storeCase{
	{"memory", func(testing.TB) func(bool) tb.Store {
		s := tb.NewMemoryStore()
		return func(bool) tb.Store { return s }
	}},
	{"lock", func(t testing.TB) func(bool) tb.Store {
		client, prefix := redisClient(t), prefixOf(t)
		return func(local bool) tb.Store { return tb.NewRedisStore(client, redisOptions(prefix, local)...) }
	}},
	{"script", func(t testing.TB) func(bool) tb.Store {
		client, prefix := redisClient(t), prefixOf(t)
		return func(local bool) tb.Store { return tb.NewRedisScriptStore(client, redisOptions(prefix, local)...) }
	}},
}

func redisOptions(prefix string, local bool) []tb.RedisOption {
	opts := []tb.RedisOption{tb.WithKeyPrefix(prefix)}
	if local {
		opts = append(opts, tb.WithLocalTime())
	}
	return opts
}

// redisClient is one that a busy machine does not make give up.
func redisClient(t testing.TB) *redis.Client {
	return redistest.Shared(t).Client(t, func(o *redis.Options) { o.ReadTimeout = time.Minute })
}

var prefixes atomic.Int64

// prefixOf gives a test keys of its own, also when it runs again.
func prefixOf(t testing.TB) string { return fmt.Sprintf("%s:%d:", t.Name(), prefixes.Add(1)) }

// patient is the store timeout of limiters on a real Redis in tests that are not about it: a machine that stands still for a second is no outage.
var patient = tb.WithStoreTimeout(20 * time.Second)

// onEveryStore runs a test on every store, with a fake clock and as many processes as it asks for.
func onEveryStore(t *testing.T, test func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store)) {
	for _, s := range stores {
		t.Run(s.name, func(t *testing.T) {
			open := s.open(t)
			test(t, clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000)), func() tb.Store { return open(true) })
		})
	}
}

// The source's worked example: 5 permits/s, a full bucket of 5, timeout 500 ms, ten calls in the same instant: five pass
// at once, two wait 200 and 400 ms, three are refused.
func TestSourceExample(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		l, err := tb.NewSmoothBursty("/ibe/AvailFare", 5, tb.WithStore(open()), patient, tb.WithClock(clock), tb.WithInitialPermits(5))
		require.NoError(t, err)
		var delays []time.Duration
		refused := 0
		for range 10 {
			r, err := l.TryReserve(ctx, 1, 500*time.Millisecond)
			require.NoError(t, err)
			if r.OK() {
				delays = append(delays, r.Delay())
			} else {
				refused++
				require.Equal(t, 100*time.Millisecond, r.RetryAfter()) // due in 600, 500 are allowed
			}
		}
		require.Equal(t, []time.Duration{0, 0, 0, 0, 0, 200 * time.Millisecond, 400 * time.Millisecond}, delays)
		require.Equal(t, 3, refused)
	})
}
