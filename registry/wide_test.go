package registry

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// rowsOf are entries by name.
func rowsOf(names ...string) map[string]*entry {
	rows := map[string]*entry{}
	for _, name := range names {
		rows[name] = &entry{limit: Limit{Name: name}}
	}
	return rows
}

// decides is the naive model: all rows are looked at.
func decides(rows map[string]*entry, name string, parts bool) string {
	if rows[name] != nil {
		return name
	}
	best, length := "", -1
	for row := range rows {
		text, star := strings.CutSuffix(row, "*")
		if strings.Contains(text, "*") {
			continue
		}
		if !star {
			if text += "|"; !parts {
				continue
			}
		}
		if strings.HasPrefix(name, text) && (len(text) > length || len(text) == length && !star) {
			best, length = row, len(text)
		}
	}
	return best
}

func foundIn(rows map[string]*entry, name string, parts bool) string {
	if rows[name] != nil {
		return name
	}
	w := newWide(rows, parts)
	if e := w.find(name); e != nil {
		return e.limit.Name
	}
	return ""
}

func TestWide(t *testing.T) {
	rows := rowsOf("*", "/ibe/*", "/ibe/a*", "/ibe/Avail", "/ibe", "/x|y*", "/x", "/x|*", "/IBE/b*", "a*b", "/only")
	for _, c := range []struct{ name, row, ofParts string }{
		{"/ibe/Avail", "/ibe/Avail", ""},
		{"/ibe/Avail2", "/ibe/*", ""},
		{"/ibe/ab", "/ibe/a*", ""},
		{"/ibe/", "/ibe/*", ""},
		{"/ibe", "/ibe", ""},
		{"/ibex", "*", ""},
		{"", "*", ""},
		{"/ibe/A", "/ibe/*", ""}, // letter case counts
		{"/IBE/x", "*", ""},
		{"/ibe/Avail|acme", "/ibe/*", "/ibe/Avail"},
		{"/ibe/other|acme", "/ibe/*", ""},
		{"/x|yes|z", "/x|y*", ""},
		{"/x|no", "/x|*", "/x"},
		{`/x\|yes`, "*", ""},
		{"/ibe/*", "/ibe/*", ""},
		{"a*b", "a*b", ""},
		{"axb", "*", ""},
		{"/only|", "*", "/only"},
	} {
		require.Equal(t, c.row, foundIn(rows, c.name, false), c.name)
		if c.ofParts == "" {
			c.ofParts = c.row
		}
		require.Equal(t, c.ofParts, foundIn(rows, c.name, true), c.name)
	}
	require.Nil(t, new(wide).find("x"))
	require.Empty(t, foundIn(rowsOf("/b*", "/d"), "/a", true))
	require.Empty(t, foundIn(rowsOf("/b*", "/d"), "/c", true))
	require.Empty(t, foundIn(rowsOf("/b*", "/d"), "/d/", true))
}

// The row that matches a name is the one that a look at all rows finds.
func FuzzWide(f *testing.F) {
	f.Add("*,/a*,/a/b*,/a/b|c*,/a/b", "/a/b|c", true)
	f.Add("aa*,ab*,aab*,a*", "aabb", false)
	f.Add("a|*,a,a|b*", "a|c", true)
	f.Fuzz(func(t *testing.T, rows, name string, parts bool) {
		all := rowsOf(strings.Split(rows, ",")...)
		delete(all, "")
		for row := range all {
			if len(row) > maxName {
				delete(all, row)
			}
		}
		require.Equal(t, decides(all, name, parts), foundIn(all, name, parts))
	})
}

// The same with names that have much in common, which a fuzzer seldom finds.
func TestWideIsTheModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	word := func(most int) string {
		b := make([]byte, r.IntN(most))
		for i := range b {
			b[i] = "aab/|*"[r.IntN(6)]
		}
		return string(b)
	}
	for range 20_000 {
		var names []string
		for range r.IntN(8) {
			names = append(names, word(5)+[]string{"", "*"}[r.IntN(2)])
		}
		rows, name, parts := rowsOf(names...), word(9), r.IntN(2) == 0
		require.Equal(t, decides(rows, name, parts), foundIn(rows, name, parts), "%q in %q, parts %v", name, names, parts)
	}
}

// A name of a megabyte costs no more than one of the longest row.
func TestWideOfALongName(t *testing.T) {
	var names []string
	for i := range maxName {
		names = append(names, strings.Repeat("a", i)+"*")
	}
	w := newWide(rowsOf(names...), false)
	require.Equal(t, strings.Repeat("a", maxName-1)+"*", w.find(strings.Repeat("a", 1<<20)).limit.Name)
	require.Equal(t, strings.Repeat("a", 9)+"*", w.find(strings.Repeat("a", 9)+strings.Repeat("b", 1<<20)).limit.Name)
	long := strings.Repeat("a", 9) + strings.Repeat("b", 1<<20)
	require.Zero(t, testing.AllocsPerRun(10, func() { w.find(long) }))
}

// No two strings have one bucket's name, and each is one.
func FuzzUnique(f *testing.F) {
	long := strings.Repeat("x", maxName)
	f.Add("a", "b")
	f.Add("\xff", "\xfe")
	f.Add(long+"a", long+"b")
	f.Add(unique(long+"a"), long+"a")
	f.Add(unique("\xff"), "\xff")
	f.Add("", unique(""))
	f.Fuzz(func(t *testing.T, a, b string) {
		for _, s := range []string{a, b} {
			c := Limit{Name: strings.ReplaceAll(unique(s), "*", "")}
			if c.Name != "" {
				require.Nil(t, c.check())
			}
			require.LessOrEqual(t, len(unique(s)), maxName)
		}
		if a != b {
			require.NotEqual(t, unique(a), unique(b))
		}
	})
}

func BenchmarkWide(b *testing.B) {
	for _, n := range []int{10, 10_000} {
		var names []string
		for i := range n {
			names = append(names, fmt.Sprintf("/ibe/%d/*", i))
		}
		w := newWide(rowsOf(names...), false)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				w.find("/ibe/7/AvailFare")
			}
		})
	}
}
