package tokenbucket_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// A context that is done takes nothing and comes back as the error; a wait that cannot end in time fails at once.
func TestContext(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		l, err := tb.NewSmoothBursty("x", 5, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		require.NoError(t, l.Reset(ctx))
		before, err := l.State(ctx)
		require.NoError(t, err)

		done, cancel := context.WithCancel(ctx)
		cancel()
		_, err = l.Acquire(done, 1)
		require.ErrorIs(t, err, context.Canceled)
		_, err = l.TryAcquire(done, 1, time.Second)
		require.ErrorIs(t, err, context.Canceled)
		_, err = l.Try(done)
		require.ErrorIs(t, err, context.Canceled)
		_, err = l.Reserve(done, 1)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, l.SetRate(done, 7), context.Canceled)
		require.ErrorIs(t, l.Reset(done), context.Canceled)
		_, err = l.State(done)
		require.ErrorIs(t, err, context.Canceled)

		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		var tooLong *tb.WaitError
		_, err = l.Acquire(short, 10)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorAs(t, err, &tooLong)
		require.Equal(t, 1800*time.Millisecond, tooLong.Wait)
		_, err = l.TryAcquire(short, 10, 5*time.Second)
		require.ErrorAs(t, err, &tooLong)
		_, err = l.TryReserve(short, 10, 5*time.Second)
		require.ErrorAs(t, err, &tooLong)
		_, err = l.Reserve(short, 10)
		require.ErrorAs(t, err, &tooLong)
		require.NoError(t, short.Err(), "all of it before the deadline")

		after, err := l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, before.StoredPermits, after.StoredPermits)
		require.Equal(t, before.NextFreeTicketMicros, after.NextFreeTicketMicros)
	})
}

// Waiting, in a bubble where time passes only while everybody waits: each at its own time, first come first served.
func TestWaitingIsExactAndInOrder(t *testing.T) {
	t.Run("waiting", func(t *testing.T) { waitingIsExactAndInOrder(t, 50, 2) })
	t.Run("uncovered beyond the horizon", func(t *testing.T) { waitingIsExactAndInOrder(t, 2500, 1) })
}

func waitingIsExactAndInOrder(t *testing.T, n, verbs int) {
	synctest.Test(t, func(t *testing.T) {
		l, err := tb.NewSmoothBursty("x", 10, tb.WithMaxPermits(1))
		require.NoError(t, err)
		start := time.Now()
		var mu sync.Mutex
		var order []int
		var callers sync.WaitGroup
		for i := range n {
			callers.Go(func() {
				var err error
				if i%verbs == 0 {
					var waited time.Duration
					waited, err = l.Acquire(ctx, 1)
					require.Equal(t, time.Duration(i)*100*time.Millisecond, waited)
				} else {
					_, err = l.TryAcquire(ctx, 1, time.Hour)
				}
				require.NoError(t, err)
				require.Equal(t, time.Duration(i)*100*time.Millisecond, time.Since(start))
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
			})
			synctest.Wait()
		}
		callers.Wait()
		require.True(t, slices.IsSorted(order), order)
	})
}

// Those who are due in the same instant are let go in order, whatever they asked for, and cancelled ones drop out.
func TestFirstComeFirstServed(t *testing.T) {
	clock := clockwork.NewFakeClock()
	l, err := tb.NewSmoothBursty("x", 1e6, tb.WithClock(clock), tb.WithMaxPermits(0))
	require.NoError(t, err)
	var held []*tb.Reservation
	for range 1000 {
		r, err := l.Reserve(ctx, 1+rand.IntN(50))
		require.NoError(t, err)
		held = append(held, r)
	}
	last := time.Duration(0)
	for i, r := range held {
		if i%3 == 0 {
			require.NoError(t, r.Cancel(ctx))
			continue
		}
		require.GreaterOrEqual(t, r.Delay(), last)
		last = r.Delay()
	}
	clock.Advance(time.Second)
	for i, r := range held {
		if i%3 != 0 {
			<-r.Ready()
		}
	}
	for i, r := range held {
		select {
		case <-r.Ready():
			require.NotZero(t, i%3, "a cancelled reservation never falls due")
		default:
			require.Zero(t, i%3)
		}
	}
}

// No trap for small rates.
func TestSmallRates(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		l, err := tb.NewSmoothBursty("tenth", 0.1, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		for range 50 {
			ok, err := l.Try(ctx)
			require.NoError(t, err)
			require.True(t, ok)
			clock.Advance(10 * time.Second)
		}

		require.NoError(t, l.Reset(ctx))
		l, err = tb.NewSmoothBursty("scaled", 5, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		require.NoError(t, l.SetRate(ctx, 0.5))
		for range 20 {
			clock.Advance(2 * time.Second)
			ok, err := l.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
		}
		require.Equal(t, 0.5, l.Rate())
		require.NoError(t, l.SetRate(ctx, 5))
		b, err := l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 5.0, b.MaxPermits)

		for _, timeout := range []time.Duration{0, time.Millisecond, 300 * time.Millisecond, time.Second} {
			l, err := tb.NewSmoothWarmingUp(fmt.Sprint("cold", timeout), 2, 10*time.Second, tb.WithStore(open()), patient, tb.WithClock(clock))
			require.NoError(t, err)
			granted := 0
			for range 240 {
				r, err := l.TryReserve(ctx, 1, timeout)
				require.NoError(t, err)
				if r.OK() {
					granted++
				}
				clock.Advance(250 * time.Millisecond)
			}
			require.GreaterOrEqual(t, granted, 60, "in a minute, cold interval 1.5 s")
		}
	})
}

// What could never be granted is an error that names the shortest timeout that would do, and takes nothing.
func TestNeverGrantable(t *testing.T) {
	for _, c := range []struct {
		name    string
		limiter func() (*tb.RateLimiter, error)
		permits int
		timeout time.Duration
		least   time.Duration
	}{
		{"no burst, no timeout", func() (*tb.RateLimiter, error) { return tb.NewSmoothBursty("x", 5, tb.WithMaxPermits(0)) }, 1, 0, 200 * time.Millisecond},
		{"more than the bucket", func() (*tb.RateLimiter, error) { return tb.NewSmoothBursty("x", 5) }, 8, 599 * time.Millisecond, 600 * time.Millisecond},
		{"cold, paid now", func() (*tb.RateLimiter, error) {
			return tb.NewSmoothWarmingUp("x", 5, 4*time.Second, tb.WithPayment(tb.PayNow))
		}, 1, 500 * time.Millisecond, 580 * time.Millisecond}, // from 600 ms to 560 ms along the curve
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := c.limiter()
			require.NoError(t, err)
			var never *tb.WaitError
			ok, err := l.TryAcquire(ctx, c.permits, c.timeout)
			require.False(t, ok)
			require.ErrorIs(t, err, tb.ErrNeverGranted)
			require.NotErrorIs(t, err, tb.ErrInvalidPermits, "the number is valid: with a longer timeout it is granted")
			require.ErrorAs(t, err, &never)
			require.Equal(t, tb.ErrNeverGranted, never.Reason)
			require.Equal(t, c.least, never.Wait)
			require.Contains(t, err.Error(), c.least.String())
			r, err := l.TryReserve(ctx, c.permits, never.Wait)
			require.NoError(t, err)
			require.True(t, r.OK() || c.name == "more than the bucket", "the shortest timeout does")
		})
	}
	l, err := tb.NewSmoothBursty("x", 5, tb.WithMaxPermits(0), tb.WithPayment(tb.PayLater))
	require.NoError(t, err)
	ok, err := l.TryAcquire(ctx, 100, 0)
	require.NoError(t, err)
	require.True(t, ok, "whoever comes next pays")
}

// Calls against a checker of any sliding window, each arriving up to the jitter late: never more than n. A million of them in
// CI, a tenth elsewhere.
func TestNewQuota(t *testing.T) {
	const jitter = 2 * time.Millisecond
	for _, q := range []struct {
		n      int
		window time.Duration
	}{{5, time.Second}, {100, time.Second}, {100, time.Minute}, {1, 250 * time.Millisecond}} {
		t.Run(fmt.Sprint(q.n, " in ", q.window), func(t *testing.T) {
			clock := clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))
			start := clock.Now()
			l, err := tb.NewQuota("x", q.n, q.window, jitter, tb.WithClock(clock))
			require.NoError(t, err)
			rate := l.Rate()
			calls := tb.Sized(250_000, 25_000) // × 4 quotas
			arrivals := make([]time.Duration, 0, calls)
			at := clock.Now()
			for range calls {
				r, err := l.Reserve(ctx, 1)
				require.NoError(t, err)
				at = at.Add(r.Delay())
				clock.Advance(at.Sub(clock.Now()))
				arrivals = append(arrivals, at.Sub(start)+rand.N(jitter+1))
				if rand.IntN(200) == 0 { // a pause fills the bucket: one permit
					at = at.Add(rand.N(2 * q.window))
					clock.Advance(at.Sub(clock.Now()))
				}
			}
			slices.Sort(arrivals)
			closest := time.Duration(math.MaxInt64) // n+1 calls
			for i := q.n; i < len(arrivals); i++ {
				closest = min(closest, arrivals[i]-arrivals[i-q.n])
			}
			require.GreaterOrEqual(t, closest, q.window)
			full := float64(q.n) / q.window.Seconds()
			require.GreaterOrEqual(t, rate, 0.95*full)
			busy := 0 // all but the half percent before which there was a pause
			for i := 1; i < len(arrivals); i++ {
				if arrivals[i]-arrivals[i-1] <= time.Duration(1e9/rate)+jitter+1 {
					busy++
				}
			}
			require.GreaterOrEqual(t, busy, calls*98/100)
		})
	}
}

// soon calls until it returns nil, and returns the error of the last call after thirty seconds.
func soon(call func() error) error {
	for began := time.Now(); ; time.Sleep(20 * time.Microsecond) {
		if err := call(); err == nil || time.Since(began) > 30*time.Second {
			return err
		}
	}
}

// Acquire reserves a second ahead, and no further; those beyond wait here, in order, and none is lost.
func TestHorizon(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		l, err := tb.NewSmoothBursty("x", 5, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		require.NoError(t, l.Reset(ctx))
		const callers = 120 // 24 s of permits
		var served sync.WaitGroup
		var passed, asked atomic.Int64
		for i := range callers {
			served.Go(func() {
				asked.Add(1)
				_, err := l.Acquire(ctx, 1)
				require.NoError(t, err)
				passed.Add(1)
			})
			require.NoError(t, soon(func() error { // until it has reserved, if it may
				b, err := l.State(ctx)
				require.NoError(t, err)
				ahead := b.NextFreeTicketMicros - clock.Now().UnixMicro()
				if asked.Load() <= int64(i) || i < 4 && ahead < int64(i)*200_000 {
					return fmt.Errorf("caller %d has not reserved: %d µs are", i, ahead)
				}
				return nil
			}))
		}
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_, err = l.Acquire(short, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded, "which cannot be in time")
		for due := range int64(callers) { // each at its time
			b, err := l.State(ctx)
			require.NoError(t, err)
			require.LessOrEqual(t, b.NextFreeTicketMicros-clock.Now().UnixMicro(), int64(1_200_000))
			require.NoError(t, soon(func() error {
				if n := passed.Load(); n < due+1 {
					return fmt.Errorf("%d passed after %d × 200 ms", n, due)
				}
				return nil
			}))
			require.Equal(t, due+1, passed.Load())
			clock.Advance(200 * time.Millisecond)
		}
		served.Wait()
	})
}

// A large request does not starve behind small ones, nor is it out of Acquire's reach.
func TestLargeAcquire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := tb.NewSmoothBursty("x", 10)
		require.NoError(t, err)
		stop := make(chan struct{})
		var small sync.WaitGroup
		for range 30 {
			small.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					_, err := l.Acquire(ctx, 1)
					require.NoError(t, err)
				}
			})
		}
		synctest.Wait()
		began := time.Now()
		_, err = l.Acquire(ctx, 200)
		require.NoError(t, err)
		require.Less(t, time.Since(began), time.Minute)
		close(stop)
		small.Wait()
	})
}

// Off, the switch lets everything pass at once, and no store is touched.
func TestSwitch(t *testing.T) {
	var on atomic.Bool
	l, err := tb.NewSmoothBursty("x", 1, tb.WithStore(failing{}), tb.WithSwitch(on.Load))
	require.NoError(t, err)
	for range 10 {
		waited, err := l.Acquire(ctx, 1000)
		require.NoError(t, err)
		require.Zero(t, waited)
		ok, err := l.Try(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		r, err := l.Reserve(ctx, 7)
		require.NoError(t, err)
		require.True(t, r.OK())
		require.Zero(t, r.Delay())
		<-r.Ready()
		require.NoError(t, r.Cancel(ctx))
	}
	_, err = l.Acquire(ctx, 0)
	require.ErrorIs(t, err, tb.ErrInvalidPermits)
	on.Store(true)
	_, err = l.Try(ctx)
	require.ErrorIs(t, err, errStore)
}

var errStore = errors.New("store failed")

type failing struct{}

func (failing) Apply(context.Context, *tb.Batch) error { return errStore }

// Try waits as long as WithMaxWait says, and half a second without it.
func TestMaxWait(t *testing.T) {
	for _, c := range []struct {
		opts []tb.Option
		want int
	}{
		{nil, 3},
		{[]tb.Option{tb.WithMaxWait(0)}, 1},
		{[]tb.Option{tb.WithMaxWait(199_999 * time.Microsecond)}, 1},
		{[]tb.Option{tb.WithMaxWait(200 * time.Millisecond)}, 2},
		{[]tb.Option{tb.WithMaxWait(500 * time.Millisecond)}, 3},
		{[]tb.Option{tb.WithMaxWait(9990 * time.Millisecond)}, 50},
	} {
		synctest.Test(t, func(t *testing.T) {
			l, err := tb.NewSmoothBursty("x", 5, c.opts...)
			require.NoError(t, err)
			var passed atomic.Int64
			var all sync.WaitGroup
			for range 60 {
				all.Go(func() {
					ok, err := l.Try(ctx)
					require.NoError(t, err)
					if ok {
						passed.Add(1)
					}
				})
			}
			all.Wait()
			require.EqualValues(t, c.want, passed.Load())
		})
	}
}

// lines is a channel of log lines.
type lines chan string

func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

// The newest version wins for the fleet, on every store; an older gateway learns it with its next answer.
func TestVersions(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		store := open()
		limiter := func(rate float64, opts ...tb.Option) *tb.RateLimiter {
			l, err := tb.NewSmoothBursty("x", rate, append(opts, tb.WithStore(store), patient, tb.WithClock(clock))...)
			require.NoError(t, err)
			return l
		}
		state := func(l *tb.RateLimiter) tb.PermitBucket {
			b, err := l.State(ctx)
			require.NoError(t, err)
			return b
		}
		touch := func(l *tb.RateLimiter) {
			_, err := l.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
		}
		old, newer := limiter(10, tb.WithVersion(1)), limiter(20, tb.WithVersion(2))
		touch(old)
		clock.Advance(500 * time.Millisecond)
		require.InDelta(t, 5, state(old).StoredPermits, 1e-9)
		touch(newer)
		require.InDelta(t, 9, state(newer).StoredPermits, 1e-9, "5 of 10 are 10 of 20, and one was taken")
		touch(old)
		require.Equal(t, 20.0, old.Rate())
		require.InDelta(t, 8, state(old).StoredPermits, 1e-9, "scaled once")

		require.NoError(t, old.SetRate(ctx, 40))
		require.NoError(t, old.SetRate(ctx, 80))
		require.EqualValues(t, 4, state(old).Version)
		require.Equal(t, 80.0, state(newer).MaxPermits)
		require.InDelta(t, 32, state(newer).StoredPermits, 1e-9)
		touch(newer)
		require.Equal(t, 80.0, newer.Rate())

		require.NoError(t, newer.Reset(ctx))
		require.EqualValues(t, 2, state(newer).Version)
		require.Equal(t, 20.0, newer.Rate())
		touch(old)
		require.Equal(t, 20.0, old.Rate(), "the reset holds for everybody")

		// Equal versions, different contents: all nodes agree on one of them, and say so.
		log := make(lines, 10)
		logger := slog.Default()
		slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))
		defer slog.SetDefault(logger)
		a, b := limiter(30, tb.WithVersion(9)), limiter(31, tb.WithVersion(9))
		for range 4 {
			touch(a)
			touch(b)
		}
		require.Equal(t, a.Rate(), b.Rate())
		require.Contains(t, <-log, "same version")
		require.Empty(t, log)

		warm, err := tb.NewSmoothWarmingUp("x", 5, time.Second, tb.WithStore(store), tb.WithClock(clock), tb.WithVersion(10))
		require.NoError(t, err)
		_, err = warm.Try(ctx)
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
		require.ErrorContains(t, err, "bursty")
		require.ErrorIs(t, warm.SetRate(ctx, 7), tb.ErrInvalidConfig)
		require.EqualValues(t, 9, state(a).Version)
	})
}

// Bad input is an error from the call that received it, which names the field and the value.
func TestBadInput(t *testing.T) {
	bursty := func(name string, rate float64, opts ...tb.Option) error {
		l, err := tb.NewSmoothBursty(name, rate, opts...)
		require.Nil(t, l)
		return err
	}
	warm := func(rate float64, period time.Duration, opts ...tb.Option) error {
		l, err := tb.NewSmoothWarmingUp("x", rate, period, opts...)
		require.Nil(t, l)
		return err
	}
	quota := func(n int, window, jitter time.Duration) error {
		l, err := tb.NewQuota("x", n, window, jitter)
		require.Nil(t, l)
		return err
	}
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		says string
		err  error
	}{
		{"permits per second NaN", bursty("x", nan)},
		{"permits per second +Inf", bursty("x", inf)},
		{"permits per second -Inf", bursty("x", -inf)},
		{"permits per second 0", bursty("x", 0)},
		{"permits per second -1", bursty("x", -1)},
		{"permits per second 1e-12", bursty("x", 1e-12)},
		{"permits per second 1.12e-10", bursty("x", 1.12e-10)},
		{"permits per second 1.12e-10", warm(1.12e-10, time.Second)},
		{"permits per second 9.99e-10", bursty("x", 9.99e-10)},
		{"cold factor 9", warm(1e-9, time.Second, tb.WithColdFactor(9))},
		{"permits per second 1e+300", bursty("x", 1e300)},
		{"permits per second NaN", warm(nan, time.Second)},
		{"warm-up period 0", warm(5, 0)},
		{"warm-up period -", warm(5, -time.Second)},
		{"warm-up period 0", warm(5, time.Nanosecond)},
		{"cold factor NaN", warm(5, time.Second, tb.WithColdFactor(nan))},
		{"cold factor +Inf", warm(5, time.Second, tb.WithColdFactor(inf))},
		{"cold factor 1", warm(5, time.Second, tb.WithColdFactor(1))},
		{"cold factor 3: want none for a bursty limiter", bursty("x", 5, tb.WithColdFactor(3))},
		{"max permits 3: want none for a limiter that warms up", warm(5, time.Second, tb.WithMaxPermits(3))},
		{"initial permits 3: want none", warm(5, time.Second, tb.WithInitialPermits(3))},
		{"max permits NaN", bursty("x", 5, tb.WithMaxPermits(nan))},
		{"max permits -1", bursty("x", 5, tb.WithMaxPermits(-1))},
		{"max permits +Inf", bursty("x", 5, tb.WithMaxPermits(inf))},
		{"initial permits 6", bursty("x", 5, tb.WithInitialPermits(6))},
		{"initial permits NaN", bursty("x", 5, tb.WithInitialPermits(nan))},
		{"initial permits -1", bursty("x", 5, tb.WithInitialPermits(-1))},
		{"max wait -1ns", bursty("x", 5, tb.WithMaxWait(-1))},
		{"max wait -2562047h47m16.854775808s", bursty("x", 5, tb.WithMaxWait(math.MinInt64))},
		{"payment 7", bursty("x", 5, tb.WithPayment(7))},
		{"version -1", bursty("x", 5, tb.WithVersion(-1))},
		{"version 9007199254740993", bursty("x", 5, tb.WithVersion(1<<53+1))},
		{"store timeout -1ns", bursty("x", 5, tb.WithStoreTimeout(-1))},
		{"switch nil", bursty("x", 5, tb.WithSwitch(nil))},
		{"option nil", bursty("x", 5, nil)},
		{"store", bursty("x", 5, tb.WithStore(nil))},
		{"store", bursty("x", 5, tb.WithStore((*tb.MemoryStore)(nil)))},
		{"store", bursty("x", 5, tb.WithStore((*tb.RedisStore)(nil)))},
		{"store", bursty("x", 5, tb.WithStore((*tb.RedisScriptStore)(nil)))},
		{"store the zero value: want one made by its constructor", bursty("x", 5, tb.WithStore(&tb.RedisStore{}))},
		{"redis client nil", bursty("x", 5, tb.WithStore(tb.NewRedisStore(nil)))},
		{"redis client nil", bursty("x", 5, tb.WithStore(tb.NewRedisScriptStore(nil)))},
		{`key prefix "a{b"`, bursty("x", 5, tb.WithStore(tb.NewRedisScriptStore(redisClient(t), tb.WithKeyPrefix("a{b"))))},
		{"lock time to live 1ms", bursty("x", 5, tb.WithStore(tb.NewRedisStore(redisClient(t), tb.WithLockTTL(time.Millisecond))))},
		{"redis option nil", bursty("x", 5, tb.WithStore(tb.NewRedisStore(redisClient(t), nil)))},
		{"clock", bursty("x", 5, tb.WithClock(nil))},
		{"clock 0001-01-01", bursty("x", 5, tb.WithClock(clockwork.NewFakeClockAt(time.Time{})))},
		{"failure policy LocalShare(0)", bursty("x", 5, tb.WithFailurePolicy(tb.LocalShare(0)))},
		{"failure policy LocalShare(-1)", bursty("x", 5, tb.WithFailurePolicy(tb.LocalShare(-1)))},
		{"failure policy LocalShare(-922", bursty("x", 5, tb.WithFailurePolicy(tb.LocalShare(math.MinInt)))},
		{"failure policy LocalShare(2)", bursty("x", 5, tb.WithStore(incomparable{}), tb.WithFailurePolicy(tb.LocalShare(2)))},
		{`name "" of 0 bytes`, bursty("", 5)},
		{"of 513 bytes", bursty(strings.Repeat("x", 513), 5)},
		{"UTF-8", bursty("a\xffb", 5)},
		{"quota 0", quota(0, time.Second, 0)},
		{"quota window 0s", quota(5, 0, 0)},
		{"quota jitter -1ns", quota(5, time.Second, -1)},
	} {
		require.ErrorIs(t, c.err, tb.ErrInvalidConfig, c.says)
		require.ErrorContains(t, c.err, c.says)
	}

	never := []int{0, -1, math.MinInt}
	if strconv.IntSize == 64 { // the most that an int of 32 bits holds is due in 14 years
		never = append(never, math.MaxInt, math.MaxInt>>10, math.MaxInt>>23)
	}
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		l, err := tb.NewSmoothBursty("x", 5, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		for _, permits := range never {
			_, err = l.Acquire(ctx, permits)
			require.ErrorIs(t, err, tb.ErrInvalidPermits, permits)
			require.ErrorContains(t, err, fmt.Sprint(permits))
			_, err = l.TryAcquire(ctx, permits, time.Second)
			require.ErrorIs(t, err, tb.ErrInvalidPermits, permits)
			_, err = l.Reserve(ctx, permits)
			require.ErrorIs(t, err, tb.ErrInvalidPermits, permits)
		}
		for _, rate := range []float64{nan, inf, -inf, 0, -1, 1e-300, 1e300} {
			err := l.SetRate(ctx, rate)
			require.ErrorIs(t, err, tb.ErrInvalidConfig, rate)
			require.ErrorContains(t, err, fmt.Sprint(rate))
		}
		b, err := l.State(ctx)
		require.NoError(t, err)
		require.EqualValues(t, 1, b.Seq, "nothing was written")
		require.Equal(t, 1.0, b.StoredPermits)
		// Many that each fit, until the sum does not.
		for range 100 {
			if _, err = l.Reserve(ctx, 1<<31-1); err != nil {
				break
			}
		}
		require.ErrorIs(t, err, tb.ErrInvalidPermits)
	})
}

// What could never be granted by the configuration that this process knows is asked for all the same, ten times a second at most:
// another process may have changed it.
func TestNeverGrantedByAnOldConfiguration(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		asked := &counted{Store: open()}
		a, err := tb.NewSmoothBursty("x", 1, tb.WithStore(asked), patient, tb.WithClock(clock))
		require.NoError(t, err)
		b, err := tb.NewSmoothBursty("x", 1, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		for range 50 {
			_, err := a.TryAcquire(ctx, 10, 0)
			require.ErrorIs(t, err, tb.ErrNeverGranted)
			_, err = a.TryReserve(ctx, 10, time.Second)
			require.ErrorIs(t, err, tb.ErrNeverGranted)
		}
		require.Equal(t, 1, asked.calls, "within 100 ms")

		require.NoError(t, b.SetRate(ctx, 1000))
		clock.Advance(100 * time.Millisecond)
		ok, err := a.TryAcquire(ctx, 10, 0)
		require.NoError(t, err)
		require.True(t, ok)
		require.EqualValues(t, 1000, a.Rate())
		r, err := a.TryReserve(ctx, 10, 0)
		require.NoError(t, err)
		require.True(t, r.OK())

		require.NoError(t, b.SetRate(ctx, 1))
		clock.Advance(time.Hour)
		var never *tb.WaitError
		_, err = a.TryAcquire(ctx, 10, time.Second)
		require.ErrorAs(t, err, &never, "the answer says that it cannot be granted")
		require.Equal(t, 9*time.Second, never.Wait)

		slow, err := tb.NewSmoothBursty("y", 0.001, tb.WithStore(asked), tb.WithClock(clock))
		require.NoError(t, err)
		for range 10 {
			_, err = slow.TryAcquire(ctx, 10_000_000, math.MaxInt64)
			require.ErrorIs(t, err, tb.ErrInvalidPermits, "300 years")
		}
		b, err = tb.NewSmoothBursty("y", 0.001, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		require.NoError(t, b.SetRate(ctx, 1e7))
		clock.Advance(100 * time.Millisecond)
		r, err = slow.Reserve(ctx, 10_000_000)
		require.NoError(t, err)
		require.LessOrEqual(t, r.Delay(), time.Second)
	})
}

// Whatever rate a limiter can be made with, its calls are answered, on every store: the slowest is a permit in 32 years.
func TestSlowestRate(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		store := open()
		bursty, err := tb.NewSmoothBursty("bursty", 1e-9, tb.WithStore(store), patient, tb.WithClock(clock))
		require.NoError(t, err)
		warm, err := tb.NewSmoothWarmingUp("warm", 2.5e-9, time.Second, tb.WithStore(store), patient, tb.WithClock(clock), tb.WithColdFactor(2.5))
		require.NoError(t, err)
		for _, l := range []*tb.RateLimiter{bursty, warm} {
			for i := range 3 {
				ok, err := l.TryAcquire(ctx, 1, time.Hour)
				require.NoError(t, err)
				require.Equal(t, i == 0, ok, "%v, call %d", l, i)
			}
			r, err := l.Reserve(ctx, 1)
			require.NoError(t, err)
			require.Greater(t, r.Delay(), 10*365*24*time.Hour)
			ok, err := l.Try(ctx)
			require.NoError(t, err)
			require.False(t, ok)
			require.ErrorIs(t, l.SetRate(ctx, 1.12e-10), tb.ErrInvalidConfig)
		}
	})
}

// With PayLater a caller waits for the debt that it finds and not for its own cost, also behind others who wait.
func TestPayLaterWaitsForTheDebt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := tb.NewSmoothBursty("x", 5, tb.WithPayment(tb.PayLater))
		require.NoError(t, err)
		_, err = l.Reserve(t.Context(), 20) // one is there, and 19 are 3.8 s
		require.NoError(t, err)
		go func() { _, _ = l.Acquire(context.Background(), 1) }() // 200 ms more for who comes behind it
		synctest.Wait()
		deadline, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		waited, err := l.Acquire(deadline, 100)
		require.NoError(t, err)
		require.Equal(t, 4*time.Second, waited)
	})
}

// A MemoryStore's answer costs no allocation, before SetRate and after: granted and refused.
func TestMemoryStoreAllocatesNothing(t *testing.T) {
	clock := clockwork.NewFakeClock()
	l, err := tb.NewSmoothBursty("x", 500, tb.WithClock(clock), tb.WithInitialPermits(500))
	require.NoError(t, err)
	granted, refused := 0, 0
	measure := func(runs int) float64 {
		return testing.AllocsPerRun(runs, func() {
			switch ok, err := l.TryAcquire(ctx, 1, 0); {
			case err != nil:
				t.Fatal(err)
			case ok:
				granted++
			default:
				refused++
			}
		})
	}
	require.Zero(t, measure(99), "granted")
	require.NoError(t, l.SetRate(ctx, 250))
	require.Zero(t, measure(199), "granted at another rate")
	require.Equal(t, 300, granted)
	require.Zero(t, measure(99), "refused at another rate")
	require.Equal(t, 100, refused)
	require.EqualValues(t, 250, l.Rate())
}

// Policies are constants: no package can change the meaning of another package's WithFailurePolicy(FailOpen).
func TestPoliciesAreConstants(t *testing.T) {
	const closed, opened = tb.FailClosed, tb.FailOpen
	var zero tb.FailurePolicy
	require.Equal(t, closed, zero)
	require.NotEqual(t, closed, opened)
	for n, share := range map[int]tb.FailurePolicy{0: tb.LocalShare(0), -1: tb.LocalShare(-1), math.MinInt: tb.LocalShare(math.MinInt)} {
		_, err := tb.NewSmoothBursty("x", 5, tb.WithFailurePolicy(share))
		require.ErrorContains(t, err, fmt.Sprintf("failure policy LocalShare(%d)", max(n, math.MinInt+2)))
	}
}

// incomparable is a store that cannot be recognised again.
type incomparable struct {
	tb.Store
	_ []int
}
