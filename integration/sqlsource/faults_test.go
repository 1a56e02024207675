package sqlsource

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// servers can be stopped and killed; SQLite has none.
var servers = map[string]func(testing.TB, ...string) *dbtest.Server{"mariadb": dbtest.MariaDB, "postgresql": dbtest.PostgreSQL}

// TestServerHangs: Load returns by its deadline, with connections and without, and works again afterwards.
func TestServerHangs(t *testing.T) {
	for _, b := range backends[:2] {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			server := servers[b.name](t)
			db := open(t, b.driver, server.DSN())
			fill(t, b, db, 10)
			s := source(t, b, db)
			require.Len(t, load(t, b, db).Limits, 10)
			require.NoError(t, server.Stop())
			for range 3 { // the first has a connection, the others make one
				began := time.Now()
				table, err := s.Load(short(t, 200*time.Millisecond))
				t.Log("returned after", time.Since(began), err)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.ErrorContains(t, err, conf)
				require.Empty(t, table)
				require.Less(t, time.Since(began), 5*time.Second)
			}
			require.NoError(t, server.Continue())
			require.Len(t, load(t, b, db).Limits, 10)
		})
	}
}

// TestServerKilled: an error while it is away, the same table when it is back.
func TestServerKilled(t *testing.T) {
	for _, b := range backends[:2] {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			server := servers[b.name](t)
			db := open(t, b.driver, server.DSN())
			fill(t, b, db, 10)
			s := source(t, b, db)
			before, err := s.Load(ctx)
			require.NoError(t, err)
			server.Kill()
			for range 3 {
				_, err := s.Load(short(t, 5*time.Second))
				require.Error(t, err)
				require.NotErrorIs(t, err, context.DeadlineExceeded, "a server that refuses is not waited for")
			}
			require.NoError(t, server.Restart())
			var after = load(t, b, db)
			require.Equal(t, before, after)
		})
	}
}

// TestCancelled: a context that has ended already, or that ends while another client locks the table.
func TestCancelled(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		fill(t, b, db, 10)
		ended, cancel := context.WithCancel(ctx)
		cancel()
		_, err := source(t, b, db).Load(ended)
		require.ErrorIs(t, err, context.Canceled)
		if b.dialect == sqlsource.SQLite {
			return
		}
		lock := "LOCK TABLES " + conf + " WRITE"
		if b.dialect == sqlsource.PostgreSQL {
			lock = "BEGIN; LOCK TABLE " + conf + " IN ACCESS EXCLUSIVE MODE"
		}
		c, err := db.Conn(ctx)
		require.NoError(t, err)
		_, err = c.ExecContext(ctx, lock)
		require.NoError(t, err)
		began := time.Now()
		_, err = source(t, b, db).Load(short(t, 200*time.Millisecond))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Less(t, time.Since(began), 5*time.Second)
		unlock := "UNLOCK TABLES"
		if b.dialect == sqlsource.PostgreSQL {
			unlock = "ROLLBACK"
		}
		_, err = c.ExecContext(ctx, unlock)
		require.NoError(t, err)
		require.NoError(t, c.Close())
		require.Len(t, load(t, b, db).Limits, 10)
	})
}

// TestSQLiteLocked: a writer with an exclusive lock does not make Load late, even if the driver waits longer than its setting.
func TestSQLiteLocked(t *testing.T) {
	b := backends[2]
	dsn := "file:" + filepath.Join(t.TempDir(), "db") + "?_pragma=busy_timeout(10000)"
	db := open(t, b.driver, dsn)
	fill(t, b, db, 10)
	c, err := db.Conn(ctx)
	require.NoError(t, err)
	_, err = c.ExecContext(ctx, "BEGIN EXCLUSIVE")
	require.NoError(t, err)
	began := time.Now()
	_, err = source(t, b, db).Load(short(t, 200*time.Millisecond))
	t.Log("returned after", time.Since(began), err)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(began), 5*time.Second, "the driver waits for ten")
	_, err = c.ExecContext(ctx, "ROLLBACK")
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.Len(t, load(t, b, db).Limits, 10)
}

// TestSnapshot: a Load while rows are moved sees each of them once, as of one moment.
func TestSnapshot(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, dsn string) {
		fill(t, b, db, 1000)
		writer := open(t, b.driver, dsn)
		done := make(chan error, 1)
		stop := make(chan struct{})
		go func() {
			for i := 1; ; i++ {
				select {
				case <-stop:
					done <- nil
					return
				default:
				}
				if _, err := writer.ExecContext(ctx, b.params("UPDATE "+conf+" SET rate = ?"), i); err != nil {
					done <- err
					return
				}
			}
		}()
		seen := make(map[float64]bool)
		for began := time.Now(); len(seen) < 4 && time.Since(began) < 20*time.Second; {
			table, err := source(t, b, db).Load(ctx)
			if !assertNoError(t, err) {
				break
			}
			if first := table.Limits[0].Rate; table.Limits[1].Rate == first || len(seen) > 0 { // after the first update
				seen[first] = true
				for _, l := range table.Limits {
					if l.Rate != first {
						t.Errorf("one Load saw rates %v and %v", first, l.Rate)
						break
					}
				}
			}
		}
		close(stop)
		require.NoError(t, <-done)
		require.GreaterOrEqual(t, len(seen), 2, "the table changed meanwhile")
	})
}

func assertNoError(t *testing.T, err error) bool {
	if err != nil {
		t.Error(err)
	}
	return err == nil
}
