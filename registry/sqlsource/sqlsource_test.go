package sqlsource

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ registry.Source = (*Source)(nil)

var dialects = []Dialect{MySQL, PostgreSQL, SQLite}

// fakeDB is a driver whose query returns rows, then fails or hangs: what a real server does only by accident. What real
// ones do is tested in the directory integration.
type fakeDB struct {
	rows  [][]driver.Value
	err   error
	stuck chan struct{} // a query waits here, whatever its context says
}

func (f *fakeDB) Connect(context.Context) (driver.Conn, error) { return f, nil }
func (f *fakeDB) Driver() driver.Driver                        { return nil }
func (f *fakeDB) Prepare(string) (driver.Stmt, error)          { return nil, errors.ErrUnsupported }
func (f *fakeDB) Begin() (driver.Tx, error)                    { return nil, errors.ErrUnsupported }
func (f *fakeDB) Close() error                                 { return nil }
func (f *fakeDB) QueryContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Rows, error) {
	if f.stuck != nil {
		<-f.stuck
	}
	if strings.HasPrefix(query, "SELECT COLUMN_NAME") { // the table has neither
		return &fakeRows{new(fakeDB), 0}, nil
	}
	return &fakeRows{f, 0}, nil
}

// width is the number of expressions that a query selects.
func (r *fakeRows) width() int {
	o, err := newOptions(MySQL, nil)
	if err != nil {
		panic(err)
	}
	return len(newRaw(o.places()).cells())
}

type fakeRows struct {
	*fakeDB
	next int
}

func (r *fakeRows) Columns() []string { return make([]string, r.width()) }
func (r *fakeRows) Next(dst []driver.Value) error {
	if r.next == len(r.rows) {
		if r.err != nil {
			return r.err
		}
		return io.EOF
	}
	clear(dst)
	copy(dst, r.rows[r.next])
	r.next++
	return nil
}

func open(t *testing.T, f *fakeDB, opts ...Option) *Source {
	t.Helper()
	db := sql.OpenDB(f)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	s, err := New(db, MySQL, opts...)
	require.NoError(t, err)
	return s
}

// TestBrokenOff: a part of the table is not the table.
func TestBrokenOff(t *testing.T) {
	f := &fakeDB{rows: [][]driver.Value{{"1", nil, nil, "a", nil, "0", nil, nil, "5"}, {int64(2), nil, nil, []byte("b"), nil, int64(0), nil, nil, 6.5}}}
	table, err := open(t, f).Load(context.Background())
	require.NoError(t, err)
	require.Equal(t, []registry.Limit{{Name: "a", Row: "1", Rate: 5, MaxWait: 500 * time.Millisecond}, {Name: "b", Row: "2", Rate: 6.5, MaxWait: 500 * time.Millisecond}},
		table.Limits, "whatever types the driver has")
	f.err = errors.New("connection lost")
	table, err = open(t, f).Load(context.Background())
	require.ErrorIs(t, err, f.err)
	require.Empty(t, table)
}

// TestDeafDriver: Load returns when its context ends though the driver does not, and there is no second query meanwhile.
func TestDeafDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDB{stuck: make(chan struct{})}
		s := open(t, f)
		for range 3 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			began := time.Now()
			_, err := s.Load(ctx)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, time.Second, time.Since(began))
		}
		require.Equal(t, 1, s.db.Stats().OpenConnections)
		close(f.stuck)
		_, err := s.Load(context.Background())
		require.NoError(t, err)
	})
}

func TestConfiguration(t *testing.T) {
	db := sql.OpenDB(new(fakeDB))
	defer func() { require.NoError(t, db.Close()) }()
	for message, call := range map[string]func() error{
		"sqlsource: tokenbucket: invalid configuration: db nil: want a database": func() error { _, err := New(nil, MySQL); return err },
		"db nil: want":                func() error { return CreateTable(context.Background(), nil, MySQL) },
		"db nil: want a":              func() error { _, err := NewSwitch(nil, MySQL); return err },
		"dialect Dialect(0)":          func() error { _, err := New(db, 0); return err },
		"dialect Dialect(4)":          func() error { _, err := Schema(4); return err },
		"dialect Dialect(5)":          func() error { _, err := SwitchSchema(5); return err },
		"option nil":                  func() error { _, err := New(db, MySQL, nil); return err },
		"switch option nil":           func() error { _, err := NewSwitch(db, MySQL, nil); return err },
		"quota jitter -1ns":           func() error { _, err := New(db, MySQL, WithQuota(-1)); return err },
		"quota jitter 2s":             func() error { _, err := New(db, MySQL, WithJitter(2*time.Second)); return err },
		`table "a b"`:                 func() error { _, err := New(db, MySQL, WithTable("a b")); return err },
		`schema of table "a-b"`:       func() error { _, err := New(db, MySQL, WithTable("a-b.c")); return err },
		`column rate "a\nb"`:          func() error { _, err := New(db, MySQL, WithColumns(Columns{Rate: "a\nb"})); return err },
		`switch name ""`:              func() error { _, err := NewSwitch(db, MySQL, WithSwitchName("")); return err },
		`switch name "a b"`:           func() error { _, err := NewSwitch(db, MySQL, WithSwitchName("a b")); return err },
		"interval 0s":                 func() error { _, err := NewSwitch(db, MySQL, WithPolling(killswitch.WithInterval(0))); return err },
		strings.Repeat("x", 63) + "y": func() error { _, err := New(db, PostgreSQL, WithTable(strings.Repeat("x", 63)+"y")); return err },
	} {
		err := call()
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, message)
		require.ErrorContains(t, err, message)
	}
	_, err := New(db, MySQL, WithTable(strings.Repeat("x", 63)+"y"))
	require.NoError(t, err)
}

// TestSchema: with the default names the text is the file, and other names are put in everywhere.
func TestSchema(t *testing.T) {
	renamed := WithColumns(Columns{ID: "c1", Name: "c2", Rate: "c3", MaxWait: "c4", Disabled: "c5", Modified: "c6",
		Burst: "c7", WarmupMillis: "c8", ColdFactor: "c9", Quota: "c10", Shadow: "c11", PerKey: "c12", Penalty: "c16",
		Window: "c13", WindowLimit: "c14", Concurrent: "c15"})
	for _, d := range dialects {
		text, err := Schema(d)
		require.NoError(t, err)
		file, err := os.ReadFile("schema/" + strings.ToLower(d.String()) + ".sql")
		require.NoError(t, err)
		require.Equal(t, string(file), text)
		text, err = SwitchSchema(d)
		require.NoError(t, err)
		file, err = os.ReadFile("schema/" + strings.ToLower(d.String()) + "_switch.sql")
		require.NoError(t, err)
		require.Equal(t, string(file), text)

		text, err = Schema(d, WithTable("s.t"), renamed)
		require.NoError(t, err)
		q := d.Quote
		for _, gone := range []string{"t_ratelimite_conf", q("configId"), q("name"), q("lastmodifytime"), q("lastModifyTime"), q("max_wait"), q("disabled"), q("shadow"), q("per_key")} {
			require.NotContains(t, text, gone)
		}
		require.Contains(t, text, "CREATE TABLE IF NOT EXISTS "+q("s")+"."+q("t")+" (")
		for i := range 15 {
			require.Contains(t, text, "\n  "+q(fmt.Sprint("c", i+1))+" ")
		}
	}
}

// TestQueries: a query is made of checked names only, and quotes balance.
func TestQueries(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := rapid.SampledFrom(dialects).Draw(t, "dialect")
		name := rapid.OneOf(rapid.StringMatching(`[A-Za-z0-9_$]{1,63}`), rapid.String(), rapid.StringMatching("[a-z`\"'.;-]{1,5}"))
		table, column := name.Draw(t, "table"), name.Draw(t, "column")
		o, err := newOptions(d, []Option{WithTable(table), WithColumns(Columns{Quota: column})})
		plain := func(s string) bool {
			return s != "" && len(s) <= 63 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_$") == ""
		}
		schema, rest, qualified := strings.Cut(table, ".")
		fits := plain(table) || qualified && plain(schema) && plain(rest)
		if err != nil {
			if fits && (column == "" || plain(column)) {
				t.Fatalf("refused: %v", err)
			}
			return
		}
		if len(table) <= 63 && !fits || column != "" && len(column) <= 63 && !plain(column) {
			t.Fatalf("accepted %q, %q", table, column)
		}
		for _, q := range []string{o.query(), o.query("shadow"), o.there(o.optional())} {
			if strings.Count(q, "`")%2 != 0 || strings.Count(q, `"`)%2 != 0 || strings.Count(q, "'")%2 != 0 || strings.Contains(q, ";") {
				t.Fatalf("query %s", q)
			}
		}
	})
}

// TestAnyRow: whatever is in a row, it is a limit within the bounds or an error that names row, field and value, on one line.
func TestAnyRow(t *testing.T) {
	o, err := newOptions(MySQL, []Option{WithJitter(time.Millisecond), WithColumns(Columns{
		Burst: "burst", Warmup: "warm", WarmupMillis: "warm_ms", ColdFactor: "cold", Quota: "quota", Jitter: "jitter", Window: "window", WindowLimit: "limit"})})
	require.NoError(t, err)
	p := newParser(o)
	anything := rapid.Custom(func(t *rapid.T) []byte {
		switch rapid.IntRange(0, 5).Draw(t, "kind") {
		case 0:
			return nil
		case 1:
			return []byte(rapid.SampledFrom([]string{"0", "1", "true", "\x01", "NaN", "Inf", "-Inf", "1e400", "0x1p-2", "1_0", "", " 1", "9007199254740993"}).Draw(t, "special"))
		case 2:
			return fmt.Append(nil, rapid.Float64().Draw(t, "float"))
		case 3:
			return fmt.Append(nil, rapid.Int64().Draw(t, "int"))
		case 4:
			return fmt.Append(nil, rapid.IntRange(0, 100).Draw(t, "small"))
		}
		return rapid.SliceOfN(rapid.Byte(), 0, 600).Draw(t, "bytes")
	})
	// Most rows are valid except for one cell or two.
	good := map[string][]string{"name": {"a", "b c"}, "rate": {"5", "0.5"}, "max_wait": {"0.5", "0", "500ms"}, "disabled": {"0", "0", "0", "1"}, "status": {"1", "1", "1", "0"}, "burst": {"20"}, "jitter": {"0"},
		"warmup": {"0", "1.5", "1500ms"}, "warmup_ms": {"0", "1500"}, "cold_factor": {"2", "3.5"}, "quota": {"0", "1"}, "shadow": {"0", "1"}, "per_key": {"0", "1"}, "window": {"5", "0.25"},
		"window_limit": {"100"}, "concurrent": {"0", "4"}, "concurrent_wait": {"0", "0", "0.5"}, "penalty": {"none", "503", "429,503"},
		"priority": {"normal", "low", "lowest"}}
	for i := range fields {
		require.Contains(t, good, fields[i].Key)
	}
	var loaded, rejected int
	rapid.Check(t, func(t *rapid.T) {
		p.quota = rapid.Bool().Draw(t, "quota")
		r := newRaw(p.places)
		fill := func(cell *sql.RawBytes, needed bool, good ...string) {
			n := rapid.IntRange(0, 9).Draw(t, "goodness")
			if n == 0 {
				*cell = anything.Draw(t, "cell")
			} else if len(good) > 0 && (n < 6 || needed) {
				*cell = []byte(rapid.SampledFrom(good).Draw(t, "good"))
			}
		}
		fill(&r.id, true, "17")
		fill(&r.micros, false, "1700000000000000")
		fill(&r.unread, false)
		for i := range p.places {
			if at := &p.places[i]; at.name == 0 || rapid.IntRange(0, 19).Draw(t, "older") == 0 {
				key := at.field.Names()[at.name]
				fill(&r.values[i], slices.Contains([]string{"name", "disabled", "rate", "max_wait"}, key), good[key]...)
			}
		}
		l, bad := p.limit(r, func(string) bool { return true })
		if bad != nil {
			rejected++
			if bad.Row == "" || bad.Field == "" || bad.Value == "" || bad.Want == "" || len(bad.Value) > 400 || strings.ContainsAny(bad.Row+bad.Value+bad.Field, "\n\x00") {
				t.Fatalf("%+v", bad)
			}
			return
		}
		loaded++
		finite := func(f, from, to float64) bool { return f >= from && f <= to }
		ok := len(l.Name) > 0 && len(l.Name) <= 512 && l.Version >= 0 && l.Version <= 1<<53
		if !l.Disabled {
			ok = ok && finite(l.Rate, 0, 1<<53) && l.MaxWait >= 0 && l.MaxWait <= 1<<53*time.Microsecond && l.Warmup >= 0 &&
				(l.ColdFactor == 0 || finite(l.ColdFactor, 1, 1<<53)) && (l.Burst == nil || finite(*l.Burst, 0, 1<<53)) &&
				(!l.Quota || l.Rate == math.Trunc(l.Rate) && l.Burst == nil && l.Warmup == 0) &&
				l.Window >= 0 && l.Window <= 100*365*24*time.Hour && (l.Window == 0) == (l.WindowLimit == 0) && l.WindowLimit >= 0 && l.Concurrent >= 0 &&
				(!l.NoRate || l.Rate == 0 && !l.Quota && l.Burst == nil && l.Warmup == 0 && (l.Window != 0 || l.Concurrent != 0))
		}
		if !ok {
			t.Fatalf("%+v", l)
		}
	})
	require.Positive(t, loaded) // a fifth of 100 rows, on average
	require.Positive(t, rejected)
}

func BenchmarkRow(b *testing.B) {
	o, err := newOptions(MySQL, nil)
	require.NoError(b, err)
	p := newParser(o)
	r := newRaw(p.places)
	r.id, r.micros = []byte("123"), []byte("1700000000000000")
	texts := map[string]string{"name": "/ibe/AvailFare", "rate": "5", "max_wait": "0.30", "disabled": "0"}
	for i := range p.places {
		if text, ok := texts[p.places[i].field.Key]; ok && p.places[i].name == 0 {
			r.values[i] = []byte(text)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, bad := p.limit(r, func(string) bool { return true }); bad != nil {
			b.Fatal(bad)
		}
	}
}

// Texts mean for Limit what the cells of a row mean for Load.
func TestLimitOfTexts(t *testing.T) {
	s := open(t, new(fakeDB))
	text := func(s string) *string { return &s }
	l, err := s.Limit(map[string]*string{"configId": text("7"), "interfaceUrl": text("/a"), "rateLimit": text("5.50"), "status": text("1"),
		"lastModifyTime": text("1700000000000000"), "shadow": text("1"), "max_wait": nil, "another": text("x")})
	require.NoError(t, err)
	require.Equal(t, registry.Limit{Row: "7", Name: "/a", Rate: 5.5, MaxWait: 500 * time.Millisecond, Version: 1700000000000000, Shadow: true}, l)
	for field, value := range map[string]string{"rateLimit": "-1", "status": "2", "lastModifyTime": "yesterday", "penalty": "all"} {
		row := map[string]*string{"interfaceUrl": text("/a"), "rateLimit": text("5"), "status": text("1")}
		row[field] = &value
		_, err := s.Limit(row)
		var bad *registry.RowError
		require.ErrorAs(t, err, &bad)
		require.Equal(t, [2]string{field, value}, [2]string{bad.Field, bad.Value})
	}
}

// TestColumnKeys: each key is a field of Columns and each field has a key. A query selects one expression for each cell.
func TestColumnKeys(t *testing.T) {
	o, err := newOptions(MySQL, nil)
	require.NoError(t, err)
	require.Len(t, o.selected(), len(newRaw(o.places()).cells()))
	names := map[*string]bool{}
	for _, key := range ColumnKeys() {
		name := o.columns.Column(key)
		require.NotNil(t, name, key)
		names[name] = true
	}
	for _, older := range []string{"status", "warmup_ms"} { // which have other values than the field
		names[o.columns.Column(older)] = true
	}
	require.Len(t, names, reflect.TypeFor[Columns]().NumField())
	require.Same(t, &o.columns.MaxWait, o.columns.Column("cache"), "an older name of a key")
	require.Nil(t, o.columns.Column("waits"))
}

// TestSchemaHasFields: a created table has a column for each field of a row that has a default name, and no other but two for notes.
func TestSchemaHasFields(t *testing.T) {
	for _, d := range dialects {
		text, err := Schema(d)
		require.NoError(t, err)
		table, _, _ := strings.Cut(text, "\n);")
		q := regexp.QuoteMeta(d.Quote("")[:1])
		var there []string
		for _, m := range regexp.MustCompile(`(?m)^  `+q+`(\w+)`+q).FindAllStringSubmatch(table, -1) {
			there = append(there, strings.ToLower(m[1]))
		}
		want := []string{"channeltype", "interfaceno"}
		own := d.columns()
		for _, name := range own.Names() {
			want = append(want, strings.ToLower(name))
		}
		require.ElementsMatch(t, want, there, d)
	}
}

// A table's column of the cold factor has a value for every row, which a row without a warm-up ignores.
func TestColdFactorWithoutWarmUp(t *testing.T) {
	s := open(t, new(fakeDB), WithColumns(Columns{WarmupMillis: "warm", ColdFactor: "cold"}))
	text := func(s string) *string { return &s }
	row := map[string]*string{"interfaceUrl": text("/a"), "rateLimit": text("5"), "status": text("1"), "cold": text("2")}
	l, err := s.Limit(row)
	require.NoError(t, err)
	require.Zero(t, l.ColdFactor)
	row["warm"] = text("1000")
	l, err = s.Limit(row)
	require.NoError(t, err)
	require.Equal(t, 2.0, l.ColdFactor)
}

// A disabled row with a wrong field keeps what identifies it, and none of its limits.
func TestDisabledRowWithWrongField(t *testing.T) {
	s := open(t, new(fakeDB))
	text := func(s string) *string { return &s }
	row := map[string]*string{"configId": text("7"), "interfaceUrl": text("/a"), "rateLimit": text("5"), "status": text("0"), "cache": text("-1"),
		"concurrent": text("3"), "perKey": text("0"), "shadow": text("1"), "lastModifyTime": text("17")}
	l, err := s.Limit(row)
	require.NoError(t, err)
	require.Equal(t, registry.Limit{Row: "7", Name: "/a", Disabled: true, Shadow: true, Version: 17}, l)
}

// A row that has different values under two names of a setting is rejected with both columns. A column that is named is the only one.
func TestTwoColumnsOfASetting(t *testing.T) {
	text := func(s string) *string { return &s }
	row := map[string]*string{"configId": text("7"), "interfaceUrl": text("/a"), "rateLimit": text("5"), "status": text("1"), "cache": text("0.25"), "max_wait": text("0.3")}
	_, err := open(t, new(fakeDB)).Limit(row)
	require.Equal(t, &registry.RowError{Row: "7", Name: "/a", Field: "max_wait", Value: "0.3", Other: "cache",
		Want: "the same value as cache 0.25, or one of the two alone: both name one setting"}, err)
	l, err := open(t, new(fakeDB), WithColumns(Columns{MaxWait: "cache"})).Limit(row)
	require.NoError(t, err)
	require.Equal(t, 250*time.Millisecond, l.MaxWait)
	row["max_wait"] = nil
	l, err = open(t, new(fakeDB)).Limit(row)
	require.NoError(t, err)
	require.Equal(t, 250*time.Millisecond, l.MaxWait)
}

// The names of the columns that a table has decide what a column holds.
func TestFieldOfAColumn(t *testing.T) {
	c := MySQL.columns()
	for column, want := range map[string][2]string{"max_wait": {"max_wait", "max_wait"}, "cache": {"max_wait", "cache"}, "perKey": {"per_key", "perKey"}, "status": {"disabled", "status"}} {
		f, ok := c.Field(column)
		require.True(t, ok, column)
		require.Equal(t, want, [2]string{f.Setting, f.Key})
	}
	for _, column := range []string{"configId", "burst", "warmup_ms", "note", ""} {
		_, ok := c.Field(column)
		require.False(t, ok, column)
	}
	c.MaxWait, c.WarmupMillis = "patience", "cold"
	f, ok := c.Field("patience")
	require.True(t, ok)
	require.Equal(t, "max_wait", f.Key)
	_, ok = c.Field("cache")
	require.False(t, ok, "the column has a name of its own")
	f, ok = c.Field("cold")
	require.True(t, ok)
	require.Equal(t, [2]string{"warmup", "warmup_ms"}, [2]string{f.Setting, f.Key})
	require.Zero(t, f.Scale, "milliseconds")
}
