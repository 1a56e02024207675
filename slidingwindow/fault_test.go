package slidingwindow

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

const (
	minPause = waiting.MinPause
	maxPause = waiting.MaxPause
)

func TestBadInput(t *testing.T) {
	client := redistestNone{}
	make := func(limit int, window, resolution time.Duration, opts ...Option) func() (*Limiter, error) {
		return func() (*Limiter, error) { return New("x", limit, window, resolution, opts...) }
	}
	for want, f := range map[string]func() (*Limiter, error){
		"limit 0:":             make(0, time.Minute, time.Second),
		"limit -1:":            make(-1, time.Minute, time.Second),
		"limit 92233720":       make(math.MaxInt, time.Minute, time.Second),
		"window 0s:":           make(1, 0, time.Second),
		"window -1m0s:":        make(1, -time.Minute, time.Second),
		"resolution 0s:":       make(1, time.Minute, 0),
		"resolution -1s:":      make(1, time.Minute, -time.Second),
		"resolution 999µs:":    make(1, time.Minute, 999*time.Microsecond),
		"resolution 1.0000":    make(1, time.Minute, time.Millisecond+1),
		"resolution 7s:":       make(1, time.Minute, 7*time.Second),
		"resolution 2m0s:":     make(1, time.Minute, 2*time.Minute),
		"window 884760h0m0.00": make(1, maxWindow+time.Millisecond, maxWindow+time.Millisecond),
		"resolution 1ms:":      make(1, time.Minute, time.Millisecond),
		"redis client nil:":    make(1, time.Minute, time.Second, WithRedis((*redis.Client)(nil))),
		"client pipeline:":     make(1, time.Minute, time.Second, WithRedis(new(redis.Pipeline))),
		"share 5: want WithRe": make(1, time.Minute, time.Second, WithFailurePolicy(LocalShare(5))),
		"option nil:":          make(1, time.Minute, time.Second, nil),
		"timeout 0s:":          make(1, time.Minute, time.Second, WithStoreTimeout(0)),
		"timeout 1h0m0s:":      make(1, time.Minute, time.Second, WithStoreTimeout(time.Hour)),
		"max waiters 0:":       make(1, time.Minute, time.Second, WithMaxWaiters(0)),
		"share 0:":             make(1, time.Minute, time.Second, WithFailurePolicy(LocalShare(0))),
		"share -6:":            make(1, time.Minute, time.Second, WithFailurePolicy(LocalShare(-6))),
		"clock nil:":           make(1, time.Minute, time.Second, WithClock(nil)),
		"local time without R": make(1, time.Minute, time.Second, WithLocalTime()),
		`key prefix "{x}":`:    make(1, time.Minute, time.Second, WithRedis(client), WithKeyPrefix("{x}")),
		`name "" of 0 bytes:`:  func() (*Limiter, error) { return New("", 1, time.Minute, time.Second) },
		"of 513 bytes:":        func() (*Limiter, error) { return New(strings.Repeat("x", 513), 1, time.Minute, time.Second) },
		"limiter \"7\": limit": func() (*Limiter, error) { return NewKey(7, 0, time.Minute, time.Second) },
	} {
		l, err := f()
		require.Nil(t, l, want)
		var invalid *InvalidError
		require.ErrorIs(t, err, ErrInvalidConfig, want)
		require.ErrorAs(t, err, &invalid, want)
		require.ErrorContains(t, err, want)
	}
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1", "b": "127.0.0.1:2"}})
	defer func() { _ = ring.Close() }()
	_, err := New("x", 1, time.Minute, time.Second, WithRedis(ring))
	require.ErrorIs(t, err, ErrInvalidConfig)
	require.ErrorContains(t, err, "HeartbeatFn")
	l, err := New("x", 5, 3*time.Millisecond, time.Millisecond)
	require.NoError(t, err)
	require.Equal(t, 3*time.Millisecond, l.Window())
	require.Equal(t, time.Millisecond, l.Resolution())
	for _, n := range []int{0, -1, 6, math.MaxInt, math.MinInt} {
		ok, err := l.AllowN(ctx, n)
		require.False(t, ok)
		require.ErrorIs(t, err, ErrInvalidPermits, "%d", n)
	}
	require.ErrorIs(t, l.SetLimit(ctx, 0), ErrInvalidPermits)
	require.Equal(t, time.Duration(math.MaxInt64), l.RetryAfter(6))
	require.Equal(t, 5, l.Limit())
	done, cancel := context.WithCancel(ctx)
	cancel()
	_, err = l.Allow(done)
	require.ErrorIs(t, err, context.Canceled)
	_, err = l.Remaining(done)
	require.ErrorIs(t, err, context.Canceled)
}

// A count that would no longer be exact is an error, in the process and in Redis.
func TestOverflow(t *testing.T) {
	const most = min(maxLimit, math.MaxInt)
	client := redistest.Shared(t).Client(t)
	for _, opts := range [][]Option{nil, {WithRedis(client), patient}} {
		clock := &handClock{micros: begin}
		if opts != nil {
			opts = append(opts, WithLocalTime())
		}
		l, err := New(unique(t), most, time.Minute, time.Minute, append(opts, WithClock(clock))...)
		require.NoError(t, err)
		_, err = l.AllowN(ctx, most)
		require.NoError(t, err)
		// The counts are set directly, because raising the limit step by step would take too long.
		if l.machine.key == "" {
			l.machine.admitted.counts.at(0).count = maxCount
			l.machine.admitted.counts.sum = 1
			l.machine.published.full.Store(nil)
		} else {
			now := clock.micros
			require.NoError(t, client.Set(ctx, l.machine.key, (&state{epoch: 7, seen: now, parts: []part{{now, maxCount}}}).String(), time.Minute).Err())
			l.process.Mu.Lock()
			l.machine.view.counts = counts{started: true, seen: now}
			l.machine.admitted.unreported.load(&l.machine.rule, now, []part{{now, 1}}) // Redis refuses before it counts too many, but not what it is told
			l.process.Mu.Unlock()
		}
		_, err = l.Allow(ctx)
		require.ErrorIs(t, err, ErrOverflow)
	}
}

// withFailures returns an option that calls f with the error of each failed round trip, and with nil for the first one that succeeds after a
// failure.
func withFailures(f func(error)) Option {
	var mu sync.Mutex
	failing := false
	return WithObserver(Observer{Trip: func(trip Trip) {
		mu.Lock()
		defer mu.Unlock()
		if failing || trip.Err != nil {
			f(trip.Err)
		}
		failing = trip.Err != nil
	}})
}

// A value that is not a state is an error that names the key, and is not overwritten.
func TestCorrupt(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	var told atomic.Int64
	l, err := New(unique(t)+" {}", 5, time.Minute, time.Second, WithRedis(client), patient, WithFailurePolicy(FailOpen), withFailures(func(err error) {
		if errors.Is(err, ErrCorruptState) {
			told.Add(1)
		}
	}))
	require.NoError(t, err)
	key := l.machine.key
	require.NotContains(t, key, " ")
	require.NoError(t, client.LPush(ctx, key, "x").Err())
	for range 2 {
		_, err = l.Allow(ctx)
		require.ErrorIs(t, err, ErrCorruptState)
		require.ErrorContains(t, err, key)
	}
	require.Equal(t, []string{"x"}, client.LRange(ctx, key, 0, -1).Val())
	require.NoError(t, client.Set(ctx, key, "tb1 epoch=5", 0).Err())
	_, err = l.Allow(ctx)
	require.ErrorIs(t, err, ErrCorruptState)
	require.ErrorContains(t, err, "tb1 epoch=5", "the error quotes the value")
	require.Equal(t, "tb1 epoch=5", client.Get(ctx, key).Val())
	for text, shown := range map[string]string{
		"WRONGTYPE \x1b[2Jé":                                `"WRONGTYPE ?[2J??"`,
		strings.Repeat("0123456789", 8) + "beyond 80 bytes": `789"`,
	} {
		require.NoError(t, client.Set(ctx, key, text, 0).Err())
		_, err = l.Allow(ctx)
		require.ErrorIs(t, err, ErrCorruptState)
		require.ErrorContains(t, err, shown)
	}
	_, err = l.Remaining(ctx)
	require.ErrorIs(t, err, ErrCorruptState)
	require.NoError(t, client.Del(ctx, key).Err())
	ok, err := l.Allow(ctx)
	require.NoError(t, err)
	require.True(t, ok)
	require.Eventually(t, func() bool { return told.Load() == 6 }, 10*time.Second, time.Millisecond)
}

// A failure that needs a repair is an error under every policy, also FailOpen and LocalShare, and is reported until it is repaired.
func TestUnusable(t *testing.T) {
	for says, err := range map[string]error{
		"WRONGPASS":               fakeReply("WRONGPASS invalid username-password pair or user is disabled."),
		"NOAUTH":                  fakeReply("NOAUTH Authentication required."),
		"NOPERM":                  fakeReply("NOPERM this user has no permissions to run the 'evalsha' command"),
		"MOVED":                   fakeReply("MOVED 3999 127.0.0.1:6381"),
		"script":                  fakeReply("ERR user_script:1: attempt to compare nil with number script: 6b81846, on @user_script:1."),
		redis.ErrClosed.Error():   redis.ErrClosed,
		"missing port in address": &net.OpError{Op: "dial", Net: "tcp", Err: &net.AddrError{Err: "missing port in address", Addr: "localhost"}},
	} {
		bubble(t, says, func(t *testing.T) {
			for _, policy := range []Option{WithFailurePolicy(FailClosed), WithFailurePolicy(FailOpen), WithFailurePolicy(LocalShare(5))} {
				client := &bubbleRedis{way: failing(err)}
				l, err := New("x", 5, time.Hour, time.Minute, WithRedis(client), policy)
				require.NoError(t, err)
				for range 10 {
					ok, err := l.Allow(ctx)
					require.False(t, ok)
					require.ErrorIs(t, err, ErrStoreUnusable)
					require.NotErrorIs(t, err, ErrStoreUnavailable)
					require.ErrorContains(t, err, says)
					require.ErrorContains(t, err, "limiter")
				}
				_, err = l.Remaining(ctx)
				require.ErrorIs(t, err, ErrStoreUnusable)
				client.by(nil)
				ok, err := l.Allow(ctx)
				require.NoError(t, err)
				require.True(t, ok, "as soon as it is repaired")
			}
		})
	}
}

// The observer receives every failed trip, and the reply that ends the failures.
func TestFailedTrips(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		var told []error
		l, err := New("x", 5, time.Hour, time.Minute, WithRedis(client), withFailures(func(err error) { told = append(told, err) }))
		require.NoError(t, err)
		allow := func(want error, hears ...error) {
			t.Helper()
			told = nil
			_, err := l.Allow(ctx)
			require.ErrorIs(t, err, want)
			synctest.Wait()
			require.Len(t, told, len(hears))
			for i := range hears {
				require.ErrorIs(t, told[i], hears[i])
			}
		}
		allow(nil)
		client.put(l.machine.key, "spoiled")
		allow(ErrCorruptState, ErrCorruptState)
		client.forget()
		allow(nil, nil)
		allow(nil)

		client.by(failing(refused))
		allow(ErrStoreUnavailable, ErrStoreUnavailable)
		client.put(l.machine.key, "spoiled")
		client.by(nil)
		time.Sleep(maxPause)
		allow(ErrStoreUnavailable, ErrCorruptState) // this call causes the round trip
		allow(ErrCorruptState, ErrCorruptState)
		client.forget()
		allow(nil, nil)
		allow(nil)
	})
}

// A script is executed once even if its reply is lost, whether the client or the caller gives up first.
func TestLostReply(t *testing.T) {
	for name, c := range map[string]struct {
		client, limiter time.Duration
		err             error
	}{
		"the limiter gives up": {5 * time.Second, 200 * time.Millisecond, ErrStoreTimeout},
		"the client gives up":  {300 * time.Millisecond, 5 * time.Second, os.ErrDeadlineExceeded},
	} {
		bubble(t, name, func(t *testing.T) {
			client := new(bubbleRedis)
			l, err := New("x", 5, time.Minute, time.Second, WithRedis(client))
			require.NoError(t, err)
			_, err = l.Allow(ctx)
			require.NoError(t, err)
			m, err := New("x", 5, time.Minute, time.Second, WithRedis(client), WithStoreTimeout(c.limiter))
			require.NoError(t, err)
			client.by(lost(c.client, os.ErrDeadlineExceeded))
			began := time.Now()
			_, err = m.Allow(ctx)
			require.Equal(t, min(c.client, c.limiter), time.Since(began))
			require.ErrorIs(t, err, ErrStoreUnavailable)
			require.ErrorIs(t, err, c.err)
			left, err := l.refreshed(t)
			require.NoError(t, err)
			require.Equal(t, 3, left)
			time.Sleep(c.client) // until the client has given up as well
			synctest.Wait()
			m.process.Mu.Lock()
			require.Zero(t, m.process.Abandoned)
			m.process.Mu.Unlock()
			require.EqualValues(t, 3, client.executed(), "two calls, and one batch without calls")
		})
	}
}

// refreshed returns Remaining after a new round trip.
func (l *Limiter) refreshed(t *testing.T) (int, error) {
	t.Helper()
	l.process.Mu.Lock()
	l.machine.view.valid = false
	l.process.Mu.Unlock()
	return l.Remaining(ctx)
}

// When Redis hangs, each caller returns by its own context or by the timeout. Then the policy decides at once. When Redis goes on, it counts
// again, including the permits admitted meanwhile. The client ignores contexts.
func TestAway(t *testing.T) {
	const timeout = 300 * time.Millisecond
	for _, c := range []struct {
		name     string
		opt      Option
		pass     int // of ten
		err      error
		retained int // of the limit of 10, after the outage
	}{
		{"refuse", WithFailurePolicy(FailClosed), 0, ErrStoreUnavailable, 9},
		{"pass", WithFailurePolicy(FailOpen), 10, nil, 0},
		{"share", WithFailurePolicy(LocalShare(4)), 3, nil, 6}, // one was admitted before the outage
	} {
		bubble(t, c.name, func(t *testing.T) {
			client := new(bubbleRedis)
			var told []error
			l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client), WithStoreTimeout(timeout), c.opt, withFailures(func(err error) {
				told = append(told, err)
			}))
			require.NoError(t, err)
			ok, err := l.Allow(ctx)
			require.NoError(t, err)
			require.True(t, ok)

			goOn := client.hang()
			impatient, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			began := time.Now()
			_, err = l.Allow(impatient)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, 20*time.Millisecond, time.Since(began))
			passed := 0
			for range 10 {
				ok, err := l.Allow(ctx)
				if c.err == nil {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, c.err)
				}
				if ok {
					passed++
				}
			}
			require.Equal(t, timeout, time.Since(began), "one timeout, not ten")
			require.Equal(t, c.pass, passed)
			_, err = l.Remaining(ctx)
			require.Equal(t, c.name == "share", err == nil)
			for range 10 { // its probes fail, and it keeps the permits to report
				_, _ = l.Allow(ctx)
				time.Sleep(maxPause)
			}
			synctest.Wait()
			require.GreaterOrEqual(t, len(told), 2)
			require.ErrorIs(t, told[0], ErrStoreUnavailable)
			for _, err := range told {
				require.Error(t, err)
			}

			goOn()
			for range 3 {
				time.Sleep(maxPause)
				_, _ = l.Remaining(ctx)
			}
			synctest.Wait()
			l.process.Mu.Lock()
			require.Nil(t, l.process.Outage.Down())
			require.Zero(t, l.machine.admitted.unreported.size)
			require.Zero(t, l.process.Abandoned)
			l.process.Mu.Unlock()
			left, err := l.refreshed(t)
			require.NoError(t, err)
			// The permits admitted during the outage are reported, too. The batch that was in flight at its beginning changed nothing: its script ran
			// after its deadline.
			require.LessOrEqual(t, left, c.retained)
			require.GreaterOrEqual(t, left, c.retained-passed-1)
			synctest.Wait()
			require.NoError(t, told[len(told)-1])
		})
	}
}

// During an outage one call probes after about 50 ms, then after twice as long, and finally once a second; RetryAfter returns when the next
// may. A client that ignores its context is used ever less often, so that few of its calls are unfinished.
func TestAwayPauses(t *testing.T) {
	away := func(t *testing.T, w way) (l *Limiter, looks *atomic.Int64) {
		looks = new(atomic.Int64)
		client := &bubbleRedis{way: func(ctx context.Context, run func() error) error {
			looks.Add(1)
			return w(ctx, run)
		}}
		l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client), WithStoreTimeout(100*time.Millisecond))
		require.NoError(t, err)
		_, err = l.Allow(ctx)
		require.ErrorIs(t, err, ErrStoreUnavailable)
		return l, looks
	}
	asked := func(t *testing.T, l *Limiter, span time.Duration) {
		for began := time.Now(); time.Since(began) < span; time.Sleep(10 * time.Millisecond) {
			_, err := l.Allow(ctx)
			require.ErrorIs(t, err, ErrStoreUnavailable)
			synctest.Wait()
		}
	}
	bubble(t, "refused", func(t *testing.T) {
		l, looks := away(t, failing(refused))
		for _, pause := range []time.Duration{minPause, 2 * minPause, 4 * minPause, 8 * minPause, 16 * minPause, maxPause, maxPause} {
			next := l.RetryAfter(1)
			require.InDelta(t, pause, next, float64(pause/2))
			before := looks.Load()
			asked(t, l, next)
			require.Equal(t, before, looks.Load())
			time.Sleep(10 * time.Millisecond)
			_, err := l.Allow(ctx)
			require.ErrorIs(t, err, ErrStoreUnavailable)
			synctest.Wait()
			require.Equal(t, before+1, looks.Load())
		}
	})
	bubble(t, "hung", func(t *testing.T) {
		open := make(chan struct{})
		l, looks := away(t, func(context.Context, func() error) error {
			<-open
			return refused
		})
		asked(t, l, 10*time.Minute)
		require.InDelta(t, 10*time.Minute/waiting.LongPause+9, looks.Load(), 5)
		close(open)
	})
}

// Requests that the view refuses are refused during an outage, too, and as cheaply.
func TestAwayFull(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for _, opt := range []Option{WithFailurePolicy(FailClosed), WithFailurePolicy(LocalShare(5)), WithFailurePolicy(FailOpen)} {
			client := new(bubbleRedis)
			l, err := New("x", 3, time.Hour, time.Minute, WithRedis(client), WithStoreTimeout(100*time.Millisecond), opt)
			require.NoError(t, err)
			for range 2 {
				_, err = l.Allow(ctx)
				require.NoError(t, err)
			}
			client.by(failing(refused))
			_, err = l.AllowN(ctx, 1)
			require.Equal(t, l.machine.policy.failure == FailClosed, errors.Is(err, ErrStoreUnavailable))
			ok, err := l.AllowN(ctx, 2)
			require.NoError(t, err)
			require.Equal(t, l.machine.policy.failure == FailOpen, ok)
		}
	})
}

// A local share is exact by Redis' clock, whenever in a slow round trip the script ran. Here it ran at the end, so its permits count until
// then. The process admits by the earliest time that Redis' clock may show, and RetryAfter returns when that will be.
func TestShareIsExact(t *testing.T) { inBubble(t, shareIsExact) }

func shareIsExact(t *testing.T) {
	client := new(bubbleRedis)
	h := &holding{RedisClient: client, open: make(chan struct{})}
	var clock, ahead atomic.Int64 // ahead: how far the script's clock is ahead when the batch is sent
	clock.Store(begin)
	l, err := New("x", 100, time.Minute, time.Second, WithRedis(h), WithStoreTimeout(time.Minute), WithFailurePolicy(LocalShare(5)),
		WithClock(clockOf{now: clock.Load}), serverClock(func() int64 { return clock.Load() + ahead.Load() }))
	require.NoError(t, err)
	const trip = 5_400_000 // µs, so that the clock leaves the sub-interval
	ahead.Store(trip)
	h.hold.Store(true)
	first := make(chan error)
	go func() {
		ok, err := l.AllowN(ctx, 5)
		if err == nil && !ok {
			err = errors.New("refused")
		}
		first <- err
	}()
	synctest.Wait()
	l.process.Mu.Lock()
	require.EqualValues(t, 5, l.machine.queue.pending)
	require.Empty(t, l.machine.queue.calls)
	l.process.Mu.Unlock()
	clock.Add(trip)
	ahead.Store(0)
	h.hold.Store(false)
	close(h.open)
	require.NoError(t, <-first)
	synctest.Wait()
	client.by(failing(refused))

	began := clock.Load()
	allow := func(at int64, n int, want bool) {
		t.Helper()
		clock.Store(at)
		ok, err := l.AllowN(ctx, n)
		require.NoError(t, err)
		require.Equal(t, want, ok)
	}
	minute := time.Minute.Microseconds()
	for _, at := range []int64{0, minute - trip, minute - trip + 1, minute - 1, minute} {
		allow(began+at, 1, false)
		require.Equal(t, time.Duration(minute+1-at)*time.Microsecond, l.RetryAfter(1))
	}
	clock.Store(began + minute + 1)
	require.Zero(t, l.RetryAfter(5))
	left, err := l.Remaining(ctx)
	require.NoError(t, err)
	require.Equal(t, 5, left)
	allow(began+minute+1, 2, true)
	allow(began+minute+1, 4, false)
	allow(began+minute+1_000_000, 3, true)
	// By Redis' clock, permits of the share may have been admitted up to a round trip later, and are reported at that time.
	for _, at := range []int64{2 * minute, 2*minute + trip} {
		allow(began+at, 1, false)
	}
	allow(began+2*minute+trip+2, 2, true)
	allow(began+2*minute+trip+2, 1, false)
	l.process.Mu.Lock()
	defer l.process.Mu.Unlock()
	owed := l.machine.admitted.unreported.list()
	require.Equal(t, began+2*minute+trip+2+trip, owed[len(owed)-1].last)
}

// A share that began before the first reply is exact, too. It is counted by the process' own clock, whose offset to Redis' clock is known only
// to within a round trip, during which more permits were admitted.
func TestShareBeforeRedis(t *testing.T) {
	l, err := New("x", 100, time.Minute, time.Second, WithRedis(redistestNone{}), WithFailurePolicy(LocalShare(5)))
	require.NoError(t, err)
	l.process.Mu.Lock()
	defer l.process.Mu.Unlock()
	allow := func(n, now int64, want bool) {
		t.Helper()
		c := &call{n: n}
		l.machine.decideLocally(c, now, new(waiting.Out))
		require.NoError(t, c.err)
		require.Equal(t, want, c.verdict.ok)
	}
	const trip, hour, minute = 1_700_000, 3_600_000_000, 60_000_000
	sent, received := begin+10_000_000, begin+10_000_000+trip
	allow(3, begin, true)
	allow(2, received, true) // before the batch was settled
	raw := received + hour   // the script ran late
	require.NoError(t, l.machine.adoptReply(&flight{sent: sent}, []string{decimal(raw) + " " + decimal(raw), "", ""}, received))
	require.Equal(t, begin+hour+trip, l.machine.admitted.unreported.at(0).last)
	allow(1, begin+minute+trip, false)
	allow(4, begin+minute+trip+1, false)
	allow(3, begin+minute+trip+1, true)
	allow(1, received+minute+trip, false)
	allow(2, received+minute+trip+1, true)
}

// A script that Redis runs after its calls have ended admits nothing.
func TestTooLate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client), WithStoreTimeout(100*time.Millisecond))
		require.NoError(t, err)
		_, err = l.Allow(ctx)
		require.NoError(t, err)
		goOn := client.hang()
		_, err = l.AllowN(ctx, 5)
		require.ErrorIs(t, err, ErrStoreTimeout)
		time.Sleep(time.Millisecond)
		require.EqualValues(t, 1, client.executed())
		goOn()
		synctest.Wait()
		require.EqualValues(t, 2, client.executed())
		l.process.Mu.Lock()
		require.Zero(t, l.process.Abandoned)
		l.process.Mu.Unlock()
		left, err := l.refreshed(t)
		require.NoError(t, err)
		require.Equal(t, 9, left)
	})
}

// When Redis has lost the state, each process reports the permits that it has admitted in this window, so that they are not admitted again.
func TestLostState(t *testing.T) { inBubble(t, lostState) }

func lostState(t *testing.T) {
	client := new(bubbleRedis)
	var all []*Limiter
	for range 2 {
		l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client))
		require.NoError(t, err)
		for range 4 {
			ok, err := l.Allow(ctx)
			require.NoError(t, err)
			require.True(t, ok)
		}
		all = append(all, l)
	}
	client.forget()
	for _, l := range all {
		_, err := l.refreshed(t)
		require.NoError(t, err)
	}
	synctest.Wait()
	left, err := all[0].refreshed(t)
	require.NoError(t, err)
	require.Equal(t, 2, left)
	client.forget()
	ok, err := all[1].AllowN(ctx, 2) // the process that detects it, with permits of its own
	require.NoError(t, err)
	require.True(t, ok)
	_, err = all[0].refreshed(t)
	require.NoError(t, err)
	synctest.Wait()
	left, err = all[0].refreshed(t)
	require.NoError(t, err)
	require.Equal(t, 0, left)
}

// When the server's clock jumps ahead, a script runs after its deadline, and the batch is sent once more.
func TestLate(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	l, err := New(unique(t), 3, time.Hour, time.Minute, WithRedis(client), patient)
	require.NoError(t, err)
	_, err = l.Allow(ctx)
	require.NoError(t, err)
	l.process.Mu.Lock()
	at := l.machine.now(l.process.Local())
	l.machine.view.server.Observe(l.machine.view.earliest(at)-10_000_000, at, at)
	l.machine.view.counts.seen -= 10_000_000
	l.process.Mu.Unlock()
	ok, err := l.Allow(ctx)
	require.NoError(t, err)
	require.True(t, ok)
	left, err := l.refreshed(t)
	require.NoError(t, err)
	require.Equal(t, 1, left)
}

// A caller that gives up makes room for others at once, at a cost that does not grow with the queue, which is not copied.
func TestManyGiveUp(t *testing.T) {
	const many = 20_000
	client := redistest.Shared(t).Client(t)
	h := &holding{RedisClient: client, open: make(chan struct{})}
	l, err := New(unique(t), many, time.Hour, time.Minute, WithRedis(h), WithStoreTimeout(time.Minute), WithMaxWaiters(many))
	require.NoError(t, err)
	h.hold.Store(true)
	var calls []*call
	results := make(chan error, 2*many)
	over, giveUp := context.WithCancel(ctx)
	submit := func(ctx context.Context) *call {
		c := &call{n: 1}
		go func() {
			_, err := l.do(ctx, c)
			results <- err
		}()
		return c
	}
	queued := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool {
			l.process.Mu.Lock()
			defer l.process.Mu.Unlock()
			return l.machine.flying != nil && l.machine.queue.live() == n
		}, 20*time.Second, time.Millisecond)
	}
	submit(ctx)
	queued(0)
	for range many - 1 {
		calls = append(calls, submit(over))
	}
	queued(many - 1)
	last := submit(ctx)
	queued(many)
	_, err = l.Allow(ctx)
	require.ErrorIs(t, err, ErrTooManyWaiters)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	giveUp()
	for range calls {
		require.ErrorIs(t, <-results, context.Canceled)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(1000*many))
	l.process.Mu.Lock()
	require.EqualValues(t, 2, l.machine.queue.pending)
	require.Less(t, len(l.machine.queue.calls), 4, "cancelled calls are removed from the queue")
	l.process.Mu.Unlock()
	h.hold.Store(false)
	close(h.open)
	require.NoError(t, <-results)
	require.NoError(t, <-results)
	require.True(t, last.verdict.ok)
	l.process.Mu.Lock()
	require.Zero(t, l.machine.queue.pending)
	require.Zero(t, l.machine.queue.cancelled)
	l.process.Mu.Unlock()
	left, err := l.refreshed(t)
	require.NoError(t, err)
	require.Equal(t, many-2, left, "the cancelled calls took nothing")
}

// A caller that makes the round trip itself returns within the timeout even if the server hangs: on an open connection and on a new one, with
// a client that heeds the deadlines of contexts and with a default client.
func TestCallerIsBackInTime(t *testing.T) {
	t.Parallel()
	for _, heeds := range []bool{false, true} {
		t.Run(fmt.Sprint(heeds), func(t *testing.T) {
			t.Parallel()
			proxy := redistest.StartProxy(t, redistest.Shared(t).Addr)
			client := redis.NewClient(&redis.Options{Addr: proxy.Addr, ContextTimeoutEnabled: heeds, ReadTimeout: time.Minute})
			defer func() { _ = client.Close() }()
			l, err := New(unique(t), 100, time.Hour, time.Minute, WithRedis(client), WithStoreTimeout(2*time.Second))
			require.NoError(t, err)
			require.NotNil(t, script.Bounded(client))
			patient, cancel := context.WithTimeout(ctx, time.Hour)
			defer cancel()
			for range 2 {
				require.Eventually(t, func() bool { _, err := l.Allow(patient); return err == nil }, 20*time.Second, time.Millisecond)
			}
			proxy.Set(redistest.Stalled)
			began := time.Now()
			for range 2 {
				l.process.Mu.Lock()
				l.process.Outage, l.machine.fault = outage.Status{}, nil // so that it makes a round trip during the outage
				l.process.Mu.Unlock()
				_, err = l.Allow(patient)
				require.ErrorIs(t, err, ErrStoreTimeout)
			}
			require.Less(t, time.Since(began), 20*time.Second)
			proxy.Set(redistest.Up)
			require.Eventually(t, func() bool {
				ok, err := l.Allow(patient)
				return err == nil && ok
			}, 20*time.Second, time.Millisecond)
		})
	}
}

// Permits admitted during an outage are reported at its end, also by a process without further calls. Permits that are out of the window are
// not.
func TestIdleTellsWhatItAdmitted(t *testing.T) {
	for _, c := range []struct {
		name        string
		away        time.Duration
		policy      Option
		admit, told int64
		refund      bool
	}{
		{"a share", 10 * time.Minute, WithFailurePolicy(LocalShare(5)), 5, 5, false},
		{"all", 10 * time.Minute, WithFailurePolicy(FailOpen), 7, 7, false},
		{"all but one, which is given back", 10 * time.Minute, WithFailurePolicy(LocalShare(5)), 5, 4, true},
		{"in another window", 3 * time.Hour, WithFailurePolicy(LocalShare(5)), 5, 0, false},
	} {
		bubble(t, c.name, func(t *testing.T) {
			client := &bubbleRedis{way: failing(refused)}
			l, err := New("x", 10, time.Hour, time.Minute, WithRedis(client), c.policy)
			require.NoError(t, err)
			var last Result
			for range c.admit {
				last, err = l.Take(ctx, 1)
				require.NoError(t, err)
				require.True(t, last.Allowed)
			}
			if c.refund {
				require.NoError(t, l.Refund(ctx, last, 1))
			}
			time.Sleep(c.away)
			client.by(nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			other, err := New("x", 10, time.Hour, time.Minute, WithRedis(client))
			require.NoError(t, err)
			left, err := other.Remaining(ctx)
			require.NoError(t, err)
			require.EqualValues(t, 10-c.told, left)
			scripts := client.executed()
			time.Sleep(time.Hour)
			require.Equal(t, scripts, client.executed(), "no further round trips")
		})
	}
}
