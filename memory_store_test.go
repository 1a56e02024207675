package tokenbucket

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

// A bucket that has been full for long without being used is dropped, as keys in Redis expire. A limiter that still exists then begins a
// new bucket.
func TestSweep(t *testing.T) {
	clock := clockwork.NewFakeClock()
	store := NewMemoryStore()
	open := func(name string) *RateLimiter {
		l, err := NewSmoothBursty(name, 10, WithStore(store), WithClock(clock), WithInitialPermits(1))
		require.NoError(t, err)
		return l
	}
	take := func(l *RateLimiter) bool {
		ok, err := l.TryAcquire(background, 1, 0)
		require.NoError(t, err)
		return ok
	}
	kept := open("kept")
	require.True(t, take(kept))
	require.False(t, take(kept))
	for i := range 1022 {
		require.True(t, take(open(fmt.Sprint("old ", i))))
	}
	require.Len(t, store.buckets, 1023)
	clock.Advance(48 * time.Hour)
	for i := range 2000 {
		require.True(t, take(open(fmt.Sprint("new ", i))))
	}
	require.Len(t, store.buckets, 2000, "none of two days ago")
	require.True(t, take(kept))
	require.False(t, take(kept), "it begins with one permit again")
	require.Len(t, store.buckets, 2001)
}

// keptKinds are limiters of one bucket each, by what a store must keep of them. All buckets are full after a second.
var keptKinds = map[string]struct {
	opts    []Option
	change  func(l *RateLimiter) error
	renewed bool // a new bucket equals the full one
}{
	"one permit":     {opts: []Option{WithMaxPermits(1)}, renewed: true},
	"begins full":    {opts: []Option{WithMaxPermits(10), WithInitialPermits(10)}, renewed: true},
	"begins with 1":  {opts: []Option{WithMaxPermits(10)}},
	"versioned":      {opts: []Option{WithMaxPermits(1), WithVersion(3)}},
	"its rate set":   {opts: []Option{WithMaxPermits(1)}, change: doubleRate},
	"penalised once": {opts: []Option{WithMaxPermits(1)}, change: penaliseOnce},

	"transient":                {opts: []Option{transient, WithMaxPermits(10), WithVersion(3)}, renewed: true},
	"transient, begins with 1": {opts: []Option{transient, WithMaxPermits(10), WithInitialPermits(1)}},
	"transient, its rate set":  {opts: []Option{transient, WithMaxPermits(10)}, change: doubleRate},
	"transient, penalised":     {opts: []Option{transient, WithMaxPermits(10), WithVersion(3)}, change: penaliseOnce, renewed: true},
}

var transient = WithTransientState()

func doubleRate(l *RateLimiter) error { return l.SetRate(background, 2*l.Rate()) }

func penaliseOnce(l *RateLimiter) error { return l.Penalize(background, time.Millisecond) }

// A bucket that a new one would equal is dropped a minute after it is full, a transient one also if it has a version or was penalised. All
// others are kept for a day: their stored permits, version and penalties could not be rebuilt.
func TestFullBucketsAreDropped(t *testing.T) {
	clock := clockwork.NewFakeClock()
	store := NewMemoryStore()
	limiters := map[string]*RateLimiter{}
	for name, kind := range keptKinds {
		l, err := NewSmoothBursty(name, 10, append(kind.opts, WithStore(store), WithClock(clock))...)
		require.NoError(t, err)
		ok, err := l.TryAcquire(background, 1, 0)
		require.NoError(t, err)
		require.True(t, ok)
		if kind.change != nil {
			require.NoError(t, kind.change(l))
		}
		limiters[name] = l
	}
	warm, err := NewSmoothWarmingUp("warm-up", 10, time.Second, WithStore(store), WithClock(clock))
	require.NoError(t, err)
	_, err = warm.Reserve(background, 1)
	require.NoError(t, err)
	others := 0
	sweep := func() {
		for range len(keptKinds) + 1 {
			others++
			l, err := NewSmoothBursty(fmt.Sprint("other ", others), 1, WithStore(store), WithClock(clock), WithVersion(1))
			require.NoError(t, err)
			_, err = l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
		}
	}
	clock.Advance(10 * time.Second)
	sweep()
	for name := range limiters {
		require.Contains(t, store.buckets, keyName(name))
	}
	clock.Advance(2 * time.Minute)
	sweep()
	require.NotContains(t, store.buckets, keyName("warm-up"))
	for name, kind := range keptKinds {
		require.Equal(t, !kind.renewed, store.buckets[keyName(name)] != nil, name)
	}
	for name, n := range map[string]int{"one permit": 1, "begins full": 10, "begins with 1": 10, "transient": 10, "transient, penalised": 10} {
		ok, err := limiters[name].TryAcquire(background, n, 0)
		require.NoError(t, err)
		require.True(t, ok, "%s is full", name)
		ok, err = limiters[name].TryAcquire(background, 1, 0)
		require.NoError(t, err)
		require.False(t, ok, name)
	}
	require.Equal(t, 20.0, limiters["its rate set"].Rate())
	clock.Advance(48 * time.Hour)
	sweep()
	sweep()
	for name := range limiters {
		require.NotContains(t, store.buckets, keyName(name))
	}
}

// A new bucket examines a constant number of others, however many there are, and drops those of them that have expired.
func TestSweepInSteps(t *testing.T) {
	const many = 10_000
	store := NewMemoryStore()
	for i := range many {
		store.bucket(fmt.Sprint(i), 0)
	}
	require.Len(t, store.buckets, many)
	late := (48 * time.Hour).Microseconds()
	for i := range many {
		before := len(store.buckets)
		store.bucket(fmt.Sprint("new ", i), late)
		require.GreaterOrEqual(t, len(store.buckets), before+1-sweepSteps)
	}
	require.Len(t, store.buckets, many)
	require.Len(t, store.names, many)
	for _, name := range store.names {
		if _, ok := store.buckets[name]; !ok { // require.Contains would walk all keys for each
			t.Fatalf("a bucket without its name: %s", name)
		}
	}
}

// In memory, a refusal behind a reservation is as cheap as one by an idle bucket. But permits that the process owns and that no waiter
// wants serve the next caller, however long the bucket itself would let it wait.
func TestRefusedBehindAReservation(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := NewMemoryStore()
		open := func(opts ...Option) *RateLimiter {
			l, err := NewSmoothBursty("x", 10, append(opts, WithStore(store), WithMaxPermits(1), WithInitialPermits(0))...)
			require.NoError(t, err)
			return l
		}
		mine := open()
		others := open(WithClock(&wall{Clock: clockwork.NewRealClock()})) // of another clock, so it has a line of its own
		r, err := mine.Reserve(background, 1)
		require.NoError(t, err)
		allocated := testing.AllocsPerRun(100, func() {
			ok, err := mine.TryAcquire(background, 1, 150*time.Millisecond)
			require.False(t, ok)
			require.NoError(t, err)
		})
		require.Zero(t, allocated)
		_, err = others.Reserve(background, 1)
		require.NoError(t, err)
		require.NoError(t, r.Cancel(background))
		began := time.Now()
		ok, err := mine.TryAcquire(background, 1, 150*time.Millisecond)
		require.NoError(t, err)
		require.True(t, ok, "others have taken behind it, so it did not go back")
		require.Equal(t, 100*time.Millisecond, time.Since(began))
	})
}

// wall is the real clock, but not of its type.
type wall struct{ clockwork.Clock }

// A bucket is kept as the limiter needs it that has used it last: a new one would not equal it for one that begins with fewer permits.
func TestKeptForTheLastLimiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := NewMemoryStore()
		made := func(name string, initial float64) *RateLimiter {
			l, err := NewSmoothBursty(name, 1, WithStore(store), WithMaxPermits(10), WithInitialPermits(initial))
			require.NoError(t, err)
			return l
		}
		takes := func(l *RateLimiter, n int) {
			ok, err := l.TryAcquire(background, n, 0)
			require.NoError(t, err)
			require.True(t, ok)
		}
		full, empty := made("x", 10), made("x", 0)
		takes(full, 10)
		time.Sleep(10 * time.Second)
		takes(empty, 1)
		time.Sleep(10 * time.Minute)
		for i := range 8 { // each looks at some of the others
			takes(made(fmt.Sprint(i), 1), 1)
		}
		takes(empty, 10)
	})
}
