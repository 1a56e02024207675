package upgrade

import (
	"database/sql"
	"fmt"
	"strings"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/upgrade/task"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

// ask runs one task without callers, and returns the texts of its lines.
func ask(t *testing.T, r release, job task.Job) (lines []string) {
	t.Helper()
	p := r.start(t, job)
	require.NoError(t, redistest.Poll(patience, func() error {
		for _, e := range p.Events() {
			switch e.What {
			case task.Failed:
				require.FailNow(t, "the task failed", "%s of the release %s: %s", e.Of, r, e.Text)
			case task.Done:
				return nil
			}
		}
		return fmt.Errorf("%v", p.Events())
	}))
	for _, e := range p.End() {
		if e.What == task.Line {
			lines = append(lines, e.Text)
		}
	}
	return lines
}

// TestTables reads a table that one release has created with both, and lets a fleet that is replaced follow it. Both see the same rows and
// the same versions, so that they agree about every bucket.
func TestTables(t *testing.T) {
	t.Parallel()
	const rate = 200.0
	for _, creator := range []release{previous, now} {
		t.Run("created by "+creator.String(), func(t *testing.T) {
			t.Parallel()
			server := dbtest.SharedMariaDB(t)
			name := fmt.Sprintf("upgrade_%d", creator)
			db, err := sql.Open("mysql", server.DSN())
			require.NoError(t, err)
			defer func() { require.NoError(t, db.Close()) }()
			conf := name + ".t_ratelimite_conf"
			exec := func(statement string) {
				t.Helper()
				_, err := db.ExecContext(t.Context(), statement)
				require.NoError(t, err)
			}
			exec("CREATE DATABASE " + name)
			dsn := strings.Replace(server.DSN(), "/test?", "/"+name+"?", 1)
			redisAddr := redistest.Shared(t).Addr
			ask(t, creator, task.Job{Redis: redisAddr, Tasks: []task.Task{{Kind: task.Create, Name: "create", DSN: dsn}}})
			exec("INSERT INTO " + conf + " (interfaceUrl, rateLimit, cache, status) VALUES" +
				" ('/ibe/Fares', 5.5, 0.3, 1), ('/ibe/Off', NULL, NULL, 0), ('/ibe/Slow', 0.4, NULL, 1), ('/ibe/*', 0, 0, 1), ('/bad', -1, 0, 1)")
			exec("INSERT INTO " + conf + " (interfaceUrl, rateLimit, `window`, windowLimit, concurrent, shadow, perKey) VALUES" +
				" ('/ibe/All', 50, 60, 1000, 8, 1, 0), ('/ibe/Keys', 10, NULL, NULL, NULL, 0, 1), ('/ibe/Count', NULL, 1.5, 7, NULL, 0, 0)")
			exec(fmt.Sprintf("INSERT INTO %s (interfaceUrl, rateLimit, cache) VALUES ('%s', %g, 0.5)", conf, name, rate))
			exec("INSERT INTO " + name + ".t_ratelimite_switch (name, enabled) VALUES ('global', 0)")
			if creator == now {
				exec("UPDATE " + conf + " SET penalty = 'none' WHERE interfaceUrl = '/ibe/Fares'") // a column that other releases may not know
			}
			job := task.Job{Redis: redisAddr, Tasks: []task.Task{{Kind: task.Table, Name: "table", DSN: dsn}}}
			before, after := ask(t, previous, job), ask(t, now, job)
			require.Len(t, before, 10, "nine rows, and the switch: %q", before)
			require.Equal(t, before, after, "what both releases read")
			require.Contains(t, after, "switch false")

			gateway := task.Job{Redis: redisAddr, Tasks: []task.Task{{Kind: task.Gateway, Name: name, Store: "script", DSN: dsn, Callers: 8}}}
			h := roll(t, creator, 100, gateway, gateway)
			all, by := h.spans(name)
			worst := faultlab.Surely(all, rate)
			t.Logf("%d permits of the previous release, %d of this one; the fullest window of %v + rate × T had %.2f + rate × T for certain",
				by[previous], by[now], rate, worst)
			require.LessOrEqual(t, worst, rate+faultlab.Noise(rate))
			h.fullyUsed(t, name, rate)
		})
	}
}
