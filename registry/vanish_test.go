package registry_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// A table that is empty, or has lost more than half of its rows, is accepted after three consecutive loads.
func TestTableVanishes(t *testing.T) {
	rows := func(from, to int) (limits []registry.Limit) {
		for i := from; i < to; i++ {
			limits = append(limits, row(fmt.Sprint("/", i), 1, 1))
		}
		return limits
	}
	for what, c := range map[string]struct {
		before, after []registry.Limit
		held          []int // after each further load
		limits        []int
		opts          []registry.Option
	}{
		"one of one":     {rows(0, 1), nil, []int{1, 1, 0}, []int{1, 1, 0}, nil},
		"all of ten":     {rows(0, 10), nil, []int{10, 10, 0}, []int{10, 10, 0}, nil},
		"six of ten":     {rows(0, 10), rows(6, 10), []int{6, 6, 0}, []int{10, 10, 4}, nil},
		"five of ten":    {rows(0, 10), rows(5, 10), []int{0}, []int{5}, nil},
		"other names":    {rows(0, 10), rows(10, 20), []int{10, 10, 0}, []int{20, 20, 10}, nil},
		"it is intended": {rows(0, 10), nil, []int{0}, []int{0}, []registry.Option{registry.WithAllowEmpty()}},
		"bad rows, too":  {append(rows(0, 2), row("/2", -1, 1)), rows(0, 1), []int{2, 2, 0}, []int{2, 2, 1}, nil},
	} {
		t.Run(what, func(t *testing.T) {
			var log logged
			source := &fake{}
			source.set(c.before...)
			r := open(t, source, tokenbucket.NewMemoryStore(), append(c.opts, log.option(), registry.WithInterval(time.Hour))...)
			source.set(c.after...)
			for i, held := range c.held {
				require.NoError(t, r.Reload(ctx))
				s := r.Stats()
				require.Equal(t, []int{held, c.limits[i]}, []int{s.Held, s.Limits}, "load %d", i+1)
				for _, l := range c.before {
					there := held > 0 || slices.ContainsFunc(c.after, func(a registry.Limit) bool { return a.Name == l.Name })
					require.Equal(t, there, pass(t, r, l.Name, 9) < 9, l.Name)
				}
			}
			require.Equal(t, len(c.held)-1, strings.Count(log.String(), "more than half of the limits are gone from the table; they stay"))
		})
	}
}

// The rows return before the loss is accepted, or a load fails meanwhile, which does not count.
func TestTableComesBack(t *testing.T) {
	source := &fake{}
	source.set(row("/a", 1, 1))
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	held := func(want int) {
		t.Helper()
		_ = r.Reload(ctx)
		require.Equal(t, want, r.Stats().Held)
	}
	for range 3 {
		source.set()
		held(1)
		held(1)
		source.set(row("/a", 1, 1))
		held(0)
	}
	require.Equal(t, 1, pass(t, r, "/a", 9))
	source.set()
	held(1)
	source.fail(errors.New("away"))
	for range 5 {
		held(1)
	}
	source.set()
	held(1)
	held(0)
	require.Equal(t, 9, pass(t, r, "/a", 9))
}

// originSwitch is a switch that knows who turned it.
type originSwitch struct{ *killswitch.Local }

func (originSwitch) Origin() string { return "by alice" }

// A switch that is off, and a table without limits, are logged at once and again every minute.
func TestVanishedLimitsAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logged
		count := func(text string) int { return strings.Count(log.String(), text) }
		sw := originSwitch{killswitch.NewLocal(false)}
		source := &fake{}
		source.set(row("/a", 1, 1))
		r := open(t, source, tokenbucket.NewMemoryStore(), log.option(), registry.WithSwitch(sw))
		began := time.Now()
		const off, still, on = `level=WARN msg="registry: the switch is off: every call passes" origin="by alice"`,
			`level=WARN msg="registry: the switch is still off: every call passes" for=`, `level=WARN msg="registry: the switch is on`
		require.Equal(t, 1, count(off), "it is off when the process starts")
		require.Equal(t, began, r.Stats().Off)
		require.Equal(t, "by alice", r.Stats().Origin)
		time.Sleep(5*time.Minute + time.Second)
		require.Equal(t, 5, count(still))
		require.Contains(t, log.String(), "for=5m0s")
		sw.Set(true)
		time.Sleep(5 * time.Minute)
		require.Equal(t, []int{1, 5, 1}, []int{count(off), count(still), count(on)})
		require.Zero(t, r.Stats().Off)
		sw.Set(false)
		time.Sleep(1500 * time.Millisecond)
		require.Equal(t, 2, count(off))
		sw.Set(true)
		r.Close()

		const none = `level=WARN msg="registry: there are no limits: every call passes"`
		require.Zero(t, count(none))
		for unknown, want := range map[registry.Otherwise]int{registry.Pass(): 3, registry.Refuse(): 0} {
			before := count(none)
			r = open(t, registry.Static{}, tokenbucket.NewMemoryStore(), log.option(), registry.WithUnknown(unknown))
			time.Sleep(2*time.Minute + time.Second)
			require.Equal(t, want, count(none)-before)
			r.Close()
		}
	})
}
