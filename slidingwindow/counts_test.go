package slidingwindow

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

var ctx = context.Background()

func TestMain(m *testing.M) {
	redistest.Main(m, server.stop)
}

// handClock is a clock that a test sets, also backwards.
type handClock struct {
	clockwork.Clock
	micros int64
}

func (c *handClock) Now() time.Time { return time.UnixMicro(c.micros) }

func (c *handClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// log is the naive model: it has every admission, and applies the rules for a clock that stands still or steps back.
type log struct {
	window, resolution int64
	seen               int64
	at                 []int64
	steps              int // how often the clock was set back beyond standing still
}

func (g *log) observe(clock int64) (now int64) {
	if g.seen-clock > standstill {
		g.shift(clock)
	}
	g.seen = max(g.seen, clock)
	return g.seen
}

func (g *log) shift(clock int64) {
	for i := range g.at {
		g.at[i] -= g.seen - clock
	}
	g.seen = clock
	g.steps++
}

// within returns the permits admitted from one time to another, both included.
func (g *log) within(from, to int64) (n int64) {
	for _, at := range g.at {
		if at >= from && at <= to {
			n++
		}
	}
	return n
}

func (g *log) add(now, n int64) {
	for range n {
		g.at = append(g.at, now)
	}
	g.at = slices.DeleteFunc(g.at, func(at int64) bool { return at < now-20*g.window })
}

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).UnixMicro()

// drawStep draws a step of the clock: within a sub-interval, to the edge of one or of a window, none, backwards, or far.
func drawStep(t *rapid.T, now, window, resolution int64) int64 {
	edge := (now/resolution + 1) * resolution
	return now + rapid.OneOf(
		rapid.SampledFrom([]int64{0, 0, 0, 1, edge - now, edge - now - 1, edge - now + 1, resolution, window, window + 1, window - 1}),
		rapid.Int64Range(0, resolution),
		rapid.Int64Range(0, window/3),
		rapid.SampledFrom([]int64{-1, -resolution, -standstill, -standstill - 1, -3_600_000_000, 50 * window, 86_400_000_000}),
	).Draw(t, "step")
}

func drawRule(t *rapid.T) (window, resolution time.Duration) {
	parts := rapid.SampledFrom([]int64{1, 2, 3, 12, 60}).Draw(t, "parts")
	resolution = rapid.SampledFrom([]time.Duration{time.Millisecond, 1500 * time.Microsecond, 7 * time.Millisecond, time.Second, time.Minute}).Draw(t, "resolution")
	return time.Duration(parts) * resolution, resolution
}

// A limiter of this process against the log of every admission: no window exceeds the limit, and a request that is refused would have exceeded it a
// resolution ago.
func TestLog(t *testing.T) {
	admitted, refused := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		window, resolution := drawRule(t)
		limit := rapid.IntRange(1, 30).Draw(t, "limit")
		clock := &handClock{micros: begin + rapid.Int64Range(0, 1e9).Draw(t, "begin")}
		l, err := New("x", limit, window, resolution, WithClock(clock))
		require.NoError(t, err)
		g := &log{window: window.Microseconds(), resolution: resolution.Microseconds()}
		for range 200 {
			clock.micros = drawStep(t, clock.micros, g.window, g.resolution)
			if rapid.IntRange(0, 30).Draw(t, "change") == 0 {
				limit = rapid.IntRange(1, 30).Draw(t, "limit")
				require.NoError(t, l.SetLimit(ctx, limit))
			}
			for range rapid.SampledFrom([]int{1, 1, 2, 10}).Draw(t, "calls") {
				n := rapid.SampledFrom([]int{1, 1, 1, 2, 5}).Draw(t, "n")
				gate := l.machine.published.full.Load()
				ok, err := l.AllowN(ctx, n)
				if n > limit {
					require.ErrorIs(t, err, ErrInvalidPermits)
					continue
				}
				if gate == nil || clock.micros < gate.from || clock.micros >= gate.until {
					g.observe(clock.micros) // otherwise the limiter has not read the clock either
				}
				now := g.seen
				require.NoError(t, err)
				if !ok {
					refused++
					slack := g.resolution * int64(1+g.steps)
					require.Greater(t, g.within(now-g.window-slack, now)+int64(n), int64(limit), "refused without need")
					if g.steps == 0 {
						require.Positive(t, l.RetryAfter(n))
					}
					continue
				}
				admitted++
				g.add(now, int64(n))
				require.LessOrEqual(t, g.within(now-g.window, now), int64(limit))
			}
		}
	})
	t.Logf("%d admitted, %d refused", admitted, refused)
	require.Greater(t, admitted, 5000)
	require.Greater(t, refused, 5000)
}

// RetryAfter returns the first microsecond at which the request is admitted.
func TestRetryAfter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		window, resolution := drawRule(t)
		clock := &handClock{micros: begin}
		l, err := New("x", 20, window, resolution, WithClock(clock))
		require.NoError(t, err)
		for range 40 {
			clock.micros += rapid.Int64Range(0, resolution.Microseconds()).Draw(t, "step")
			_, err := l.AllowN(ctx, rapid.IntRange(1, 5).Draw(t, "n"))
			require.NoError(t, err)
		}
		n := rapid.IntRange(1, 20).Draw(t, "n")
		if wait := l.RetryAfter(n); wait > 0 {
			clock.micros += wait.Microseconds() - 1
			ok, err := l.AllowN(ctx, n)
			require.NoError(t, err)
			require.False(t, ok)
			clock.micros++
		}
		left, err := l.Remaining(ctx)
		require.NoError(t, err)
		require.GreaterOrEqual(t, left, n)
		ok, err := l.AllowN(ctx, n)
		require.NoError(t, err)
		require.True(t, ok)
	})
}

// The edge that distinguishes a sliding window from a fixed one: ten permits at the end of a minute and ten at the beginning of the next must
// not be admitted.
func TestEdge(t *testing.T) {
	for _, c := range []struct {
		resolution time.Duration
		after      time.Duration // since the burst
		want       int
	}{
		{time.Second, time.Second, 0},
		{time.Second, 60 * time.Second, 0}, // [t, t + 60 s] holds both
		{time.Second, 60*time.Second + time.Microsecond, 10},
		{time.Minute, 60*time.Second + time.Microsecond, 10}, // a burst counts for exactly the window
	} {
		clock := &handClock{micros: time.Date(2026, 1, 1, 0, 0, 59, 500_000_000, time.UTC).UnixMicro()}
		l, err := New("x", 10, time.Minute, c.resolution, WithClock(clock))
		require.NoError(t, err)
		pass := func() (n int) {
			for range 20 {
				ok, err := l.Allow(ctx)
				require.NoError(t, err)
				if ok {
					n++
				}
			}
			return n
		}
		require.Equal(t, 10, pass())
		clock.micros += c.after.Microseconds()
		require.Equal(t, c.want, pass(), "%+v", c)
	}
}

// Any text is either refused, or encoded back the same and usable for decisions.
func FuzzState(f *testing.F) {
	f.Add("sw1 epoch=7 seen=1763724915123456 1763724914000123:17 1763724915123456:3", int64(1763724915123456))
	f.Add("sw1 epoch=7 seen=-5", int64(0))
	f.Add("sw1 epoch=7 seen=5 back=3 limit=4 version=9007199254740992 5:1", int64(0))
	f.Add("sw2 epoch=7 seen=5 5:1", int64(0))
	f.Add("sw1 epoch=07 seen=5 +5:1", int64(0))
	f.Add("", int64(0))
	f.Fuzz(func(t *testing.T, text string, now int64) {
		read, ok := parse(text)
		if !ok {
			return
		}
		written := read.String()
		again, ok := parse(written)
		if !ok || !reflect.DeepEqual(read, again) {
			t.Fatalf("%q was written as %q", text, written)
		}
		if now < -maxInteger || now > maxInteger {
			return
		}
		for _, r := range []rule{{60_000_000, 1_000_000, 60}, {1000, 1000, 1}} {
			var s counts
			s.load(&r, read.seen, read.parts)
			at := s.advance(&r, now)
			if s.size > int(r.parts)+1 || len(s.ring) > int(r.parts)+1 {
				t.Fatalf("%q: %d parts of %d", text, s.size, r.parts)
			}
			used := s.used(&r, at)
			if used < 0 || used > s.sum {
				t.Fatalf("%q at %d: %d used of %d", text, now, used, s.sum)
			}
			if free := s.until(&r, at, 0); s.used(&r, free) != 0 || free > at && s.used(&r, free-1) == 0 {
				t.Fatalf("%q at %d: free at %d", text, now, free)
			}
		}
	})
}

// Neither two names nor a name and a number share a key, and no name leaves its braces.
func FuzzName(f *testing.F) {
	for _, name := range []string{"x", "{}", "a}{b", "%7B", "\x00", "é", "\xff", "0000000000000001"} {
		f.Add(name, "{", uint64(1))
	}
	client := redistestNone{}
	f.Fuzz(func(t *testing.T, a, b string, number uint64) {
		key := func(l *Limiter, err error) string {
			if err != nil {
				if !errors.Is(err, ErrInvalidConfig) {
					t.Fatal(err)
				}
				return ""
			}
			return l.machine.key
		}
		one := key(New(a, 1, time.Minute, time.Second, WithRedis(client)))
		two := key(New(b, 1, time.Minute, time.Second, WithRedis(client)))
		three := key(NewKey(number, 1, time.Minute, time.Second, WithRedis(client)))
		if (one == "") != (len(a) < 1 || len(a) > 512) {
			t.Fatalf("%q: %q", a, one)
		}
		if one != "" && (one == two && a != b || one == three) {
			t.Fatalf("%q, %q and %d: %q, %q, %q", a, b, number, one, two, three)
		}
		if strings.Count(one, "{") > 1 || strings.Count(one, "}") > 1 || strings.Count(three, "{") != 1 {
			t.Fatalf("%q leaves its braces: %q, %q", a, one, three)
		}
	})
}
