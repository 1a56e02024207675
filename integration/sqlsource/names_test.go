package sqlsource

import (
	"database/sql"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// olderColumns are the names of the columns of a table that an earlier release created.
func (b backend) olderColumns() sqlsource.Columns {
	return sqlsource.Columns{
		Name: b.column("interfaceUrl"), Rate: b.column("rateLimit"), MaxWait: "cache", Status: "status",
		WindowLimit: b.column("windowLimit"), ConcurrentWait: b.column("concurrentWait"), PerKey: b.column("perKey"),
	}
}

// A table with the older names of columns is read and edited as one with the names of now.
func TestOlderColumns(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect, sqlsource.WithColumns(b.olderColumns())))
		require.NoError(t, editor.CreateAuditTable(ctx, db, b.dialect))
		window := b.quoted("window")
		b.insert(t, db, conf, "interfaceUrl, rateLimit, cache, status, "+window+", windowLimit, concurrent, concurrentWait, penalty", "/a", 5, 0.25, 1, 60, 100, 3, 1.5, "none")
		b.insert(t, db, conf, "interfaceUrl, rateLimit, perKey", "/k/*", 7, 1)
		b.insert(t, db, conf, "interfaceUrl, rateLimit, status", "/off", 7, 0)
		s := source(t, b, db)
		read := func() map[string]registry.Limit {
			t.Helper()
			table, err := s.Load(ctx)
			require.NoError(t, err)
			require.Empty(t, table.Rejected)
			all := map[string]registry.Limit{}
			for _, l := range table.Limits {
				l.Version = 0
				all[l.Name] = l
			}
			return all
		}
		a := registry.Limit{Name: "/a", Row: "1", Rate: 5, MaxWait: 250 * time.Millisecond, Window: time.Minute, WindowLimit: 100, Concurrent: 3,
			ConcurrentWait: 1500 * time.Millisecond, Penalty: registry.PenaltyNone}
		k := registry.Limit{Name: "/k/*", Row: "2", Rate: 7, MaxWait: registry.DefaultMaxWait, PerKey: true}
		off := registry.Limit{Name: "/off", Row: "3", Rate: 7, MaxWait: registry.DefaultMaxWait, Disabled: true}
		require.Equal(t, map[string]registry.Limit{"/a": a, "/k/*": k, "/off": off}, read())
		older := b.olderColumns()
		found := s.Columns()
		require.Equal(t, [6]string{older.Name, older.Rate, older.MaxWait, older.Status, older.WindowLimit, older.PerKey},
			[6]string{found.Name, found.Rate, found.MaxWait, found.Status, found.WindowLimit, found.PerKey})
		require.Empty(t, found.Disabled)

		e := editorOf(t, b, db)
		change := func(name string, to editor.Values) error {
			t.Helper()
			row, err := e.Get(ctx, name)
			require.NoError(t, err)
			_, err = e.Change(ctx, editor.Change{Name: name, From: row.Version, To: to, Who: "ann", Why: "to see"})
			return err
		}
		require.NoError(t, change("/a", editor.Values{older.Rate: editor.Text(6), "status": editor.Text(0)}), "as the table has it")
		require.NoError(t, change("/a", editor.Values{"status": editor.Text(1)}))
		require.NoError(t, change("/a", editor.Values{"rate": editor.Text(8), "max_wait": editor.Text(0.5)}), "by the names of now")
		require.NoError(t, change("/k/*", editor.Values{"rate": editor.Text(9), "per_key": editor.Text(0)}))
		var column *editor.ColumnError
		require.ErrorAs(t, change("/off", editor.Values{"disabled": editor.Text(0)}), &column, "status is its opposite")
		a.Rate, a.MaxWait, k.Rate, k.PerKey = 8, registry.DefaultMaxWait, 9, false
		require.Equal(t, map[string]registry.Limit{"/a": a, "/k/*": k, "/off": off}, read())
		row, err := e.Get(ctx, "/off")
		require.NoError(t, err)
		require.True(t, row.Limit.Disabled)
		_, err = e.Change(ctx, editor.Change{Name: "/new", To: editor.Values{"rate": editor.Text(1)}, Who: "ann", Why: "to see"})
		require.NoError(t, err)
		require.Equal(t, registry.Limit{Name: "/new", Row: "4", Rate: 1, MaxWait: registry.DefaultMaxWait}, read()["/new"])
	})
}

// A table may have a column under both names, as while it is being renamed. A row with different values is bad, and its error names both.
func TestBothColumns(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect, sqlsource.WithColumns(b.olderColumns())))
		exec(t, db, "ALTER TABLE "+conf+" ADD COLUMN max_wait VARCHAR(20)")
		exec(t, db, "ALTER TABLE "+conf+" ADD COLUMN disabled INT")
		insert := func(name string, cache, wait any, status int, disabled any) {
			b.insert(t, db, conf, "interfaceUrl, rateLimit, cache, max_wait, status, disabled", name, 5, cache, wait, status, disabled)
		}
		insert("/older", 0.25, nil, 1, nil)
		insert("/newer", nil, "250ms", 1, 0)
		insert("/same", 0.25, "0.250", 1, 0)
		insert("/wait", 0.5, "250ms", 1, 0)
		insert("/off", 0.25, "250ms", 0, 0)
		insert("/on", 0.25, "250ms", 1, 1)
		table := load(t, b, db)
		require.Len(t, table.Limits, 3)
		for _, l := range table.Limits {
			require.Equal(t, [2]any{5.0, 250 * time.Millisecond}, [2]any{l.Rate, l.MaxWait}, l.Name)
			require.False(t, l.Disabled)
		}
		require.Len(t, table.Rejected, 3)
		for i, names := range [][2]string{{"max_wait", "cache"}, {"disabled", "status"}, {"disabled", "status"}} {
			bad := &table.Rejected[i]
			require.Equal(t, names, [2]string{bad.Field, bad.Other})
			require.ErrorContains(t, bad, names[0]+" "+bad.Value+": want the same value as "+names[1]+" ")
			require.ErrorContains(t, bad, "both name one setting")
		}
		one := load(t, b, db, sqlsource.WithColumns(sqlsource.Columns{MaxWait: "cache", Status: "status"}))
		require.Len(t, one.Limits, 6, "a column that is named is the only one")
	})
}

// A missing column that every table has is an error that names it.
func TestNoColumnUnderAnyName(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		exec(t, db, "CREATE TABLE "+conf+" (configId INT, name VARCHAR(20), rateLimit INT, status INT, lastModifyTime TIMESTAMP NULL)")
		_, err := source(t, b, db).Load(ctx)
		require.ErrorContains(t, err, "max_wait")
	})
}
