package storetest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

var background = context.Background()

// slow is a rate of one permit a day, so a bucket has only its stored permits.
const slow = 1.0 / 86_400

// limiter returns a limiter, as of another process, of a bucket with the given permits. A slow store is no outage.
func limiter(t testing.TB, s tokenbucket.Store, name string, permits float64) *tokenbucket.RateLimiter {
	t.Helper()
	l, err := tokenbucket.NewSmoothBursty(name, slow, tokenbucket.WithStore(s), tokenbucket.WithMaxPermits(permits),
		tokenbucket.WithInitialPermits(permits), tokenbucket.WithStoreTimeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// try takes permits, and reports whether they were granted at once.
func try(t testing.TB, l *tokenbucket.RateLimiter, permits int) bool {
	t.Helper()
	ok, err := l.TryAcquire(background, permits, 0)
	if err != nil {
		t.Error(err)
	}
	return ok
}

func state(t testing.TB, l *tokenbucket.RateLimiter) tokenbucket.PermitBucket {
	t.Helper()
	b, err := l.State(background)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Eight processes with several callers each request far more than the thousand permits of a bucket: exactly a thousand are granted.
func exactlyWhatThereIs(t *testing.T, store func() tokenbucket.Store) {
	const permits = 1000
	var granted atomic.Int64
	processes(8, store, func(p int, s tokenbucket.Store) {
		l := limiter(t, s, "x", permits)
		processes(4, func() tokenbucket.Store { return s }, func(int, tokenbucket.Store) {
			for i := range 40 {
				if n := 1 + (p+i)%3; try(t, l, n) {
					granted.Add(int64(n))
				}
			}
		})
	})
	last := limiter(t, store(), "x", permits)
	for try(t, last, 1) {
		granted.Add(1)
	}
	if granted.Load() != permits {
		t.Errorf("%d permits granted of %d", granted.Load(), permits)
	}
}

// Numbers are read back to the last bit, also those with many digits.
func keepsEveryDigit(t *testing.T, store func() tokenbucket.Store) {
	for i := range 30 {
		name, rate := fmt.Sprint("digits", i), math.Pow(10, rand.Float64()*10-3)
		opts := []tokenbucket.Option{tokenbucket.WithVersion(rand.Int64N(1 << 53)), tokenbucket.WithStoreTimeout(patience)}
		open := func() *tokenbucket.RateLimiter {
			opts := append(opts, tokenbucket.WithStore(store()))
			l, err := tokenbucket.NewSmoothBursty(name, rate, append(opts, tokenbucket.WithMaxPermits(float64(i)/7))...)
			if i%5 == 0 {
				l, err = tokenbucket.NewSmoothWarmingUp(name, rate, time.Duration(i+1)*time.Second, append(opts, tokenbucket.WithColdFactor(1.1+float64(i)))...)
			}
			if err != nil {
				t.Fatal(err)
			}
			return l
		}
		l := open()
		debt, err := l.Reserve(background, 1000*(i+1)) // so that passing time changes only SeenMicros
		if err != nil {
			t.Fatal(err)
		}
		want, got := state(t, l), state(t, open())
		at := max(want.NextFreeTicketMicros, got.NextFreeTicketMicros, got.SeenMicros)
		want.ReSync(at)
		got.ReSync(at)
		if want.NextFreeTicketMicros != got.NextFreeTicketMicros || want.StoredPermits != got.StoredPermits || want.CarryMicros != got.CarryMicros ||
			want.MaxPermits != got.MaxPermits || want.IntervalMicros != got.IntervalMicros || want.Rate != got.Rate || want.Version != got.Version || want.WarmupMicros != got.WarmupMicros {
			t.Errorf("wrote %+v\n read %+v", want, got)
		}
		if err := debt.Cancel(background); err != nil {
			t.Error(err)
		}
	}
}

func readingWritesNothing(t *testing.T, store func() tokenbucket.Store) {
	first, second := state(t, limiter(t, store(), "x", 5)), state(t, limiter(t, store(), "x", 5))
	if first.Epoch == second.Epoch {
		t.Error("reading has created a bucket")
	}
	try(t, limiter(t, store(), "x", 5), 1)
	before, after := state(t, limiter(t, store(), "x", 5)), state(t, limiter(t, store(), "x", 5))
	if before.Seq != after.Seq || before.Epoch != after.Epoch {
		t.Errorf("reading changed %+v to %+v", before, after)
	}
}

func refusalTakesNothing(t *testing.T, store func() tokenbucket.Store) {
	l := limiter(t, store(), "x", 5)
	if !try(t, l, 4) || try(t, limiter(t, store(), "x", 5), 2) {
		t.Error("of five permits, four must be granted and then two refused")
	}
	if !try(t, limiter(t, store(), "x", 5), 1) {
		t.Error("a refusal took permits")
	}
}

func kindsDoNotMix(t *testing.T, store func() tokenbucket.Store) {
	l := limiter(t, store(), "x", 5)
	try(t, l, 1)
	warm, err := tokenbucket.NewSmoothWarmingUp("x", 5, time.Second, tokenbucket.WithStore(store()), tokenbucket.WithStoreTimeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := warm.Try(background); !errors.Is(err, tokenbucket.ErrInvalidConfig) {
		t.Errorf("a warm-up limiter asked a bursty bucket: %v", err)
	}
	if !try(t, l, 4) {
		t.Error("the bursty bucket was changed")
	}
}

// Any name is the name of one bucket, whatever characters it has.
func oneBucketForAll(t *testing.T, store func() tokenbucket.Store) {
	for _, name := range []string{"a", "a:lock", "a{b}", "{a}", "%7Ba%7D", "a\x00", "a\r\n", " ", "é"} {
		if !try(t, limiter(t, store(), name, 1), 1) || try(t, limiter(t, store(), name, 1), 1) {
			t.Errorf("bucket %q does not have its one permit", name)
		}
	}
}
