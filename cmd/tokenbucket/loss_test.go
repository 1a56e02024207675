package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// fillTable writes rows from /01 on.
func fillTable(t *testing.T, table limitsTable, rows int) {
	for i := range rows {
		execSQL(t, table.DB, fmt.Sprintf("INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/%02d', 1, 0)", i+1))
	}
}

// reports waits until all that an operator may look at has these texts: /readyz, the console's first page, the log.
func (p *process) reports(t *testing.T, ready, page, log string) {
	t.Helper()
	p.becomes(t, http.StatusOK, ready)
	for _, path := range []string{"", "health", "holders", "limit?name=%2F01"} {
		shows(t, p.admin+"/console/"+path, page)
	}
	p.waitFor(t, log)
}

// A table of 17 rows that is reduced to one, emptied, dropped and locked: readiness, metrics, statistics, console and log of two gateways
// report each, until the loss is confirmed by the command or the rows are back.
func TestTableIsLost(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		redis := redistest.Start(t)
		upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		t.Cleanup(upstream.Close)
		args := []string{"--upstream", upstream.URL, "--limits", table.dsn, "--redis", redis.Addr, "--create-table", "--interval", "100ms", "--load-timeout", "2s"}
		one := startGateway(t, args...)
		fillTable(t, table, 17)
		two := startGateway(t, args...)
		for _, p := range []*process{one, two} {
			eventually(t, func() error {
				if n := len(p.stats(t).Limits); n != 17 {
					return fmt.Errorf("%d limits", n)
				}
				return nil
			})
		}
		confirm := func(want int) string {
			status, out, errs := execute(context.Background(), "confirm", "--redis", redis.Addr, "--who", "ann", "--why", "they have moved")
			require.Equal(t, want, status, out+errs)
			return out
		}
		require.Contains(t, confirm(exitBroken), "nothing to confirm")

		execSQL(t, table.DB, "DELETE FROM t_ratelimite_conf WHERE name <> '/01'")
		one.reports(t, "16 of 17 limits are gone from the table, and ", "16 of 17 limits are gone from the table since ", `gone=16 of=17`)
		one.becomes(t, http.StatusOK, "and no longer in force")
		one.becomes(t, http.StatusOK, ": /02, /03, /04, /05, /06, …; confirm the loss")
		m := one.scrape(t)
		require.Equal(t, []float64{16, 17, 1, 0}, []float64{value(m, "tokenbucket_gateway_limits_lost"), value(m, "tokenbucket_gateway_limits_before_loss"),
			value(m, "tokenbucket_gateway_limits"), value(m, "tokenbucket_gateway_limits_held")})
		var s struct{ Loads struct{ Loss loss } }
		_, _, text, err := get(one.admin + "/stats")
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal([]byte(text), &s))
		require.Equal(t, []any{17, 16, false}, []any{s.Loads.Loss.Before, s.Loads.Loss.Gone, s.Loads.Loss.Held})
		two.becomes(t, http.StatusOK, "16 of 17 limits")
		shows(t, one.admin+"/console/", "as 2 instances report")
		require.Contains(t, confirm(exitOK), "confirmed: every gateway has applied it")
		for _, p := range []*process{one, two} {
			_, ready := p.readiness()
			require.NotContains(t, ready, "gone")
			require.Contains(t, p.out.String(), `the loss of limits was confirmed" gone=16 of=17 by=ann why="they have moved"`)
			require.Zero(t, value(p.scrape(t), "tokenbucket_gateway_limits_lost"))
		}

		execSQL(t, table.DB, "DELETE FROM t_ratelimite_conf")
		one.reports(t, "there are no limits", "There are no limits", "there are no limits")
		one.becomes(t, http.StatusOK, "1 of 1 limits are gone")
		fillTable(t, table, 17)
		one.waitFor(t, "the limits that were gone from the table are back")
		eventually(t, func() error {
			_, ready := one.readiness()
			_, _, page, err := get(one.admin + "/console/")
			if err == nil && (strings.Contains(ready, "gone") || strings.Contains(page, "gone from the table") || strings.Contains(page, "There are no limits")) {
				err = fmt.Errorf("still reported: %s %.3000s", ready, page)
			}
			return err
		})

		execSQL(t, table.DB, "ALTER TABLE t_ratelimite_conf RENAME TO elsewhere")
		one.reports(t, "ago; loads fail: ", "loads fail, the limits loaded ", "limits could not be loaded")
		require.Equal(t, 17.0, value(one.scrape(t), "tokenbucket_gateway_limits"))
		execSQL(t, table.DB, "ALTER TABLE elsewhere RENAME TO t_ratelimite_conf")
		eventually(t, func() error {
			_, ready := one.readiness()
			if strings.Contains(ready, "fail") {
				return fmt.Errorf("%s", ready)
			}
			return nil
		})

		conn, err := table.DB.Conn(t.Context())
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		lock, unlock := []string{"LOCK TABLES t_ratelimite_conf WRITE"}, "UNLOCK TABLES"
		if table.server == "PostgreSQL" {
			lock, unlock = []string{"BEGIN", "LOCK TABLE t_ratelimite_conf IN ACCESS EXCLUSIVE MODE"}, "ROLLBACK"
		}
		for _, statement := range lock {
			_, err := conn.ExecContext(t.Context(), statement)
			require.NoError(t, err)
		}
		one.becomes(t, http.StatusOK, "ago; loads fail: ")
		_, err = conn.ExecContext(t.Context(), unlock)
		require.NoError(t, err)
		eventually(t, func() error {
			if _, ready := one.readiness(); strings.Contains(ready, "fail") {
				return fmt.Errorf("%s", ready)
			}
			return nil
		})
	})
}

// loss is what /stats has of a loss.
type loss struct {
	Since        time.Time
	Before, Gone int
	Held         bool
}

// With --confirm-losses limits whose rows are gone stay in force until the loss is confirmed at the console. It excludes --allow-empty.
func TestLossIsConfirmedAtTheConsole(t *testing.T) {
	t.Parallel()
	_, db, args := newShared(t, 0.01)
	p := startGateway(t, append(args, "--interval", "50ms", "--create-table", "--confirm-losses", "--console-users", usersFile(t))...)
	require.Less(t, p.calls(t, "/a")[http.StatusOK], 8)
	execSQL(t, db, "DELETE FROM t_ratelimite_conf")
	p.loads(t, 10)
	p.becomes(t, http.StatusOK, ": /a; confirm the loss")
	require.Less(t, p.calls(t, "/a")[http.StatusOK], 8)
	console := p.admin + "/console/"
	shows(t, console, "They are still in force")
	status, page, err := ask("GET", console, "", "")
	require.NoError(t, err)
	require.Equal(t, 200, status)
	require.Contains(t, page, `data-act="confirm"`)
	_, _, page, err = get(console)
	require.NoError(t, err)
	require.NotContains(t, page, `data-act="confirm"`, "who may only look confirms nothing")
	_, page, err = ask("GET", console, "", "")
	require.NoError(t, err)
	status, said, err := ask("POST", console+"api/confirm", pageToken.FindStringSubmatch(page)[1], `{"why":"they have moved"}`)
	require.NoError(t, err)
	require.Equal(t, 200, status, said)
	p.becomes(t, http.StatusOK, "there are no limits")
	p.waitFor(t, `by=ann why="they have moved"`)
	require.Equal(t, map[int]int{http.StatusOK: 8}, p.calls(t, "/a"))
	shows(t, console, "There are no limits")
	var entries int
	require.NoError(t, db.QueryRow("SELECT count(*) FROM t_ratelimite_audit WHERE changedBy = 'ann' AND why = 'they have moved'").Scan(&entries))
	require.Equal(t, 1, entries)

	status, _, errs := execute(context.Background(), append([]string{"gateway", "--confirm-losses", "--allow-empty"}, args...)...)
	require.Equal(t, exitUsage, status)
	require.Contains(t, errs, "--confirm-losses true: want false together with --allow-empty")
	for _, wrong := range [][]string{{"confirm", "--redis", "127.0.0.1:1"}, {"confirm", "--store", "memory", "--why", "x"}, {"confirm", "--why", "x"}} {
		status, _, errs := execute(context.Background(), wrong...)
		require.Equal(t, exitUsage, status, wrong)
		require.Contains(t, errs, "want ", wrong)
	}
}

// A table of the switch that is gone is reported while the last value stays.
func TestSwitchCannotBeRead(t *testing.T) {
	t.Parallel()
	_, db, args := newShared(t, 5)
	p := startGateway(t, append(args, "--create-table", "--switch", "sql")...)
	_, ready := p.readiness()
	require.NotContains(t, ready, "switch")
	execSQL(t, db, "ALTER TABLE t_ratelimite_switch RENAME TO elsewhere")
	p.becomes(t, http.StatusOK, "the switch cannot be read, so it stays on: limits apply; for ")
	execSQL(t, db, "ALTER TABLE elsewhere RENAME TO t_ratelimite_switch")
	eventually(t, func() error {
		if _, ready := p.readiness(); strings.Contains(ready, "switch") {
			return fmt.Errorf("%s", ready)
		}
		return nil
	})
}

// What /stats has of a row adds up to its calls, whichever bound of the row decides.
func TestStatsAddUp(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	file := newLimitsFile(t, "limits:\n  - {name: /window, rate: none, window: 1h, window_limit: 3}\n  - {name: /rate, rate: 0.001, cache: 0}\n"+
		"  - {name: /both, rate: 1000, window: 1h, window_limit: 2}\n  - {name: /waits, rate: 10, cache: 1, window: 1h, window_limit: 4}\n"+
		"  - {name: /off, rate: 1, disabled: true}\n  - {name: /zero, rate: 0}\n  - {name: /trial, rate: 0.001, cache: 0, shadow: true}\n  - {name: /tried, rate: 0.001, cache: 0, window: 1h, window_limit: 3, shadow: true}\n  - {name: /bad}\n")
	p := startGateway(t, "--upstream", upstream.URL, "--limits", "file://"+string(file), "--redis", redis.Addr,
		"--store-timeout", "20s") // a busy machine is no outage
	want := map[string][5]float64{ // granted, refused, failed, would refuse, bypassed
		"/window": {3, 5}, "/rate": {1, 7}, "/both": {2, 6}, "/waits": {4, 4}, "/off": {0, 0, 0, 0, 8}, "/zero": {0, 8}, "/trial": {1, 0, 0, 7}, "/tried": {1, 0, 0, 7},
	}
	for name := range want {
		p.calls(t, name)
	}
	p.calls(t, "/bad")
	p.calls(t, "/no/row")
	s := p.stats(t)
	for name, counts := range want {
		l := s.of(name)
		require.Equal(t, counts, [5]float64{l.Granted, l.Refused, l.Failed, l.WouldRefuse, l.Bypassed}, name)
	}
	require.Equal(t, 8.0, s.Others.Bypassed)
	m := p.scrape(t)
	require.Equal(t, float64(8*len(want)+16), value(m, "tokenbucket_gateway_admissions_total"))
	require.Equal(t, 8.0, value(m, "tokenbucket_gateway_admissions_total", "bucket=other", "by=unknown", "result=passed"))
	require.Equal(t, 4.0, value(m, "tokenbucket_gateway_admissions_total", "bucket=/waits", "by=window", "result=refused"))
	require.Equal(t, []float64{3, 3}, []float64{value(m, "tokenbucket_gateway_limit_window_used", "bucket=/window"), value(m, "tokenbucket_gateway_limit_window_limit", "bucket=/window")})
}

// What a person does at the console has a name and a reason wherever it shows: a penalty in the limit's chart, list and page, and the
// switch in /readyz, in the log, and on top of every page.
func TestWhoDidIt(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	file := newLimitsFile(t, "limits:\n  - {name: /a, rate: 5, cache: 0}\n")
	p := startGateway(t, "--upstream", upstream.URL, "--limits", "file://"+string(file), "--redis", redis.Addr, "--switch", "redis:switch", "--console-users", usersFile(t))
	console := p.admin + "/console/"
	do := func(what, order string) {
		t.Helper()
		_, page, err := ask("GET", console, "", "")
		require.NoError(t, err)
		status, said, err := ask("POST", console+"api/"+what, pageToken.FindStringSubmatch(page)[1], order)
		require.NoError(t, err)
		require.Equal(t, 200, status, said)
	}
	p.calls(t, "/a")
	do("penalize", `{"name":"/a","seconds":600,"why":"they ring"}`)
	var history struct{ Marks []struct{ Kind, Text string } }
	_, _, text, err := get(console + "api/history?name=%2Fa")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal([]byte(text), &history))
	require.Contains(t, history.Marks, struct{ Kind, Text string }{"held back", "held back for 10 min, by ann: they ring"})
	shows(t, console+"health", "held back for 10 min, by ann: they ring")
	shows(t, console, "penalised")

	do("switch", `{"on":false,"why":"incident 7"}`)
	p.becomes(t, http.StatusOK, "the switch is off: every call passes; for ")
	for _, page := range []string{"", "health", "holders", "limit?name=%2Fa"} {
		shows(t, console+page, "The switch is off: every call passes (by ann: incident 7).")
	}
	shows(t, console+"health", "by ann: incident 7): every call passes")
	do("switch", `{"on":true,"why":"over"}`)
	eventually(t, func() error {
		_, ready := p.readiness()
		_, _, page, err := get(console)
		if err == nil && (strings.Contains(ready, "switch") || strings.Contains(page, "The switch is off")) {
			err = fmt.Errorf("%s", ready)
		}
		return err
	})
}
