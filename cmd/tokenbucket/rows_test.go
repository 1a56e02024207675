package main

import (
	"database/sql"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

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

// loads waits until the table has been read so many times from now on.
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

// An INSERT that says nothing of the status limits.
func TestRowWithoutStatus(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		p := table.start(t)
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (interfaceUrl, rateLimit, cache) VALUES ('/x', 1, 0)")
		p.loads(t, 2)
		require.Less(t, p.calls(t, "/x")[http.StatusOK], 8)
	})
}
