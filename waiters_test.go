package tokenbucket

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// A waiter beyond the look-ahead is served when the bucket is free much sooner, whichever process has freed it.
func TestParkedHear(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for name, open := range map[string]func() func() Store{ // a store each, as in processes of their own
		"script": func() func() Store { return func() Store { return NewRedisScriptStore(client) } },
		"lock":   func() func() Store { return func() Store { return NewRedisStore(client) } },
		"memory": func() func() Store { s := NewMemoryStore(); return func() Store { return s } },
		"apart":  func() func() Store { s := NewMemoryStore(); return func() Store { return &distant{Store: s} } },
	} {
		for what, free := range map[string]func(*RateLimiter, *Reservation) error{
			"reset":  func(l *RateLimiter, _ *Reservation) error { return l.Reset(background) },
			"cancel": func(_ *RateLimiter, r *Reservation) error { return r.Cancel(background) },
		} {
			for _, who := range []string{"itself", "another"} {
				t.Run(fmt.Sprint(name, "/", what, "/", who), func(t *testing.T) {
					switch name {
					case "memory", "apart":
						bubble(t, func(t *testing.T) { parkedHear(t, open(), free, who == "itself") })
					default:
						t.Parallel()
						parkedHear(t, open(), free, who == "itself")
					}
				})
			}
		}
	}
}

func parkedHear(t *testing.T, store func() Store, free func(*RateLimiter, *Reservation) error, itself bool) {
	const rate = 100
	bucket := fmt.Sprint(t.Name(), rand.Uint64())
	open := func() *RateLimiter {
		l, err := NewSmoothBursty(bucket, rate, WithStore(store()), patient)
		require.NoError(t, err)
		return l
	}
	l := open()
	other := l
	if !itself {
		other = open()
	}
	debt, err := other.Reserve(background, 3000*rate)
	require.NoError(t, err)
	gone, cancel := context.WithCancel(background)
	results := make(chan error, 4)
	go func() {
		_, err := l.Acquire(gone, 1)
		results <- err
	}()
	uncovered := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool {
			return look(l).Uncovered == n
		}, 10*time.Second, time.Millisecond)
	}
	uncovered(1)
	for range 2 {
		go func() {
			_, err := l.Acquire(background, 1)
			results <- err
		}()
	}
	uncovered(3)
	cancel()
	require.ErrorIs(t, <-results, context.Canceled)
	uncovered(2)
	require.NoError(t, free(other, debt))
	for range 2 {
		select {
		case err := <-results:
			require.NoError(t, err)
		case <-time.After(20 * time.Second):
			t.Fatal("nobody has told them")
		}
	}
}

// A reply that shows that there is room lets the first caller beyond its process's look-ahead go at once: it does not wait until the process
// would ask for it again.
func TestRoomIsUsedAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const rate, trip = 100, time.Millisecond
		memory := NewMemoryStore()
		for after := time.Second; after < 1500*time.Millisecond; after += 70 * time.Millisecond {
			open := func() *RateLimiter {
				s := &distant{Store: memory}
				s.trip.Store(int64(trip))
				l, err := NewSmoothBursty(fmt.Sprint(after), rate, WithStore(s))
				require.NoError(t, err)
				return l
			}
			l := open()
			_, err := open().Reserve(background, 3000*rate) // by another process: this one owns nothing
			require.NoError(t, err)
			var freed time.Time
			time.AfterFunc(after, func() {
				freed = time.Now()
				assert.NoError(t, l.Reset(background))
			})
			_, err = l.Acquire(background, 1)
			require.NoError(t, err)
			require.LessOrEqual(t, time.Since(freed), 3*trip, "freed after %v", after)
		}
	})
}

// A process that waits for many buckets does not ask for each of them twice a second, and still learns of a penalty in time.
func TestManyListen(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const buckets, seconds = 1500, 2
		memory := NewMemoryStore()
		s := &distant{Store: memory}
		var all []*Reservation
		for i := range buckets {
			l, err := NewSmoothBursty(fmt.Sprint(i), 1, WithStore(s), WithMaxPermits(1))
			require.NoError(t, err)
			r, err := l.Reserve(background, 100)
			require.NoError(t, err)
			all = append(all, r)
		}
		before := s.calls.Load()
		time.Sleep(seconds * time.Second)
		rate := (s.calls.Load() - before) / seconds
		t.Logf("%d batches a second for %d buckets", rate, buckets)
		require.LessOrEqual(t, rate, int64(1.2*1e6/engine.ListenShare))

		other, err := NewSmoothBursty(fmt.Sprint(buckets-1), 1, WithStore(&distant{Store: memory}), WithMaxPermits(1))
		require.NoError(t, err)
		last := all[buckets-1]
		delay := last.Delay()
		require.NoError(t, other.Penalize(background, time.Minute))
		time.Sleep(buckets * engine.ListenShare * time.Microsecond)
		require.Equal(t, delay+time.Minute, last.Delay())
		for _, r := range all {
			require.NoError(t, r.Cancel(background))
		}
		require.Less(t, engine.Listeners(), int64(buckets/2), "they wait no more")
	})
}

// Nobody waits behind those who have left, in whatever order they did.
func TestParkedLeave(t *testing.T) {
	clock := clockwork.NewFakeClock()
	l, err := NewSmoothBursty("x", 1, WithClock(clock))
	require.NoError(t, err)
	_, err = l.Reserve(background, 100)
	require.NoError(t, err)
	uncovered := func() int {
		return look(l).Uncovered
	}
	left := make(chan error)
	var leave []func()
	for i := range 5 {
		gone, cancel := context.WithCancel(background)
		leave = append(leave, cancel)
		go func() {
			_, err := l.Acquire(gone, 1)
			left <- err
		}()
		require.Eventually(t, func() bool { return uncovered() == i+1 }, 10*time.Second, time.Millisecond)
	}
	for _, step := range []struct{ who, uncovered int }{{1, 4}, {0, 3}, {4, 2}, {3, 1}, {2, 0}} {
		leave[step.who]()
		require.ErrorIs(t, <-left, context.Canceled)
		require.Equal(t, step.uncovered, uncovered())
	}
	require.Zero(t, uncovered())
}

// A bucket of another kind is replaced though the calls that it fails go on, and something is still to be given back.
func TestResetBehindOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &distant{Store: NewMemoryStore()}
		before, err := NewSmoothBursty("x", 10, WithStore(s))
		require.NoError(t, err)
		l, err := NewSmoothWarmingUp("x", 10, time.Second, WithStore(s))
		require.NoError(t, err)
		r, err := before.Reserve(background, 5)
		require.NoError(t, err)
		s.trip.Store(int64(50 * time.Millisecond))
		var calls sync.WaitGroup
		for range 8 {
			calls.Go(func() {
				for {
					if _, err := l.Try(background); err == nil {
						return
					}
				}
			})
		}
		calls.Go(func() { _ = r.Cancel(background) })
		synctest.Wait() // a batch is under way, and others queue up behind it
		require.NoError(t, l.Reset(background))
		s.trip.Store(0)
		calls.Wait()
	})
}

// A bucket that warms up grants permits faster while it is warm than while it is cold. ErrNeverGranted refers only to a cold bucket that
// refused.
func TestWarmBucketIsAsked(t *testing.T) {
	for name, store := range map[string]func() Store{
		"memory": func() Store { return NewMemoryStore() },
		"apart":  func() Store { return &distant{Store: NewMemoryStore()} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				l, err := NewSmoothWarmingUp("x", 10, 4*time.Second, WithPayment(PayNow), WithStore(store()))
				require.NoError(t, err)
				const timeout = 150 * time.Millisecond // 100 ms is enough for a warm one
				try := func() (bool, error) {
					_, err := l.State(background) // it has had a recent reply
					require.NoError(t, err)
					return l.TryAcquire(background, 1, timeout)
				}
				_, err = try()
				require.ErrorIs(t, err, ErrNeverGranted)
				_, err = l.Acquire(background, 200)
				require.NoError(t, err)
				ok, err := try()
				require.NoError(t, err)
				require.True(t, ok)
				r, err := l.Reserve(background, 10)
				require.NoError(t, err)
				ok, err = try()
				require.NoError(t, err, "it is in debt")
				require.False(t, ok)
				require.NoError(t, r.Cancel(background))
				short, cancel := context.WithTimeout(background, timeout/3)
				defer cancel()
				_, err = l.TryAcquire(short, 1, timeout)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				time.Sleep(time.Hour)
				_, err = try()
				require.ErrorIs(t, err, ErrNeverGranted)
			})
		})
	}
}

// While a bucket that warms up is in debt, what could not be granted in time even by a cold one is refused without asking, too.
func TestDebtOfAWarmBucketIsRemembered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := &distant{Store: NewMemoryStore()}
		l, err := NewSmoothWarmingUp("x", 2, 4*time.Second, WithPayment(PayNow), WithStore(store))
		require.NoError(t, err)
		_, err = l.Reserve(background, 10)
		require.NoError(t, err)
		asked := store.calls.Load()
		for range 100 {
			ok, err := l.Try(background)
			require.NoError(t, err)
			require.False(t, ok)
			r, err := l.TryReserve(background, 1, 0)
			require.NoError(t, err)
			require.False(t, r.OK())
		}
		require.Equal(t, asked, store.calls.Load())
	})
}
