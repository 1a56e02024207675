package sqlsource

import (
	"cmp"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const conf = "t_ratelimite_conf"

func TestDefaultTable(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect))
		require.Empty(t, load(t, b, db), "an empty table is no error")
		began := time.Now().Add(-2 * time.Second)
		columns := "channelType, interfaceNo, name, rate, max_wait, disabled"
		b.insert(t, db, conf, columns, "web", "17", "/ibe/AvailFare", 5, 0.30, 0)
		b.insert(t, db, conf, columns, nil, nil, "/ibe/Book", 10_000, nil, 0)
		b.insert(t, db, conf, columns, nil, nil, "/ibe/Off", nil, nil, 1)
		b.insert(t, db, conf, "name, rate", "/ibe/Plain", 2.5)
		b.insert(t, db, conf, "name, rate", "/ibe/Slow", "0.4")
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect), "twice changes nothing")

		table := load(t, b, db)
		require.Empty(t, table.Rejected)
		require.Len(t, table.Limits, 5)
		for i, l := range table.Limits {
			require.GreaterOrEqual(t, l.Version, began.UnixMicro(), "the time of the insert")
			require.LessOrEqual(t, l.Version, time.Now().Add(time.Second).UnixMicro())
			table.Limits[i].Version = 0
		}
		require.Equal(t, []registry.Limit{
			{Name: "/ibe/AvailFare", Row: "1", Rate: 5, MaxWait: 300 * time.Millisecond}, // exactly, also from a FLOAT
			{Name: "/ibe/Book", Row: "2", Rate: 10_000, MaxWait: 500 * time.Millisecond},
			{Name: "/ibe/Off", Row: "3", Disabled: true},
			{Name: "/ibe/Plain", Row: "4", Rate: 2.5, MaxWait: 500 * time.Millisecond}, // a row that does not say that it is disabled is in force
			{Name: "/ibe/Slow", Row: "5", Rate: 0.4, MaxWait: 500 * time.Millisecond},
		}, table.Limits)

		quota := load(t, b, db, sqlsource.WithQuota(2*time.Millisecond))
		require.True(t, quota.Limits[0].Quota)
		require.Equal(t, 2*time.Millisecond, quota.Limits[0].Jitter)
	})
}

// TestCreateAtOnce: the processes of a fleet all create the tables when they start.
func TestCreateAtOnce(t *testing.T) {
	each(t, func(t *testing.T, b backend, _ *sql.DB, dsn string) {
		errs := make([]error, 12)
		var running sync.WaitGroup
		for i := range errs {
			db := open(t, b.driver, dsn)
			running.Go(func() {
				if errs[i] = sqlsource.CreateTable(ctx, db, b.dialect); errs[i] == nil {
					errs[i] = sqlsource.CreateSwitchTable(ctx, db, b.dialect)
				}
			})
		}
		running.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
	})
}

// loose is a table in which anything can stand, as a user's may be.
var loose = map[sqlsource.Dialect]string{
	sqlsource.MySQL: "CREATE TABLE loose (id BIGINT, name VARBINARY(2000), rate VARCHAR(64), cache VARCHAR(64), status VARCHAR(64)," +
		" at DATETIME(6), burst VARCHAR(64), warm VARCHAR(64), cold VARCHAR(64), quota VARCHAR(64)," +
		" win VARCHAR(64), lim VARCHAR(64), conc VARCHAR(64))",
	sqlsource.PostgreSQL: "CREATE TABLE loose (id bigint, name text, rate text, cache text, status text, at timestamp, burst text, warm text, cold text, quota text," +
		" win text, lim text, conc text)",
	sqlsource.SQLite: "CREATE TABLE loose (id, name, rate, cache, status, at, burst, warm, cold, quota, win, lim, conc)",
}

var looseColumns = sqlsource.Columns{ID: "id", Name: "name", Rate: "rate", MaxWait: "cache", Status: "status", Modified: "at",
	Burst: "burst", WarmupMillis: "warm", ColdFactor: "cold", Quota: "quota", Window: "win", WindowLimit: "lim", Concurrent: "conc"}

// size is a bucket's.
func size(n float64) *float64 { return &n }

func TestRows(t *testing.T) {
	good := registry.Limit{Rate: 5, MaxWait: 500 * time.Millisecond}
	with := func(change func(*registry.Limit)) *registry.Limit {
		l := good
		change(&l)
		return &l
	}
	const emoji = "🚦🪣"
	type row struct {
		name, rate, cache, status, at, burst, warm, cold, quota, window, limit, concurrent any
	}
	cases := []struct {
		title string
		row   row
		want  *registry.Limit // or
		field string          // that is wrong
		value string
		only  sqlsource.Dialect // the only one that can store it; 0 if all can
	}{
		{title: "good", row: row{rate: "5", status: "1"}, want: &good},
		{title: "fraction", row: row{rate: "0.25", status: "1"}, want: with(func(l *registry.Limit) { l.Rate = 0.25 })},
		{title: "rate 0", row: row{rate: "0.0", status: "1"}, want: with(func(l *registry.Limit) { l.Rate = 0 })},
		{title: "cache 0", row: row{rate: "5", cache: "0", status: "1"}, want: with(func(l *registry.Limit) { l.MaxWait = 0 })},
		{title: "cache 9.99", row: row{rate: "5", cache: "9.99", status: "1"}, want: with(func(l *registry.Limit) { l.MaxWait = 9990 * time.Millisecond })},
		{title: "all columns", row: row{rate: "5", status: "1", burst: "20", quota: "0"}, want: with(func(l *registry.Limit) { l.Burst = size(20) })},
		{title: "burst 0", row: row{rate: "5", status: "1", burst: "0"}, want: with(func(l *registry.Limit) { l.Burst = size(0) })},
		{title: "warm-up", row: row{rate: "5", status: "1", warm: "1500.5", cold: "2.5"}, want: with(func(l *registry.Limit) { l.Warmup, l.ColdFactor = 1500500*time.Microsecond, 2.5 })},
		{title: "no warm-up", row: row{rate: "5", status: "1", warm: "0", cold: "junk"}, want: &good},
		{title: "quota", row: row{rate: "5", status: "1", quota: "1"}, want: with(func(l *registry.Limit) { l.Quota, l.Jitter = true, time.Millisecond })},
		{title: "quota of a BOOLEAN", row: row{rate: "5", status: "true", quota: "true"}, want: with(func(l *registry.Limit) { l.Quota, l.Jitter = true, time.Millisecond })},
		{title: "window", row: row{rate: "5", status: "1", window: "86400", limit: "10000"}, want: with(func(l *registry.Limit) { l.Window, l.WindowLimit = 24*time.Hour, 10000 })},
		{title: "fraction of a second", row: row{rate: "5", status: "1", window: "2.050", limit: "9"}, want: with(func(l *registry.Limit) { l.Window, l.WindowLimit = 2050*time.Millisecond, 9 })},
		{title: "concurrent", row: row{rate: "5", status: "1", concurrent: "20"}, want: with(func(l *registry.Limit) { l.Concurrent = 20 })},
		{title: "zeros", row: row{rate: "5", status: "1", window: "0.000", limit: "0", concurrent: "0"}, want: &good},
		{title: "rate 0 with a window", row: row{rate: "0", status: "1", window: "1", limit: "1"}, want: with(func(l *registry.Limit) { l.Rate, l.Window, l.WindowLimit = 0, time.Second, 1 })},
		{title: "no rate", row: row{cache: "0.3", status: "1", window: "1", limit: "1", concurrent: "2"}, want: &registry.Limit{NoRate: true, Window: time.Second, WindowLimit: 1, Concurrent: 2}},
		{title: "time", row: row{rate: "5", status: "1", at: "1970-01-01 00:00:01.250000"}, want: with(func(l *registry.Limit) { l.Version = 1_250_000 })},
		{title: "last time", row: row{rate: "5", status: "1", at: "2255-06-05 23:47:34.740000"}, want: with(func(l *registry.Limit) { l.Version = 9007199254740000 })},
		{title: "off", row: row{status: "0"}, want: &registry.Limit{Disabled: true}},
		{title: "off and bad", row: row{rate: "-1", cache: "junk", status: "0", burst: "NaN", at: "1970-01-02 00:00:00"}, want: &registry.Limit{Disabled: true, Version: 86_400_000_000}},
		{title: "off and good", row: row{rate: "7", cache: "0.25", status: "0"}, want: &registry.Limit{Disabled: true, Rate: 7, MaxWait: 250 * time.Millisecond}},

		{title: "rate NULL", row: row{status: "1"}, field: "rate", value: "NULL"},
		{title: "rate negative", row: row{rate: "-5", status: "1"}, field: "rate", value: "-5"},
		{title: "rate huge", row: row{rate: "1e300", status: "1"}, field: "rate", value: "1e300"},
		{title: "rate beyond", row: row{rate: "1e999", status: "1"}, field: "rate", value: "1e999"},
		{title: "rate infinite", row: row{rate: "Inf", status: "1"}, field: "rate", value: "Inf"},
		{title: "rate no number", row: row{rate: "NaN", status: "1"}, field: "rate", value: "NaN"},
		{title: "rate hexadecimal", row: row{rate: "0x10p0", status: "1"}, field: "rate", value: "0x10p0"},
		{title: "rate text", row: row{rate: "five\n5", status: "1"}, field: "rate", value: `"five\n5"`},
		{title: "rate empty", row: row{rate: "", status: "1"}, field: "rate", value: `""`},
		{title: "rate long", row: row{rate: strings.Repeat("9", 64), status: "1"}, field: "rate", value: `"` + strings.Repeat("9", 40) + `"… (64 bytes)`},
		{title: "quota of a fraction", row: row{rate: "2.5", status: "1", quota: "1"}, field: "rate", value: "2.5"},
		{title: "cache negative", row: row{rate: "5", cache: "-0.1", status: "1"}, field: "cache", value: "-0.1"},
		{title: "cache large", row: row{rate: "5", cache: "9007199255", status: "1"}, field: "cache", value: "9007199255"},
		{title: "cache no number", row: row{rate: "5", cache: "nan", status: "1"}, field: "cache", value: "nan"},
		{title: "status NULL", row: row{rate: "5"}, field: "status", value: "NULL"},
		{title: "status 2", row: row{rate: "5", status: "2"}, field: "status", value: "2"},
		{title: "status text", row: row{rate: "5", status: "on"}, field: "status", value: "on"},
		{title: "burst negative", row: row{rate: "5", status: "1", burst: "-1"}, field: "burst", value: "-1"},
		{title: "burst of a quota", row: row{rate: "5", status: "1", burst: "5", quota: "1"}, field: "burst", value: "5"},
		{title: "burst of a warm-up", row: row{rate: "5", status: "1", burst: "5", warm: "1"}, field: "burst", value: "5"},
		{title: "warm-up negative", row: row{rate: "5", status: "1", warm: "-1"}, field: "warm", value: "-1"},
		{title: "warm-up of a quota", row: row{rate: "5", status: "1", warm: "1", quota: "1"}, field: "warm", value: "1"},
		{title: "cold factor 1", row: row{rate: "5", status: "1", warm: "1", cold: "1"}, field: "cold", value: "1"},
		{title: "no rate and nothing else", row: row{status: "1", window: "0", limit: "0", concurrent: "0"}, field: "rate", value: "NULL"},
		{title: "no rate and a burst", row: row{status: "1", concurrent: "1", burst: "3"}, field: "burst", value: "3"},
		{title: "no rate and a quota", row: row{status: "1", concurrent: "1", quota: "1"}, field: "quota", value: "1"},
		{title: "window with a unit", row: row{rate: "5", status: "1", window: "1h", limit: "1"}, want: with(func(l *registry.Limit) { l.Window, l.WindowLimit = time.Hour, 1 })},
		{title: "wait with a unit", row: row{rate: "5", cache: "250ms", status: "1"}, want: with(func(l *registry.Limit) { l.MaxWait = 250 * time.Millisecond })},
		{title: "window text", row: row{rate: "5", status: "1", window: "long", limit: "1"}, field: "win", value: "long"},
		{title: "window negative", row: row{rate: "5", status: "1", window: "-1", limit: "1"}, field: "win", value: "-1"},
		{title: "window too fine", row: row{rate: "5", status: "1", window: "0.0005", limit: "1"}, field: "win", value: "0.0005"},
		{title: "window long", row: row{rate: "5", status: "1", window: "3155760001", limit: "1"}, field: "win", value: "3155760001"},
		{title: "window alone", row: row{rate: "5", status: "1", window: "1"}, field: "lim", value: "NULL"},
		{title: "window of nothing", row: row{rate: "5", status: "1", window: "1", limit: "0"}, field: "lim", value: "0"},
		{title: "window limit alone", row: row{rate: "5", status: "1", limit: "1"}, field: "win", value: "NULL"},
		{title: "window limit of a fraction", row: row{rate: "5", status: "1", window: "1", limit: "1.5"}, field: "lim", value: "1.5"},
		{title: "concurrent negative", row: row{rate: "5", status: "1", concurrent: "-1"}, field: "conc", value: "-1"},
		{title: "concurrent large", row: row{rate: "5", status: "1", concurrent: "2147483648"}, field: "conc", value: "2147483648"},
		{title: "quota 2", row: row{rate: "5", status: "1", quota: "2"}, field: "quota", value: "2"},
		{title: "quota empty", row: row{rate: "5", status: "1", quota: ""}, field: "quota", value: `""`},
		{title: "before 1970", row: row{rate: "5", status: "0", at: "1969-12-31 23:59:59.999000"}, field: "at", value: "-1000"},
		{title: "after 2255", row: row{rate: "5", status: "1", at: "2255-06-05 23:47:34.741000"}, field: "at", value: "9007199254741000"},
		{title: "the year 9999", row: row{rate: "5", status: "1", at: "9999-12-31 23:59:59"}, field: "at", value: "253402300799000000"},
		{title: "infinity", row: row{rate: "5", status: "1", at: "infinity"}, field: "at", value: "infinity", only: sqlsource.PostgreSQL},
		{title: "the year 200000", row: row{rate: "5", status: "1", at: "200000-01-01"}, field: "at", value: `"200000-01-01 00:00:00"`, only: sqlsource.PostgreSQL},
		{title: "before Christ", row: row{rate: "5", status: "1", at: "4000-01-01 BC"}, field: "at", value: `"4000-01-01 00:00:00 BC"`, only: sqlsource.PostgreSQL},
		{title: "now", row: row{rate: "5", status: "1", at: "now"}, field: "at", value: "now", only: sqlsource.SQLite},
		{title: "number as a time", row: row{rate: "5", status: "1", at: 1_700_000_000}, field: "at", value: "1700000000", only: sqlsource.SQLite},
		{title: "a zone", row: row{rate: "5", status: "1", at: "1970-01-01T09:00:01.500+09:00"}, want: with(func(l *registry.Limit) { l.Version = 1_500_000 }), only: sqlsource.SQLite},

		{title: "name NULL", row: row{name: nil, rate: "5", status: "1"}, field: "name", value: "NULL"},
		{title: "name empty", row: row{name: "", rate: "5", status: "0"}, field: "name", value: `""`},
		{title: "name long", row: row{name: strings.Repeat("n", 513), rate: "5", status: "1"}, field: "name", value: `"` + strings.Repeat("n", 40) + `"… (513 bytes)`},
		{title: "name at most", row: row{name: strings.Repeat("n", 512), rate: "5", status: "1"}, want: &good},
		{title: "name emoji", row: row{name: strings.Repeat(emoji, 64), rate: "5", status: "1"}, want: &good},
		{title: "name emoji long", row: row{name: strings.Repeat(emoji, 65), rate: "5", status: "1"}, field: "name", value: `"` + strings.Repeat(emoji, 5) + `"… (520 bytes)`},
		{title: "name SQL", row: row{name: `'; DROP TABLE loose; -- " ` + "`", rate: "5", status: "1"}, want: &good},
		{title: "name braces", row: row{name: "{a}{b}%s%!d(nil)", rate: "5", status: "1"}, want: &good},
		{title: "name lines", row: row{name: "a\r\nb\tc ", rate: "5", status: "1"}, want: &good},
		{title: "name umlaut", row: row{name: "/ibe/Füße", rate: "5", status: "1"}, want: &good},
		{title: "name NUL", row: row{name: []byte("a\x00b"), rate: "5", status: "1"}, want: &good, only: sqlsource.MySQL},
		{title: "name NUL", row: row{name: []byte("a\x00b"), rate: "5", status: "1"}, want: &good, only: sqlsource.SQLite},
		{title: "name not UTF-8", row: row{name: []byte("a\xff\xfeb"), rate: "5", status: "1"}, field: "name", value: `"a\xff\xfeb"`, only: sqlsource.MySQL},
		{title: "name not UTF-8", row: row{name: []byte("a\xff\xfeb"), rate: "5", status: "1"}, field: "name", value: `"a\xff\xfeb"`, only: sqlsource.SQLite},
	}
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		exec(t, db, loose[b.dialect])
		names := make([]string, len(cases))
		for i, c := range cases {
			if c.only != 0 && c.only != b.dialect {
				continue
			}
			r := c.row
			if r.name == nil && c.title != "name NULL" {
				r.name = fmt.Sprint("bucket ", i)
			}
			switch n := r.name.(type) {
			case string:
				names[i] = n
			case []byte:
				names[i] = string(n)
			}
			b.insert(t, db, "loose", "id, name, rate, cache, status, at, burst, warm, cold, quota, win, lim, conc", i, r.name, r.rate, r.cache, r.status, r.at, r.burst, r.warm, r.cold, r.quota,
				r.window, r.limit, r.concurrent)
		}
		table := load(t, b, db, sqlsource.WithTable("loose"), sqlsource.WithColumns(looseColumns), sqlsource.WithJitter(time.Millisecond))
		limits, rejected := table.Limits, table.Rejected
		for i, c := range cases {
			if c.only != 0 && c.only != b.dialect {
				continue
			}
			id := fmt.Sprint(i)
			at := slices.IndexFunc(limits, func(l registry.Limit) bool { return l.Row == id })
			bad := slices.IndexFunc(rejected, func(e registry.RowError) bool { return e.Row == id })
			if c.want != nil {
				if assert.GreaterOrEqual(t, at, 0, "%s is not loaded: %v", c.title, rejected) {
					want := *c.want
					want.Name, want.Row = names[i], id
					assert.Equal(t, want, limits[at], c.title)
					assert.Negative(t, bad, c.title)
				}
				continue
			}
			if assert.GreaterOrEqual(t, bad, 0, "%s is not rejected", c.title) {
				e := rejected[bad]
				assert.Equal(t, []string{c.field, c.value}, []string{e.Field, e.Value}, c.title)
				assert.NotEmpty(t, e.Want)
				assert.NotContains(t, e.Error(), "\n", c.title)
				if c.field != "name" {
					assert.Equal(t, names[i], e.Name, "the last good limit of the bucket can stay")
				}
				assert.Negative(t, at, c.title)
			}
		}
		require.True(t, slices.IsSortedFunc(limits, func(x, y registry.Limit) int { return cmp.Compare(number(x.Row), number(y.Row)) }))
	})
}

func number(s string) (n int) {
	_, _ = fmt.Sscan(s, &n)
	return n
}

func TestDuplicateNames(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		exec(t, db, loose[b.dialect])
		const older, newest = "2024-01-01 00:00:00", "2024-01-01 00:00:01"
		for _, r := range []struct {
			id       int
			name, at any
			rate     string
		}{
			{1, "newest first", newest, "1"}, {2, "newest first", older, "2"}, {3, "newest first", nil, "3"},
			{4, "newest last", older, "4"}, {5, "newest last", newest, "5"},
			{9, "tie", older, "9"}, {10, "tie", older, "10"}, // as texts, 9 would be the larger key
			{11, "newest is bad", older, "11"}, {12, "newest is bad", newest, "-1"},
			{13, "case", older, "13"}, {14, "Case", older, "14"}, // two names
		} {
			b.insert(t, db, "loose", "id, name, rate, status, at", r.id, r.name, r.rate, "1", r.at)
		}
		source, err := sqlsource.New(db, b.dialect, sqlsource.WithTable("loose"), sqlsource.WithColumns(looseColumns))
		require.NoError(t, err)
		limits, err := registry.New(source, tokenbucket.NewMemoryStore())
		require.NoError(t, err)
		defer limits.Close()
		var rows, bad []string
		for _, l := range limits.Limits() {
			rows = append(rows, l.Name+" "+l.Row)
		}
		for _, e := range limits.Stats().Rejected {
			bad = append(bad, e.Row+" "+e.Field)
		}
		require.Equal(t, []string{"Case 14", "case 13", "newest first 1", "newest is bad 11", "newest last 5", "tie 10"}, rows)
		require.ElementsMatch(t, []string{"2 name", "3 name", "4 name", "9 name", "12 rate"}, bad)
	})
}

// TestRenamed: other names, reserved words among them, and the same triggers.
func TestRenamed(t *testing.T) {
	columns := sqlsource.Columns{ID: "order", Name: "select", Rate: "limit", MaxWait: "from", Status: "table", Modified: "when",
		Burst: "group", WarmupMillis: "warm$ms", ColdFactor: "cold_factor", Quota: "Is_Quota", Window: "window", WindowLimit: "rows", Concurrent: "concurrent"}
	for _, b := range backends {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			name, dsn := b.place(t)
			db := open(t, b.driver, dsn)
			for _, table := range []string{"union", name + ".Grant$1"} {
				opts := []sqlsource.Option{sqlsource.WithTable(table), sqlsource.WithColumns(columns)}
				require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect, opts...))
				require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect, opts...))
				q := func(names ...string) string {
					mark := "`"
					if b.dialect == sqlsource.PostgreSQL {
						mark = `"`
					}
					return mark + strings.Join(names, mark+", "+mark) + mark
				}
				quoted := q(table)
				if table != "union" {
					quoted = q(name) + "." + q("Grant$1")
				}
				b.insert(t, db, quoted, q("select", "limit", "table", "group", "Is_Quota"), "a", 5, 1, 7.5, 0)
				b.insert(t, db, quoted, q("select", "limit", "table", "warm$ms", "cold_factor"), "b", 5, 1, 250, 1.5)
				b.insert(t, db, quoted, q("select", "table", "window", "rows", "concurrent"), "c", 1, 7776000, 2147483647, 2147483647)
				b.insert(t, db, quoted, q("select", "limit", "table", "window", "rows"), "d", 5, 1, 0.001, 1)
				limits := load(t, b, db, opts...).Limits
				require.Len(t, limits, 4)
				require.Equal(t, "at most 2,147,483,647 in any 90 d, at most 2,147,483,647 at once", limits[2].String())
				require.Equal(t, time.Millisecond, limits[3].Window)
				require.Equal(t, size(7.5), limits[0].Burst)
				require.Equal(t, 250*time.Millisecond, limits[1].Warmup)
				require.Equal(t, 1.5, limits[1].ColdFactor)

				exec(t, db, "UPDATE "+quoted+" SET "+q("when")+" = '2020-01-01 00:00:00'")
				require.Equal(t, time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro(), load(t, b, db, opts...).Limits[0].Version)
				exec(t, db, "UPDATE "+quoted+" SET "+q("limit")+" = 6")
				require.Greater(t, load(t, b, db, opts...).Limits[0].Version, time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro())
			}
			_, err := source(t, b, db).Load(ctx)
			require.Error(t, err, "none of these was the default table")
		})
	}
}

func TestMissing(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		_, err := source(t, b, db).Load(ctx)
		require.ErrorContains(t, err, "table t_ratelimite_conf")
		require.ErrorContains(t, err, "t_ratelimite_conf")
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect))
		b.insert(t, db, conf, "name, rate", "a", 5)
		require.Len(t, load(t, b, db).Limits, 1)
		// SQLite would take a name in double quotes for a text.
		_, err = source(t, b, db, sqlsource.WithColumns(sqlsource.Columns{Burst: "burst"})).Load(ctx)
		require.ErrorContains(t, err, "burst")
		exec(t, db, "DROP TABLE "+conf)
		_, err = source(t, b, db).Load(ctx)
		require.Error(t, err, "a table that has gone is not an empty one")
	})
}

// TestModified: every change gives a row another, later time, and no change none.
func TestModified(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect))
		if b.dialect == sqlsource.MySQL { // whose default counts seconds
			exec(t, db, "ALTER TABLE "+conf+" MODIFY lastModifyTime DATETIME(6) DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6)")
		}
		b.insert(t, db, conf, "name, rate", "a", 5)
		b.insert(t, db, conf, "name, rate", "b", 5)
		version := func(i int) int64 { return load(t, b, db).Limits[i].Version }
		first, other := version(0), version(1)
		last := first
		for i := range 20 {
			exec(t, db, b.params("UPDATE "+conf+" SET rate = ? WHERE name = 'a'"), 10+i)
			now := version(0)
			require.Greater(t, now, last)
			last = now
		}
		require.Less(t, last-first, time.Minute.Microseconds())
		require.Equal(t, other, version(1), "the row that was not changed")
		require.Equal(t, last, version(0))

		exec(t, db, "UPDATE "+conf+" SET lastModifyTime = NULL")
		require.Zero(t, version(0), "no time")
		exec(t, db, "UPDATE "+conf+" SET rate = 99")
		require.Greater(t, version(0), last)

		if b.dialect != sqlsource.MySQL { // which has only its clock
			exec(t, db, "UPDATE "+conf+" SET lastModifyTime = '2200-01-01 00:00:00'")
			ahead := version(0)
			require.Greater(t, ahead, last+time.Hour.Microseconds(), "the given time is kept")
			exec(t, db, "UPDATE "+conf+" SET rate = 100")
			require.Greater(t, version(0), ahead, "a clock that was set back does not hide an edit")
		}
	})
}

// TestLatin: a name in a column of another character set, through a session of yet another.
func TestLatin(t *testing.T) {
	b := backends[0]
	_, dsn := b.place(t)
	db := open(t, b.driver, dsn)
	exec(t, db, "CREATE TABLE latin (configId INT, interfaceUrl VARCHAR(20) CHARACTER SET latin1, rateLimit FLOAT, cache FLOAT, status BIT(1), lastModifyTime TIMESTAMP(6) NULL)")
	exec(t, db, "INSERT INTO latin VALUES (1, 'Füße', 5, 0.3, 1, NULL), (2, 'b', 0.1, 9.99, 0, '2024-01-01')")
	for _, params := range b.zones {
		limits := load(t, b, open(t, b.driver, dsn+params), sqlsource.WithTable("latin")).Limits
		require.Len(t, limits, 2)
		require.Equal(t, registry.Limit{Name: "Füße", Row: "1", Rate: 5, MaxWait: 300 * time.Millisecond}, limits[0], params)
		require.Equal(t, []float64{0.1, 9.99}, []float64{limits[1].Rate, limits[1].MaxWait.Seconds()})
		require.True(t, limits[1].Disabled)
	}
}

// TestHostileIdentifiers: identifiers other than plain names never reach the database.
func TestHostileIdentifiers(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		for _, name := range []string{
			"", ".", "a.", ".a", "a.b.c", "a b", "a;b", "a`b", `a"b`, "a'b", "a--", "a/*", "a\x00", "a\n", "ä", "a[b]", "a)", strings.Repeat("a", 65),
		} {
			_, err := sqlsource.New(db, b.dialect, sqlsource.WithTable(name))
			require.ErrorContains(t, err, "table", "%q", name)
			_, err = sqlsource.Schema(b.dialect, sqlsource.WithTable(name))
			require.Error(t, err)
			require.Error(t, sqlsource.CreateTable(ctx, db, b.dialect, sqlsource.WithTable(name)))
			_, err = sqlsource.NewSwitch(db, b.dialect, sqlsource.WithSwitchTable(name))
			require.Error(t, err)
			if name != "" { // which leaves the default
				_, err = sqlsource.New(db, b.dialect, sqlsource.WithColumns(sqlsource.Columns{ColdFactor: name}))
				require.ErrorContains(t, err, "column cold_factor", "%q", name)
			}
		}
		most := 64
		if b.dialect == sqlsource.PostgreSQL {
			most = 63
		}
		long := sqlsource.WithTable(strings.Repeat("x", most))
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect, long))
		require.Empty(t, load(t, b, db, long))
	})
}

// TestLarge: 10,000 rows are read by one query, well within a second.
func TestLarge(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		fill(t, b, db, 10_000)
		began := time.Now()
		table := load(t, b, db)
		t.Log("10,000 rows in", time.Since(began))
		require.Len(t, table.Limits, 10_000)
		require.Empty(t, table.Rejected)
		require.Equal(t, "/interface/9999", table.Limits[9999].Name)
		require.Equal(t, 300*time.Millisecond, table.Limits[7].MaxWait)
	})
}

func fill(t testing.TB, b backend, db *sql.DB, rows int) {
	t.Helper()
	require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect))
	for from := 0; from < rows; from += 1000 {
		var values []string
		for i := from; i < min(rows, from+1000); i++ {
			values = append(values, fmt.Sprintf("('/interface/%d', %d, 0.3, 0)", i, i+1))
		}
		exec(t, db, "INSERT INTO "+conf+" (name, rate, max_wait, disabled) VALUES "+strings.Join(values, ", "))
	}
}

func BenchmarkLoad(b *testing.B) {
	for _, k := range backends {
		b.Run(k.name, func(b *testing.B) {
			_, dsn := k.place(b)
			db := open(b, k.driver, dsn)
			fill(b, k, db, 10_000)
			s := source(b, k, db)
			b.ReportAllocs()
			for b.Loop() {
				if table, err := s.Load(ctx); err != nil || len(table.Limits) != 10_000 {
					b.Fatal(len(table.Limits), err)
				}
			}
		})
	}
}
