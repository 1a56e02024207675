package registry_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// logged is what a registry has logged so far.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logged) option() registry.Option {
	return registry.WithLogger(slog.New(slog.NewTextHandler(l, nil)))
}

// Calls of a row that never was valid are refused, or handled by WithBadRows, until the row is repaired.
func TestBadRows(t *testing.T) {
	for what, c := range map[string]struct {
		opts   []registry.Option
		passes int
		then   string
	}{
		"by default": {nil, 0, "its calls are refused"},
		"refuse":     {[]registry.Option{registry.WithBadRows(registry.Refuse())}, 0, "its calls are refused"},
		"pass":       {[]registry.Option{registry.WithBadRows(registry.Pass())}, 9, "its calls pass without a limit"},
		"default":    {[]registry.Option{registry.WithBadRows(registry.Default(row("", 2, 0)))}, 1, "its calls have the limit 2/s"},
	} {
		t.Run(what, func(t *testing.T) {
			source := &fake{}
			source.set(row("/a", -5, 1), row("/b", 1, 1))
			source.table.Rejected = []registry.RowError{{Row: "7", Name: "/c", Field: "rateLimit", Value: "NULL", Want: "a number"}}
			r := open(t, source, tokenbucket.NewMemoryStore(), append(c.opts, registry.WithInterval(time.Hour))...)
			require.Equal(t, c.passes, pass(t, r, "/a", 9))
			require.Equal(t, c.passes, pass(t, r, "/c", 9))
			require.Equal(t, 1, pass(t, r, "/b", 9))
			require.Equal(t, 9, pass(t, r, "/unknown", 9))
			ok, err := allow(ctx, r, "/a")
			require.NoError(t, err)
			require.Equal(t, c.passes > 0, ok)
			by, _ := r.Decider("/a")
			want := gate.ByBadRow
			if what == "default" { // a bucket of its own
				want = gate.ByLimit
			}
			require.Equal(t, want, by)
			s := r.Stats()
			require.Equal(t, []int{1, 2}, []int{s.Limits, s.Bad})
			require.Len(t, r.Limits(), 1)
			for _, e := range s.Rejected {
				require.Contains(t, e.Consequence, c.then)
			}
			for range 2 { // it stays so
				require.NoError(t, r.Reload(ctx))
				require.Equal(t, 2, r.Stats().Bad)
				require.Equal(t, c.passes == 9, pass(t, r, "/a", 9) == 9)
			}

			source.table.Rejected = nil
			source.set(row("/a", 3, 2), row("/b", 1, 1))
			require.NoError(t, r.Reload(ctx))
			require.LessOrEqual(t, pass(t, r, "/a", 9), 3, "repaired")
			limiter, err := r.Limiter("/a")
			require.NoError(t, err)
			require.Equal(t, 3.0, limiter.Rate())
			require.Equal(t, 9, pass(t, r, "/c", 9), "removed")
			require.Zero(t, r.Stats().Bad)
		})
	}
}

// The last valid limit of a row that turns bad stays in force. The error has the consequence of a restart.
func TestRowTurnsBad(t *testing.T) {
	source := &fake{}
	source.set(row("/a", 1, 1))
	store := tokenbucket.NewMemoryStore()
	r := open(t, source, store, registry.WithInterval(time.Hour))
	source.set(row("/a", -1, 2))
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, 1, pass(t, r, "/a", 9))
	s := r.Stats()
	require.Equal(t, []int{1, 0}, []int{s.Limits, s.Bad})
	require.Equal(t, "its last good limit, 1/s, saves up 1, waits up to 500 ms, stays in force; in a process that starts now, its calls are refused", s.Rejected[0].Consequence)
	restarted := open(t, source, store)
	require.Equal(t, 0, pass(t, restarted, "/a", 9))
}

// A rate of 0 lets nothing pass, whatever was before and in force elsewhere.
func TestRateZero(t *testing.T) {
	source := &fake{}
	zero := row("/a", 0, 1)
	source.set(zero, with(row("/q", 0, 1), func(l *registry.Limit) { l.Quota = true }))
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithBadRows(registry.Pass()))
	nothing := func() {
		t.Helper()
		require.Equal(t, 0, pass(t, r, "/a", 9))
		ok, err := allow(ctx, r, "/a")
		require.NoError(t, err)
		require.False(t, ok)
		by, passes := r.Decider("/a")
		require.Equal(t, gate.ByZero, by)
		require.False(t, passes)
	}
	nothing()
	require.Equal(t, 0, pass(t, r, "/q", 9))
	require.Empty(t, r.Stats().Rejected, "it is no mistake")
	source.set(row("/a", 2, 2))
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, 1, pass(t, r, "/a", 9))
	zero.Version = 3
	source.set(zero)
	require.NoError(t, r.Reload(ctx))
	nothing()
	source.set(with(zero, func(l *registry.Limit) { l.MaxWait = -1 }))
	require.NoError(t, r.Reload(ctx))
	require.ErrorContains(t, &r.Stats().Rejected[0], "max_wait -1ns", "the rest of the row must be right")
	nothing()
}

// Bad rows are logged at once and again every minute, with their consequence. So is a source that fails.
func TestBadRowsAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logged
		source := &fake{}
		source.set(row("/a", -5, 1))
		r := open(t, source, tokenbucket.NewMemoryStore(), log.option())
		defer r.Close()
		count := func(text string) int { return strings.Count(log.String(), text) }
		require.Equal(t, 1, count(`level=WARN msg="registry: a row is bad"`))
		require.Contains(t, log.String(), `rate -5: want a number of permits`)
		require.Contains(t, log.String(), `bucket=/a row="row of /a" consequence="its calls are refused"`)
		time.Sleep(59 * time.Second)
		require.Equal(t, 1, count("a row is bad"))
		time.Sleep(10*time.Minute + 2*time.Second)
		require.Equal(t, 12, count("a row is bad"))
		source.set()
		time.Sleep(2 * time.Minute)
		require.LessOrEqual(t, count("a row is bad"), 13)
		before := count("a row is bad")
		source.fail(errors.New("connection refused"))
		time.Sleep(10 * time.Minute)
		require.Equal(t, before, count("a row is bad"))
		require.InDelta(t, 10, count("still cannot be loaded"), 1)
		many := make([]registry.Limit, 50)
		for i := range many {
			many[i] = row(fmt.Sprint("/", i), -1, 1)
		}
		source.set(many...)
		time.Sleep(30 * time.Second)
		require.Contains(t, log.String(), `msg="registry: further rows are bad, see Stats" rows=30`)
	})
}

// The hook is called once for each call that no bucket decides about.
func TestBypassIsTold(t *testing.T) {
	told := map[string]int{}
	sw := killswitch.NewLocal(true)
	r := open(t, registry.Static{
		row("/a", 1, 1), row("/zero", 0, 1), row("/bad", -1, 1), with(row("/off", 1, 1), func(l *registry.Limit) { l.Disabled = true }),
	}, tokenbucket.NewMemoryStore(), registry.WithSwitch(sw), registry.WithBypassHook(func(name string, by gate.Decider, pass bool) {
		told[fmt.Sprint(name, " ", by, " ", pass)]++
	}))
	ask := func(names ...string) {
		for _, name := range names {
			_, err := allow(ctx, r, name)
			require.NoError(t, err)
		}
	}
	ask("/a", "/zero", "/bad", "/off", "/unknown")
	sw.Set(false)
	ask("/a")
	require.Equal(t, map[string]int{"/zero zero false": 1, "/bad bad_row false": 1, "/off disabled true": 1, "/unknown unknown true": 1, "/a switch true": 1}, told)
	require.Len(t, r.Limiters(), 1)
	require.True(t, r.Has("/bad"))
	require.False(t, r.Has("/unknown"))
}

// Of two rows of one name the first counts, also if it was in force before: the error mentions no last valid limit.
func TestSecondRowOfAName(t *testing.T) {
	source := new(fake)
	source.set(row("/a", 5, 1))
	r := open(t, source, tokenbucket.NewMemoryStore())
	source.set(row("/a", 5, 1), with(row("/a", 7, 1), func(l *registry.Limit) { l.Row = "another" }))
	require.NoError(t, r.Reload(ctx))
	s := r.Stats()
	require.Len(t, s.Rejected, 1)
	require.Equal(t, "row row of /a is in force for the name", s.Rejected[0].Consequence)
}
