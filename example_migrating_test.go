package tokenbucket_test

import (
	"context"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// The code of docs/migrating.md, each library's rows in the order of its table. Time is virtual.

func TestMigratingFromTimeRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		limiter, err := tokenbucket.NewSmoothBursty("fares", 10, tokenbucket.WithMaxPermits(20), tokenbucket.WithInitialPermits(20))
		require.NoError(t, err)

		ok, err := limiter.TryAcquire(ctx, 20, 0)
		require.NoError(t, err)
		require.True(t, ok, "it began full")
		ok, err = limiter.TryAcquire(ctx, 21, 0)
		require.ErrorIs(t, err, tokenbucket.ErrNeverGranted)
		require.False(t, ok)

		waited, err := limiter.Acquire(ctx, 21)
		require.NoError(t, err)
		require.Equal(t, 2100*time.Millisecond, waited)

		ok, err = limiter.TryAcquire(ctx, 1, 500*time.Millisecond)
		require.NoError(t, err)
		require.True(t, ok)

		called := 0
		call := func() { called++ }
		reserved := func() error {
			r, err := limiter.Reserve(ctx, 1)
			if err != nil {
				return err
			}
			defer r.Cancel(ctx)
			select {
			case <-r.Ready():
				call()
			case <-ctx.Done():
			}
			return nil
		}
		require.NoError(t, reserved())
		require.Equal(t, 1, called)

		// Cancelled permits serve the next caller, even if others have reserved behind them.
		first, err := limiter.Reserve(ctx, 1)
		require.NoError(t, err)
		_, err = limiter.Reserve(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, first.Cancel(ctx))
		third, err := limiter.Reserve(ctx, 1)
		require.NoError(t, err)
		require.LessOrEqual(t, third.Delay(), 200*time.Millisecond)
		time.Sleep(time.Second)

		require.NoError(t, limiter.SetRateAndBurst(ctx, 100, 20))
		require.NoError(t, limiter.SetRateAndBurst(ctx, limiter.Rate(), 40))
		bucket, err := limiter.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 100.0, limiter.Rate())
		require.Equal(t, 40.0, bucket.MaxPermits)
		require.Less(t, bucket.StoredPermits, 20.0, "as many as before")

		off, err := tokenbucket.NewSmoothBursty("off", 1, tokenbucket.WithSwitch(func() bool { return false }))
		require.NoError(t, err)
		for range 100 {
			ok, err := off.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
		}
	})
}

func TestMigratingFromRedisRate(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	defer func() { require.NoError(t, client.Close()) }()
	var store tokenbucket.Store = tokenbucket.NewRedisScriptStore(client)
	store = tokenbucket.NewMemoryStore() // this test has no Redis
	synctest.Test(t, func(t *testing.T) {
		ctx, n := context.Background(), 3
		limiter, err := tokenbucket.NewSmoothBursty("user:42", 5.0/60, tokenbucket.WithMaxPermits(5), tokenbucket.WithInitialPermits(5), tokenbucket.WithStore(store))
		require.NoError(t, err)

		type result struct {
			allowed            bool
			remaining          float64
			retryAfter, resets time.Duration
		}
		allow := func() (result, error) {
			r, err := limiter.TryReserve(ctx, 1, 0)
			if err != nil {
				return result{}, err
			}
			level, _ := r.Level()
			return result{r.OK(), level.Remaining, r.RetryAfter(), level.Full}, nil
		}
		got, err := allow()
		require.NoError(t, err)
		require.Equal(t, result{true, 4, 0, 12 * time.Second}, got)

		ok, err := limiter.TryAcquire(ctx, n, 0)
		require.NoError(t, err)
		require.True(t, ok)

		atMost := func() (allowed int, err error) {
			for ok := true; ok && allowed < n; {
				if ok, err = limiter.TryAcquire(ctx, 1, 0); err != nil {
					return allowed, err
				}
				if ok {
					allowed++
				}
			}
			return allowed, nil
		}
		allowed, err := atMost()
		require.NoError(t, err)
		require.Equal(t, 1, allowed)
		got, err = allow()
		require.NoError(t, err)
		require.Equal(t, result{false, 0, 12 * time.Second, time.Minute}, got)

		_, err = limiter.TryAcquire(ctx, 6, 0)
		require.ErrorIs(t, err, tokenbucket.ErrNeverGranted)

		require.NoError(t, limiter.Reset(ctx))
		bucket, err := limiter.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 5.0, bucket.StoredPermits)
	})
}

func TestMigratingFromGuava(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithPayment(tokenbucket.PayLater), tokenbucket.WithInitialPermits(0))
		require.NoError(t, err)

		waited, err := limiter.Acquire(ctx, 10)
		require.NoError(t, err)
		require.Zero(t, waited, "the next one pays")
		ok, err := limiter.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.False(t, ok)
		ok, err = limiter.TryAcquire(ctx, 10, 2*time.Second)
		require.NoError(t, err)
		require.True(t, ok)

		require.NoError(t, limiter.SetRate(ctx, 10))
		bucket, err := limiter.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 10.0, bucket.MaxPermits)
		require.Equal(t, 10.0, limiter.Rate())

		warm, err := tokenbucket.NewSmoothWarmingUp("booking", 5, 4*time.Second)
		require.NoError(t, err)
		cold, err := warm.Reserve(ctx, 1)
		require.NoError(t, err)
		require.Zero(t, cold.Delay(), "pay later")
		bucket, err = warm.State(ctx)
		require.NoError(t, err)
		require.InDelta(t, 0.6, float64(bucket.NextFreeTicketMicros-bucket.SeenMicros)/1e6, 0.03, "three times the interval, nearly")

		usual, err := tokenbucket.NewSmoothBursty("fares", 5)
		require.NoError(t, err)
		waited, err = usual.Acquire(ctx, 10)
		require.NoError(t, err)
		require.Equal(t, 1800*time.Millisecond, waited, "for its own permits, but one")
	})
}

func TestMigratingFromBucket4j(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		limiter, err := tokenbucket.NewSmoothBursty("fares", 10, tokenbucket.WithMaxPermits(20), tokenbucket.WithInitialPermits(20))
		require.NoError(t, err)

		ok, err := limiter.TryAcquire(ctx, 5, 0)
		require.NoError(t, err)
		require.True(t, ok)
		waited, err := limiter.Acquire(ctx, 25)
		require.NoError(t, err)
		require.Equal(t, time.Second, waited)

		estimate := func(n float64) (time.Duration, error) {
			bucket, err := limiter.State(ctx)
			if err != nil {
				return 0, err
			}
			debt := bucket.NextFreeTicketMicros - bucket.SeenMicros
			missing := max(0, n-bucket.StoredPermits)
			return time.Duration(float64(debt)+missing*bucket.IntervalMicros) * time.Microsecond, nil
		}
		wait, err := estimate(5)
		require.NoError(t, err)
		require.Equal(t, 500*time.Millisecond, wait)

		r, err := limiter.Reserve(ctx, 5)
		require.NoError(t, err)
		wait, err = estimate(5)
		require.NoError(t, err)
		require.Equal(t, time.Second, wait)
		require.NoError(t, r.Cancel(ctx))
		wait, err = estimate(5)
		require.NoError(t, err)
		require.Equal(t, 500*time.Millisecond, wait)

		time.Sleep(time.Second)
		require.NoError(t, limiter.SetRateAndBurst(ctx, 10, 100))
		bucket, err := limiter.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 10.0, bucket.StoredPermits, "as is")
		require.NoError(t, limiter.SetRate(ctx, 20))
		bucket, err = limiter.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 20.0, bucket.StoredPermits, "proportionally")
		require.NoError(t, limiter.Reset(ctx))
	})
}

func TestMigratingFromRedisson(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		limiter, err := tokenbucket.NewQuota("fares", 10, time.Second, 2*time.Millisecond)
		require.NoError(t, err)
		full, err := tokenbucket.NewSmoothBursty("full", 10, tokenbucket.WithInitialPermits(10))
		require.NoError(t, err)

		inASecond := map[*tokenbucket.RateLimiter]int{}
		for range 1000 {
			for _, l := range []*tokenbucket.RateLimiter{limiter, full} {
				for ok := true; ok; {
					ok, err = l.TryAcquire(ctx, 1, 0)
					require.NoError(t, err)
					if ok {
						inASecond[l]++
					}
				}
			}
			time.Sleep(time.Millisecond)
		}
		require.Equal(t, 10, inASecond[limiter])
		require.Equal(t, 19, inASecond[full])

		waited, err := full.Acquire(ctx, 11)
		require.NoError(t, err)
		require.GreaterOrEqual(t, waited, time.Second)
		_, err = limiter.Acquire(ctx, 1)
		require.NoError(t, err)
		began := time.Now()
		ok, err := limiter.TryAcquire(ctx, 1, 50*time.Millisecond)
		require.NoError(t, err)
		require.False(t, ok)
		require.Zero(t, time.Since(began), "refused at once")

		time.Sleep(time.Second)
		bucket, err := limiter.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 1.0, bucket.StoredPermits)

		require.NoError(t, limiter.SetQuota(ctx, 20, time.Second, 2*time.Millisecond))
		require.InDelta(t, 20/1.002, limiter.Rate(), 1e-9)
	})
}

func TestMigratingFromUber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		atOnce := func(limiter *tokenbucket.RateLimiter, err error) (n int) {
			require.NoError(t, err)
			waited, err := limiter.Acquire(ctx, 1)
			require.NoError(t, err)
			require.Zero(t, waited)
			waited, err = limiter.Acquire(ctx, 1)
			require.NoError(t, err)
			require.Equal(t, 10*time.Millisecond, waited, "no slack in the beginning")
			time.Sleep(time.Second)
			for {
				ok, err := limiter.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				if !ok {
					return n
				}
				n++
			}
		}
		require.Equal(t, 11, atOnce(tokenbucket.NewSmoothBursty("fares", 100, tokenbucket.WithMaxPermits(11))))
		require.Equal(t, 1, atOnce(tokenbucket.NewSmoothBursty("fares", 100, tokenbucket.WithMaxPermits(1))))
		slow, err := tokenbucket.NewSmoothBursty("slow", 2.0/60, tokenbucket.WithMaxPermits(11))
		require.NoError(t, err)

		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err = slow.Acquire(short, 1)
		require.NoError(t, err)
		_, err = slow.Acquire(short, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded, "at once: 30 s are too long")
	})
}

func TestMigratingFromSemaphore(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	defer func() { require.NoError(t, client.Close()) }()
	ctx := context.Background()
	fleet, err := semaphore.NewRedis(client, "booking", 10)
	require.NoError(t, err)
	require.NoError(t, fleet.Close(ctx))
	places, err := semaphore.NewMemory(10)
	require.NoError(t, err)

	place, err := places.Acquire(ctx, 3)
	require.NoError(t, err)
	_, err = places.TryAcquire(ctx, 8, 0)
	require.ErrorIs(t, err, semaphore.ErrRefused)
	_, err = places.Acquire(ctx, 11)
	require.ErrorIs(t, err, semaphore.ErrTooMany)
	require.NoError(t, place.Release(ctx))
	require.NoError(t, place.Release(ctx), "without effect")
	all, err := places.TryAcquire(ctx, 10, 0)
	require.NoError(t, err)
	require.NoError(t, all.Release(ctx))

	called := 0
	call := func(context.Context) error { called++; return nil }
	require.NoError(t, places.Do(ctx, call))
	require.Equal(t, 1, called)
}

func TestMigratingFromLimitersByKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, key := context.Background(), "alice"
		store := tokenbucket.NewMemoryStore()
		byKey := func() error {
			burst := 20.0
			source := registry.Static{{Name: "user:*", Rate: 10, Burst: &burst, PerKey: true}}
			limits, err := registry.New(source, store)
			if err != nil {
				return err
			}
			defer limits.Close()
			for _, key := range []string{"alice", "bob"} {
				for i := range 21 {
					a, err := limits.Enter(ctx, "user:"+key)
					if err != nil {
						return err
					}
					require.Equal(t, i < 20, a.OK, "%s has a bucket of 20", key)
					a.Leave()
				}
			}
			limiter, err := limits.Limiter("user:" + key)
			if err != nil {
				return err
			}
			bucket, err := limiter.State(ctx)
			require.NoError(t, err)
			require.Zero(t, bucket.StoredPermits)
			require.NoError(t, limits.Reset(ctx, "user:"+key))
			bucket, err = limiter.State(ctx)
			require.NoError(t, err)
			require.Equal(t, 20.0, bucket.StoredPermits, "full again")
			return nil
		}
		require.NoError(t, byKey())

		single, err := tokenbucket.NewSmoothBursty("user:"+key, 10, tokenbucket.WithStore(store))
		require.NoError(t, err)
		require.Equal(t, "user:alice", single.Name())

		window, err := slidingwindow.New("user:"+key, 20, time.Minute, time.Second)
		require.NoError(t, err)
		passed := 0
		for range 590 { // less than a minute
			ok, err := window.Allow(ctx)
			require.NoError(t, err)
			if ok {
				passed++
			}
			time.Sleep(100 * time.Millisecond)
		}
		require.Equal(t, 20, passed)
	})
}

// The code in the second column of the tables of docs/migrating.md is part of the tests above.
func TestMigratingTables(t *testing.T) {
	squeeze := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	source, err := os.ReadFile("example_migrating_test.go")
	require.NoError(t, err)
	page, err := os.ReadFile("docs/migrating.md")
	require.NoError(t, err)
	require.LessOrEqual(t, strings.Count(string(page), "\n"), 200, "lines")
	code := regexp.MustCompile("`([^`]+)`")
	tables, cells := 0, 0
	for line := range strings.Lines(string(page)) {
		columns := strings.Split(line, " | ")
		if len(columns) != 3 || strings.HasPrefix(line, "| ---") {
			continue
		}
		if columns[1] == "here" {
			tables++
			continue
		}
		for _, m := range code.FindAllStringSubmatch(columns[1], -1) {
			require.Contains(t, squeeze(string(source)), squeeze(m[1]), "no test has it")
			cells++
		}
	}
	require.Equal(t, 8, tables)
	require.Greater(t, cells, 35)
}
