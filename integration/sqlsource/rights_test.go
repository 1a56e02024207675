package sqlsource

import (
	"database/sql"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// reader returns a database whose user may read some columns of the table alone.
func (b backend) reader(t *testing.T, admin *sql.DB, place, dsn string, columns []string) *sql.DB {
	t.Helper()
	user := "reader_" + place
	exec(t, admin, "CREATE USER "+user)
	if b.dialect == sqlsource.MySQL {
		dsn = strings.Replace(dsn, "root:@", user+":@", 1)
	} else {
		exec(t, admin, "GRANT USAGE ON SCHEMA "+place+" TO "+user)
		dsn = strings.Replace(dsn, "//postgres@", "//"+user+"@", 1)
	}
	for _, c := range columns {
		exec(t, admin, "GRANT SELECT ("+b.quoted(c)+") ON "+place+"."+conf+" TO "+user)
	}
	return open(t, b.driver, dsn)
}

// A column that the table has and the user may not read makes the load fail, and the error names it: without it a row would lose its window
// or its concurrency. The rows in force stay.
func TestColumnThatMayNotBeRead(t *testing.T) {
	for _, b := range backends {
		if b.dialect == sqlsource.SQLite { // which has no users
			continue
		}
		for _, hidden := range []string{"window_limit", "concurrent", "rate"} {
			t.Run(b.name+" "+hidden, func(t *testing.T) {
				t.Parallel()
				place, dsn := b.place(t)
				admin := open(t, b.driver, dsn)
				require.NoError(t, sqlsource.CreateTable(ctx, admin, b.dialect))
				b.insert(t, admin, conf, "name, rate, "+b.quoted("window")+", window_limit, concurrent", "/a", 5, 3600, 100, 3)
				var columns []string
				for _, c := range []string{"configId", "name", "rate", "max_wait", "disabled", "window", "window_limit", "concurrent", "concurrent_wait", "shadow", "per_key", "penalty", "priority", "lastModifyTime"} {
					columns = append(columns, b.column(c))
				}
				db := b.reader(t, admin, place, dsn, columns)
				limits, err := registry.New(source(t, b, db), tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores(), registry.WithInterval(1e12))
				require.NoError(t, err)
				defer limits.Close()
				require.Equal(t, 3, limits.Limits()[0].Concurrent)

				exec(t, admin, "REVOKE SELECT ("+b.quoted(b.column(hidden))+") ON "+place+"."+conf+" FROM reader_"+place)
				err = limits.Reload(ctx)
				var right *sqlsource.RightError
				require.ErrorAs(t, err, &right)
				require.Equal(t, "SELECT", right.Right)
				require.Equal(t, b.column(hidden), right.Column)
				require.Equal(t, 100, limits.Limits()[0].WindowLimit, "what was in force stays")
				require.Equal(t, 3, limits.Limits()[0].Concurrent)

				edit := editorOf(t, b, db)
				_, err = edit.Get(ctx, "/a")
				require.ErrorAs(t, err, &right, "nor is a row shown without what it says")
			})
		}
	}
}

// quoted is a column as a statement may have it.
func (b backend) quoted(column string) string {
	if b.dialect == sqlsource.PostgreSQL {
		return `"` + column + `"`
	}
	return "`" + column + "`"
}

// The rights of a gateway that edits no rows: SELECT in the table of limits and in that of the switch. Tables are created with the right to
// create, also if they exist.
func TestRightsOfAGateway(t *testing.T) {
	for _, b := range backends {
		if b.dialect == sqlsource.SQLite {
			continue
		}
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			place, dsn := b.place(t)
			admin := open(t, b.driver, dsn)
			require.NoError(t, sqlsource.CreateTable(ctx, admin, b.dialect))
			require.NoError(t, sqlsource.CreateSwitchTable(ctx, admin, b.dialect))
			b.insert(t, admin, conf, "name, rate", "/a", 5)
			db := b.reader(t, admin, place, dsn, nil)
			for _, table := range []string{conf, "t_ratelimite_switch"} {
				exec(t, admin, "GRANT SELECT ON "+place+"."+table+" TO reader_"+place)
			}
			require.Len(t, load(t, b, db).Limits, 1)
			sw, err := sqlsource.NewSwitch(db, b.dialect)
			require.NoError(t, err)
			defer sw.Close()
			require.NoError(t, sw.Err())
			require.Error(t, sqlsource.CreateTable(ctx, db, b.dialect), "it exists, but the database checks the right first")
			require.Error(t, sqlsource.CreateSwitchTable(ctx, db, b.dialect))
		})
	}
}
