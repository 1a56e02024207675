package sqlsource

import (
	"database/sql"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// flagsOf are what rows say of themselves, by name.
func flagsOf(table registry.Table) map[string][2]bool {
	flags := map[string][2]bool{}
	for _, l := range table.Limits {
		flags[l.Name] = [2]bool{l.Shadow, l.PerKey}
	}
	return flags
}

// A created table has columns for shadow and perKey; what an INSERT does not say is 0.
func TestShadowAndPerKey(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect))
		b.insert(t, db, conf, "name, rate", "/plain", 5)
		b.insert(t, db, conf, "name, rate, shadow", "/shadow", 5, 1)
		b.insert(t, db, conf, "name, rate, per_key", "/each/*", 5, 1)
		b.insert(t, db, conf, "name, rate, shadow", "/bad", -5, 1)
		b.insert(t, db, conf, "name, rate, shadow", "/two", 5, 2)
		b.insert(t, db, conf, "name, rate, disabled, per_key", "/off", 5, 1, 2)
		table := load(t, b, db)
		require.Equal(t, map[string][2]bool{"/plain": {}, "/shadow": {true, false}, "/each/*": {false, true}, "/off": {}}, flagsOf(table))
		require.Len(t, table.Rejected, 2)
		require.True(t, table.Rejected[0].Shadow)
		require.Equal(t, "shadow 2: want 0 or 1, or NULL", strings.Join([]string{table.Rejected[1].Field, table.Rejected[1].Value + ": want", table.Rejected[1].Want}, " "))
	})
}

// A table of an earlier release is read as it is, and a column that is added is read at the next load; so with a schema in its name.
func TestTableWithoutShadow(t *testing.T) {
	for _, b := range backends {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			place, dsn := b.place(t)
			db := open(t, b.driver, dsn)
			exec(t, db, "CREATE TABLE old_limits (configId INT PRIMARY KEY, interfaceUrl VARCHAR(128), rateLimit INT, cache FLOAT, status INT, lastModifyTime TIMESTAMP NULL)")
			b.insert(t, db, "old_limits", "configId, interfaceUrl, rateLimit, status", 1, "/a", 5, 1)
			var sources []*sqlsource.Source
			for _, name := range []string{"old_limits", place + ".old_limits"} {
				sources = append(sources, source(t, b, db, sqlsource.WithTable(name)))
			}
			check := func(shadow, perKey bool) {
				t.Helper()
				for _, s := range sources {
					table, err := s.Load(ctx)
					require.NoError(t, err)
					require.Empty(t, table.Rejected)
					require.Equal(t, map[string][2]bool{"/a": {shadow, perKey}}, flagsOf(table))
				}
			}
			check(false, false)
			exec(t, db, "ALTER TABLE old_limits ADD COLUMN shadow INT DEFAULT 1")
			check(true, false)
			exec(t, db, "ALTER TABLE old_limits ADD COLUMN perKey INT DEFAULT 1")
			check(true, true)
			exec(t, db, "ALTER TABLE old_limits DROP COLUMN shadow")
			check(false, true)
			exec(t, db, "ALTER TABLE old_limits ADD COLUMN dry INT DEFAULT 1")
			table := load(t, b, db, sqlsource.WithTable("old_limits"), sqlsource.WithColumns(sqlsource.Columns{Shadow: "dry"}))
			require.Equal(t, map[string][2]bool{"/a": {true, true}}, flagsOf(table))
			_, err := source(t, b, db, sqlsource.WithTable("old_limits"), sqlsource.WithColumns(sqlsource.Columns{Shadow: "shadow"})).Load(ctx)
			require.Error(t, err, "a column that was named must be there")
		})
	}
}

// A created table has a column for what holds a row back, and a table of an earlier release is read without.
func TestPenaltyColumn(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect))
		b.insert(t, db, conf, "name, rate", "/default", 5)
		b.insert(t, db, conf, "name, rate, penalty", "/both", 5, "429,503")
		b.insert(t, db, conf, "name, rate, penalty", "/none", 5, "none")
		b.insert(t, db, conf, "name, rate, penalty", "/bad", 5, "418")
		table := load(t, b, db)
		require.Len(t, table.Limits, 3)
		for i, want := range []registry.Penalty{registry.PenaltyDefault, registry.PenaltyBoth, registry.PenaltyNone} {
			require.Equal(t, want, table.Limits[i].Penalty)
		}
		require.Len(t, table.Rejected, 1)
		require.Equal(t, []string{"penalty", "418", "none, 503, 429 or 429,503, or NULL"},
			[]string{table.Rejected[0].Field, table.Rejected[0].Value, table.Rejected[0].Want})
		exec(t, db, "ALTER TABLE "+conf+" DROP COLUMN penalty")
		table = load(t, b, db)
		require.Empty(t, table.Rejected)
		require.Len(t, table.Limits, 4)
		require.Equal(t, registry.PenaltyDefault, table.Limits[1].Penalty)
	})
}

// A created table has columns for a window and a concurrency, and one that is added is read from then on.
func TestBoundColumns(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect))
		quoted := map[bool]string{true: `"window"`, false: "`window`"}[b.dialect == sqlsource.PostgreSQL]
		b.insert(t, db, conf, "name, rate, "+quoted+", window_limit, concurrent", "/all", 5, 86400, 10000, 20)
		b.insert(t, db, conf, "name, concurrent", "/places", 2)
		limits := load(t, b, db).Limits
		require.Len(t, limits, 2)
		require.Equal(t, "5/s, saves up 5, at most 10,000 in any 1 d, at most 20 at once, waits up to 500 ms", limits[0].String())
		require.Equal(t, "at most 2 at once", limits[1].String())
		exec(t, db, "ALTER TABLE "+conf+" DROP COLUMN concurrent")
		table := load(t, b, db)
		require.Equal(t, "5/s, saves up 5, at most 10,000 in any 1 d, waits up to 500 ms", table.Limits[0].String())
		require.Len(t, table.Rejected, 1, "a NULL rate, and nothing else")
	})
}

// Flags and counts may be in columns DECIMAL and REAL, as administrators and older tables have them.
func TestFractionColumns(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		for table, number := range map[string]string{"decimals": "DECIMAL(10,2)", "reals": "REAL", "doubles": "DOUBLE PRECISION"} {
			exec(t, db, "CREATE TABLE "+table+" (configId INT PRIMARY KEY, name VARCHAR(128), rate INT, max_wait FLOAT, status "+number+", shadow "+number+
				", window_limit "+number+", "+b.dialect.Quote("window")+" INT, concurrent "+number+", lastModifyTime TIMESTAMP NULL)")
			columns := "configId, name, rate, status, shadow, window_limit, " + b.dialect.Quote("window") + ", concurrent"
			b.insert(t, db, table, columns, 1, "/a", 5, 1, 1, 1000000, 60, 3)
			b.insert(t, db, table, columns, 2, "/off", 5, 0, 0, 0, 0, 0)
			b.insert(t, db, table, columns, 3, "/half", 5, 1, 0, 0, 0, 2.5)
			loaded := load(t, b, db, sqlsource.WithTable(table))
			require.Len(t, loaded.Limits, 2, "%v", loaded.Rejected)
			a, off := loaded.Limits[0], loaded.Limits[1]
			require.Equal(t, []any{false, true, 1000000, 3}, []any{a.Disabled, a.Shadow, a.WindowLimit, a.Concurrent})
			require.Equal(t, []any{true, false}, []any{off.Disabled, off.Shadow})
			require.Len(t, loaded.Rejected, 1)
			require.Equal(t, "concurrent", loaded.Rejected[0].Field)
		}
	})
}
