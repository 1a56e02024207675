package tokenbucket

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// lagging is a store that decides every other batch by a time which has passed, as a prediction does.
type lagging struct {
	Store
	lag     time.Duration
	batches atomic.Int64
}

func (s *lagging) Apply(ctx context.Context, b *Batch) error {
	if s.batches.Add(1)%2 == 0 {
		time.Sleep(s.lag)
		return s.Store.Apply(ctx, b)
	}
	now := b.asked.LocalMicros()
	before := *b.asked.Batch
	before.LocalMicros = func() int64 { return now - s.lag.Microseconds() }
	err := askStore(ctx, s.Store, &before)
	before.Outcome.Local = clock.FromMicros(now)
	time.Sleep(s.lag)
	b.asked.Outcome = before.Outcome
	return b.asked.answered(err)
}

// Every permit that was granted is used, though the store's time lies before the callers came.
func TestLaggingDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := NewSmoothBursty("x", 100, WithMaxPermits(1), WithStore(&lagging{Store: NewMemoryStore(), lag: 3 * time.Millisecond}))
		require.NoError(t, err)
		before, err := l.State(background)
		require.NoError(t, err)
		const calls = 300
		for range calls {
			ok, err := l.TryAcquire(background, 1, time.Second)
			require.NoError(t, err)
			require.True(t, ok)
			time.Sleep(rand.N(20 * time.Millisecond))
		}
		after, err := l.State(background)
		require.NoError(t, err)
		require.EqualValues(t, calls, after.Seq-max(1, before.Seq), "taken")
	})
}

// belated decides at once, and answers late.
type belated struct {
	Store
	by atomic.Int64
}

func (s *belated) Apply(ctx context.Context, b *Batch) error {
	by := time.Duration(s.by.Load())
	err := s.Store.Apply(ctx, b)
	time.Sleep(by)
	return err
}

// The grant in a late reply lapses if a newer reply has shown a penalty or a new epoch.
func TestLateAnswerOfAnEarlierEpoch(t *testing.T) {
	for what, change := range map[string]func(*RateLimiter) error{
		"held back": func(l *RateLimiter) error { return l.Penalize(background, 30*time.Second) },
		"begun anew, and its time is taken": func(l *RateLimiter) error {
			if err := l.Reset(background); err != nil {
				return err
			}
			_, err := l.Reserve(background, 100)
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				memory := NewMemoryStore()
				open := func() (*RateLimiter, *belated) { // as in processes of their own
					store := &belated{Store: memory}
					l, err := NewSmoothBursty("x", 10, WithStore(store), WithMaxPermits(1), WithInitialPermits(0))
					require.NoError(t, err)
					return l, store
				}
				l, store := open()
				other, _ := open()
				_, err := l.State(background)
				require.NoError(t, err)
				store.by.Store(int64(3 * time.Second))
				_, err = l.Reserve(background, 100)
				require.ErrorIs(t, err, ErrStoreTimeout)
				store.by.Store(0)
				require.NoError(t, change(other))
				for err = ErrStoreUnavailable; err != nil; _, err = l.State(background) {
					time.Sleep(50 * time.Millisecond) // a probe has failed, too
				}
				time.Sleep(3 * time.Second)
				for range 10 {
					ok, err := l.TryAcquire(background, 1, 500*time.Millisecond)
					require.NoError(t, err)
					require.False(t, ok)
				}
			})
		})
	}
}

// delayed is a store whose batches take as long as trip says, there and back. Probes are answered at once.
type delayed struct {
	Store
	trip func() (there, back time.Duration)
}

func (s *delayed) Apply(ctx context.Context, b *Batch) error {
	there, back := s.trip()
	if b.asked.Probe {
		there, back = 0, 0
	}
	time.Sleep(there)
	defer time.Sleep(back)
	return s.Store.Apply(ctx, b)
}

// The only reply so far came after its deadline. The process does not know the clock offset, so it cannot convert the due time of the
// grant, which may be later than that of other processes' grants. The grant is refunded.
func TestFirstAnswerIsLate(t *testing.T) {
	for _, alone := range []bool{false, true} {
		t.Run(fmt.Sprintf("alone=%v", alone), func(t *testing.T) { firstAnswerIsLate(t, alone) })
	}
}

// It says nothing of the configuration in force either: what that would grant is asked for.
func TestFirstAnswerIsLateAndOlder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const timeout, late = 100 * time.Millisecond, 900 * time.Millisecond
		memory := NewMemoryStore()
		newer, err := NewSmoothBursty("x", 10, WithVersion(2), WithMaxPermits(100), WithInitialPermits(100), WithStore(memory))
		require.NoError(t, err)
		require.NoError(t, newer.Reset(background))
		began := time.Now()
		store := &delayed{memory, func() (there, back time.Duration) {
			if time.Since(began) < late {
				return 0, late
			}
			return 0, 0
		}}
		l, err := NewSmoothBursty("x", 10, WithVersion(1), WithMaxPermits(0), WithStore(store), WithStoreTimeout(timeout), Logged(t))
		require.NoError(t, err)
		_, err = l.State(background)
		require.ErrorIs(t, err, ErrStoreTimeout)
		time.Sleep(late - timeout + time.Millisecond)
		ok, err := l.TryAcquire(background, 5, 0)
		require.NoError(t, err)
		require.True(t, ok)
	})
}

func firstAnswerIsLate(t *testing.T, alone bool) {
	bubble(t, func(t *testing.T) {
		const rate, ms, timeout = 20.0, time.Millisecond, 100 * time.Millisecond
		memory := NewMemoryStore()
		open := func(trip func() (there, back time.Duration)) *RateLimiter {
			l, err := NewSmoothBursty("x", rate, WithMaxPermits(0), WithStore(&delayed{memory, trip}), WithStoreTimeout(timeout), Logged(t))
			require.NoError(t, err)
			return l
		}
		began := time.Now()
		other := open(func() (there, back time.Duration) { return 0, 0 })
		l := open(func() (there, back time.Duration) {
			switch asked := time.Since(began); {
			case asked == 0:
				return 0, 900 * ms
			case asked < 900*ms:
				return 10 * time.Second, 0
			}
			return 0, 99 * ms
		})
		var mu sync.Mutex
		var used []event
		var callers sync.WaitGroup
		take := func(l *RateLimiter, n int) {
			callers.Go(func() {
				if ok, err := l.TryAcquire(background, n, 2*time.Second); err == nil && ok {
					mu.Lock()
					defer mu.Unlock()
					used = append(used, event{time.Now().UnixMicro(), float64(n)})
				}
			})
		}
		if alone {
			take(l, 40)
		} else {
			take(l, 20)
			time.Sleep(10 * ms)
			for range 20 {
				take(other, 1)
			}
		}
		for range 15 { // some of them wait when the answer comes
			time.Sleep(80 * ms)
			for range 20 {
				take(l, 1)
			}
		}
		callers.Wait()
		t.Logf("%d permits were used", len(used))
		if alone {
			require.GreaterOrEqual(t, len(used), 40, "what went back is used: the last wait for two seconds")
		}
		require.LessOrEqual(t, worst(used, rate), 1+rate*(timeout.Seconds()+schedule.Tolerated/1e6))
	})
}

// A late answer is none to those who came since: they are answered within their timeout all the same.
func TestLateAnswerProlongsNobodysWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ms, timeout = time.Millisecond, time.Second
		began := time.Now()
		l, err := NewSmoothBursty("x", 10, WithStoreTimeout(timeout), WithStore(&delayed{NewMemoryStore(), func() (there, back time.Duration) {
			if time.Since(began) < timeout {
				return 0, 1500 * ms
			}
			return 10 * time.Second, 0
		}}))
		require.NoError(t, err)
		var callers sync.WaitGroup
		for _, at := range []time.Duration{0, timeout / 2, timeout + 100*ms} {
			callers.Go(func() {
				time.Sleep(at)
				_, err := l.TryAcquire(background, 1, 0)
				require.ErrorIs(t, err, ErrStoreTimeout)
				require.LessOrEqual(t, time.Since(began), at+timeout+ms)
			})
		}
		callers.Wait()
	})
}
