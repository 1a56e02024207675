package registry_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

func perKey(l *registry.Limit) { l.PerKey = true }

// A row with a * limits all that it holds for together; a row of the very name comes before it, and the longest of several.
func TestPatternIsOneBucket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, registry.Static{row("/ibe/*", 3, 1), row("/ibe/Book", 2, 1), row("/ibe/x/*", 1, 1)}, tokenbucket.NewMemoryStore())
		require.Equal(t, 1, pass(t, r, "/ibe/a", 9))
		require.Equal(t, 0, pass(t, r, "/ibe/c/d", 9))
		require.Equal(t, 1, pass(t, r, "/ibe/Book", 9))
		require.Equal(t, 1, pass(t, r, "/ibe/x/y", 9))
		require.Equal(t, 9, pass(t, r, "/ibe", 9))
		require.Equal(t, 9, pass(t, r, "/IBE/a", 9), "letter case counts")
		for name, want := range map[string]string{"/ibe/a": "/ibe/*", "/ibe/x/y": "/ibe/x/*", "/ibe/Book": "/ibe/Book", "/ibe": ""} {
			got, exact, ok := r.Match(name)
			require.Equal(t, want, got)
			require.Equal(t, want == name, exact)
			require.Equal(t, want != "", ok)
		}
		require.NoError(t, r.Penalize(ctx, "/ibe/z", time.Minute))
		time.Sleep(30 * time.Second)
		require.Equal(t, 0, pass(t, r, "/ibe/a", 9), "the bucket is that of all")
		r.Close()
	})
}

// A * elsewhere than at the end is a bad row, and so is a long name with a limit for each key.
func TestBadPatterns(t *testing.T) {
	long := "/" + strings.Repeat("x", 256)
	r := open(t, registry.Static{row("/a*b", 1, 1), row("/**", 1, 1), with(row("/off*/", 1, 1), func(l *registry.Limit) { l.Disabled = true }),
		with(row(long, 1, 1), perKey), row("/good*", 1, 1)}, tokenbucket.NewMemoryStore())
	s := r.Stats()
	require.Len(t, s.Rejected, 4)
	for i, want := range []string{`name "/a*b": want a * at its end only`, `name "/**": want a *`, `name "/off*/": want a *`, " of 257 bytes: want at most 256 bytes, for a limit per key"} {
		require.ErrorContains(t, &s.Rejected[i], want)
	}
	require.Equal(t, "it limits nothing: such a name matches no call", s.Rejected[0].Consequence)
	require.Equal(t, "its calls are refused", s.Rejected[3].Consequence)
	require.Equal(t, 9, pass(t, r, "/axb", 9))
	require.Equal(t, 9, pass(t, r, "/a*b", 9))
	require.Equal(t, 0, pass(t, r, long, 9))
	require.Equal(t, 1, pass(t, r, "/good", 9))
}

// Of a source that has one name for all of its rows, a file, it is not known which of the limits that are gone was the bad row's.
func TestBadRowOfAFile(t *testing.T) {
	of := func(l registry.Limit) registry.Limit {
		return with(l, func(l *registry.Limit) { l.Row = "limits.yaml" })
	}
	source := &fake{}
	source.set(of(row("/gone", 1, 1)), of(row("/a", 1, 1)), of(row("/b", 1, 1)))
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	source.set(of(row("/a*b", 1, 1)), of(row("/a", 1, 1)), of(row("/b", 1, 1)))
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, "it limits nothing: such a name matches no call", r.Stats().Rejected[0].Consequence)
	require.Equal(t, 9, pass(t, r, "/gone", 9))
}

// A pattern whose row is bad refuses what it would have limited.
func TestBadRowWithAPattern(t *testing.T) {
	r := open(t, registry.Static{row("/a/*", -1, 1), row("/a/b", 1, 1)}, tokenbucket.NewMemoryStore())
	require.Equal(t, 0, pass(t, r, "/a/x", 9))
	require.Equal(t, 1, pass(t, r, "/a/b", 9))
	by, ok := r.Decider("/a/x")
	require.Equal(t, gate.ByBadRow, by)
	require.False(t, ok)
}

// requireNew fails the test unless calls of a name use a bucket that is new. A row's own bucket begins with one permit, a key's with all of its
// burst, which is a second's worth.
func requireNew(t *testing.T, r *registry.Registry, name, bucket string, rate float64) {
	t.Helper()
	passed := pass(t, r, name, 9)
	l, err := r.Limiter(name)
	require.NoError(t, err)
	require.Equal(t, bucket, l.Name())
	require.Equal(t, rate, l.Rate())
	if r.Limiters()[bucket] != nil {
		require.Equal(t, 1, passed)
	} else {
		require.Equal(t, int(rate), passed)
	}
}

// Each value of what a row leaves open has a bucket of its own.
func TestPerKey(t *testing.T) {
	limits := registry.Static{with(row("/ibe/*", 2, 1), perKey), with(row("/book", 3, 1), perKey), row("/all", 4, 1), row("/book|vip", 7, 1)}
	t.Run("parts", func(t *testing.T) {
		r := open(t, limits, tokenbucket.NewMemoryStore(), registry.WithParts())
		requireNew(t, r, "/ibe/a|acme", "/ibe/*|acme", 2)
		require.Equal(t, 0, pass(t, r, "/ibe/b|acme", 9), "whatever the path")
		requireNew(t, r, "/ibe/b|zenith", "/ibe/*|zenith", 2)
		requireNew(t, r, `/ibe/b|zen\|ith`, `/ibe/*|zen\|ith`, 2)
		requireNew(t, r, "/ibe/b|", "/ibe/*|", 2)
		requireNew(t, r, "/book|acme", "/book|acme", 3)
		requireNew(t, r, "/book|zenith", "/book|zenith", 3)
		requireNew(t, r, "/book|vip", "/book|vip", 7)
		requireNew(t, r, "/all|acme", "/all", 4)
		require.Equal(t, 0, pass(t, r, "/all|zenith", 9), "all together")
		requireNew(t, r, `/ibe/x\|y|acme2`, "/ibe/*|acme2", 2)
		require.Equal(t, 0, pass(t, r, `/ibe/z|acme2`, 9))
		require.Equal(t, 7, r.Stats().Keys)
		for _, bucket := range []string{"/ibe/*|acme", "/ibe/*|zenith", "/book|acme", "/all|acme"} {
			got, _, ok := r.Match(bucket)
			require.True(t, ok)
			require.Contains(t, []string{"/ibe/*", "/book", "/all"}, got)
			require.True(t, strings.HasPrefix(bucket, got))
		}
	})
	t.Run("one part", func(t *testing.T) {
		r := open(t, limits, tokenbucket.NewMemoryStore())
		requireNew(t, r, "/ibe/a", "/ibe/*|a", 2)
		require.Equal(t, 0, pass(t, r, "/ibe/a", 9))
		requireNew(t, r, "/ibe/a|b", "/ibe/*|a|b", 2)
		requireNew(t, r, "/book", "/book", 3)
		require.Equal(t, 9, pass(t, r, "/all|acme", 9), "no row")
		require.NotContains(t, r.Limiters(), "/ibe/*|a")
	})
}

// A disabled row and a row with a rate of 0 have no buckets of keys.
func TestPerKeyWithoutBuckets(t *testing.T) {
	r := open(t, registry.Static{with(row("/zero*", 0, 1), perKey), with(row("/off*", 1, 1), func(l *registry.Limit) { l.PerKey, l.Disabled = true, true })}, tokenbucket.NewMemoryStore())
	require.Equal(t, 0, pass(t, r, "/zero/a", 9))
	require.Equal(t, 9, pass(t, r, "/off/a", 9))
	require.Zero(t, r.Stats().Keys)
}

// A change of a row reaches the buckets of all its keys, in all processes, also if the row's time has not risen.
func TestPerKeyFollowsItsRow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source, store := &fake{}, tokenbucket.NewMemoryStore()
		source.set(with(row("/a/*", 2, 10), perKey))
		one := open(t, source, store, registry.WithInterval(time.Second))
		two := open(t, source, store, registry.WithInterval(time.Hour))
		for _, key := range []string{"x", "y"} {
			require.Equal(t, 2, pass(t, one, "/a/"+key, 9))
			require.Equal(t, 0, pass(t, two, "/a/"+key, 9))
		}
		source.set(with(row("/a/*", 5, 10), perKey)) // the same version
		time.Sleep(3 * time.Second)
		for _, key := range []string{"x", "y", "new"} {
			require.NotZero(t, pass(t, one, "/a/"+key, 1))
		}
		time.Sleep(3 * time.Second)
		for _, key := range []string{"x", "y", "new"} {
			require.Equal(t, 5, pass(t, one, "/a/"+key, 9), key)
			l, err := one.Limiter("/a/" + key)
			require.NoError(t, err)
			require.Equal(t, 5.0, l.Rate())
		}
		time.Sleep(time.Second)
		_, err := allow(ctx, two, "/a/x")
		require.NoError(t, err)
		l, err := two.Limiter("/a/x")
		require.NoError(t, err)
		require.Equal(t, 5.0, l.Rate(), "learnt from the bucket")
		one.Close()
		two.Close()
	})
}

// The row wins over what else is put in force in the bucket of a key.
func TestPerKeyDisputed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, registry.Static{with(row("/a/*", 2, 10), perKey)}, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Second))
		l, err := r.Limiter("/a/x")
		require.NoError(t, err)
		require.NoError(t, l.SetRate(ctx, 100))
		require.Equal(t, 100.0, l.Rate())
		time.Sleep(5 * time.Second)
		_, err = allow(ctx, r, "/a/x")
		require.NoError(t, err)
		l, err = r.Limiter("/a/x")
		require.NoError(t, err)
		require.Equal(t, 2.0, l.Rate())
		r.Close()
	})
}

// The number of limiters for keys is bounded, and a key whose limiter was dropped gets no more than its limit.
func TestKeysAreBounded(t *testing.T) {
	r := open(t, registry.Static{with(row("/a/*", 0.001, 1), perKey)}, tokenbucket.NewMemoryStore(), registry.WithMaxKeyLimiters(10))
	require.Equal(t, 1, pass(t, r, "/a/first", 9))
	for i := range 1000 {
		require.Equal(t, 1, pass(t, r, fmt.Sprint("/a/", i), 3))
		require.LessOrEqual(t, r.Stats().Keys, 10)
	}
	require.Zero(t, pass(t, r, "/a/first", 9))
}

// What a client sends never makes the limiter fail, nor two keys share a bucket.
func TestPerKeyOfAnything(t *testing.T) {
	var seen []string
	var failed atomic.Int64
	r := open(t, registry.Static{with(row("/a/*", 1, 1), perKey)}, tokenbucket.NewMemoryStore(), registry.WithParts(),
		registry.WithLimiterOptions(tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(_ context.Context, d tokenbucket.Decision) {
			if d.Err != nil {
				failed.Add(1)
			}
			seen = append(seen, d.Bucket)
		}})))
	long := strings.Repeat("x", 1<<20)
	for _, key := range []string{"\xff", "\xfe", long, long + "y", "\xff" + long, strings.Repeat("é", 300), "a\x00b", ""} {
		require.Equal(t, 1, pass(t, r, "/a/b|"+key, 2), "%.20q", key)
	}
	require.Zero(t, failed.Load())
	slices.Sort(seen)
	seen = slices.Compact(seen)
	require.Len(t, seen, 8)
	for _, bucket := range seen {
		row, _, _ := r.Match(bucket)
		require.Equal(t, "/a/*", row, "%.30q", bucket)
	}
}

// Names of parts without a row have buckets of their own, however long they are.
func TestUnknownParts(t *testing.T) {
	long := strings.Repeat("/x", 600)
	r := open(t, registry.Static{row("/a", 1, 1)}, tokenbucket.NewMemoryStore(), registry.WithParts(), registry.WithUnknown(registry.Default(row("", 2, 0))))
	for _, name := range []string{long + "|a", long + "|b", "\xff|a", "\xfe|a"} {
		require.Equal(t, 2, pass(t, r, name, 9))
		require.Equal(t, 0, pass(t, r, name, 9))
	}
}

// A row that changes its name to a pattern, and back, limits without a gap while calls go on.
func TestPatternsAreReplacedAsOne(t *testing.T) {
	source := &fake{}
	source.set(row("/a/b", 0, 1))
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithAllowEmpty())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 300 {
			source.set(row([]string{"/a/*", "/a/b"}[i%2], 0, 1))
			if r.Reload(ctx) != nil {
				return
			}
		}
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		ok, err := allow(ctx, r, "/a/b")
		require.NoError(t, err)
		require.False(t, ok)
	}
}
