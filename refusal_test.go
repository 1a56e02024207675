package tokenbucket

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// While a bucket only moves forward, what is refused without asking would have been refused by the store too, at any time
// that its clock can have reached, whatever others took meanwhile.
func TestRefusalIsNeverWrong(t *testing.T) {
	var refusals, asked int
	rapid.Check(t, func(rt *rapid.T) {
		c := drawPlain(rt)
		s := newSetting(c)
		limiter := &RateLimiter{own: s}
		l := &line{real: true}
		limiter.line = l
		b := bucketOf(rt, c, rapid.Float64Range(0, s.max).Draw(rt, "initial"), 0)
		now := int64(0)
		for range 50 {
			takeAt(rt, b, now, rapid.Int64Range(1, 20).Draw(rt, "taken"), maxExact)
			seen := *b
			// The answer is under way for a while, and the process waits for another while.
			passed := rapid.Int64Range(0, 90_000).Draw(rt, "passed")
			l.sight.Store(&sight{setting: &s, at: seen.mark(), clock: now, sent: mono() - time.Duration(passed)*time.Microsecond})
			n := rapid.Int64Range(1, 20).Draw(rt, "permits")
			wait := int64(rapid.Float64Range(0, 30).Draw(rt, "timeout") * s.interval)
			least, refused := l.refuses(limiter, n, wait)
			later := now + rapid.Int64Range(0, passed).Draw(rt, "later")
			if rapid.Bool().Draw(rt, "others") {
				takeAt(rt, b, now+rapid.Int64Range(0, later-now).Draw(rt, "when"), rapid.Int64Range(1, 5).Draw(rt, "more"), maxExact)
			}
			if refused {
				refusals++
				probe := *b
				g := takeAt(rt, &probe, later, n, wait)
				require.False(rt, g.OK, "%+v: %d permits within %d µs", c, n, wait)
				require.GreaterOrEqual(rt, g.WaitMicros, least-2)
			} else {
				asked++
			}
			now = later + int64(rapid.Float64Range(0, 30).Draw(rt, "gap")*s.interval)
		}
	})
	t.Logf("%d refused without asking, %d asked", refusals, asked)
	require.Greater(t, refusals, 100)
	require.Greater(t, asked, 100)
}

// A warm-up bucket without debt becomes colder with time: what would wait too long later may be granted now.
func TestRefusalOfAColderBucket(t *testing.T) {
	c := Config{Kind: WarmingUp, Payment: PayNow, Rate: 10, WarmupMicros: 150_000, ColdFactor: 10}
	s := newSetting(c)
	b := bucketOf(t, c, 0, 0)
	b.StoredPermits = b.MaxPermits / 2
	now := takeAt(t, b, 0, 1, maxExact).WaitMicros
	l := &line{real: true}
	l.sight.Store(&sight{setting: &s, at: mark{Stored: s.max / 2}, sent: mono() - 90*time.Millisecond})
	_, refused := l.refuses(&RateLimiter{line: l, own: s}, 1, now)
	require.False(t, refused)
}

// commands counts what a server has been asked.
func commands(t *testing.T, client *redis.Client, name string) int {
	info, err := client.Info(background, "commandstats").Result()
	require.NoError(t, err)
	m := regexp.MustCompile(`cmdstat_` + name + `:calls=(\d+)`).FindStringSubmatch(info)
	if m == nil {
		return 0
	}
	n, err := strconv.Atoi(m[1])
	require.NoError(t, err)
	return n
}

// Under overload, refusing asks the server ten times a second, not once a call.
func TestRefusingCostsNoRoundTrip(t *testing.T) {
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			server := redistest.Start(t)
			client := server.Client(t)
			l, err := NewSmoothBursty("x", 1, WithStore(redisStores(server.Client(t))[which]))
			require.NoError(t, err)
			_, err = l.Reserve(background, 3600)
			require.NoError(t, err)
			before := commands(t, client, "evalsha")
			refused := 0
			var mu sync.Mutex
			var callers sync.WaitGroup
			began := time.Now()
			for range 64 {
				callers.Go(func() {
					mine := 0
					for time.Since(began) < time.Second {
						ok, err := l.TryAcquire(background, 1, time.Millisecond)
						require.NoError(t, err)
						require.False(t, ok)
						mine++
					}
					mu.Lock()
					defer mu.Unlock()
					refused += mine
				})
			}
			callers.Wait()
			asked := commands(t, client, "evalsha") - before
			t.Logf("%d refused, %d scripts", refused, asked)
			require.Greater(t, refused, 10_000)
			scripts := 2 // a question: one, and one of those that came while it was under way
			if which == "lock" {
				scripts = 6
			}
			require.LessOrEqual(t, asked, int(time.Since(began)/sightAge+2)*scripts)
			require.GreaterOrEqual(t, asked, 5, "and asked anew")
		})
	}
}

// What another process gives back, a raised rate and an emptied server show within 100 ms.
func TestRefusalLearns(t *testing.T) {
	server := redistest.Start(t)
	for _, which := range []string{"script", "lock"} {
		for what, change := range map[string]func(*RateLimiter, *Reservation) error{
			"a refund":       func(_ *RateLimiter, r *Reservation) error { return r.Cancel(background) },
			"a raised rate":  func(l *RateLimiter, _ *Reservation) error { return l.SetRate(background, 1e6) },
			"a reset":        func(l *RateLimiter, _ *Reservation) error { return l.Reset(background) },
			"a lost state":   func(*RateLimiter, *Reservation) error { return server.Client(t).FlushAll(background).Err() },
			"a newer config": nil,
		} {
			t.Run(fmt.Sprint(which, " ", what), func(t *testing.T) {
				name := fmt.Sprint("x", rand.Uint64())
				open := func(rate float64, opts ...Option) *RateLimiter {
					opts = append(opts, WithStore(redisStores(server.Client(t))[which]), WithMaxPermits(rate))
					l, err := NewSmoothBursty(name, rate, opts...)
					require.NoError(t, err)
					return l
				}
				l, other := open(1), open(1)
				r, err := other.TryReserve(background, 1, 0)
				require.NoError(t, err)
				require.True(t, r.OK())
				ok, err := l.TryAcquire(background, 1, 200*time.Millisecond)
				require.NoError(t, err)
				require.False(t, ok)
				require.NotNil(t, l.line.sight.Load())
				if change == nil {
					_, err = open(1e6, WithVersion(5)).State(background)
					require.NoError(t, err)
					_, err = open(1e6, WithVersion(5)).TryAcquire(background, 1, 0)
				} else {
					err = change(other, r)
				}
				require.NoError(t, err)
				began := time.Now()
				require.Eventually(t, func() bool {
					ok, err := l.TryAcquire(background, 1, 200*time.Millisecond)
					require.NoError(t, err)
					return ok
				}, 700*time.Millisecond, time.Millisecond) // in 800 ms the permit would come by itself
				t.Logf("after %v", time.Since(began).Round(time.Millisecond))
			})
		}
	}
}

// What this process itself gives back or changes shows at once.
func TestRefusalForgetsAtOnce(t *testing.T) {
	server := redistest.Start(t)
	for which, store := range redisStores(server.Client(t)) {
		t.Run(which, func(t *testing.T) {
			l, err := NewSmoothBursty(fmt.Sprint("x", rand.Uint64()), 10, WithStore(store))
			require.NoError(t, err)
			refused := func() bool {
				r, err := l.TryReserve(background, 1, 500*time.Millisecond)
				require.NoError(t, err)
				if r.OK() {
					require.NoError(t, r.Cancel(background))
				} else {
					require.Positive(t, r.RetryAfter())
					require.Less(t, r.RetryAfter(), 31*100*time.Millisecond)
				}
				return !r.OK()
			}
			r, err := l.Reserve(background, 30)
			require.NoError(t, err)
			require.True(t, refused())
			require.NoError(t, r.Cancel(background))
			require.False(t, refused())
			_, err = l.Reserve(background, 30)
			require.NoError(t, err)
			require.True(t, refused())
			require.NoError(t, l.Reset(background))
			require.False(t, refused())
		})
	}
}
