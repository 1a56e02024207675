package fleet

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

var ctx = context.Background()

// databases, each with the table.
var databases = []struct {
	name, driver string
	dialect      sqlsource.Dialect
	open         func(t *testing.T) (server *dbtest.Server, dsn string)
}{
	{"mariadb", "mysql", sqlsource.MySQL, func(t *testing.T) (*dbtest.Server, string) {
		s := dbtest.MariaDB(t)
		return s, s.DSN()
	}},
	{"postgresql", "pgx", sqlsource.PostgreSQL, func(t *testing.T) (*dbtest.Server, string) {
		s := dbtest.PostgreSQL(t)
		return s, s.DSN()
	}},
	{"sqlite", "sqlite", sqlsource.SQLite, func(t *testing.T) (*dbtest.Server, string) {
		return nil, "file:" + filepath.Join(t.TempDir(), "limits.db") + "?_pragma=busy_timeout(10000)&_pragma=journal_mode(wal)"
	}},
}

func exec1(t *testing.T, db *sql.DB, statement string) {
	t.Helper()
	result, err := db.ExecContext(ctx, statement)
	require.NoError(t, err, statement)
	n, err := result.RowsAffected()
	require.NoError(t, err)
	require.Equal(t, int64(1), n, statement)
}

// A rate is changed in the table while three processes are under load: each of them follows within the polling interval, and
// in no window more passes than the bound, across the changes too.
func TestFollow(t *testing.T) {
	t.Parallel()
	const interval = time.Second
	for _, d := range databases {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			_, dsn := d.open(t)
			db, err := sql.Open(d.driver, dsn)
			require.NoError(t, err)
			defer func() { require.NoError(t, db.Close()) }()
			require.NoError(t, sqlsource.CreateTable(ctx, db, d.dialect))
			exec1(t, db, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/ibe/AvailFare', 50, 0.5)")
			var workers []*worker.Worker[event]
			for range 3 {
				workers = append(workers, worker.Start[event](t, workerEnv, job{
					Redis: redistest.Shared(t).Addr, Prefix: t.Name() + ":", Driver: d.driver, DSN: dsn, Dialect: d.dialect,
					Interval: interval, Path: "/ibe/AvailFare", Callers: 8,
				}))
			}
			told := func(what string, n int) { // by each process
				t.Helper()
				require.Eventually(t, func() bool {
					for _, w := range workers {
						events := w.Events()
						if len(slices.DeleteFunc(events, func(e event) bool { return e.What != what })) < n {
							return false
						}
					}
					return true
				}, 30*time.Second, 10*time.Millisecond, "%d times %s", n, what)
			}
			told("granted", 1)
			time.Sleep(2 * time.Second) // the rate is measured for that time
			steps := []struct {
				at   int64
				rate float64
			}{{rate: 50}}
			for i, rate := range []float64{200, 20, 80} {
				exec1(t, db, fmt.Sprintf("UPDATE t_ratelimite_conf SET rate = %v WHERE name = '/ibe/AvailFare'", rate))
				steps = append(steps, struct {
					at   int64
					rate float64
				}{time.Now().UnixMicro(), rate})
				told("followed", i+1)
				time.Sleep(2500 * time.Millisecond) // the rate is measured for that time
			}
			ended := time.Now().UnixMicro()
			var granted []faultlab.Event
			var slow slowness
			followed := make([]int64, len(steps)) // when the last process had
			slowest := time.Duration(0)           // to follow
			events := make([][]event, len(workers))
			for i, w := range workers {
				var seen []int64
				events[i] = w.End()
				for _, e := range events[i] {
					switch e.What {
					case "granted":
						granted = append(granted, faultlab.Event{At: e.At, Permits: 1})
					case "followed":
						seen = append(seen, e.At)
					case "slowest":
						slow = slow.most(e.Slow)
					case "stalled":
					default:
						t.Errorf("%d: %+v", w.Pid, e)
					}
				}
				require.Len(t, seen, 3, "changes that process %d followed", w.Pid)
				for i, at := range seen {
					after := time.Duration(at-steps[i+1].at) * time.Microsecond
					t.Logf("process %d follows to %v/s after %v", w.Pid, steps[i+1].rate, after)
					slowest = max(slowest, after)
					followed[i+1] = max(followed[i+1], at)
				}
			}
			late := slow.Woken
			t.Logf("%+v", slow)
			// A load may be under way when the row changes, and miss it.
			require.Less(t, slowest, interval+500*time.Millisecond+4*late+2*slow.Load, "the interval and a load")
			// Times at which a rate is in force: a raise at the earliest when the row has it, a lower rate at the latest when all processes
			// know it.
			type change struct {
				at   int64
				rate float64
			}
			force := []change{{0, steps[0].rate}}
			for i := 1; i < len(steps); i++ {
				at := steps[i].at
				if steps[i].rate < steps[i-1].rate {
					at = followed[i]
				}
				force = append(force, change{at, steps[i].rate})
			}
			drained := func(from, to int64) (permits float64) {
				for i, c := range force {
					end := to
					if i+1 < len(force) {
						end = min(to, force[i+1].at)
					}
					permits += c.rate * float64(max(0, end-max(from, c.at))) / 1e6
				}
				return permits
			}
			worst, size := faultlab.WorstBy(granted, drained), 200.0
			t.Logf("%d granted; fullest window %.1f, largest size of the bucket %v, woken at most %v late", len(granted), worst, size, late)
			require.LessOrEqual(t, worst, size+2*size*late.Seconds()+1) // and late again by the others who were woken
			count := func(from, to int64) (n float64) {
				for _, e := range granted {
					if e.At >= from && e.At < to {
						n++
					}
				}
				return n
			}
			for i := range steps { // the full rate, once all follow
				from, to := followed[i]+200_000, ended
				if i+1 < len(steps) {
					to = steps[i+1].at
				}
				if i == 0 {
					from = steps[1].at - 1_500_000
				}
				n, rate := count(from, to), steps[i].rate
				want, stalled := rate*float64(to-from)/1e6, time.Duration(0)
				for _, all := range events {
					stalled = max(stalled, stalls(t, all, from, to))
				}
				require.LessOrEqual(t, n, want+5+0.1*n+2*rate*late.Seconds(), "at %v/s", rate)
				require.GreaterOrEqual(t, n, want-5-0.1*n-rate*max(stalled, late).Seconds(), "at %v/s, stalled for %v", rate, stalled)
			}
		})
	}
}

// What happens to rows and servers, as a gateway sees it.
func TestRowsAndServers(t *testing.T) {
	for _, d := range databases {
		t.Run(d.name, func(t *testing.T) {
			server, dsn := d.open(t)
			db, err := sql.Open(d.driver, dsn)
			require.NoError(t, err)
			defer func() { require.NoError(t, db.Close()) }()
			require.NoError(t, sqlsource.CreateTable(ctx, db, d.dialect))
			exec1(t, db, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/a', 1, 0)")
			exec1(t, db, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/b', 1, 0)")
			source, err := sqlsource.New(db, d.dialect)
			require.NoError(t, err)
			r, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithUnknown(registry.Refuse()),
				registry.WithInterval(50*time.Millisecond), registry.WithLoadTimeout(300*time.Millisecond))
			require.NoError(t, err)
			defer r.Close()
			passing := func(n int) bool {
				ok := 0
				for range n {
					if a, err := r.Enter(ctx, "/a"); err == nil && a.OK {
						ok++
					}
				}
				return ok == n
			}
			until := func(what string, condition func() bool) {
				t.Helper()
				require.Eventually(t, condition, 20*time.Second, 5*time.Millisecond, what)
			}
			rate := func() float64 {
				for _, l := range r.Limits() {
					if l.Name == "/a" && !l.Disabled {
						return l.Rate
					}
				}
				return 0
			}
			require.False(t, passing(3))
			exec1(t, db, "UPDATE t_ratelimite_conf SET disabled = 1 WHERE name = '/a'")
			until("a disabled row lets every call pass", func() bool { return passing(50) })
			exec1(t, db, "UPDATE t_ratelimite_conf SET disabled = 0, rate = 7 WHERE name = '/a'")
			until("enabled, with another rate", func() bool { return rate() == 7 })
			exec1(t, db, "UPDATE t_ratelimite_conf SET rate = -7 WHERE name = '/a'")
			until("a bad row is rejected", func() bool { return len(r.Stats().Rejected) == 1 })
			require.Equal(t, 7.0, rate(), "and what was before stays")
			require.ErrorContains(t, &r.Stats().Rejected[0], "-7")
			exec1(t, db, "DELETE FROM t_ratelimite_conf WHERE name = '/a'")
			until("a deleted row is as if it had never been", func() bool { return rate() == 0 })
			exec1(t, db, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/a', 3, 0)")
			until("it comes back", func() bool { return rate() == 3 })
			if server == nil {
				return
			}
			t.Run("server hung and back", func(t *testing.T) {
				require.NoError(t, server.Stop())
				until("noticed", func() bool { return r.Stats().Err != nil && r.Stats().Age > 500*time.Millisecond })
				// Some load is in flight for six of seven parts of the time: callers that wait for it would wait that long.
				began, within := time.Now(), time.Duration(0)
				for time.Since(began) < 2*time.Second {
					asked := time.Now()
					_, err := r.Enter(ctx, "/b")
					within += time.Since(asked)
					require.NoError(t, err)
					time.Sleep(time.Millisecond)
				}
				require.Less(t, within, time.Since(began)/2, "no call waits for the database")
				require.Equal(t, 3.0, rate())
				require.NoError(t, server.Continue())
				until("recovered", func() bool { return r.Stats().Err == nil && r.Stats().Age < 500*time.Millisecond })
			})
			t.Run("server killed and back", func(t *testing.T) {
				server.Kill()
				until("noticed", func() bool { return r.Stats().Err != nil })
				require.Equal(t, 3.0, rate())
				require.NoError(t, server.Restart())
				until("recovered", func() bool { return r.Stats().Err == nil })
				require.Equal(t, 3.0, rate())
				exec1(t, db, "UPDATE t_ratelimite_conf SET rate = 4 WHERE name = '/a'")
				until("follows again", func() bool { return rate() == 4 })
			})
		})
	}
}
