package sqlsource

import (
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const audit = "t_ratelimite_audit"

// editorOf returns an editor of the table that these options mean. It makes no tables.
func editorOf(t testing.TB, b backend, db *sql.DB, opts ...sqlsource.Option) *editor.Editor {
	t.Helper()
	source, err := sqlsource.New(db, b.dialect, opts...)
	require.NoError(t, err)
	e, err := editor.New(db, source)
	require.NoError(t, err)
	return e
}

// newEditor makes the tables, and returns an editor of them.
func newEditor(t testing.TB, b backend, db *sql.DB, opts ...sqlsource.Option) *editor.Editor {
	t.Helper()
	require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect, opts...))
	require.NoError(t, editor.CreateAuditTable(ctx, db, b.dialect))
	return editorOf(t, b, db, opts...)
}

func get(t testing.TB, e *editor.Editor, name string) editor.Row {
	t.Helper()
	row, err := e.Get(ctx, name)
	require.NoError(t, err)
	return row
}

// to are values for the columns of an editor, by the names of MySQL's default table.
func to(e *editor.Editor, rate, cache any) editor.Values {
	c := e.Columns()
	v := editor.Values{c.Rate: editor.Text(rate)}
	if cache != nil {
		v[c.MaxWait] = editor.Text(cache)
	}
	return v
}

// TestEdit: add, change, remove, and all of it back; what the source loads, and what the audit table says.
func TestEdit(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		_, err := e.Get(ctx, "/a")
		require.ErrorIs(t, err, editor.ErrNoRow)
		began := time.Now().Add(-time.Second)

		added, err := e.Change(ctx, editor.Change{Name: "/a", To: to(e, 5, 0.25), Who: "ann", Why: "a new partner"})
		require.NoError(t, err)
		require.Nil(t, added.From)
		require.WithinRange(t, added.At, began, time.Now().Add(time.Second))
		first := get(t, e, "/a")
		require.Equal(t, 5.0, first.Limit.Rate)
		require.Equal(t, 250*time.Millisecond, first.Limit.MaxWait)
		exec(t, db, "UPDATE "+conf+" SET channelType = 'web'") // what the editor knows nothing of
		old := get(t, e, "/a")
		require.NotEqual(t, first.Version, old.Version)

		for i := range 5 { // within one second
			was := get(t, e, "/a")
			_, err = e.Change(ctx, editor.Change{Name: "/a", From: was.Version, To: to(e, 6+i, nil), Who: "ben", Why: "more"})
			require.NoError(t, err)
			is := get(t, e, "/a")
			require.Greater(t, is.Limit.Version, was.Limit.Version)
			require.NotEqual(t, was.Version, is.Version)
			require.Equal(t, was.Limit.MaxWait, is.Limit.MaxWait)
		}
		require.Equal(t, 10.0, load(t, b, db).Limits[0].Rate)

		history, err := e.History(ctx, "/a", 100)
		require.NoError(t, err)
		require.Len(t, history, 6)
		require.Equal(t, added, history[5])
		require.Equal(t, "ben", history[0].Who)
		require.Contains(t, history[0].Changed(), e.Columns().Rate)

		undone, err := e.Undo(ctx, history[0].ID, "cat", "too much")
		require.NoError(t, err)
		require.Equal(t, 9.0, get(t, e, "/a").Limit.Rate)
		_, err = e.Undo(ctx, history[0].ID, "cat", "again")
		require.ErrorIs(t, err, editor.ErrUndone)
		_, err = e.Undo(ctx, history[2].ID, "cat", "an older one")
		require.ErrorIs(t, err, editor.ErrConflict)
		_, err = e.Undo(ctx, undone.ID, "cat", "the undo")
		require.NoError(t, err)
		require.Equal(t, 10.0, get(t, e, "/a").Limit.Rate)
		_, err = e.Undo(ctx, 1_000_000, "cat", "what never was")
		require.ErrorIs(t, err, editor.ErrNoEntry)

		was := get(t, e, "/a")
		removed, err := e.Change(ctx, editor.Change{Name: "/a", From: was.Version, Who: "dan", Why: "no longer"})
		require.NoError(t, err)
		require.Nil(t, removed.To)
		require.Empty(t, load(t, b, db).Limits)
		_, err = e.Undo(ctx, removed.ID, "dan", "a mistake")
		require.NoError(t, err)
		is := get(t, e, "/a")
		require.Equal(t, was.ID, is.ID)
		require.Equal(t, 10.0, is.Limit.Rate)
		require.Equal(t, "web", *is.Values[b.column("channelType")])

		history, err = e.History(ctx, "", 1)
		require.NoError(t, err)
		require.Len(t, history, 1)
		require.Nil(t, history[0].From)
		require.Equal(t, is.Values, history[0].To)
	})
}

// TestEditRefused: a change that is refused returns a typed error, and leaves no trace.
func TestEditRefused(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		c := e.Columns()
		text := editor.Text
		_, err := e.Change(ctx, editor.Change{Name: "/a", To: to(e, 5, nil), Who: "ann", Why: "new"})
		require.NoError(t, err)
		row := get(t, e, "/a")
		for _, test := range []struct {
			to         editor.Values
			field, was string // RowError
			column     string // ColumnError
		}{
			{to: editor.Values{c.Rate: text(-1)}, field: c.Rate, was: "-1"},
			{to: editor.Values{c.Rate: text("five")}, field: c.Rate, was: "five"},
			{to: editor.Values{c.Rate: text("1'; DROP TABLE x; --")}, field: c.Rate, was: `"1'; DROP TABLE x; --"`},
			{to: editor.Values{c.Rate: nil}, field: c.Rate, was: "NULL"},
			{to: editor.Values{c.MaxWait: text(-1)}, field: c.MaxWait, was: "-1"},
			{to: editor.Values{c.Disabled: text(2)}, field: c.Disabled, was: "2"},
			{to: editor.Values{c.Disabled: text(1), c.Rate: text("junk")}, field: c.Rate, was: "junk"},
			{to: editor.Values{}, field: "change", was: "nothing"},
			{to: editor.Values{"elsewhere": text(1)}, column: "elsewhere"},
			{to: editor.Values{c.Name: text("/b")}, column: c.Name},
			{to: editor.Values{c.Modified: text("2020-01-01")}, column: c.Modified},
			{to: editor.Values{b.column("channelType"): text("web")}, column: b.column("channelType")},
			{to: editor.Values{"a`b\"c'd": text(1)}, column: "a`b\"c'd"},
		} {
			_, err := e.Change(ctx, editor.Change{Name: "/a", From: row.Version, To: test.to, Who: "ben", Why: "to see"})
			var bad *registry.RowError
			var column *editor.ColumnError
			switch {
			case test.column != "":
				require.True(t, errors.As(err, &column), "%v %v", test.to, err)
				require.Equal(t, test.column, column.Column)
			default:
				require.True(t, errors.As(err, &bad), "%v: %v", test.to, err)
				require.Equal(t, [3]string{row.ID, test.field, test.was}, [3]string{bad.Row, bad.Field, bad.Value})
				require.NotEmpty(t, bad.Want)
			}
		}
		if b.dialect != sqlsource.SQLite { // which keeps what it is given
			for value, want := range map[string]string{"0.3040004": "0.304000", "9.9910001": "9.991000"} {
				_, err := e.Change(ctx, editor.Change{Name: "/a", From: row.Version, To: editor.Values{c.MaxWait: text(value)}, Who: "ben", Why: "to see"})
				var bad *registry.RowError
				require.True(t, errors.As(err, &bad), "%v", err)
				require.Equal(t, [2]string{c.MaxWait, value}, [2]string{bad.Field, bad.Value})
				_ = want
			}
			_, err = e.Change(ctx, editor.Change{Name: "/a", From: row.Version, To: editor.Values{c.Rate: text(1e12), c.MaxWait: text(1)}, Who: "ben", Why: "to see"})
			var bad *registry.RowError
			require.True(t, errors.As(err, &bad), "%v", err)
			t.Log(bad)
		}
		for _, change := range []editor.Change{
			{Name: "/a", From: row.Version, To: to(e, 6, nil), Who: "", Why: "x"},
			{Name: "/a", From: row.Version, To: to(e, 6, nil), Who: "x", Why: " "},
			{Name: "/a", From: row.Version, To: to(e, 6, nil), Who: "x\x00", Why: "x"},
			{Name: "", To: to(e, 6, nil), Who: "x", Why: "x"},
			{Name: "/c", Who: "x", Why: "x"},
			{Name: "/c", To: editor.Values{}, Who: "x", Why: "x"},
		} {
			_, err := e.Change(ctx, change)
			var bad *registry.RowError
			require.True(t, errors.As(err, &bad), "%+v: %v", change, err)
		}
		require.Equal(t, row, get(t, e, "/a"))
		history, err := e.History(ctx, "", 100)
		require.NoError(t, err)
		require.Len(t, history, 1)
	})
}
