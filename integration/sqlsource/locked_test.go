package sqlsource

import (
	"database/sql"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// Changes of a row that another transaction holds give up soon, and take one connection meanwhile: loads and the switch have the others.
func TestLockedRow(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, dsn string) {
		e := newEditor(t, b, db)
		_, err := e.Change(ctx, editor.Change{Name: "/a", To: to(e, 5, nil), Who: "ann", Why: "new"})
		require.NoError(t, err)
		row := get(t, e, "/a")

		other := open(t, b.driver, dsn)
		lock := "SELECT * FROM " + conf + " FOR UPDATE"
		if b.dialect == sqlsource.SQLite {
			lock = "DELETE FROM " + conf + " WHERE 0"
		}
		tx, err := other.BeginTx(ctx, nil)
		require.NoError(t, err)
		defer func() { _ = tx.Rollback() }()
		_, err = tx.ExecContext(ctx, lock)
		require.NoError(t, err)

		db.SetMaxOpenConns(4)
		began := time.Now()
		var changes sync.WaitGroup
		var mu sync.Mutex
		var errs []error
		for range 3 {
			changes.Go(func() {
				_, err := e.Change(short(t, time.Minute), editor.Change{Name: "/a", From: row.Version, To: to(e, 6, nil), Who: "ben", Why: "to see"})
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			})
		}
		require.NoError(t, redistest.Poll(time.Minute, func() error {
			if db.Stats().InUse == 0 {
				return sql.ErrNoRows
			}
			return nil
		}))
		time.Sleep(500 * time.Millisecond)
		waited := db.Stats().WaitCount
		require.LessOrEqual(t, db.Stats().InUse, 1)
		table := load(t, b, db)
		require.Len(t, table.Limits, 1)
		require.Equal(t, waited, db.Stats().WaitCount, "the load has waited for no connection")

		changes.Wait()
		require.Len(t, errs, 3)
		require.Less(t, time.Since(began), 40*time.Second, "MariaDB itself waits for 50 s, and PostgreSQL without end")
		for _, err := range errs {
			require.ErrorIs(t, err, editor.ErrLocked)
		}
		require.NoError(t, tx.Rollback())
		_, err = e.Change(ctx, editor.Change{Name: "/a", From: row.Version, To: to(e, 6, nil), Who: "ben", Why: "to see"})
		require.NoError(t, err, "nothing is left locked")
	})
}
