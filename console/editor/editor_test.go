package editor

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// TestAuditSchema: with the default name the text is the file, and another name is put in everywhere.
func TestAuditSchema(t *testing.T) {
	for _, d := range dialects {
		text, err := AuditSchema(d)
		require.NoError(t, err)
		file, err := os.ReadFile("schema/" + strings.ToLower(d.String()) + ".sql")
		require.NoError(t, err)
		require.Equal(t, string(file), text)
		for _, c := range auditColumns {
			require.Contains(t, text, "\n  "+d.Quote(auditColumn(d, c))+" ")
		}
		text, err = AuditSchema(d, WithAuditTable("s.t"))
		require.NoError(t, err)
		require.NotContains(t, text, defaultAuditTable)
		require.Contains(t, text, "CREATE TABLE IF NOT EXISTS "+d.Quote("s")+"."+d.Quote("t")+" (")
	}
}

func TestEditorConfiguration(t *testing.T) {
	db, source := openNowhere(t, sqlsource.MySQL)
	e, err := New(db, source)
	require.NoError(t, err)
	for message, call := range map[string]func() error{
		"db nil: want":            func() error { _, err := New(nil, source); return err },
		"source nil: want":        func() error { _, err := New(db, nil); return err },
		"dialect Dialect(0)":      func() error { _, err := AuditSchema(0); return err },
		"dialect Dialect(7)":      func() error { _, err := AuditSchema(7); return err },
		"db nil: want a":          func() error { return CreateAuditTable(t.Context(), nil, sqlsource.SQLite) },
		`table "a;b"`:             func() error { _, err := New(db, source, WithAuditTable("a;b")); return err },
		"editable column \"a`b\"": func() error { _, err := New(db, source, WithEditable("a`b")); return err },
		"option nil":              func() error { _, err := New(db, source, nil); return err },
		"switch option nil: want": func() error { _, err := e.SetSwitch(t.Context(), true, "a", "b", nil); return err },
		`switch name "a b": want 1`: func() error {
			_, err := e.SetSwitch(t.Context(), true, "a", "b", sqlsource.WithSwitchName("a b"))
			return err
		},
	} {
		err := call()
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, message)
		require.ErrorContains(t, err, message)
	}
}

// TestValuesStay: values are read from the audit table as they were written, whatever they contain.
func TestValuesStay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := Values{}
		for range rapid.IntRange(0, 4).Draw(t, "columns") {
			name := rapid.String().Draw(t, "column")
			v[strings.ToValidUTF8(name, "")] = rapid.SampledFrom([]*string{nil, Text(rapid.String().Draw(t, "text")),
				Text(string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))), Text(`{"hex":"00"}`), Text("<&>\u2028")}).Draw(t, "value")
		}
		back, err := parseValues(v.json())
		if err != nil || fmt.Sprint(len(v)) != fmt.Sprint(len(back)) {
			t.Fatal(err, v, back)
		}
		for column, value := range v {
			got, ok := back[column]
			if !ok || (got == nil) != (value == nil) || got != nil && *got != *value {
				t.Fatalf("%q: %v, then %v", column, value, got)
			}
		}
	})
	none, err := parseValues(Values(nil).json())
	require.NoError(t, err)
	require.Nil(t, none)
	for _, text := range []string{"", "[]", "{", `{"a":{"hex":"x"}}`, `"a"`} { // edited by hand
		_, err := parseValues(&text)
		require.Error(t, err, text)
	}
	byHand, err := parseValues(Text(`{"rate":5.5,"on":true}`))
	require.NoError(t, err)
	require.Equal(t, Values{"rate": Text("5.5"), "on": Text("1")}, byHand)
	require.Equal(t, `{"a":null,"b":"<x>","c":{"hex":"ff"}}`, *Values{"a": nil, "b": Text("<x>"), "c": Text("\xff")}.json())
}

func TestSame(t *testing.T) {
	for _, test := range []struct {
		a, b *string
		want bool
	}{
		{nil, nil, true}, {nil, Text(""), false}, {Text("5"), Text("5.000"), true}, {Text("0.3"), Text("0.30"), true}, {Text("1e3"), Text(1000), true},
		{Text("5"), Text("6"), false}, {Text(true), Text("true"), true}, {Text(false), Text("false"), true}, {Text(false), Text("true"), false},
		{Text("\x01"), Text(1), true}, {Text("a"), Text("A"), false}, {Text("NaN"), Text("NaN"), true}, {Text("a"), Text("a "), false},
	} {
		require.Equal(t, test.want, same(test.a, test.b), "%v %v", test.a, test.b)
		require.Equal(t, test.want, same(test.b, test.a), "%v %v", test.b, test.a)
	}
	entry := AuditEntry{From: Values{"a": Text(1), "b": Text(2), "gone": nil}, To: Values{"a": Text("1.0"), "b": Text(3), "new": nil}}
	require.Equal(t, []string{"b", "gone", "new"}, entry.Changed())
}

// A row is validated with its present and its new values.
func TestCells(t *testing.T) {
	e := newEditor(t, sqlsource.SQLite, sqlsource.WithColumns(sqlsource.Columns{
		ID: "f0", Name: "f1", Rate: "f2", MaxWait: "f3", Disabled: "f4", Modified: "f5", Burst: "f6", WarmupMillis: "f7", ColdFactor: "f8", Quota: "f9",
	}))
	s := &session{Editor: e}
	good := Values{"f1": Text("/a"), "f2": Text(5), "f3": Text(0.5), "f4": Text(0)}
	for name, want := range map[string]string{"f2": "-1", "f3": "-2", "f4": "-3", "f6": "-4", "f7": "-5", "f9": "-6"} {
		var bad *registry.RowError
		require.ErrorAs(t, s.check("/a", &Row{ID: "1", Values: good}, []cell{{column{name: name}, &want}}), &bad)
		require.Equal(t, [2]string{name, want}, [2]string{bad.Field, bad.Value})
	}
	require.NoError(t, s.check("/a", &Row{ID: "1", Values: good}, []cell{{column{name: "f6"}, Text(7)}}))
	require.NoError(t, s.check("/a", nil, nil), "what is not known yet is right")
}

// TestLater: the time of a modification is later than the last one, in the unit of its column.
func TestLater(t *testing.T) {
	for want, test := range map[string]struct {
		d sqlsource.Dialect
		c column
	}{
		"INTERVAL 1000000 MICROSECOND": {sqlsource.MySQL, column{name: "at", kind: "datetime"}},
		"INTERVAL 1 MICROSECOND":       {sqlsource.MySQL, column{name: "at", kind: "timestamp", digits: 6}},
		"interval '1000 microseconds'": {sqlsource.PostgreSQL, column{name: "at", kind: "timestamp with time zone", digits: 3}},
		"'+0.001 seconds'":             {sqlsource.SQLite, column{name: "at", digits: 3}},
	} {
		require.Contains(t, later(test.d, test.c), want)
		require.NotContains(t, now(test.d, test.c), test.d.Quote("at"))
		require.NotEmpty(t, now(test.d, test.c))
	}
	require.Empty(t, later(sqlsource.MySQL, column{name: "at", kind: "bigint"}))
	require.Empty(t, now(sqlsource.PostgreSQL, column{name: "at", kind: "bigint"}))
}

// What another editor has changed in its table of limits is no turning of a switch, though the table has a column enabled, too.
func TestUndoOfAnotherTable(t *testing.T) {
	e := newEditor(t, sqlsource.SQLite)
	s := &session{Editor: e, q: e.db}
	_, err := s.switchBack(context.Background(), &AuditEntry{
		ID: 1, Table: "others", Name: "x", From: Values{"enabled": Text(1), e.Columns().Rate: Text(5)}, To: Values{"enabled": Text(1), e.Columns().Rate: Text(7)},
	}, "ann", "wrong")
	require.ErrorIs(t, err, ErrNoEntry)
}

// TestLimitOfValues: what a row would be follows from its values alone, by the rules of the source.
func TestLimitOfValues(t *testing.T) {
	e := newEditor(t, sqlsource.MySQL)
	l, err := e.Limit("/a", Values{"rateLimit": Text("5.50"), "cache": nil, "window": Text(60), "windowLimit": Text(100), "shadow": Text(1)})
	require.NoError(t, err)
	require.Equal(t, registry.Limit{Row: newRow, Name: "/a", Rate: 5.5, MaxWait: 500 * time.Millisecond, Window: time.Minute, WindowLimit: 100, Shadow: true}, l)
	l, err = e.Limit("/a", Values{"rateLimit": Text("nonsense"), "status": Text(0)})
	require.NoError(t, err, "what a disabled row would limit to does not matter")
	require.True(t, l.Disabled)
	for field, values := range map[string]Values{
		"rate": {}, "status": {"rateLimit": Text(5), "status": Text(7)}, "cache": {"rateLimit": Text(5), "cache": Text("-1")},
		"concurrent": {"rateLimit": Text(5), "concurrent": Text("many")},
	} {
		_, err = e.Limit("/a", values)
		var bad *registry.RowError
		require.ErrorAs(t, err, &bad)
		require.Equal(t, field, bad.Field)
	}
}
