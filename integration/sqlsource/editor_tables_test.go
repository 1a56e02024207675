package sqlsource

import (
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// TestEditHostile: names, people and reasons that are anything but plain, in sessions of any character set and zone.
func TestEditHostile(t *testing.T) {
	for _, b := range backends {
		for _, zone := range b.zones {
			t.Run(b.name+zone, func(t *testing.T) {
				t.Parallel()
				_, dsn := b.place(t)
				e := newEditor(t, b, open(t, b.driver, dsn+zone))
				plain := editorOf(t, b, open(t, b.driver, dsn))
				names := []string{
					"'; DROP TABLE t_ratelimite_conf; --", "<script>alert(1)</script>", `"`, "`", `\`, `\'`, "%", "?", "$1", ":a", " a ", "a\nb", "é", "e\u0301", "🚦",
					"a", "A", "{\"a\":null}", "\u2028",
				}
				if zone != "" {
					names = []string{"'é🚦"}
				}
				for _, name := range names {
					who, why := name+"x", name+name+"x"
					_, err := e.Change(ctx, editor.Change{Name: name, To: to(e, 5, 0.5), Who: who, Why: why})
					require.NoError(t, err, "%q", name)
					row := get(t, plain, name)
					require.Equal(t, name, row.Limit.Name)
					require.Equal(t, get(t, e, name).Version, row.Version, "the same in every session")
					changed, err := plain.Change(ctx, editor.Change{Name: name, From: row.Version, To: to(e, 6, nil), Who: who, Why: why})
					require.NoError(t, err, "%q", name)
					undone, err := e.Undo(ctx, changed.ID, who, why)
					require.NoError(t, err, "%q", name)
					history, err := e.History(ctx, name, 10)
					require.NoError(t, err)
					require.Len(t, history, 3, "%q", name)
					require.Equal(t, undone, history[0])
					require.Equal(t, [4]string{name, who, why, conf}, [4]string{history[0].Name, history[0].Who, history[0].Why, history[0].Table})
					require.Equal(t, undone.ID, history[1].UndoneBy)
					require.WithinDuration(t, time.Now(), undone.At, time.Minute)
				}
			})
		}
	}
}

// TestEditLong: a value that a column cannot hold is an error, and is not cut off.
func TestEditLong(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		var bad *registry.RowError
		switch b.dialect { // as an earlier release made it; SQLite does not mind
		case sqlsource.MySQL:
			exec(t, db, "ALTER TABLE "+conf+" MODIFY name VARCHAR(128)")
		case sqlsource.PostgreSQL:
			exec(t, db, "ALTER TABLE "+conf+" ALTER COLUMN name TYPE varchar(128)")
		}
		for _, name := range []string{strings.Repeat("x", 129), strings.Repeat("x", 513), "\xff", "a\x00b"} {
			_, err := e.Change(ctx, editor.Change{Name: name, To: to(e, 5, 0.5), Who: "ann", Why: "new"})
			if b.dialect == sqlsource.SQLite && len(name) == 129 {
				require.NoError(t, err)
				continue
			}
			require.True(t, errors.As(err, &bad), "%.20q: %v", name, err)
		}
		_, err := e.Change(ctx, editor.Change{Name: "/long", To: to(e, 5, 0.5), Who: strings.Repeat("é", 128), Why: strings.Repeat("ü", 1000)})
		require.NoError(t, err)
	})
}

// TestOptionalColumns: those that the table has can be changed; shadow by one call.
func TestOptionalColumns(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		named := sqlsource.WithColumns(sqlsource.Columns{Burst: "burst", Quota: "quota"})
		newEditor(t, b, db, named)
		source, err := sqlsource.New(db, b.dialect, named)
		require.NoError(t, err)
		e, err := editor.New(db, source, editor.WithEditable("note"))
		require.NoError(t, err)
		change := func(name string, to editor.Values) error {
			row, _ := e.Get(ctx, name)
			_, err := e.Change(ctx, editor.Change{Name: name, From: row.Version, To: to, Who: "ann", Why: "to see"})
			return err
		}
		text := editor.Text
		quote := map[sqlsource.Dialect]string{sqlsource.MySQL: "`"}[b.dialect]
		if quote == "" {
			quote = `"`
		}
		own := e.Columns()
		for _, c := range []string{own.Shadow, own.PerKey, own.Window, own.WindowLimit, own.Concurrent, own.ConcurrentWait, own.Penalty, own.Priority} { // as in a table of an earlier release
			exec(t, db, "ALTER TABLE "+conf+" DROP COLUMN "+quote+c+quote)
		}
		require.NoError(t, change("/a", to(e, 5, nil)))
		var column *editor.ColumnError
		_, err = e.SetShadow(ctx, "/a", get(t, e, "/a").Version, true, "ann", "try it")
		require.True(t, errors.As(err, &column), "%v", err)
		require.Equal(t, editor.ColumnError{Table: conf, Column: "shadow"}, *column)

		flag := map[sqlsource.Dialect]string{sqlsource.MySQL: "BIT(1)", sqlsource.PostgreSQL: "boolean", sqlsource.SQLite: "TINYINT"}[b.dialect]
		exec(t, db, "ALTER TABLE "+conf+" ADD shadow "+flag)
		exec(t, db, "ALTER TABLE "+conf+" ADD note VARCHAR(20)")
		exec(t, db, "ALTER TABLE "+conf+" ADD concurrent INTEGER")
		row := get(t, e, "/a")
		c := e.Columns()
		require.Equal(t, []string{c.Rate, c.MaxWait, c.Disabled, "burst", "quota", "shadow", "note", "concurrent"}, inOrder(row.Editable, "burst", "quota"))
		on, err := e.SetShadow(ctx, "/a", row.Version, true, "ann", "try it")
		require.NoError(t, err)
		require.Contains(t, []string{"1", "true"}, *on.To["shadow"])
		_, err = e.Undo(ctx, on.ID, "ann", "it works")
		require.NoError(t, err)
		require.Nil(t, get(t, e, "/a").Values["shadow"])

		require.NoError(t, change("/a", editor.Values{"burst": text(20), "note": text("for 'us'"), "concurrent": text(3)}))
		require.Equal(t, 20.0, *get(t, e, "/a").Limit.Burst)
		var bad *registry.RowError
		require.True(t, errors.As(change("/a", editor.Values{"quota": text(true)}), &bad), "a burst, and a quota")
		require.Equal(t, "burst", bad.Field)
		require.NoError(t, change("/a", editor.Values{"quota": text(true), "burst": nil}))
		require.True(t, get(t, e, "/a").Limit.Quota)
		require.Equal(t, "3", *get(t, e, "/a").Values["concurrent"])
		require.True(t, errors.As(change("/a", editor.Values{"shadow": text("perhaps")}), &bad))
		require.Equal(t, "shadow", bad.Field)
		require.True(t, errors.As(change("/a", editor.Values{"concurrent": text("many")}), &bad))
		require.Equal(t, "concurrent", bad.Field)
	})
}

// inOrder moves columns to the end of the third place: where a table has them depends on its schema.
func inOrder(columns []string, moved ...string) []string {
	var first, last []string
	for _, c := range columns {
		if c == moved[0] || c == moved[1] {
			last = append(last, c)
		} else {
			first = append(first, c)
		}
	}
	return append(append(append([]string{}, first[:3]...), last...), first[3:]...)
}

// TestEditElsewhere: tables in a schema of their own, with other names, a unique name, and no audit table yet.
func TestEditElsewhere(t *testing.T) {
	for _, b := range backends {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			place, dsn := b.place(t)
			other, _ := b.place(t)
			if b.dialect == sqlsource.SQLite {
				other = "main"
			}
			db := open(t, b.driver, dsn)
			names := sqlsource.Columns{ID: "id", Name: "Name of$it", Rate: "order", MaxWait: "group", Status: "select", Modified: "when"}
			names.Name = "from"
			opts := []sqlsource.Option{sqlsource.WithTable(other + ".Table$1"), sqlsource.WithColumns(names)}
			require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect, opts...))
			source, err := sqlsource.New(db, b.dialect, opts...)
			require.NoError(t, err)
			audit := editor.WithAuditTable(place + ".Who$1")
			e, err := editor.New(db, source, audit)
			require.NoError(t, err)
			_, err = e.Change(ctx, editor.Change{Name: "/a", To: to(e, 5, 0.5), Who: "ann", Why: "new"})
			require.ErrorIs(t, err, editor.ErrNoAudit)
			_, err = e.History(ctx, "/a", 1)
			require.ErrorIs(t, err, editor.ErrNoAudit)
			_, err = e.Get(ctx, "/a")
			require.ErrorIs(t, err, editor.ErrNoRow, "which needs no audit table")

			for range 2 {
				require.NoError(t, editor.CreateAuditTable(ctx, db, b.dialect, audit))
			}
			added, err := e.Change(ctx, editor.Change{Name: "/a", To: to(e, 5, 0.5), Who: "ann", Why: "new"})
			require.NoError(t, err)
			require.Equal(t, other+".Table$1", added.Table)
			_, err = e.Undo(ctx, added.ID, "ann", "no")
			require.NoError(t, err)
			require.Empty(t, load(t, b, db, opts...).Limits)
		})
	}
}

// TestEditOtherTables: two rows with one name and which of them is in force, a bad row, a name that must be unique, and a table without
// transactions.
func TestEditOtherTables(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		c := e.Columns()
		for _, rate := range []int{7, 8} {
			b.insert(t, db, conf, "name, rate", "/two", rate)
		}
		b.insert(t, db, conf, "name, rate", "/bad", -1)
		two, bad := get(t, e, "/two"), get(t, e, "/bad")
		require.Equal(t, 8.0, two.Limit.Rate)
		require.Equal(t, c.Rate, bad.Bad.Field)
		_, err := e.Change(ctx, editor.Change{Name: "/bad", From: bad.Version, To: to(e, 1, nil), Who: "ann", Why: "repair"})
		require.NoError(t, err)
		_, err = e.Change(ctx, editor.Change{Name: "/two", From: two.Version, To: to(e, 9, nil), Who: "ann", Why: "more"})
		require.NoError(t, err)
		require.Equal(t, 9.0, get(t, e, "/two").Limit.Rate)

		exec(t, db, "DELETE FROM "+conf)
		exec(t, db, "CREATE UNIQUE INDEX once ON "+conf+" (name)")
		_, err = e.Change(ctx, editor.Change{Name: "/a", To: to(e, 1, nil), Who: "ann", Why: "new"})
		require.NoError(t, err)
		if b.dialect == sqlsource.MySQL {
			exec(t, db, "ALTER TABLE "+audit+" ENGINE = MyISAM")
			_, err = e.Change(ctx, editor.Change{Name: "/a", From: get(t, e, "/a").Version, To: to(e, 2, nil), Who: "ann", Why: "more"})
			require.ErrorContains(t, err, "MyISAM, has no transactions")
			require.Equal(t, 1.0, get(t, e, "/a").Limit.Rate)
		}
	})
}

// TestSetSwitch: the actor and the reason of a change of the switch are recorded; a fleet's switch follows, and an undo turns it back.
func TestSetSwitch(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		_, err := e.SetSwitch(ctx, false, "ann", "an emergency")
		require.Error(t, err, "there is no table")
		require.NoError(t, sqlsource.CreateSwitchTable(ctx, db, b.dialect))
		exec(t, db, "ALTER TABLE t_ratelimite_switch ADD changedBy VARCHAR(64)")
		sw, err := sqlsource.NewSwitch(db, b.dialect, polling(func(error) {}))
		require.NoError(t, err)
		defer sw.Close()
		require.True(t, sw.Enabled())
		off, err := e.SetSwitch(ctx, false, "ann", "an emergency")
		require.NoError(t, err)
		require.Equal(t, [3]string{"t_ratelimite_switch", "global", "0"}, [3]string{off.Table, off.Name, *off.To["enabled"]})
		require.Nil(t, off.From)
		faultlab.Soon(t, 5*time.Second, func() bool { return !sw.Enabled() })
		require.Contains(t, sw.Origin(), "by ann")
		_, err = e.Undo(ctx, off.ID, "ben", "it is over")
		require.NoError(t, err)
		faultlab.Soon(t, 5*time.Second, sw.Enabled)
		off, err = e.SetSwitch(ctx, false, "ann", "again")
		require.NoError(t, err)
		_, err = e.SetSwitch(ctx, true, "ben", "no")
		require.NoError(t, err)
		_, err = e.Undo(ctx, off.ID, "ann", "too late")
		require.ErrorIs(t, err, editor.ErrConflict)
		history, err := e.History(ctx, "", 10)
		require.NoError(t, err)
		require.Len(t, history, 4)
		history, err = e.History(ctx, "global", 10)
		require.NoError(t, err)
		require.Empty(t, history, "it is no limit")
	})
}

// TestEditRights: without a right, the error names the missing one.
func TestEditRights(t *testing.T) {
	for _, b := range backends[:2] {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			place, dsn := b.place(t)
			db := open(t, b.driver, dsn)
			root := newEditor(t, b, db)
			_, err := root.Change(ctx, editor.Change{Name: "/a", To: to(root, 5, nil), Who: "ann", Why: "new"})
			require.NoError(t, err)
			user := "reader_" + place
			grant := func(rights, table string) { exec(t, db, "GRANT "+rights+" ON "+place+"."+table+" TO "+user) }
			exec(t, db, "CREATE USER "+user)
			if b.dialect == sqlsource.MySQL {
				dsn = strings.Replace(dsn, "root:@", user+":@", 1)
			} else {
				exec(t, db, "GRANT USAGE ON SCHEMA "+place+" TO "+user)
				dsn = strings.Replace(dsn, "//postgres@", "//"+user+"@", 1)
			}
			grant("SELECT", conf)
			reader := editorOf(t, b, open(t, b.driver, dsn))
			row := get(t, reader, "/a")
			change := func(from editor.Version, values editor.Values, name string) *sqlsource.RightError {
				_, err := reader.Change(ctx, editor.Change{Name: name, From: from, To: values, Who: "ben", Why: "to see"})
				var right *sqlsource.RightError
				require.True(t, errors.As(err, &right), "%v", err)
				require.Equal(t, row, get(t, reader, "/a"))
				return right
			}
			values := to(root, 6, nil)
			require.Equal(t, [2]string{"SELECT", audit}, of(change(row.Version, values, "/a")))
			grant("SELECT", audit)
			require.Equal(t, [2]string{"UPDATE", conf}, of(change(row.Version, values, "/a")))
			require.Equal(t, [2]string{"INSERT", conf}, of(change("", values, "/b")))
			grant("UPDATE", conf)
			require.Equal(t, [2]string{"INSERT", audit}, of(change(row.Version, values, "/a")))
			require.Equal(t, [2]string{"DELETE", conf}, of(change(row.Version, nil, "/a")))
			grant("INSERT", audit)
			entry, err := reader.Change(ctx, editor.Change{Name: "/a", From: row.Version, To: values, Who: "ben", Why: "to see"})
			require.NoError(t, err)
			_, err = reader.Undo(ctx, entry.ID, "ben", "back")
			var right *sqlsource.RightError
			require.True(t, errors.As(err, &right), "%v", err)
			require.Equal(t, [2]string{"UPDATE", audit}, of(right))
		})
	}
	t.Run("sqlite", func(t *testing.T) {
		b, path := backends[2], filepath.Join(t.TempDir(), "db")
		root := newEditor(t, b, open(t, b.driver, "file:"+path))
		reader := editorOf(t, b, open(t, b.driver, "file:"+path+"?mode=ro"))
		_, err := reader.Change(ctx, editor.Change{Name: "/a", To: to(root, 5, nil), Who: "ben", Why: "new"})
		var right *sqlsource.RightError
		require.True(t, errors.As(err, &right), "%v", err)
		require.Equal(t, [2]string{"WRITE", audit}, of(right))
	})
}

func of(e *sqlsource.RightError) [2]string { return [2]string{e.Right, e.Table} }
