package filesource

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// write makes a file with that text.
func write(t *testing.T, text string) *Source {
	t.Helper()
	path := filepath.Join(t.TempDir(), "limits.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return &Source{Path: path}
}

func TestExample(t *testing.T) {
	table, err := (&Source{Path: "example.yaml"}).Load(t.Context())
	require.NoError(t, err)
	require.Empty(t, table.Rejected)
	size := 10.0
	for i := range table.Limits {
		require.Positive(t, table.Limits[i].Version)
		table.Limits[i].Version = 0
	}
	const row = "example.yaml"
	require.Equal(t, []registry.Limit{
		{Name: "/ibe/AvailFare", Row: row, Rate: 5, MaxWait: 300 * time.Millisecond},
		{Name: "/ibe/Book", Row: row, Rate: 2.5, MaxWait: 500 * time.Millisecond, Burst: &size},
		{Name: "/ibe/Price", Row: row, Rate: 100, MaxWait: 500 * time.Millisecond, Warmup: 30 * time.Second, ColdFactor: 3},
		{Name: "/partner/quote", Row: row, Rate: 20, MaxWait: 500 * time.Millisecond, Quota: true, Jitter: 50 * time.Millisecond},
		{Name: "/ibe/Order", Row: row, Rate: 5, MaxWait: 500 * time.Millisecond, Window: 24 * time.Hour, WindowLimit: 10_000, Concurrent: 20, ConcurrentWait: 2 * time.Second, Penalty: registry.PenaltyBoth, Priority: tokenbucket.Low},
		{Name: "/ibe/Report", Row: row, NoRate: true, Concurrent: 2},
		{Name: "/ibe/Search", Row: row, Rate: 50, MaxWait: 500 * time.Millisecond, Disabled: true},
		{Name: "/ibe/Offer", Row: row, Rate: 50, MaxWait: 500 * time.Millisecond, Shadow: true},
		{Name: "/ibe/*", Row: row, Rate: 20, MaxWait: 500 * time.Millisecond, PerKey: true},
	}, table.Limits)
	limits, err := registry.New(&Source{Path: "example.yaml"}, tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores())
	require.NoError(t, err)
	defer limits.Close()
	require.Empty(t, limits.Stats().Rejected)
}

// A document that is wrong as a whole is an error, never an empty table.
func TestBadDocuments(t *testing.T) {
	for text, want := range map[string]string{
		"":                                      `line 1: the document is empty: want "limits:" and a list`,
		"# nothing yet\n":                       `line 1: the document is empty`,
		"limits:\n":                             "line 1: limits without a value: want a list, [] for none",
		"\nlimits: 5\n":                         `line 2: limits "5": want a list`,
		"limits: {}\n":                          "line 1: limits a map: want a list",
		"- name: /a\n":                          "line 1: the document is a list: want",
		"limits: []\nlimit: []\n":               `line 2: key "limit": want no other than limits`,
		"limits: []\nlimits: []\n":              "line 2: limits for the second time",
		"limits: []\n---\nlimits: []":           "a second document: want one",
		"{}":                                    "line 1: the document has no limits",
		"limits:\n  - name: /a\n   rate: 5\n":   "line 3: did not find expected '-' indicator: want YAML",
		"limits:\n  - name: /a\n\trate: 5\n":    "line 3: found a tab character that violates indentation: want YAML",
		strings.Repeat("#", mostBytes+1) + "\n": "more than 16777216 bytes",
	} {
		s := write(t, text)
		table, err := s.Load(t.Context())
		require.ErrorContains(t, err, want, "%.80q", text)
		require.ErrorContains(t, err, s.Path)
		require.Zero(t, table)
	}
	_, err := (&Source{Path: t.TempDir()}).Load(t.Context())
	require.ErrorContains(t, err, "want a file")
	_, err = (&Source{Path: "/no/such/file"}).Load(t.Context())
	require.ErrorIs(t, err, os.ErrNotExist)
	table, err := write(t, "limits: []").Load(t.Context())
	require.NoError(t, err)
	require.Equal(t, registry.Table{Lines: []int{}}, table)
}

// The line of a document that is no YAML is the one that must be repaired, however many are before and after.
func TestLineOfSyntaxError(t *testing.T) {
	const item = "  - name: /a\n    rate: 5\n"
	for wrong, line := range map[string]int{
		"  - name: /a\n   rate: 5\n":                             2,
		"  - name: /a\n    rate: 5: 6\n":                         2,
		"  - name: /a\n\trate: 5\n":                              2,
		"  - name: \"/a\n    rate: 5\n":                          1,
		"  - {name: /a,\n    rate: 5\n":                          3, // the next item, which is no part of it
		"  - {\n    name: /a, rate: 5}}\n":                       2,
		"  - {name: /a rate: 5}\n":                               1,
		"  - {\n    name: /a,\n    rate: 5\n    cache: 1}\n":     4,
		"  - {\n    name: /a\n\n    \"b\": 5}\n":                 4,
		"  - name: 'x\n":                                         1,
		"  - name: /a\n    rate: 5\n    cache\n\n  - name: /b\n": 3,
		"  - name: /a\n    rate: *nowhere\n":                     2,
		" - name: /a\n":                                          1,
	} {
		for _, n := range []int{1, 10, 500} {
			text := "limits:\n" + strings.Repeat(item, n) + wrong
			_, err := write(t, text+strings.Repeat(item, 10)).Load(t.Context())
			require.ErrorContains(t, err, fmt.Sprintf("yaml: line %d: ", 1+2*n+line), "%q", wrong)
		}
	}
}

// The missing comma of a list in brackets is found in one pass, however long the list is, and the message names the line on which the list
// begins.
func TestMissingComma(t *testing.T) {
	for _, n := range []int{100, 5000} {
		items := make([]string, n)
		for i := range items {
			items[i] = fmt.Sprintf("  {name: /a/%d, rate: 5},\n", i)
		}
		items[n/2] = strings.Replace(items[n/2], "},", "}", 1)
		began := time.Now()
		_, err := write(t, "limits:\n [\n"+strings.Join(items, "")+" ]\n").Load(t.Context())
		require.ErrorContains(t, err, fmt.Sprintf("line %d: did not find expected ',' or ']' of what begins on line 2: want YAML", 2+n/2+2))
		require.Less(t, time.Since(began), time.Minute, "by lines it took hours")
	}
}

// countdown is a context that ends when it has been asked so often whether it has.
type countdown struct {
	context.Context
	left, asked int
}

func (c *countdown) Err() error {
	if c.asked++; c.asked > c.left {
		return context.Canceled
	}
	return nil
}

// A load asks often whether its context has ended, and ends as soon as it has: while it parses, and while it looks for the line that is wrong.
func TestLoadHeedsItsContext(t *testing.T) {
	s := write(t, "limits:\n"+strings.Repeat("  - {name: /a, rate: 5}\n", 2000)+"  junk\n")
	whole := &countdown{t.Context(), math.MaxInt, 0}
	_, err := s.Load(whole)
	require.ErrorContains(t, err, "want YAML")
	require.Greater(t, whole.asked, 1000)
	for _, part := range []int{1, 10, whole.asked / 2, whole.asked * 9 / 10} {
		ends := &countdown{t.Context(), part, 0}
		_, err := s.Load(ends)
		require.ErrorIs(t, err, context.Canceled)
		require.Less(t, ends.asked, part+20)
	}
}

// A bad item is rejected alone, and the message names line, field, value and the values that are accepted.
func TestBadItems(t *testing.T) {
	for item, want := range map[string]string{
		"{name: /b, rate: -5}":                               `bucket "/b": rate "-5": want a number of permits per second from 1e-9 to 2^53`,
		"{name: /b, rate: .inf}":                             `rate ".inf": want a number`,
		"{name: /b, rate: NaN}":                              `rate "NaN": want a number`,
		"{name: /b, rate: 0x10}":                             `rate "0x10": want a number`,
		"{name: /b, rate: 1e-10}":                            `rate "1e-10": want a number`,
		"{name: /b, rate: 1e999}":                            `rate "1e999": want a number`,
		"{name: /b, rate: [5]}":                              `rate a list: want a number`,
		"{name: /b, rate: }":                                 `rate without a value: want a number`,
		"{name: /b}":                                         `rate missing: want a number`,
		"{name: /b, rate: 5, cache: -1}":                     `cache "-1": want seconds, 0 to 9007199254, or a duration such as 500ms`,
		"{name: /b, rate: 5, burst: many}":                   `burst "many": want a number of permits`,
		"{name: /b, rate: 5, max_wait: soon}":                `max_wait "soon": want seconds, 0 to 9007199254, or a duration such as 500ms`,
		"{name: /b, rate: 5, warmup: -4}":                    `warmup "-4": want seconds, 0 to 3153600000, or a duration such as 4s`,
		"{name: /b, rate: 5, warmup: 4s, cold_factor: 1}":    `cold_factor "1": want a number above 1`,
		"{name: /b, rate: 5, cold_factor: 2}":                `cold_factor "2": want no value without a warm-up`,
		"{name: /b, rate: 5, warmup: 4s, burst: 1}":          `burst "1": want no value: the row has a warm-up`,
		"{name: /b, rate: 5, quota: yes}":                    `quota "yes": want true or false`,
		"{name: /b, rate: 2.5, quota: true}":                 `rate "2.5": want a whole number`,
		"{name: /b, rate: 5, quota: true, burst: 2}":         `burst "2": want no value: the row is a quota`,
		"{name: /b, rate: 5, quota: true, warmup: 2s}":       `warmup "2s": want no value: the row is a quota`,
		"{name: /b, rate: 5, jitter: 1ms}":                   `jitter "1ms": want no value: the row is no quota`,
		"{name: /b, rate: 5, quota: true, jitter: 2s}":       `jitter "2s": want seconds, 0 to 1, or a duration such as 50ms`,
		"{name: /b, rate: 5, window: 0.0005}":                `window "0.0005": want seconds to the millisecond`,
		"{name: /b, rate: 5, window: 0s, window_limit: 1}":   `window "0s": want seconds`,
		"{name: /b, rate: 5, window: 1us, window_limit: 1}":  `window "1us": want seconds`,
		"{name: /b, rate: 5, window: 1s}":                    `window_limit missing: want 1 to 2147483647: the row has a window`,
		"{name: /b, rate: 5, window_limit: 1}":               `window missing: want a length: the row has a limit for a window`,
		"{name: /b, rate: 5, window: 1s, window_limit: 0}":   `window_limit "0": want a whole number of calls, 1 to`,
		"{name: /b, rate: 5, concurrent: 1.5}":               `concurrent "1.5": want a whole number of calls`,
		"{name: /b, rate: 5, concurrent: 0}":                 `concurrent "0": want a whole number of calls`,
		"{name: /b, rate: none}":                             `rate "none": want a rate, a window or a concurrency`,
		"{name: /b, rate: none, concurrent: 1, burst: 1}":    `burst "1": want no value: the row has no rate`,
		"{name: /b, rate: none, concurrent: 1, warmup: 1s}":  `warmup "1s": want no value: the row has no rate`,
		"{name: /b, rate: none, concurrent: 1, quota: true}": `quota "true": want no value: the row has no rate`,
		"{name: /b, rate: 5, disabled: 1}":                   `disabled "1": want true or false`,
		"{name: /b, rat: 5}":                                 `bucket "/b": key "rat": want one of name, disabled, shadow, rate, max_wait, burst`,
		"{name: /b, rate: 5, rate: 6}":                       `bucket "/b": key "rate": want each key once`,
		"{rate: 5}":                                          `bucket "": name missing: want a name`,
		`{name: "", rate: 5}`:                                `name "": want a name`,
		"{name: " + strings.Repeat("x", 513) + ", rate: 5}":  "want a name, 1 to 512 bytes",
		"{name: /b, rate: 5, shadow: 1}":                     `shadow "1": want true or false`,
		"{name: /b, rate: 5, per_key: 1}":                    `per_key "1": want true or false`,
		"{name: /b*c, rate: 5}":                              `bucket "/b*c": name "/b*c": want a * at its end only`,
		"/b":                                                 `item "/b": want a map with name and rate`,
		"":                                                   `item without a value: want a map`,
		"[name, rate]":                                       `item a list: want a map`,
	} {
		table, err := write(t, "limits:\n  - {name: /a, rate: 5}\n\n  - "+item+"\n").Load(t.Context())
		require.NoError(t, err, item)
		require.Len(t, table.Limits, 1, item)
		require.Len(t, table.Rejected, 1, item)
		require.ErrorContains(t, &table.Rejected[0], "row limits.yaml:4: ", item)
		require.ErrorContains(t, &table.Rejected[0], want, item)
	}
	// The line is the field's.
	table, err := write(t, "limits:\n  - name: /a\n    rate: 5\n    cache: -1\n").Load(t.Context())
	require.NoError(t, err)
	require.Equal(t, "limits.yaml:4", table.Rejected[0].Row)
	// Of a disabled item only the name matters.
	table, err = write(t, "limits:\n  - {name: /a, disabled: true, rate: -5, what: 1}\n").Load(t.Context())
	require.NoError(t, err)
	require.True(t, table.Limits[0].Disabled)
	// A bad item in shadow is marked as such, wherever the field stands.
	table, err = write(t, "limits:\n  - {name: /a, what: 1, rate: -5, shadow: true}\n  - {name: /b, rate: 5, jitter: 1ms, shadow: true}\n").Load(t.Context())
	require.NoError(t, err)
	require.True(t, table.Rejected[0].Shadow)
	require.True(t, table.Rejected[1].Shadow)
}

// An item of a file may leave out what a row of a table may have as NULL, have a duration as text or number, and use older names.
func TestItemsAsRows(t *testing.T) {
	load := func(item string) registry.Table {
		table, err := write(t, "limits:\n  - "+item+"\n").Load(t.Context())
		require.NoError(t, err)
		return table
	}
	second := time.Second
	for item, want := range map[string]registry.Limit{
		"{name: /a, concurrent: 1}":                              {Name: "/a", NoRate: true, Concurrent: 1},
		"{name: /a, window: 24h, window_limit: 5}":               {Name: "/a", NoRate: true, Window: 24 * time.Hour, WindowLimit: 5},
		"{name: /a, rate: 5, max_wait: 500ms}":                   {Name: "/a", Rate: 5, MaxWait: second / 2},
		"{name: /a, rate: 5, max_wait: 0.3}":                     {Name: "/a", Rate: 5, MaxWait: 300 * time.Millisecond},
		"{name: /a, rate: 5, cache: 500ms}":                      {Name: "/a", Rate: 5, MaxWait: second / 2},
		"{name: /a, rate: 5, cache: 0.3}":                        {Name: "/a", Rate: 5, MaxWait: 300 * time.Millisecond},
		"{name: /a, rate: 5, cache: 0.3, max_wait: 300ms}":       {Name: "/a", Rate: 5, MaxWait: 300 * time.Millisecond},
		"{name: /a, rate: 5, concurrent: 1, concurrent_wait: 2}": {Name: "/a", Rate: 5, MaxWait: second / 2, Concurrent: 1, ConcurrentWait: 2 * second},
		"{interfaceUrl: /a, rateLimit: 5, perKey: true}":         {Name: "/a", Rate: 5, MaxWait: second / 2, PerKey: true},
		"{name: /a, rate: 5, warmup_ms: 1500}":                   {Name: "/a", Rate: 5, MaxWait: second / 2, Warmup: 1500 * time.Millisecond},
		"{name: /a, rate: 5, warmup: 1.5}":                       {Name: "/a", Rate: 5, MaxWait: second / 2, Warmup: 1500 * time.Millisecond},
		"{name: /a, rate: 5, status: false}":                     {Name: "/a", Rate: 5, MaxWait: second / 2, Disabled: true},
		"{name: /a, rate: 5, windowLimit: 7, window: 86400}":     {Name: "/a", Rate: 5, MaxWait: second / 2, Window: 24 * time.Hour, WindowLimit: 7},
	} {
		table := load(item)
		require.Empty(t, table.Rejected, item)
		require.Len(t, table.Limits, 1, item)
		want.Row, want.Version = "limits.yaml", table.Limits[0].Version
		require.Equal(t, want, table.Limits[0], item)
	}
	for item, want := range map[string]registry.RowError{
		"{name: /a, rate: 5, max_wait: 500ms, cache: 0.3}":  {Field: "max_wait", Value: `"500ms"`, Other: "cache", Want: `the same value as cache "0.3", or one of the two alone: both name one setting`},
		"{name: /a, rate: 5, disabled: true, status: true}": {Field: "disabled", Value: `"true"`, Other: "status", Want: `the same value as status "true", or one of the two alone: both name one setting`},
		"{name: /a, interfaceUrl: /b, rate: 5}":             {Field: "name", Value: `"/a"`, Other: "interfaceUrl", Want: `the same value as interfaceUrl "/b", or one of the two alone: both name one setting`},
	} {
		table := load(item)
		require.Empty(t, table.Limits, item)
		require.Len(t, table.Rejected, 1, item)
		want.Row, want.Name = "limits.yaml:2", "/a"
		require.Equal(t, want, table.Rejected[0], item)
	}
}

// What the settings say counts for items that say nothing.
func TestQuotas(t *testing.T) {
	s := write(t, "limits: [{name: /a, rate: 5}, {name: /b, rate: 5, quota: false}, {name: /c, rate: 5, jitter: 1ms}]")
	s.Quota, s.Jitter = true, time.Millisecond*30
	table, err := s.Load(t.Context())
	require.NoError(t, err)
	require.Empty(t, table.Rejected)
	require.Equal(t, []time.Duration{30 * time.Millisecond, 0, time.Millisecond}, []time.Duration{table.Limits[0].Jitter, table.Limits[1].Jitter, table.Limits[2].Jitter})
	require.Equal(t, []bool{true, false, true}, []bool{table.Limits[0].Quota, table.Limits[1].Quota, table.Limits[2].Quota})
}

// limits is a file with one limit.
func limits(rate int) string { return fmt.Sprintf("limits:\n  - {name: /a, rate: %d}\n", rate) }

func rateOf(t *testing.T, r *registry.Registry) float64 {
	t.Helper()
	require.NoError(t, r.Reload(t.Context()))
	all := r.Limits()
	require.Len(t, all, 1)
	return all[0].Rate
}

// In whatever way a file is replaced, the next load reads it; a bad file changes nothing.
func TestReplacedFiles(t *testing.T) {
	dir := t.TempDir()
	at := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	put := func(path, text string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	// As Kubernetes mounts a ConfigMap: limits.yaml → ..data/limits.yaml, ..data → a directory of each version.
	put(at("..1", "limits.yaml"), limits(1))
	require.NoError(t, os.Symlink("..1", at("..data")))
	require.NoError(t, os.Symlink(filepath.Join("..data", "limits.yaml"), at("limits.yaml")))
	r, err := registry.New(&Source{Path: at("limits.yaml")}, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	require.NoError(t, err)
	defer r.Close()
	require.Equal(t, 1.0, rateOf(t, r))
	put(at("..2", "limits.yaml"), limits(2))
	require.NoError(t, os.Symlink("..2", at("..data_tmp")))
	require.NoError(t, os.Rename(at("..data_tmp"), at("..data")))
	require.NoError(t, os.RemoveAll(at("..1")))
	require.Equal(t, 2.0, rateOf(t, r))
	put(at(".limits.yaml.swp"), limits(3)) // an editor
	require.NoError(t, os.Rename(at(".limits.yaml.swp"), at("limits.yaml")))
	require.Equal(t, 3.0, rateOf(t, r))
	put(at("limits.yaml"), limits(4)) // in place
	require.Equal(t, 4.0, rateOf(t, r))
	require.NoError(t, os.Chtimes(at("limits.yaml"), time.Time{}, time.Unix(1000, 0))) // an old file that comes back
	put(at("limits.yaml"), limits(5))
	require.NoError(t, os.Chtimes(at("limits.yaml"), time.Time{}, time.Unix(1000, 0)))
	require.Equal(t, 5.0, rateOf(t, r))

	for _, wrong := range []string{"limits:\n  - {name: /a, rate: 6\n", "", "limits:\n  - {name: /a, rate: -6}\n"} {
		put(at("limits.yaml"), wrong)
		_ = r.Reload(t.Context())
		require.Equal(t, 5.0, r.Limits()[0].Rate, wrong)
	}
	require.NoError(t, os.Remove(at("limits.yaml")))
	require.ErrorIs(t, r.Reload(t.Context()), os.ErrNotExist)
	require.Equal(t, 5.0, r.Limits()[0].Rate)
}

// Lines that are added above a limit do not change it.
func TestLinesMove(t *testing.T) {
	s := write(t, limits(1))
	var last registry.Load
	r, err := registry.New(s, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithHook(func(l registry.Load) { last = l }))
	require.NoError(t, err)
	defer r.Close()
	require.NoError(t, os.WriteFile(s.Path, []byte("# another line\n"+limits(1)), 0o600))
	require.NoError(t, r.Reload(t.Context()))
	require.Equal(t, 1, last.Limits)
	require.Zero(t, last.Changed)
}

func FuzzLoad(f *testing.F) {
	text, err := os.ReadFile("example.yaml")
	require.NoError(f, err)
	f.Add(text)
	f.Add([]byte("limits: [&a {name: /a, rate: 5}, *a, {<<: *a}]"))
	f.Add([]byte("limits: &l [*l]"))
	path := filepath.Join(f.TempDir(), "limits.yaml")
	f.Fuzz(func(t *testing.T, text []byte) {
		require.NoError(t, os.WriteFile(path, text, 0o600))
		table, err := (&Source{Path: path}).Load(context.Background())
		if err != nil {
			require.Zero(t, table)
		}
		for _, l := range table.Limits {
			require.NotEmpty(t, l.Name)
			require.True(t, l.Rate >= 0 && l.MaxWait >= 0 && l.MaxWait <= 1<<53*time.Microsecond && !math.IsInf(l.Rate, 0))
		}
	})
}

// A file that is put in place of a newer one, as a backup is, is newer than that.
func TestOlderFileIsPutBack(t *testing.T) {
	s := write(t, "limits:\n  - {name: /a, rate: 5}\n")
	began := time.Now().Truncate(time.Second)
	var last int64
	for i, modified := range []time.Time{began.Add(-time.Hour), began.Add(-time.Minute), began.Add(-2 * time.Hour), began.Add(-time.Hour)} {
		require.NoError(t, os.Chtimes(s.Path, modified, modified))
		for range 2 {
			table, err := s.Load(t.Context())
			require.NoError(t, err)
			require.Equal(t, i < 2, table.Limits[0].Version == modified.UnixMicro())
			require.GreaterOrEqual(t, table.Limits[0].Version, last)
			last = table.Limits[0].Version
		}
	}
}

// An item whose name cannot be read any more keeps its last valid limit, whatever its name has become.
func TestNameTurnsBad(t *testing.T) {
	for _, name := range []string{"nam: /a", "name:", "name: []", "name: [/a]", "name: /a*b", `name: ""`, "name: " + strings.Repeat("x", 513)} {
		for _, others := range []string{"", "  - {name: /b, rate: 7}\n"} {
			s := write(t, "limits:\n  - {name: /a, rate: 2, max_wait: 0, burst: 2}\n"+others)
			limits, err := registry.New(s, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour),
				registry.WithLimiterOptions(tokenbucket.WithInitialPermits(2)), registry.WithLogger(slog.New(slog.DiscardHandler)))
			require.NoError(t, err)
			load := func(text string) {
				t.Helper()
				require.NoError(t, os.WriteFile(s.Path, []byte(text), 0o600))
				require.NoError(t, limits.Reload(t.Context()))
			}
			load("# a line more\nlimits:\n  - {" + name + ", rate: 1000}\n" + others)
			passed := 0
			for range 20 {
				a, err := limits.Enter(t.Context(), "/a")
				require.NoError(t, err)
				if a.OK {
					passed++
				}
			}
			require.LessOrEqual(t, passed, 3, name)
			require.Len(t, limits.Stats().Rejected, 1)
			require.True(t, limits.Has("/a"))
			load("limits:\n  - {name: /c, rate: 1000}\n" + others)
			require.False(t, others != "" && limits.Has("/a"), "the item is gone")
			limits.Close()
		}
	}
}

// Of two items with one name the first counts. If it turns bad, its last valid limit stays in force, whatever the other allows.
func TestTwoItemsOfOneName(t *testing.T) {
	s := write(t, "limits:\n  - {name: /a, rate: 2}\n  - {name: /a, rate: 1000}\n")
	limits, err := registry.New(s, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	defer limits.Close()
	for _, first := range []string{"{name: /a, rate: 2}", "{name: /a, rate: x}", "{name: /a, rate: 3}"} {
		require.NoError(t, os.WriteFile(s.Path, []byte("limits:\n  - "+first+"\n  - {name: /a, rate: 1000}\n"), 0o600))
		require.NoError(t, limits.Reload(t.Context()))
		all, rejected := limits.Limits(), limits.Stats().Rejected
		require.Len(t, all, 1)
		require.Len(t, rejected, 1)
		if strings.Contains(first, "x") {
			require.Equal(t, 2.0, all[0].Rate)
			require.Contains(t, rejected[0].Consequence, "its last good limit, 2/s")
			continue
		}
		require.Less(t, all[0].Rate, 5.0)
		require.EqualError(t, &rejected[0], `registry: row limits.yaml:3: bucket "/a": name "/a": want one row for each name: row limits.yaml:2 is newer, has a larger key, or comes first`)
		require.Equal(t, "row limits.yaml is in force for the name", rejected[0].Consequence)
	}
}
