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
// the same versions, so that they agree about every bucket. A table of this release has other names; the previous one reads it through a view.
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
			columns, bounds, off, on, view := "interfaceUrl, rateLimit, cache, status", "interfaceUrl, rateLimit, `window`, windowLimit, concurrent, shadow, perKey", 0, 1, ""
			if creator == now {
				columns, bounds, off, on, view = "name, rate, max_wait, disabled", "name, rate, `window`, window_limit, concurrent, shadow, per_key", 1, 0, "t_ratelimite_before"
				exec("CREATE VIEW " + name + "." + view + " AS SELECT configId, name AS interfaceUrl, rate AS rateLimit, max_wait AS cache, 1 - disabled AS status, `window`," +
					" window_limit AS windowLimit, concurrent, shadow, per_key AS perKey, lastModifyTime FROM " + conf)
			}
			exec(fmt.Sprintf("INSERT INTO %s (%s) VALUES ('/ibe/Fares', 5.5, 0.3, %[4]d), ('/ibe/Off', NULL, NULL, %[3]d), ('/ibe/Slow', 0.4, NULL, %[4]d),"+
				" ('/ibe/*', 0, 0, %[4]d), ('/bad', -1, 0, %[4]d)", conf, columns, off, on))
			exec("INSERT INTO " + conf + " (" + bounds + ") VALUES" +
				" ('/ibe/All', 50, 60, 1000, 8, 1, 0), ('/ibe/Keys', 10, NULL, NULL, NULL, 0, 1), ('/ibe/Count', NULL, 1.5, 7, NULL, 0, 0)")
			exec(fmt.Sprintf("INSERT INTO %s (%s) VALUES ('%s', %g, 0.5, %d)", conf, columns, name, rate, on))
			exec("INSERT INTO " + name + ".t_ratelimite_switch (name, enabled) VALUES ('global', 0)")
			if creator == now {
				exec("UPDATE " + conf + " SET penalty = 'none' WHERE name = '/ibe/Fares'") // a column that other releases may not know
			}
			job := task.Job{Redis: redisAddr, Tasks: []task.Task{{Kind: task.Table, Name: "table", DSN: dsn, View: view}}}
			before, after := ask(t, previous, job), ask(t, now, job)
			require.Len(t, before, 10, "nine rows, and the switch: %q", before)
			require.Equal(t, before, after, "what both releases read")
			require.Contains(t, after, "switch false")

			gateway := task.Job{Redis: redisAddr, Tasks: []task.Task{{Kind: task.Gateway, Name: name, Store: "script", DSN: dsn, View: view, Callers: 8}}}
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
