package main

import (
	"database/sql"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

// What rows say reaches a gateway's calls: gateways are processes, databases are servers.

// limitsTable is a database of a test's own, with the tables that a gateway creates.
type limitsTable struct {
	server string // MariaDB or PostgreSQL
	dsn    string // for --limits
	*sql.DB
}

var databases atomic.Int64

// eachServer runs a test with a database on each kind of server.
func eachServer(t *testing.T, test func(t *testing.T, table limitsTable)) {
	for server, place := range map[string]func(t *testing.T, name string) (driver, dsn, own string){
		"MariaDB": func(t *testing.T, name string) (driver, dsn, own string) {
			s := dbtest.SharedMariaDB(t)
			return "mysql", s.DSN(), "mysql://root:@" + s.Addr + "/" + name
		},
		"PostgreSQL": func(t *testing.T, name string) (driver, dsn, own string) {
			s := dbtest.SharedPostgreSQL(t)
			return "pgx", s.DSN(), "postgres://postgres@" + s.Addr + "/" + name + "?sslmode=disable"
		},
	} {
		t.Run(server, func(t *testing.T) {
			t.Parallel()
			name := fmt.Sprint("limits_", databases.Add(1))
			driver, dsn, own := place(t, name)
			admin, err := sql.Open(driver, dsn)
			require.NoError(t, err)
			execSQL(t, admin, "CREATE DATABASE "+name)
			require.NoError(t, admin.Close())
			dsn = strings.Replace(strings.Replace(dsn, "/test?", "/"+name+"?", 1), "/postgres?", "/"+name+"?", 1)
			db, err := sql.Open(driver, dsn)
			require.NoError(t, err)
			t.Cleanup(func() { _ = db.Close() })
			test(t, limitsTable{server, own, db})
		})
	}
}

// start runs a gateway of its own memory before an upstream that answers 200.
func (l *limitsTable) start(t *testing.T, more ...string) *process {
	t.Helper()
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	return startGateway(t, append([]string{"--upstream", upstream.URL, "--limits", l.dsn, "--create-table", "--store", "memory",
		"--interval", "50ms"}, more...)...)
}

// calls counts the answers to eight calls at once after one another.
func (p *process) calls(t *testing.T, path string) map[int]int {
	t.Helper()
	statuses := map[int]int{}
	for range 8 {
		status, _, _, err := get(p.url + path)
		require.NoError(t, err)
		statuses[status]++
	}
	return statuses
}

// loads waits for n further loads of the table.
func (p *process) loads(t *testing.T, n int) {
	t.Helper()
	from := p.stats(t).Loads.Tried
	eventually(t, func() error {
		if now := p.stats(t).Loads.Tried; now < from+n {
			return fmt.Errorf("%d loads", now-from)
		}
		return nil
	})
}

// An INSERT that does not name the column disabled limits.
func TestRowWithoutDisabled(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		p := table.start(t)
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/x', 0.01, 0)")
		p.loads(t, 2)
		require.Less(t, p.calls(t, "/x")[http.StatusOK], 8)
	})
}

// Rows that never were good refuse their calls, and say so wherever an operator may look.
func TestBadRows(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		first := table.start(t)
		for _, row := range []string{"('/zero', 0, 0, 0)", "('/null', NULL, 0, 0)", "('/minus', -5, 0, 0)", "('/disabled', 5, 0, 2)", "('/good', 0.01, 0, 0)", "('/live', 1, 0, 0)"} {
			execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait, disabled) VALUES "+row)
		}
		refused := map[int]int{http.StatusServiceUnavailable: 8}
		check := func(p *process) {
			t.Helper()
			for _, path := range []string{"/zero", "/null", "/minus", "/disabled"} {
				require.Equal(t, refused, p.calls(t, path), path)
			}
			require.Less(t, p.calls(t, "/good")[http.StatusOK], 8)
			require.Equal(t, map[int]int{http.StatusOK: 8}, p.calls(t, "/no/row"))
		}
		first.loads(t, 2)
		check(first)
		require.Contains(t, first.out.String(), `level=WARN msg="registry: a row is bad"`)
		require.Regexp(t, `bucket \\"/minus\\": rate -5\.0+: want .*" bucket=/minus row=3 consequence="its calls are refused"`, strings.ToLower(first.out.String()))
		first.becomes(t, http.StatusOK, `bucket "/null"`)
		_, text := first.readiness()
		require.Contains(t, text, "NULL")
		require.Contains(t, text, "its calls are refused")
		s := first.stats(t)
		require.Len(t, s.Rejected, 3, "0 is a limit")
		require.Equal(t, "its calls are refused", s.Rejected[0].Consequence)
		require.Equal(t, 3, s.Loads.BadNames)

		// A live row stays limited, and does after a restart: then nothing passes until it is repaired.
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET rate = -1 WHERE name = '/live'")
		first.loads(t, 2)
		statuses := first.calls(t, "/live")
		require.Positive(t, statuses[http.StatusOK])
		require.Positive(t, statuses[http.StatusTooManyRequests])
		require.Contains(t, first.out.String(), "its last good limit, 1/s, saves up 1, does not wait, stays in force; in a process that starts now, its calls are refused")
		second := table.start(t)
		check(second)
		require.Equal(t, refused, second.calls(t, "/live"))
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET rate = 1 WHERE rate IS NULL OR rate < 0")
		second.loads(t, 2)
		for _, path := range []string{"/null", "/minus", "/live"} {
			statuses := second.calls(t, path)
			require.Positive(t, statuses[http.StatusOK], path)
			require.Positive(t, statuses[http.StatusTooManyRequests], path)
		}
		passing := table.start(t, "--bad-rows", "pass")
		require.Equal(t, map[int]int{http.StatusOK: 8}, passing.calls(t, "/disabled"))
		require.Equal(t, refused, passing.calls(t, "/zero"))
		_, text = passing.readiness()
		require.Contains(t, text, "its calls pass without a limit")
	})
}

// A created table holds the rate that was written: 2.5 is not 3, and 0.4 is not 0.
func TestFractions(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		p := table.start(t)
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate) VALUES ('/a', 2.5), ('/b', 0.4), ('/c', 9999999999.999999)")
		eventually(t, func() error {
			got := map[string]float64{}
			for _, l := range p.stats(t).Limits {
				got[l.Name] = l.Rate
			}
			if want := map[string]float64{"/a": 2.5, "/b": 0.4, "/c": 9999999999.999999}; !maps.Equal(got, want) {
				return fmt.Errorf("limits %v", got)
			}
			return nil
		})
	})
}

// DELETE without WHERE: the limits stay in force until three loads agree, and an operator is warned before.
func TestTableVanishes(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		slow := table.start(t, "--interval", "10s") // time for what is asked before the loss is accepted
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/a', 0.01, 0), ('/b', 1, 0), ('/c', 1, 0)")
		eventually(t, func() error {
			if n := len(slow.stats(t).Limits); n != 3 {
				return fmt.Errorf("%d limits", n)
			}
			return nil
		})
		quick := table.start(t, "--allow-empty")
		execSQL(t, table.DB, "DELETE FROM t_ratelimite_conf")
		slow.becomes(t, http.StatusOK, "3 of 3 limits are gone from the table, and ")
		require.Positive(t, slow.calls(t, "/a")[http.StatusTooManyRequests])
		require.Equal(t, 3, slow.stats(t).Loads.Held)
		require.Contains(t, slow.out.String(), `level=WARN msg="registry: more than half of the limits are gone from the table; they stay in force until further loads agree" gone=3 of=3 loads=2`)
		quick.becomes(t, http.StatusOK, "there are no limits")
		require.Equal(t, map[int]int{http.StatusOK: 8}, quick.calls(t, "/a"), "it was told to")
		slow.becomes(t, http.StatusOK, "there are no limits")
		require.Eventually(t, func() bool { // it is logged after the load has taken effect
			return strings.Contains(slow.out.String(), `level=WARN msg="registry: more than half of the limits are gone" gone=3 of=3`)
		}, 30*time.Second, 10*time.Millisecond)
	})
}

// While the switch is off, every view of the gateway says so, and since when.
func TestSwitchIsOff(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		p := table.start(t, "--switch", "sql")
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/a', 1, 0)")
		execSQL(t, table.DB, "ALTER TABLE t_ratelimite_switch ADD COLUMN changedBy VARCHAR(64)")
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_switch (name, enabled, changedBy) VALUES ('global', 0, 'alice')")
		p.becomes(t, http.StatusOK, "the switch is off: every call passes; for ")
		p.becomes(t, http.StatusOK, " by alice") // once the registry has seen it
		_, text := p.readiness()
		origin := fmt.Sprintf(`at %d-\d\d-\d\d.\d\d:\d\d:\d\d\S* by alice`, time.Now().Year())
		require.Regexp(t, "the switch is off: every call passes; for .*: "+origin, text)
		require.Regexp(t, `level=WARN msg="registry: the switch is off: every call passes" origin="`+origin, p.out.String())
		require.Regexp(t, origin, p.stats(t).Switch.Origin)
		execSQL(t, table.DB, "UPDATE t_ratelimite_switch SET enabled = 1")
		p.waitFor(t, `level=WARN msg="registry: the switch is on: calls are limited"`)
		_, text = p.readiness()
		require.NotContains(t, text, "switch")
	})
}

// What reaches the same path of an upstream does not escape its row.
func TestMatch(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		gateways := map[string]*process{"clean": table.start(t)}
		for _, match := range []string{"exact", "prefix"} {
			gateways[match] = table.start(t, "--match", match)
		}
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/ibe/AvailFare', 0.001, 0)")
		for match, refused := range map[string][]string{
			"exact":  {"/ibe/AvailFare", "/ibe//./AvailFare"},
			"clean":  {"/ibe/AvailFare", "/ibe//./AvailFare", "/ibe/AvailFare/", "/ibe/AvailFare;x=1", "/ibe;a/AvailFare/;b"},
			"prefix": {"/ibe/AvailFare", "/ibe//./AvailFare", "/ibe/AvailFare/", "/ibe/AvailFare;x=1", "/ibe;a/AvailFare/;b", "/ibe/AvailFare/2024/deep"},
		} {
			p := gateways[match]
			p.loads(t, 2)
			p.calls(t, "/ibe/AvailFare")
			for _, path := range []string{"/ibe/AvailFare", "/ibe//./AvailFare", "/ibe/AvailFare/", "/ibe/AvailFare;x=1", "/ibe;a/AvailFare/;b", "/ibe/AvailFare/2024/deep"} {
				want := http.StatusOK
				if slices.Contains(refused, path) {
					want = http.StatusTooManyRequests
				}
				status, _, _, err := get(p.url + path)
				require.NoError(t, err)
				require.Equal(t, want, status, "%s %s", match, path)
			}
		}
	})
}

// A call that can never pass gets no Retry-After.
func TestUnknownStatus(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		for _, c := range []struct {
			args []string
			want int
		}{{nil, http.StatusNotFound}, {[]string{"--unknown-status", "403"}, http.StatusForbidden}, {[]string{"--inbound"}, http.StatusNotFound}} {
			p := table.start(t, append(c.args, "--unknown", "refuse")...)
			execSQL(t, table.DB, "DELETE FROM t_ratelimite_conf")
			execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/zero', 0, 0), ('/a', 0.001, 0)")
			p.loads(t, 4)
			for path, want := range map[string]int{"/unknown": c.want, "/zero": http.StatusServiceUnavailable} {
				status, header, body, err := get(p.url + path)
				require.NoError(t, err)
				require.Equal(t, want, status, body)
				require.Empty(t, header.Get("Retry-After"))
			}
			p.calls(t, "/a")
			status, header, _, err := get(p.url + "/a")
			require.NoError(t, err)
			require.Equal(t, http.StatusTooManyRequests, status)
			require.NotEmpty(t, header.Get("Retry-After"))
		}
	})
}
