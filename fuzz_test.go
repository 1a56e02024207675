package tokenbucket

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// No two names share a key, and none leaves its braces.
func FuzzNames(f *testing.F) {
	for _, name := range []string{"", "x", "{}", "a}{b", "%7B", "{", "\x00", "\r\n", "é", "\xff", strings.Repeat("x", 513)} {
		f.Add(name, "{")
	}
	s := NewRedisStore(nil).redis
	f.Fuzz(func(t *testing.T, a, b string) {
		bucket, lock := s.Keys(keyName(a))
		other, otherLock := s.Keys(keyName(b))
		if a != b && (bucket == other || lock == otherLock || bucket == otherLock || lock == other) {
			t.Fatalf("%q and %q share a key", a, b)
		}
		tag := bucket[len("tokenbucket:"):]
		if tag[0] != '{' || strings.IndexByte(tag, '}') != len(tag)-1 || strings.LastIndexByte(tag, '{') != 0 || lock != bucket+":lock" {
			t.Fatalf("%q leaves its braces: %q", a, bucket)
		}
		if len(tag) == 2 && a != "" {
			t.Fatalf("%q has no hash tag", a)
		}
		_, err := NewSmoothBursty(a, 5)
		if valid := len(a) >= 1 && len(a) <= 512 && utf8.ValidString(a); valid != (err == nil) {
			t.Fatalf("%q: %v", a, err)
		}
	})
}

// Whatever is read is refused as corrupt, or is a state that can be decided on and that is written back the same.
func FuzzState(f *testing.F) {
	for _, c := range []config{{Rate: 5, Size: 5, Floor: 1}, {Kind: warmingUp, Rate: 0.1, WarmupMicros: 4e6, ColdFactor: 3, Version: 7}} {
		b := new(PermitBucket)
		b.begin(1_700_000_000_000_000, &permit.Batch{Initial: 1, Epoch: 9}, newSetting(c))
		b.returned = []int64{3, 4}
		text := b.appendText(nil)
		f.Add(text)
	}
	f.Add([]byte("tb2 x"))
	f.Fuzz(func(t *testing.T, text []byte) {
		b := PermitBucket{Name: "x"}
		if err := b.unmarshal(string(text)); err != nil {
			if !errors.Is(err, ErrCorruptState) || b.Name != "x" || b.Epoch != 0 {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		if len(text) == 0 {
			return
		}
		written := b.appendText(nil)
		var again PermitBucket
		if err := again.unmarshal(string(written)); err != nil {
			t.Fatalf("%q was written as %q: %v", text, written, err)
		}
		if twice := again.appendText(nil); string(twice) != string(written) {
			t.Fatalf("%q is written as %q and as %q", text, written, twice)
		}
		batch := &permit.Batch{Name: "x", Terms: &b.setting.terms, Epoch: 1, Requests: []permit.Request{{Permits: 3, MaxWaitMicros: maxExact}, {Op: permit.SetRate, Rate: 3},
			{Op: permit.SetRateAndBurst, Rate: 7, MaxPermits: 0.5}}}
		var out permit.Outcome
		err := b.apply(1_700_000_000_000_000, batch, &out)
		if err == nil && out.Changed {
			after := b.appendText(nil)
			if err := again.unmarshal(string(after)); err != nil {
				t.Fatalf("%q became %q: %v", text, after, err)
			}
			if g := batch.Requests[0].Grant; g.OK && g.WaitMicros < 0 {
				t.Fatalf("%q: wait of %d", text, g.WaitMicros)
			}
		} else if err != nil && !errors.Is(err, ErrCorruptState) {
			t.Fatal(err)
		}
	})
}

// Options make a limiter that grants without panicking, or an error; never a wait below 0 or beyond 2^53 µs.
func FuzzOptions(f *testing.F) {
	for _, v := range []float64{0, -1, 5, 1e-12, 1e12, math.NaN(), math.Inf(1), math.Inf(-1), 1 << 53} {
		f.Add(v, v, v, v, int64(v), int64(v), int(1), int64(0), true)
	}
	f.Add(5.0, 5.0, 1.0, 3.0, int64(time.Second), int64(1), math.MaxInt, int64(math.MinInt64), false)
	f.Fuzz(func(t *testing.T, rate, most, initial, cold float64, maxWait, version int64, permits int, timeout int64, warm bool) {
		opts := []Option{WithVersion(version), WithMaxWait(time.Duration(maxWait))}
		var l *RateLimiter
		var err error
		if warm {
			l, err = NewSmoothWarmingUp("x", rate, time.Duration(timeout), append(opts, WithColdFactor(cold))...)
		} else {
			l, err = NewSmoothBursty("x", rate, append(opts, WithMaxPermits(most), WithInitialPermits(initial))...)
		}
		if err != nil {
			if !errors.Is(err, ErrInvalidConfig) {
				t.Fatal(err)
			}
			return
		}
		for _, n := range []int{permits, 1} {
			r, err := l.TryReserve(context.Background(), n, time.Duration(timeout))
			switch {
			case err != nil && !errors.Is(err, ErrInvalidPermits) && !errors.Is(err, ErrNeverGranted):
				t.Fatal(err)
			case err == nil && (r.Delay() < 0 || r.Delay() > time.Duration(max(0, timeout)) || r.RetryAfter() < 0):
				t.Fatalf("delay %v of %v, retry after %v", r.Delay(), time.Duration(timeout), r.RetryAfter())
			case err == nil && r.Cancel(context.Background()) != nil:
				t.Fatal("cancel")
			}
		}
		if err := l.SetRate(context.Background(), most); err != nil && !errors.Is(err, ErrInvalidConfig) {
			t.Fatal(err)
		}
		if err := l.SetRateAndBurst(context.Background(), rate, most); err != nil && !errors.Is(err, ErrInvalidConfig) {
			t.Fatal(err)
		} else if b, _ := l.State(context.Background()); err == nil && b.MaxPermits != most {
			t.Fatalf("max permits %v, not %v", b.MaxPermits, most)
		}
		if b, err := l.State(context.Background()); err != nil || !(b.StoredPermits >= 0 && b.StoredPermits <= b.MaxPermits) {
			t.Fatalf("%+v, %v", b, err)
		}
	})
}
