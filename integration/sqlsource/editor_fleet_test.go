package sqlsource

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// TestEditorsRace: if many editors change, add or remove the same row, each from the row that it has read, one wins each time, and the
// others get the present row.
func TestEditorsRace(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, dsn string) {
		newEditor(t, b, db)
		editors := make([]*editor.Editor, 6)
		for i := range editors { // processes of their own
			editors[i] = editorOf(t, b, open(t, b.driver, dsn))
		}
		race := func(from editor.Version, remove bool) (won editor.AuditEntry) {
			entries, errs := make([]editor.AuditEntry, len(editors)), make([]error, len(editors))
			var running sync.WaitGroup
			for i, e := range editors {
				running.Go(func() {
					values := to(e, 100+i, nil)
					if remove {
						values = nil
					}
					entries[i], errs[i] = e.Change(ctx, editor.Change{Name: "/a", From: from, To: values, Who: fmt.Sprint("editor ", i), Why: "to be first"})
				})
			}
			running.Wait()
			winner := -1
			for i, err := range errs {
				if err == nil {
					require.Equal(t, -1, winner, "two have won")
					winner, won = i, entries[i]
				}
			}
			require.NotEqual(t, -1, winner, "%v", errs)
			for i, err := range errs {
				var conflict *editor.ConflictError
				if i == winner {
					continue
				}
				require.ErrorIs(t, err, editor.ErrConflict)
				require.True(t, errors.As(err, &conflict))
				if remove {
					require.Nil(t, conflict.Now)
					continue
				}
				require.Equal(t, won.To, conflict.Now.Values)
				require.Equal(t, float64(100+winner), conflict.Now.Limit.Rate)
			}
			return won
		}
		for range 5 {
			require.Nil(t, race("", false).From)
			require.Len(t, load(t, b, db).Limits, 1, "one row, though nothing in the table forbids two")
			for range 3 {
				race(get(t, editors[0], "/a").Version, false)
			}
			require.Nil(t, race(get(t, editors[0], "/a").Version, true).To)
		}
		history, err := editors[0].History(ctx, "", 1000)
		require.NoError(t, err)
		require.Len(t, history, 25)
		for i := 1; i < len(history); i++ { // what one left is what the next one found
			require.Equal(t, history[i].To, history[i-1].From)
		}
	})
}

// TestUndoRace: an entry is undone once.
func TestUndoRace(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, dsn string) {
		e := newEditor(t, b, db)
		_, err := e.Change(ctx, editor.Change{Name: "/a", To: to(e, 5, nil), Who: "ann", Why: "new"})
		require.NoError(t, err)
		changed, err := e.Change(ctx, editor.Change{Name: "/a", From: get(t, e, "/a").Version, To: to(e, 6, nil), Who: "ann", Why: "more"})
		require.NoError(t, err)
		var undone atomic.Int32
		var running sync.WaitGroup
		for range 6 {
			other := editorOf(t, b, open(t, b.driver, dsn))
			running.Go(func() {
				_, err := other.Undo(ctx, changed.ID, "ben", "back")
				if err == nil {
					undone.Add(1)
				} else {
					assert.ErrorIs(t, err, editor.ErrUndone)
				}
			})
		}
		running.Wait()
		require.Equal(t, int32(1), undone.Load())
		require.Equal(t, 5.0, get(t, e, "/a").Limit.Rate)
	})
}

// TestEditByHand: a change of a row by SQL between reading and writing is not overwritten; not even a change and its reversal.
func TestEditByHand(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		_, err := e.Change(ctx, editor.Change{Name: "/a", To: to(e, 5, nil), Who: "ann", Why: "new"})
		require.NoError(t, err)
		for _, statement := range []string{"UPDATE " + conf + " SET max_wait = 0.1", "UPDATE " + conf + " SET channelType = 'web'", "DELETE FROM " + conf} {
			row := get(t, e, "/a")
			exec(t, db, statement)
			_, err := e.Change(ctx, editor.Change{Name: "/a", From: row.Version, To: to(e, 6, nil), Who: "ben", Why: "more"})
			require.ErrorIs(t, err, editor.ErrConflict, statement)
		}
		_, err = e.Change(ctx, editor.Change{Name: "/a", From: "x", Who: "ben", Why: "no longer"})
		require.ErrorIs(t, err, editor.ErrConflict, "to remove what is gone")
	})
}

// TestFleetFollows: what an editor writes is in force after the next load, in the bucket that is in use, within one second, too; and
// loads beside the edits see rows from before or after, and no others.
func TestFleetFollows(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		_, err := e.Change(ctx, editor.Change{Name: "/a", To: to(e, 1, 0.01), Who: "ann", Why: "new"})
		require.NoError(t, err)
		store := tokenbucket.NewMemoryStore()
		fleet := make([]*registry.Registry, 2)
		for i := range fleet {
			fleet[i], err = registry.New(source(t, b, db), store, registry.WithInterval(time.Hour))
			require.NoError(t, err)
			defer fleet[i].Close()
			_, err = fleet[i].Enter(ctx, "/a")
			require.NoError(t, err)
		}
		inForce := func(r *registry.Registry) float64 {
			require.NoError(t, r.Reload(ctx))
			l, err := r.Limiter("/a")
			require.NoError(t, err)
			state, err := l.State(ctx)
			require.NoError(t, err)
			return state.Rate
		}
		stop, reading := make(chan struct{}), sync.WaitGroup{}
		for range 2 {
			reading.Go(func() {
				s := source(t, b, db)
				for {
					select {
					case <-stop:
						return
					default:
					}
					table, err := s.Load(ctx)
					if !assert.NoError(t, err) || !assert.Empty(t, table.Rejected) || !assert.Len(t, table.Limits, 1) ||
						!assert.InDelta(t, table.Limits[0].Rate/100, table.Limits[0].MaxWait.Seconds(), 1e-9) {
						return
					}
				}
			})
		}
		for i := range 6 { // max_wait goes with the rate
			rate := 200 - 10*i
			_, err := e.Change(ctx, editor.Change{Name: "/a", From: get(t, e, "/a").Version, To: to(e, rate, float64(rate)/100), Who: "ben", Why: "less"})
			require.NoError(t, err)
			require.Equal(t, float64(rate), inForce(fleet[i%2]))
			require.Equal(t, float64(rate), inForce(fleet[(i+1)%2]))
		}
		close(stop)
		reading.Wait()

		// A process that begins now, and knows nothing of the past, does not bring anything older back.
		late, err := registry.New(source(t, b, db), store, registry.WithInterval(time.Hour))
		require.NoError(t, err)
		defer late.Close()
		_, err = late.Enter(ctx, "/a")
		require.NoError(t, err)
		require.Equal(t, 150.0, inForce(late))
		require.Equal(t, 150.0, inForce(fleet[0]))
	})
}

// cutting is a connector whose connections break when a statement begins so.
type cutting struct {
	driver driver.Driver
	dsn    string
	at     atomic.Value // string
}

type cutConn struct {
	driver.Conn
	c *cutting
}

func (c *cutting) Driver() driver.Driver { return c.driver }

func (c *cutting) Connect(context.Context) (driver.Conn, error) {
	conn, err := c.driver.Open(c.dsn)
	return &cutConn{conn, c}, err
}

func (c *cutConn) cut(statement string) error {
	if at := c.c.at.Load().(string); at != "" && strings.HasPrefix(statement, at) {
		if c.c.dsn[:5] != "file:" { // SQLite is in this process: closed within a transaction it falls over
			_ = c.Conn.Close()
		}
		return errors.New("the connection is cut")
	}
	return nil
}

func (c *cutConn) ExecContext(ctx context.Context, statement string, args []driver.NamedValue) (driver.Result, error) {
	if err := c.cut(statement); err != nil {
		return nil, err
	}
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, statement, args)
}

func (c *cutConn) QueryContext(ctx context.Context, statement string, args []driver.NamedValue) (driver.Rows, error) {
	if err := c.cut(statement); err != nil {
		return nil, err
	}
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, statement, args)
}

func (c *cutConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

func (c *cutConn) CheckNamedValue(v *driver.NamedValue) error {
	if checker, ok := c.Conn.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

// TestCrashBetween: if the connection breaks between the change and its audit entry, or before either, there is neither.
func TestCrashBetween(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, dsn string) {
		e := newEditor(t, b, db)
		_, err := e.Change(ctx, editor.Change{Name: "/a", To: to(e, 5, nil), Who: "ann", Why: "new"})
		require.NoError(t, err)
		row := get(t, e, "/a")
		c := &cutting{driver: db.Driver(), dsn: dsn}
		c.at.Store("")
		breaking := sql.OpenDB(c)
		defer func() { require.NoError(t, breaking.Close()) }()
		other := editorOf(t, b, breaking)
		quote := "`"
		if b.dialect == sqlsource.PostgreSQL {
			quote = `"`
		}
		change := editor.Change{Name: "/a", From: row.Version, To: to(e, 6, nil)}
		remove := editor.Change{Name: "/a", From: row.Version}
		add := editor.Change{Name: "/b", To: to(e, 6, nil)}
		for _, test := range []struct {
			change editor.Change
			at     string
		}{
			{change, "UPDATE " + quote + conf}, {change, "INSERT INTO " + quote + audit},
			{remove, "DELETE FROM " + quote + conf}, {remove, "INSERT INTO " + quote + audit},
			{add, "INSERT INTO " + quote + conf}, {add, "INSERT INTO " + quote + audit},
		} {
			c.at.Store(test.at)
			test.change.Who, test.change.Why = "ben", "to see"
			_, err := other.Change(ctx, test.change)
			require.Error(t, err)
			require.NotErrorIs(t, err, editor.ErrConflict)
			require.Equal(t, row, get(t, e, "/a"))
			require.Len(t, load(t, b, db).Limits, 1)
		}
		c.at.Store("")
		_, err = other.Change(ctx, editor.Change{Name: "/a", From: row.Version, To: to(e, 7, nil), Who: "ben", Why: "now"})
		require.NoError(t, err)
		history, err := e.History(ctx, "", 100)
		require.NoError(t, err)
		require.Len(t, history, 2)
	})
}
