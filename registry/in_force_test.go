package registry_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// passing returns how many calls pass at once of so many in the same instant.
func passing(t *testing.T, r *registry.Registry, name string, calls int) (passed int) {
	t.Helper()
	for range calls {
		if ok, err := allow(ctx, r, name); ok {
			require.NoError(t, err)
			passed++
		}
	}
	return passed
}

// at once is a limit that lets no call wait.
func atOnce(l registry.Limit) registry.Limit { l.MaxWait = 0; return l }

// Rows that one statement turns off are a loss as those that it deletes: they stay in force until three loads agree, and are told.
func TestAllRowsOff(t *testing.T) {
	source := &fake{}
	limits := func(off bool, version int64) (all []registry.Limit) {
		for _, l := range rows(0, 3) {
			l.Disabled, l.Version, l.MaxWait = off, version, 0
			all = append(all, l)
		}
		return all
	}
	source.set(limits(false, 1)...)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	source.set(limits(true, 2)...)
	for range 2 {
		require.NoError(t, r.Reload(ctx))
		l := r.Stats().Loss
		require.Equal(t, []any{3, 3, 3, true}, []any{l.Before, l.Gone, l.Off, l.Held})
		require.LessOrEqual(t, passing(t, r, "/00", 60), 2)
	}
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, 60, passing(t, r, "/00", 60))
	require.Equal(t, 3, r.Stats().Disabled)
	require.Equal(t, 3, r.Stats().Loss.Gone, "it is told until it is confirmed")
	require.NoError(t, r.Confirm(ctx, "ann", "meant"))
	require.Zero(t, r.Stats().Loss)
}

// Rows that are deleted in steps are a loss once they are more than half of those that were confirmed.
func TestRowsDeletedInSteps(t *testing.T) {
	source := &fake{}
	source.set(rows(0, 5)...)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	load := func(from int) registry.Loss {
		source.set(rows(from, 5)...)
		require.NoError(t, r.Reload(ctx))
		return r.Stats().Loss
	}
	require.Zero(t, load(2))
	l := load(3)
	require.Equal(t, []any{5, 3, true}, []any{l.Before, l.Gone, l.Held})
	require.Equal(t, 4, load(4).Gone)
	require.True(t, r.Has("/02"))
	require.True(t, load(4).Held)
	require.False(t, load(4).Held)
	require.Equal(t, []any{1, 4}, []any{r.Stats().Limits, r.Stats().Loss.Gone})
}

// A row that ends, or that is bad in a new process, leaves no version in the bucket of the limit that takes its place.
func TestEndedRowLeavesNothing(t *testing.T) {
	const calls = 2000
	for what, opts := range map[string][]registry.Option{
		"deleted": {registry.WithUnknown(registry.Default(atOnce(row("", 5, 0)))), registry.WithAllowEmpty()},
		"bad":     {registry.WithBadRows(registry.Default(atOnce(row("", 5, 0))))},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source, store := &fake{}, tokenbucket.NewMemoryStore()
				source.set(atOnce(row("/a", 1000, 1_700_000_000_000_000)))
				first := open(t, source, store, append(opts, registry.WithInterval(time.Second))...)
				require.Positive(t, passing(t, first, "/a", 10))
				counted := func(r *registry.Registry) (passed int) {
					for range calls {
						passed += passing(t, r, "/a", 1)
						time.Sleep(time.Millisecond)
					}
					r.Close()
					return passed
				}
				if what == "deleted" {
					source.set()
					time.Sleep(5 * time.Second)
					require.LessOrEqual(t, counted(first), 16)
				} else {
					first.Close()
					source.set(row("/a", -1, 1_700_000_001_000_000))
				}
				require.LessOrEqual(t, counted(open(t, source, store, append(opts, registry.WithInterval(time.Second))...)), 16, "a new process")
			})
		})
	}
	t.Run("Redis", func(t *testing.T) {
		source, store := &fake{}, tokenbucket.NewRedisScriptStore(redistest.Shared(t).Client(t))
		name := fmt.Sprint("/ended/", rand.Uint64())
		source.set(row(name, 1000, 1_700_000_000_000_000))
		process := func() *registry.Registry {
			return open(t, source, store, registry.WithUnknown(registry.Default(row("", 5, 0))), registry.WithAllowEmpty(), registry.WithInterval(time.Hour))
		}
		rate := func(r *registry.Registry) float64 {
			_, err := allow(ctx, r, name)
			require.NoError(t, err)
			l, err := r.Limiter(name)
			require.NoError(t, err)
			return l.InForce().Rate
		}
		first := process()
		require.Equal(t, 1000.0, rate(first))
		source.set()
		require.NoError(t, first.Reload(ctx))
		require.Equal(t, 5.0, rate(first))
		require.Equal(t, 5.0, rate(process()))
	})
}

// An item of a file is known by its name only. If that cannot be read any more, limits whose items are gone stay in force.
func TestNamelessItemKeepsItsLimit(t *testing.T) {
	source := &fake{}
	var log logged
	item := atOnce(registry.Limit{Name: "/a", Row: "limits.yaml", Rate: 2, Version: 1})
	source.table = registry.Table{Limits: []registry.Limit{item}, Lines: []int{2}}
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), log.option())
	for _, bad := range []registry.RowError{{}, {Name: "/a*b"}} {
		bad.Row, bad.Field = "limits.yaml:2", "name"
		source.table = registry.Table{Rejected: []registry.RowError{bad}, Lines: []int{}}
		for range 5 {
			require.NoError(t, r.Reload(ctx))
		}
		require.LessOrEqual(t, passing(t, r, "/a", 20), 2)
		require.Equal(t, 1, strings.Count(log.String(), "its last good limit stays in force"))
	}
}

// Of two rows of one name the newer turns bad: its last valid limit stays in force, whatever the older one allows.
func TestNewerOfTwoRowsTurnsBad(t *testing.T) {
	older, newer := atOnce(row("/a", 1000, 10)), atOnce(row("/a", 5, 20))
	older.Row, newer.Row = "1", "2"
	off := older
	off.Disabled = true
	for what, older := range map[string]registry.Limit{"faster": older, "off": off} {
		t.Run(what, func(t *testing.T) {
			source := &fake{}
			source.set(older, newer)
			r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
			require.Equal(t, "row 2 is in force for the name", r.Stats().Rejected[0].Consequence)
			for _, name := range []string{"/a", ""} {
				source.table = registry.Table{Limits: []registry.Limit{older}, Rejected: []registry.RowError{{Row: "2", Name: name, Field: "rate", Value: "-1"}}}
				for range 4 {
					require.NoError(t, r.Reload(ctx))
				}
				require.Equal(t, 5.0, r.Limits()[0].Rate)
				require.LessOrEqual(t, passing(t, r, "/a", 1000), 6)
				require.Contains(t, r.Stats().Rejected[0].Consequence, "stays in force")
			}
			source.set(older) // the newer one is deleted
			require.NoError(t, r.Reload(ctx))
			require.Equal(t, older.Rate, r.Limits()[0].Rate)
		})
	}
}

// A process whose table lags behind, or that reads it from replicas in turn, does not put an older row in force above the newer one.
func TestLaggingProcess(t *testing.T) {
	for what, again := range map[string]bool{"lags": false, "in turn": true} {
		for _, version := range []int64{1, 1_700_000_000_000_000} { // numbers of changes, and times
			t.Run(fmt.Sprint(what, version), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					store := tokenbucket.NewMemoryStore()
					fast, slow := atOnce(row("/a", 1000, version)), atOnce(row("/a", 5, version+1))
					if version > 1 {
						slow.Version += 1_000_000
					}
					up, behind := &fake{}, &fake{}
					up.set(fast)
					behind.set(fast)
					first := open(t, up, store, registry.WithInterval(time.Second))
					second := open(t, behind, store, registry.WithInterval(time.Second), registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(2*time.Second)))
					passing(t, second, "/a", 10)
					up.set(slow)
					time.Sleep(2 * time.Second)
					passing(t, first, "/a", 1)
					passed := 0
					for ms := range 120_000 {
						if again && ms%5000 == 0 {
							behind.set([]registry.Limit{slow, fast}[ms/5000%2])
						}
						if ms%20 == 0 {
							passed += passing(t, []*registry.Registry{first, second}[ms/20%2], "/a", 25)
						}
						time.Sleep(time.Millisecond)
					}
					require.LessOrEqual(t, passed, 610)
					require.Greater(t, passed, 500)
					if !again {
						require.Equal(t, []string{"/a"}, second.Stats().Outdated)
					}
					behind.set(slow)
					time.Sleep(2 * time.Second)
					require.Empty(t, second.Stats().Outdated)
					first.Close()
					second.Close()
				})
			})
		}
	}
}

// Loads that each see another part of a table do not agree. A table that is emptied and filled again row by row is in force as it was until it is full.
func TestLoadsMustAgree(t *testing.T) {
	source := &fake{}
	all := rows(0, 10)
	source.set(all...)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	for _, part := range [][]registry.Limit{all[:4], all[4:8], all[6:], all[:4], all[:0], all[:1], all[:2], all[:3], all[:4], all[:5], all[:6], all[:7], all[:8], all[:9]} {
		source.set(part...)
		require.NoError(t, r.Reload(ctx))
		require.Equal(t, 10, r.Stats().Limits)
		require.Equal(t, 10-len(part), r.Stats().Held)
	}
	source.set(all...)
	require.NoError(t, r.Reload(ctx))
	require.Zero(t, r.Stats().Held)
	require.Zero(t, r.Stats().Loss)
}
