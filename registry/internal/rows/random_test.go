//go:build !race

package rows

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// model has the rules of docs/gateway.md about rows that come, go, are off and turn bad, for tables without keys and times.
type model struct {
	inForce, missing, base map[string]text // missing and base: names only; base is nil without a loss
	lacked                 []string        // the limits that the last load lacked
	agreed                 int             // loads in a row that lacked the same
	count                  map[string]int  // rows of each name, with those that may have lost it
	off                    time.Time       // since when the switch is; no rule asks it
}

func limiting(rows map[string]text) map[string]text {
	rows = maps.Clone(rows)
	maps.DeleteFunc(rows, func(_ string, t text) bool { return t.Off() })
	return rows
}

// load is a load of valid rows, of further ones of their names, and of bad ones by name; "" is one whose name cannot be read.
func (m *model) load(given, twins map[string]text, bad []string) {
	next := maps.Clone(twins)
	maps.Copy(next, given) // the first of two rows
	count, nameless := map[string]int{}, slices.Contains(bad, "")
	for _, names := range [][]string{bad, slices.Collect(maps.Keys(given)), slices.Collect(maps.Keys(twins))} {
		for _, name := range names {
			count[name]++
		}
	}
	for name, was := range m.inForce {
		if slices.Contains(bad, name) || nameless && (count[name] == 0 || count[name] < m.count[name]) {
			next[name] = was // the last valid limit of a bad row
		}
	}
	if !nameless {
		m.count = nil
	}
	for name, n := range m.count {
		count[name] = max(count[name], n)
	}
	m.count = count
	has := limiting(next)
	absent := func(rows map[string]text) []string {
		return slices.DeleteFunc(slices.Sorted(maps.Keys(rows)), func(name string) bool { _, ok := has[name]; return ok })
	}
	lacks, known := absent(limiting(m.inForce)), limiting(m.inForce)
	maps.DeleteFunc(m.missing, func(name string, _ text) bool { _, ok := has[name]; return ok })
	maps.Copy(known, m.missing)
	if doubt := 2*len(absent(known)) > len(known); m.base == nil && doubt && len(lacks) > 0 {
		m.base, m.lacked = known, nil // more than half of what was confirmed
	}
	if m.agreed++; !slices.Equal(lacks, m.lacked) {
		m.agreed = 1
	}
	m.lacked = lacks
	few := 2*len(absent(m.base)) <= len(m.base)
	mine := slices.ContainsFunc(lacks, func(name string) bool { _, ok := m.base[name]; return ok })
	gone := slices.ContainsFunc(lacks, func(name string) bool { _, ok := next[name]; return !ok })
	if m.base != nil && len(lacks) > 0 && m.agreed < 3 && (gone || len(lacks) > 1) && (mine || !few) {
		for _, name := range lacks {
			next[name] = m.inForce[name]
		}
	} else {
		for _, name := range lacks {
			m.missing[name] = ""
		}
		if m.base != nil && few { // the rows are back, and limits that came instead of them do not count
			maps.DeleteFunc(m.missing, func(name string, _ text) bool { _, ok := m.base[name]; return !ok })
			m.base = nil
		}
		m.lacked = nil
	}
	m.inForce = next
}

// confirm is a person's confirmation. A loss that is held ends with the next load, so it is left out here.
func (m *model) confirm() { m.base, m.missing, m.lacked = nil, map[string]text{}, nil }

// look is a look at the switch.
func (m *model) look(now time.Time, s Switch) {
	if s == On {
		m.off = time.Time{}
	} else if m.off.IsZero() {
		m.off = now
	}
}

// Ten thousand random histories of rows leave in force what the model says.
func TestRandomHistories(t *testing.T) {
	names := []string{"a", "b", "c", "d", "e"}
	for seed := range uint64(10_000) {
		r := rand.New(rand.NewPCG(seed, 0))
		m, want, now := New[text](AfterLoads), &model{missing: map[string]text{}}, time.Unix(0, 0)
		given, twins, story := map[string]text{}, map[string]text{}, ""
		for range 12 {
			var bad []string
			if r.IntN(3) > 0 { // else the same table again
				for _, name := range names[:1+r.IntN(len(names))] {
					if delete(twins, name); r.IntN(8) == 0 {
						twins[name] = "9/s"
					}
					switch k := r.IntN(10); {
					case k < 4:
						given[name] = text(fmt.Sprint(1+r.IntN(2), "/s"))
					case k < 7:
						delete(given, name)
					case k < 8:
						given[name] = "off"
					case k < 9 && want.inForce[name] != "": // a row that never was valid is no part of the model
						bad = append(bad, name)
						delete(given, name)
					case r.IntN(4) == 0:
						bad = append(bad, "")
					}
				}
			}
			table := Table[text]{}
			for _, rows := range []map[string]text{given, twins} {
				for name, content := range rows {
					table.Rows = append(table.Rows, Row[text]{Name: name, Content: content})
				}
			}
			for _, name := range bad {
				table.Bad = append(table.Bad, Bad{Name: name})
			}
			now = now.Add(time.Second)
			fails, loaded := r.IntN(4) == 0, m.rules != nil
			if fails { // which changes nothing
				require.Equal(t, SourceFails, m.Fail(now))
				require.Equal(t, Nothing, m.Fail(now))
			}
			if r.IntN(3) == 0 {
				s := Switch(r.IntN(2))
				turn, was := m.Look(now, s, ""), want.off
				want.look(now, s)
				since, _ := m.Off()
				require.Equal(t, want.off, since)
				require.Equal(t, was != want.off, turn == SwitchOn || turn == SwitchOff)
			}
			step := m.Load(now, &table)
			want.load(given, twins, bad)
			require.Equal(t, fails && loaded, slices.ContainsFunc(step.Events, func(e Event[text]) bool { return e.Kind == SourceBack }))
			got := map[string]text{}
			for name, rule := range step.Rules {
				got[name] = rule.Content
			}
			story += fmt.Sprint(given, " twins ", twins, " bad ", bad, " → ", got, "\n")
			require.Equal(t, want.inForce, got, "%d:\n%s", seed, story)
			require.Equal(t, want.base != nil, !m.Loss().Since.IsZero(), "%d:\n%s", seed, story)
			if r.IntN(6) == 0 && !m.Loss().Held {
				m.Confirm()
				want.confirm()
				story += "confirmed\n"
			}
		}
	}
}

// Which row of a name counts does not depend on the order of the rows.
func TestTwinsInAnyOrder(t *testing.T) {
	keys := []string{"1", "2", "9", "10", "11", "100", "-1", "01", "a", "b", "B", "1a", "99999999999999999999", "100000000000000000000", "é", "0", "00"}
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 2))
		table := Table[text]{}
		for _, i := range r.Perm(len(keys))[:1+r.IntN(len(keys))] {
			table.Rows = append(table.Rows, Row[text]{[]string{"x", "y", "z"}[r.IntN(3)], keys[i], r.Int64N(3), text(keys[i])})
		}
		inForce := func() map[string]text {
			all := map[string]text{}
			step := New[text](AfterLoads).Load(time.Unix(0, 0), &table)
			for name, rule := range step.Rules {
				all[name] = rule.Content
			}
			require.Len(t, table.Rows, len(all)+len(step.Twins))
			return all
		}
		before := inForce()
		r.Shuffle(len(table.Rows), func(i, j int) { table.Rows[i], table.Rows[j] = table.Rows[j], table.Rows[i] })
		require.Equal(t, before, inForce())
	}
	require.True(t, Newer(2, "1", 1, "2"))
	for _, k := range [][2]string{{"10", "9"}, {"100000000000000000000", "99999999999999999999"}, {"9a", "10"}} {
		require.True(t, Newer(1, k[0], 1, k[1]))
		require.False(t, Newer(1, k[1], 1, k[0]))
	}
}

// Processes load the table as it is now or was before, in any order. The bucket that they share always has the latest row that one of them has loaded, and
// a rate that was set by hand is replaced once two loads in a row have found it.
func TestLaggingReplicas(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 1))
		var processes [3]*Machine[text]
		var has [3]int // the latest row that each has loaded
		for i := range processes {
			processes[i], has[i] = New[text](AfterLoads), -1
		}
		latest, bucket, content, byHand := 0, int64(-1), text(""), false
		for range 60 {
			latest += r.IntN(8) / 7
			i := r.IntN(len(processes))
			loads := r.IntN(latest + 1)
			if has[i] < 0 || r.IntN(4) > 0 {
				loads = max(loads, has[i]) // at most as far back as it has been, and each on the way there
			}
			for at := range loads + 1 {
				if at <= has[i] && at < loads {
					continue
				}
				row := Row[text]{Name: "a", Version: int64(10 + at), Content: text(fmt.Sprint(at, "/s"))}
				differs := map[string]int64{}
				if rule := processes[i].Rule("a"); rule != nil && rule.Content != content {
					differs["a"] = bucket
				}
				rule := processes[i].Load(time.Unix(0, 0), &Table[text]{Rows: []Row[text]{row}, Differs: differs}).Rules["a"]
				if rule.Bucket > bucket {
					bucket, content, byHand = rule.Bucket, rule.Content, false
				}
				has[i] = max(has[i], at)
			}
			if newest := slices.Max(has[:]); !byHand {
				require.Equal(t, text(fmt.Sprint(newest, "/s")), content, "%d", seed)
				require.Equal(t, Version(int64(10+newest)), given(bucket))
			}
			if r.IntN(20) == 0 {
				bucket, content, byHand = bucket+1, "by hand", true
			}
		}
		for i := range processes { // all have caught up
			for range 6 {
				row := Row[text]{Name: "a", Version: int64(10 + latest), Content: text(fmt.Sprint(latest, "/s"))}
				differs := map[string]int64{}
				if processes[i].Rule("a") != nil && processes[i].Rule("a").Content != content {
					differs["a"] = bucket
				}
				if rule := processes[i].Load(time.Unix(0, 0), &Table[text]{Rows: []Row[text]{row}, Differs: differs}).Rules["a"]; rule.Bucket > bucket {
					bucket, content = rule.Bucket, rule.Content
				}
			}
		}
		require.Equal(t, text(fmt.Sprint(latest, "/s")), content, "%d", seed)
	}
}
