package sqlsource

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// TestAuditSchema: with the default name the text is the file, and another name is put in everywhere.
func TestAuditSchema(t *testing.T) {
	for _, d := range dialects {
		text, err := AuditSchema(d)
		require.NoError(t, err)
		file, err := os.ReadFile("schema/" + strings.ToLower(d.String()) + "_audit.sql")
		require.NoError(t, err)
		require.Equal(t, string(file), text)
		for _, c := range auditColumns {
			require.Contains(t, text, "\n  "+d.quote(d.auditColumn(c))+" ")
		}
		text, err = AuditSchema(d, WithAuditTable("s.t"))
		require.NoError(t, err)
		require.NotContains(t, text, defaultAuditTable)
		require.Contains(t, text, "CREATE TABLE IF NOT EXISTS "+d.quote("s")+"."+d.quote("t")+" (")
	}
}

func TestEditorConfiguration(t *testing.T) {
	db := sql.OpenDB(new(fakeDB))
	defer func() { require.NoError(t, db.Close()) }()
	for message, call := range map[string]func() error{
		"db nil: want":            func() error { _, err := NewEditor(nil, MySQL); return err },
		"dialect Dialect(0)":      func() error { _, err := NewEditor(db, 0); return err },
		"dialect Dialect(7)":      func() error { _, err := AuditSchema(7); return err },
		"db nil: want a":          func() error { return CreateAuditTable(context.Background(), nil, SQLite) },
		`table "a;b"`:             func() error { _, err := NewEditor(db, MySQL, WithAuditTable("a;b")); return err },
		"editable column \"a`b\"": func() error { _, err := NewEditor(db, MySQL, WithEditable("a`b")); return err },
		"option nil":              func() error { _, err := NewEditor(db, MySQL, nil); return err },
		"switch option nil: want": func() error {
			e, _ := NewEditor(db, MySQL)
			_, err := e.SetSwitch(context.Background(), true, "a", "b", nil)
			return err
		},
		`switch name "a b": want 1`: func() error {
			e, _ := NewEditor(db, MySQL)
			_, err := e.SetSwitch(context.Background(), true, "a", "b", WithSwitchName("a b"))
			return err
		},
	} {
		err := call()
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, message)
		require.ErrorContains(t, err, message)
	}
}

// TestValuesStay: what the audit table holds is what was there, whatever it is.
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
	for _, text := range []string{"", "[]", "{", `{"a":{"hex":"x"}}`, `"a"`} { // somebody has edited it
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

// What drivers' errors look like.
type (
	mysqlError  struct{ Number uint16 }
	stateError  string
	codeError   int
	errNo       int
	mattnError  struct{ Code errNo }
	plainStruct struct{ Number string }
)

func (e *mysqlError) Error() string   { return fmt.Sprint("Error ", e.Number) }
func (e stateError) Error() string    { return string(e) }
func (e stateError) SQLState() string { return string(e) }
func (e codeError) Error() string     { return "sqlite" }
func (e codeError) Code() int         { return int(e) }
func (e mattnError) Error() string    { return "sqlite" }
func (e plainStruct) Error() string   { return "plain" }

func TestKindOf(t *testing.T) {
	for want, errs := range map[kind][]error{
		denied:   {&mysqlError{1142}, stateError("42501"), codeError(23), mattnError{23}},
		readOnly: {&mysqlError{1290}, stateError("25006"), codeError(8 | 3<<8), mattnError{8}},
		noTable:  {&mysqlError{1146}, stateError("42P01")},
		badValue: {&mysqlError{1406}, stateError("22003"), stateError("23505"), codeError(19 | 8<<8), mattnError{19}},
		other:    {nil, &mysqlError{1213}, stateError("40001"), stateError(""), codeError(5), mattnError{5}, plainStruct{"8"}, errors.New("8")},
	} {
		for _, err := range errs {
			require.Equal(t, want, kindOf(err), "%#v", err)
			if err != nil {
				require.Equal(t, want, kindOf(fmt.Errorf("twice: %w", fmt.Errorf("wrapped: %w", err))))
			}
		}
	}
}

// TestCells: fields and cells of a row are in one order, which the check before a write relies on.
func TestCells(t *testing.T) {
	o, err := newOptions(MySQL, nil)
	require.NoError(t, err)
	fields, cells := o.columns.fields(), new(raw).cells()
	require.Len(t, cells, len(fields)+1)
	require.Len(t, o.selected(), len(cells))
	require.Equal(t, "Modified", fields[modifiedCells].field)
	all := WithColumns(Columns{ID: "f0", Name: "f1", Rate: "f2", Cache: "f3", Status: "f4", Modified: "f5", Burst: "f6", WarmupMillis: "f7", ColdFactor: "f8", Quota: "f9"})
	e, err := NewEditor(sql.OpenDB(new(fakeDB)), SQLite, all)
	require.NoError(t, err)
	require.NoError(t, e.db.Close())
	s := &session{Editor: e}
	good := Values{"f1": Text("/a"), "f2": Text(5), "f3": Text(0.5), "f4": Text(1)}
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
		d Dialect
		c column
	}{
		"INTERVAL 1000000 MICROSECOND": {MySQL, column{name: "at", kind: "datetime"}},
		"INTERVAL 1 MICROSECOND":       {MySQL, column{name: "at", kind: "timestamp", digits: 6}},
		"interval '1000 microseconds'": {PostgreSQL, column{name: "at", kind: "timestamp with time zone", digits: 3}},
		"'+0.001 seconds'":             {SQLite, column{name: "at", digits: 3}},
	} {
		require.Contains(t, test.d.later(test.c), want)
		require.NotContains(t, test.d.now(test.c), test.d.quote("at"))
		require.NotEmpty(t, test.d.now(test.c))
	}
	require.Empty(t, MySQL.later(column{name: "at", kind: "bigint"}))
	require.Empty(t, PostgreSQL.now(column{name: "at", kind: "bigint"}))
}

// What another editor has changed in its table of limits is no turning of a switch, though the table has a column enabled, too.
func TestUndoOfAnotherTable(t *testing.T) {
	db := sql.OpenDB(new(fakeDB))
	defer func() { require.NoError(t, db.Close()) }()
	e, err := NewEditor(db, SQLite)
	require.NoError(t, err)
	s := &session{Editor: e, q: db}
	_, err = s.switchBack(context.Background(), &AuditEntry{
		ID: 1, Table: "others", Name: "x", From: Values{"enabled": Text(1), e.options.columns.Rate: Text(5)}, To: Values{"enabled": Text(1), e.options.columns.Rate: Text(7)},
	}, "ann", "wrong")
	require.ErrorIs(t, err, ErrNoEntry)
}
