package tokenbucket

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// While a bucket only moves forward, the store would also have refused every request that a snapshot refuses, at any time that its clock
// may have shown, whatever other processes took meanwhile.
func TestRefusalIsNeverWrong(t *testing.T) {
	var refusals, asked int
	rapid.Check(t, func(rt *rapid.T) {
		c := drawPlain(rt)
		s := newSetting(c)
		b := bucketOf(rt, c, rapid.Float64Range(0, s.max).Draw(rt, "initial"), 0)
		now := int64(0)
		for range 50 {
			takeAt(rt, b, now, rapid.Int64Range(1, 20).Draw(rt, "taken"), maxExact)
			// The answer is under way for a while, and the process waits for another while.
			seen, passed := engine.Seen{Terms: &s.terms, Balance: b.balance(), Now: now}, rapid.Int64Range(0, 90_000).Draw(rt, "passed")
			n := rapid.Int64Range(1, 20).Draw(rt, "permits")
			maxWait := int64(rapid.Float64Range(0, 30).Draw(rt, "timeout") * s.interval)
			if wait, ok := engine.Wait(seen.Terms, seen.Balance, now+passed, n); ok && rapid.Bool().Draw(rt, "barely") {
				maxWait = max(0, wait+rapid.Int64Range(-10, 10).Draw(rt, "off"))
			}
			least, refused := seen.Refuses(n, maxWait, time.Duration(passed)*time.Microsecond)
			later := now + rapid.Int64Range(0, passed).Draw(rt, "later")
			if rapid.Bool().Draw(rt, "others") {
				takeAt(rt, b, now+rapid.Int64Range(0, later-now).Draw(rt, "when"), rapid.Int64Range(1, 5).Draw(rt, "more"), maxExact)
			}
			if refused {
				refusals++
				probe := *b
				g := takeAt(rt, &probe, later, n, maxWait)
				require.False(rt, g.OK, "%+v: %d permits within %d µs", c, n, maxWait)
				require.GreaterOrEqual(rt, g.WaitMicros, least-2)
			} else {
				asked++
			}
			now = later + int64(rapid.Float64Range(0, 30).Draw(rt, "gap")*s.interval)
		}
	})
	t.Logf("%d refused without asking, %d asked", refusals, asked)
	require.Greater(t, refusals, 100)
	require.Greater(t, asked, 100) // of 1000 with -short
}

// A warm-up bucket without debt becomes colder with time: what would wait too long later may be granted now.
func TestRefusalOfAColderBucket(t *testing.T) {
	c := config{Kind: warmingUp, Payment: PayNow, Rate: 10, WarmupMicros: 150_000, ColdFactor: 10}
	s := newSetting(c)
	b := bucketOf(t, c, 0, 0)
	b.StoredPermits = b.MaxPermits / 2
	now := takeAt(t, b, 0, 1, maxExact).WaitMicros
	seen := engine.Seen{Terms: &s.terms, Balance: permit.Balance{Stored: s.max / 2}}
	_, refused := seen.Refuses(1, now, 90*time.Millisecond)
	require.False(t, refused)
}

// Under overload, refusing asks the store ten times a second, not once a call.
func TestRefusingCostsNoRoundTrip(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := &distant{Store: NewMemoryStore()}
		store.trip.Store(int64(time.Millisecond))
		l, err := NewSmoothBursty("x", 1, WithStore(store))
		require.NoError(t, err)
		r, err := l.Reserve(background, 3600)
		require.NoError(t, err)
		before := store.calls.Load()
		var refused atomic.Int64
		var callers sync.WaitGroup
		began := time.Now()
		for range 32 {
			callers.Go(func() {
				for time.Since(began) < time.Second {
					ok, err := l.TryAcquire(background, 1, time.Millisecond)
					require.NoError(t, err)
					require.False(t, ok)
					refused.Add(1)
					time.Sleep(time.Millisecond)
				}
			})
		}
		callers.Wait()
		asked := store.calls.Load() - before
		t.Logf("%d refused, %d asked", refused.Load(), asked)
		require.Greater(t, refused.Load(), int64(10_000))
		// A question: one batch, and one of those that came while it was under way.
		require.LessOrEqual(t, asked, int64(2*(time.Since(began)/engine.SnapshotAge+2)))
		require.GreaterOrEqual(t, asked, int64(5), "and asked anew")
		require.NoError(t, r.Cancel(background))
	})
}

// What another process gives back, a raised rate and an emptied store show within 100 ms.
func TestRefusalLearns(t *testing.T) {
	const trip = time.Millisecond
	for what, change := range map[string]func(*RateLimiter, *Reservation) error{
		"a refund":       func(_ *RateLimiter, r *Reservation) error { return r.Cancel(background) },
		"a raised rate":  func(l *RateLimiter, _ *Reservation) error { return l.SetRate(background, 1e6) },
		"a reset":        func(l *RateLimiter, _ *Reservation) error { return l.Reset(background) },
		"a lost state":   nil,
		"a newer config": nil,
	} {
		t.Run(what, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				memory := NewMemoryStore()
				open := func(rate float64, opts ...Option) (*RateLimiter, *distant) { // a store each, as in processes of their own
					store := &distant{Store: memory}
					store.trip.Store(int64(trip))
					l, err := NewSmoothBursty("x", rate, append(opts, WithStore(store), WithMaxPermits(rate))...)
					require.NoError(t, err)
					return l, store
				}
				l, store := open(1)
				other, _ := open(1)
				n := 1 // that is there
				if what == "a refund" {
					n = 2 // or it would be used
				}
				r, err := other.Reserve(background, n)
				require.NoError(t, err)
				ok, err := l.TryAcquire(background, 1, 200*time.Millisecond)
				require.NoError(t, err)
				require.False(t, ok)
				began := time.Now()
				switch what {
				case "a newer config":
					newer, _ := open(1e6, WithVersion(5))
					_, err = newer.TryAcquire(background, 1, 0)
				case "a lost state":
					store.Store = NewMemoryStore()
				default:
					err = change(other, r)
				}
				require.NoError(t, err)
				for ok = false; !ok; {
					ok, err = l.TryAcquire(background, 1, 200*time.Millisecond)
					require.NoError(t, err)
					time.Sleep(time.Millisecond)
				}
				require.LessOrEqual(t, time.Since(began), engine.SnapshotAge+5*trip) // in 800 ms the permit would come by itself
			})
		})
	}
}

// The same with Redis, where another process' change must arrive.
func TestRefusalLearnsFromRedis(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	for _, which := range []string{"script", "lock"} {
		for what, change := range map[string]func(l *RateLimiter, r *Reservation, key string) error{
			"a refund":      func(_ *RateLimiter, r *Reservation, _ string) error { return r.Cancel(background) },
			"a raised rate": func(l *RateLimiter, _ *Reservation, _ string) error { return l.SetRate(background, 1e6) },
			"a reset":       func(l *RateLimiter, _ *Reservation, _ string) error { return l.Reset(background) },
			"a lost state":  func(_ *RateLimiter, _ *Reservation, key string) error { return client.Del(background, key).Err() },
		} {
			t.Run(fmt.Sprint(which, " ", what), func(t *testing.T) {
				t.Parallel()
				name := fmt.Sprint("x", rand.Uint64())
				open := func() *RateLimiter {
					const rate = 0.01 // so that no permit comes by itself
					l, err := NewSmoothBursty(name, rate, WithStore(redisStores(client, WithKeyPrefix(prefix))[which]), patient)
					require.NoError(t, err)
					return l
				}
				l, other := open(), open()
				n := 1 // that is there
				if what == "a refund" {
					n = 2 // or it would be used
				}
				r, err := other.Reserve(background, n)
				require.NoError(t, err)
				ok, err := l.TryAcquire(background, 1, 200*time.Millisecond)
				require.NoError(t, err)
				require.False(t, ok)
				require.NoError(t, change(other, r, prefix+"{"+name+"}"))
				require.Eventually(t, func() bool {
					ok, err := l.TryAcquire(background, 1, 200*time.Millisecond)
					require.NoError(t, err)
					return ok
				}, 20*time.Second, time.Millisecond)
			})
		}
	}
}

// What this process itself gives back or changes shows at once.
func TestRefusalForgetsAtOnce(t *testing.T) {
	for which, store := range redisStores(redistest.Shared(t).Client(t)) {
		t.Run(which, func(t *testing.T) {
			l, err := NewSmoothBursty(fmt.Sprint("x", rand.Uint64()), 0.1, WithStore(store), patient)
			require.NoError(t, err)
			refused := func() bool {
				r, err := l.TryReserve(background, 1, 50*time.Second)
				require.NoError(t, err)
				if r.OK() {
					require.NoError(t, r.Cancel(background))
				} else {
					require.Positive(t, r.RetryAfter())
					require.Less(t, r.RetryAfter(), 31*10*time.Second)
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
