package input

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Numbers that are passed by mistake, and those at the edges of the valid ranges.
var (
	floats = []float64{
		0, math.Copysign(0, -1), -1, math.NaN(), math.Inf(1), math.Inf(-1), 1e-12, 1e12, 1e-300, 1e300, math.MaxFloat64, math.SmallestNonzeroFloat64,
		math.MaxInt64, math.MinInt64, 1 << 53, 1<<53 + 2, 1.2e-10, 1e-10, 0.001, 1.0 / 3, 0.5, 1, 5, 1e7, math.Nextafter(1, 0), math.Nextafter(1, 2),
	}
	integers = []int{ // the shifts: 2^53 and its neighbours, 2^40, 2^31 and 2^31 − 1 where an int has 64 bits
		0, -1, 1, 2, 5, math.MaxInt, math.MinInt, math.MaxInt - 1, math.MaxInt>>10 + 1, math.MaxInt>>10 + 2, math.MaxInt >> 10, math.MaxInt>>23 + 1,
		math.MaxInt>>32 + 1, math.MaxInt >> 32, 1_000_000,
	}
	durations = []time.Duration{
		0, -1, 1, math.MaxInt64, math.MinInt64, 999, time.Microsecond, time.Millisecond, time.Second, time.Minute, time.Hour, time.Hour + 1, 1 << 53,
		1<<53*time.Microsecond - 1,
	}
)

const exact = 1 << 53 // microseconds, or permits, beyond which Redis' numbers are not whole any more

// I1: with any numbers, a limiter returns a correct result or an error: it does not panic, no wait is negative, beyond the timeout or
// beyond 2^53 µs, and the first wait of a new bucket is the cost of its permits to the microsecond. Errors that need no state are returned
// without a request to Redis.
func TestI1Numbers(t *testing.T) {
	for which, store := range faultlab.Stores {
		t.Run(which, func(t *testing.T) {
			t.Parallel()
			random := faultlab.Seed(t)
			server := redistest.Start(t)
			client, count := counted(t, server)
			buckets := store(client)
			sent := int64(0)
			unasked := func(what ...any) {
				t.Helper()
				require.Equal(t, sent, count.sent.Load(), "Redis was asked about %v", what)
			}
			pick := func() float64 { // mostly an edge, otherwise of any size
				if random.IntN(4) > 0 {
					return floats[random.IntN(len(floats))]
				}
				return math.Pow(10, random.Float64()*40-20)
			}
			made, refused, granted, denied := 0, 0, 0, 0
			last := int(faultlab.Lasting(4000, 100_000))
			for i := range last {
				rate, size, initial := pick(), pick(), pick()
				if random.IntN(2) == 0 {
					initial = 0
				}
				period, version := durations[random.IntN(len(durations))], int64(integers[random.IntN(len(integers))])
				if random.IntN(2) == 0 {
					version = 0
				}
				opts := []tokenbucket.Option{tokenbucket.WithStore(buckets), tokenbucket.WithStoreTimeout(limit), tokenbucket.WithVersion(version)}
				name, burst := fmt.Sprint("b", i), random.IntN(4) > 0
				var l *tokenbucket.RateLimiter
				var err error
				sent = count.sent.Load()
				if burst {
					l, err = tokenbucket.NewSmoothBursty(name, rate, append(opts, tokenbucket.WithMaxPermits(size), tokenbucket.WithInitialPermits(initial))...)
				} else {
					l, err = tokenbucket.NewSmoothWarmingUp(name, rate, period, append(opts, tokenbucket.WithColdFactor(size))...)
				}
				unasked(rate, size, initial, version)
				if err != nil {
					require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
					require.Nil(t, l)
					refused++
					continue
				}
				require.True(t, rate > 0 && rate <= exact && version >= 0 && version <= exact, "rate %v, version %d", rate, version)
				made++
				what := fmt.Sprintf("rate %v, size or cold factor %v, initial %v, period %v, version %d", rate, size, initial, period, version)

				for first := true; ; first = false {
					n, timeout := integers[random.IntN(len(integers))], durations[random.IntN(len(durations))]
					asked := fmt.Sprintf("%s: %d permits within %v", what, n, timeout)
					sent = count.sent.Load()
					r, err := l.TryReserve(ctx, n, timeout)
					var wait *tokenbucket.WaitError
					switch {
					case n <= 0 || int64(n) > exact:
						require.ErrorIs(t, err, tokenbucket.ErrInvalidPermits, asked)
						unasked(asked)
					case errors.As(err, &wait):
						require.ErrorIs(t, err, tokenbucket.ErrNeverGranted, asked)
						require.Greater(t, wait.Wait, timeout, asked)
					case err != nil: // the debt would be beyond 2^53 µs, of this request or of all
						require.ErrorIs(t, err, tokenbucket.ErrInvalidPermits, asked)
					case !r.OK():
						denied++
						require.GreaterOrEqual(t, r.RetryAfter(), time.Duration(0), asked)
						require.Zero(t, r.Delay(), asked)
					default:
						granted++
						require.GreaterOrEqual(t, r.Delay(), time.Duration(0), asked)
						require.LessOrEqual(t, r.Delay().Microseconds(), max(0, timeout.Microseconds()), asked)
						require.LessOrEqual(t, r.Delay().Microseconds(), int64(exact), asked)
						if first && burst {
							require.InDelta(t, cost(n, initial, rate), r.Delay().Microseconds(), 1, asked)
						}
						require.NoError(t, r.Cancel(ctx), asked)
					}
					if r != nil && r.OK() || random.IntN(3) == 0 {
						break
					}
				}
				next := pick()
				if err := l.SetRate(ctx, next); err != nil {
					require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, "%s: %v", what, next)
				} else {
					require.True(t, next > 0 && next <= exact, "%s: %v", what, next)
				}
				d := durations[random.IntN(len(durations))]
				sent = count.sent.Load()
				if err := l.Penalize(ctx, d); d <= 0 || d > time.Hour {
					require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, d)
					unasked(d)
				} else {
					require.NoError(t, err, "%s: %v", what, d)
				}
				b, err := l.State(ctx)
				require.NoError(t, err, what)
				require.True(t, b.StoredPermits >= 0 && b.StoredPermits <= b.MaxPermits && b.MaxPermits <= exact, "%s: %+v", what, b)
				require.True(t, b.IntervalMicros > 0 && b.IntervalMicros <= exact, "%s: %+v", what, b)
				require.LessOrEqual(t, b.NextFreeTicketMicros, int64(exact), what)
				require.GreaterOrEqual(t, b.NextFreeTicketMicros, int64(0), what)
			}
			t.Logf("%d reservations granted, %d denied", granted, denied)
			faultlab.Figure(t, "limiters made", made)
			faultlab.Figure(t, "refused", refused)
			require.Greater(t, made, last/10)
			require.Greater(t, refused, last/10)
			require.Greater(t, granted, made/10)
			require.Greater(t, denied, 0)
			for _, key := range client.Keys(ctx, "*").Val() {
				ttl := client.PTTL(ctx, key).Val()
				require.Greater(t, ttl, time.Duration(0), key)
			}
		})
	}
}

// cost returns the first wait of a new bucket for n permits, in microseconds, computed with 200 bits.
func cost(n int, initial, rate float64) float64 {
	fresh := new(big.Float).SetPrec(200).Sub(big.NewFloat(float64(n)), big.NewFloat(min(initial, float64(n))))
	micros := new(big.Float).SetPrec(200).Quo(fresh.Mul(fresh, big.NewFloat(1e6)), big.NewFloat(rate))
	f, _ := micros.Float64()
	if f <= 1e-9*1e6/rate { // less than a billionth of a permit is none
		return 0
	}
	return math.Ceil(f)
}

// I1: the other times and shares that a limiter takes, and the verbs that wait.
func TestI1Waits(t *testing.T) {
	for which, store := range faultlab.Stores {
		t.Run(which, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			client, count := counted(t, server)
			buckets := store(client)
			accepted := 0
			for i, d := range durations {
				for option, opt := range map[string]tokenbucket.Option{
					"store timeout": tokenbucket.WithStoreTimeout(d), "lease": tokenbucket.WithPrefetch(d),
				} {
					sent := count.sent.Load()
					l, err := tokenbucket.NewSmoothBursty(fmt.Sprint(option, i), 1000, tokenbucket.WithStore(buckets),
						tokenbucket.WithStoreTimeout(limit), opt)
					require.Equal(t, sent, count.sent.Load())
					if err != nil {
						require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, "%s %v", option, d)
						require.ErrorContains(t, err, option)
						continue
					}
					if option == "store timeout" && d < time.Second { // which a busy machine may need
						continue
					}
					accepted++
					for range 3 {
						_, err := l.Acquire(ctx, 1)
						for d == time.Second && errors.Is(err, tokenbucket.ErrStoreUnavailable) { // which a busy machine may need, too
							_, err = l.Acquire(ctx, 1)
						}
						require.NoError(t, err, "%s %v", option, d)
					}
					require.NoError(t, l.Close(ctx))
				}
			}
			for i, d := range durations {
				l, err := tokenbucket.NewSmoothBursty(fmt.Sprint("max wait", i), 1000, tokenbucket.WithStore(buckets), tokenbucket.WithMaxWait(d),
					tokenbucket.WithStoreTimeout(limit))
				if d < 0 {
					require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, d)
					require.ErrorContains(t, err, "max wait")
					continue
				}
				require.NoError(t, err, d)
				ok, err := l.Try(ctx)
				require.NoError(t, err)
				require.True(t, ok)
				accepted++
			}
			require.Greater(t, accepted, 15)

			l, err := tokenbucket.NewSmoothBursty("waits", 1e6, tokenbucket.WithStore(buckets), tokenbucket.WithStoreTimeout(limit))
			require.NoError(t, err)
			quiet, none := counted(t, server) // a call before may still release its lock
			refuses, err := tokenbucket.NewSmoothBursty("refuses", 1e6, tokenbucket.WithStore(store(quiet)), tokenbucket.WithStoreTimeout(limit))
			require.NoError(t, err)
			for _, n := range integers {
				l := l
				if n <= 0 || int64(n) > exact {
					l = refuses
				}
				for _, timeout := range durations {
					short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
					began := time.Now()
					_, err1 := l.TryAcquire(short, n, timeout)
					waited, err2 := l.Acquire(short, n)
					cancel()
					require.GreaterOrEqual(t, waited, time.Duration(0))
					require.Less(t, time.Since(began), limit, "%d permits within %v", n, timeout)
					for _, err := range []error{err1, err2} {
						switch {
						case n <= 0 || int64(n) > exact:
							require.ErrorIs(t, err, tokenbucket.ErrInvalidPermits)
							require.Zero(t, none.sent.Load())
						case errors.Is(err, context.DeadlineExceeded), errors.Is(err, tokenbucket.ErrStoreTimeout): // the store took all of 50 ms
						case err != nil && !errors.Is(err, tokenbucket.ErrNeverGranted):
							require.ErrorIs(t, err, tokenbucket.ErrInvalidPermits)
						}
					}
				}
			}
			require.NoError(t, l.Reset(ctx))
			ok, err := l.TryAcquire(ctx, 1, math.MaxInt64)
			require.NoError(t, err)
			require.True(t, ok)
		})
	}
}

// I1: semaphores and sliding windows.
func TestI1Others(t *testing.T) {
	server := redistest.Start(t)
	client, count := counted(t, server)
	unasked := func(f func()) {
		t.Helper()
		sent := count.sent.Load()
		f()
		require.Equal(t, sent, count.sent.Load(), "Redis was asked")
	}
	for i, n := range integers {
		valid := n >= 1 && int64(n) <= 1<<31
		unasked(func() {
			_, err := semaphore.NewRedis(client, fmt.Sprint("n", i), n)
			require.Equal(t, !valid, errors.Is(err, semaphore.ErrInvalidConfig), n)
			_, err = slidingwindow.New(fmt.Sprint("n", i), n, time.Second, time.Second, slidingwindow.WithRedis(client))
			require.Equal(t, !valid, errors.Is(err, slidingwindow.ErrInvalidConfig), n)
		})
	}
	s, err := semaphore.NewRedis(client, "x", 5, semaphore.WithStoreTimeout(limit))
	require.NoError(t, err)
	w, err := slidingwindow.New("x", 5, time.Hour, time.Minute, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(limit))
	require.NoError(t, err)
	for _, n := range integers {
		for _, timeout := range durations {
			switch {
			case n < 1:
				unasked(func() {
					_, err := s.TryAcquire(ctx, n, timeout)
					require.ErrorIs(t, err, semaphore.ErrInvalidPermits)
					_, err = s.Acquire(ctx, n)
					require.ErrorIs(t, err, semaphore.ErrInvalidPermits)
				})
			case timeout > 0 && timeout < time.Minute: // in which the answer need not arrive
				p, err := s.TryAcquire(ctx, n, timeout)
				if err != nil {
					require.True(t, errors.Is(err, semaphore.ErrTooMany) || errors.Is(err, semaphore.ErrRefused), err)
				} else {
					require.NoError(t, p.Release(ctx))
				}
			case n > 5:
				_, err := s.TryAcquire(ctx, n, timeout)
				require.ErrorIs(t, err, semaphore.ErrTooMany, n)
			default:
				p, err := s.TryAcquire(ctx, n, timeout)
				require.NoError(t, err)
				require.NotNil(t, p, "%d within %v", n, timeout)
				require.Equal(t, n, p.Permits())
				require.NoError(t, p.Release(ctx))
			}
		}
		if n < 1 || int64(n) > 1<<31 {
			unasked(func() { require.ErrorIs(t, s.SetPermits(ctx, n), semaphore.ErrInvalidPermits) })
			require.ErrorIs(t, w.SetLimit(ctx, n), slidingwindow.ErrInvalidPermits)
		}
		if n < 1 || n > 5 {
			_, err := w.AllowN(ctx, n) // Redis may be asked whether the limit was raised
			require.ErrorIs(t, err, slidingwindow.ErrInvalidPermits)
		}
	}
	require.NoError(t, redistest.Poll(limit, func() error { // permits of callers that have left are refunded in the background
		held, err := s.Holders(ctx)
		if err == nil && len(held) > 0 {
			err = fmt.Errorf("held: %v", held)
		}
		return err
	}))
	ok, err := w.AllowN(ctx, 5)
	require.NoError(t, err)
	require.True(t, ok, "nothing was counted")
	for _, window := range durations {
		for _, resolution := range durations {
			unasked(func() {
				_, err := slidingwindow.New("y", 1, window, resolution, slidingwindow.WithRedis(client))
				if window <= 0 || resolution < time.Millisecond {
					require.ErrorIs(t, err, slidingwindow.ErrInvalidConfig, "%v of %v", resolution, window)
				}
			})
		}
	}
	require.NoError(t, s.Close(ctx))
}
