package sqlsource

import (
	"database/sql"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const (
	pollEvery = 100 * time.Millisecond
	slack     = 5 * time.Second // of a busy machine; the measured times are logged
)

// told returns the next value that a hook received.
func told(t *testing.T, outages <-chan error) error {
	t.Helper()
	select {
	case err := <-outages:
		return err
	case <-time.After(slack):
		require.FailNow(t, "the hook was not called")
		return nil
	}
}

func polling(hook func(error)) sqlsource.SwitchOption {
	return sqlsource.WithPolling(killswitch.WithInterval(pollEvery), killswitch.WithTimeout(10*time.Second), killswitch.WithHook(hook))
}

func TestSwitch(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, dsn string) {
		outages := make(chan error, 100)
		s, err := sqlsource.NewSwitch(db, b.dialect, polling(func(err error) { outages <- err }))
		require.NoError(t, err)
		defer s.Close()
		require.ErrorContains(t, told(t, outages), "t_ratelimite_switch", "a missing table is an error")
		require.True(t, s.Enabled())
		require.NoError(t, sqlsource.CreateSwitchTable(ctx, db, b.dialect))
		require.NoError(t, sqlsource.CreateSwitchTable(ctx, db, b.dialect), "twice changes nothing")
		require.NoError(t, told(t, outages))
		require.True(t, s.Enabled(), "a missing row means on")

		other, err := sqlsource.NewSwitch(open(t, b.driver, dsn), b.dialect, polling(func(err error) { outages <- err }))
		require.NoError(t, err)
		defer other.Close()
		third, err := sqlsource.NewSwitch(db, b.dialect, sqlsource.WithSwitchName("Global"), polling(func(err error) { outages <- err }))
		require.NoError(t, err)
		defer third.Close()
		var slowest time.Duration
		for i := range 6 {
			on := i%2 == 1
			require.NoError(t, s.Set(ctx, on))
			require.Equal(t, on, s.Enabled())
			slowest = max(slowest, faultlab.Soon(t, pollEvery+slack, func() bool { return other.Enabled() == on }))
			require.True(t, third.Enabled(), "another row")
		}
		t.Log("slowest of 6 flips until the other process saw it:", slowest, "with an interval of", pollEvery)
		require.NoError(t, third.Set(ctx, false))
		require.NoError(t, s.Set(ctx, true))
		require.False(t, third.Enabled())
		require.Empty(t, outages)

		exec(t, db, "UPDATE t_ratelimite_switch SET enabled = 2 WHERE name = 'global'")
		require.ErrorContains(t, told(t, outages), "enabled 2")
		told(t, outages) // the other's
		require.True(t, s.Enabled(), "garbage is no value")
		exec(t, db, "DELETE FROM t_ratelimite_switch WHERE name = 'global'")
		require.NoError(t, told(t, outages))
		require.NoError(t, told(t, outages))
	})
}

// TestSwitchAway: a server that hangs leaves the last value, is reported once, and is read again when it is back.
func TestSwitchAway(t *testing.T) {
	for _, b := range backends[:2] {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			server := servers[b.name](t)
			db := open(t, b.driver, server.DSN())
			table := sqlsource.WithSwitchTable("switches")
			require.NoError(t, sqlsource.CreateSwitchTable(ctx, db, b.dialect, table))
			outages := make(chan error, 100)
			s, err := sqlsource.NewSwitch(db, b.dialect, table, polling(func(err error) { outages <- err }),
				sqlsource.WithPolling(killswitch.WithTimeout(time.Second))) // a read wakes some ten processes, one after the other
			require.NoError(t, err)
			defer s.Close()
			require.NoError(t, s.Set(ctx, false))
			for _, fault := range []struct{ begin, end func() error }{
				{server.Stop, server.Continue},
				{func() error { server.Kill(); return nil }, server.Restart},
			} {
				for len(outages) > 0 { // a read that a busy machine has made too slow
					told(t, outages)
				}
				faultlab.Soon(t, slack, func() bool { return s.Err() == nil })
				require.NoError(t, fault.begin())
				faultlab.Soon(t, 4*slack, func() bool { return s.Err() != nil && s.Age() > 8*pollEvery })
				require.False(t, s.Enabled())
				require.NoError(t, fault.end())
				faultlab.Soon(t, 4*slack, func() bool { return s.Err() == nil })
				require.False(t, s.Enabled(), "what was set")
			}
		})
	}
}

// TestSwitchCollation: in a table whose collation takes 'Global' for 'global', as the default of MariaDB does, the row that Set writes is the
// row that is read. Names have characters that mean something in texts of SQL.
func TestSwitchCollation(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, dsn string) {
		column := map[sqlsource.Dialect]string{sqlsource.MySQL: "VARCHAR(64)", sqlsource.SQLite: "VARCHAR(64) COLLATE NOCASE",
			sqlsource.PostgreSQL: "varchar(64) COLLATE folded"}[b.dialect]
		if b.dialect == sqlsource.PostgreSQL {
			exec(t, db, "CREATE COLLATION folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
		}
		exec(t, db, "CREATE TABLE t_ratelimite_switch (name "+column+" NOT NULL PRIMARY KEY, enabled SMALLINT NOT NULL)")
		for _, names := range [][2]string{{"Global", "global"}, {`It's\A"?`, `it's\a"?`}} {
			b.insert(t, db, "t_ratelimite_switch", "name, enabled", names[0], 1)
			outages := make(chan error, 100)
			quiet := sqlsource.WithSwitchName(names[1])
			s, err := sqlsource.NewSwitch(db, b.dialect, quiet, polling(func(err error) { outages <- err }))
			require.NoError(t, err)
			defer s.Close()
			for _, on := range []bool{false, true, false} {
				require.NoError(t, s.Set(ctx, on))
				other, err := sqlsource.NewSwitch(open(t, b.driver, dsn), b.dialect, quiet, polling(func(err error) { outages <- err }))
				require.NoError(t, err)
				require.Equal(t, on, other.Enabled(), "a process that starts now")
				other.Close()
			}
			require.Empty(t, outages)
		}
		var rows int
		require.NoError(t, db.QueryRowContext(ctx, "SELECT COUNT(*) FROM t_ratelimite_switch").Scan(&rows))
		require.Equal(t, 2, rows)
	})
}
