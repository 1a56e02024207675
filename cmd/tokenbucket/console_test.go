package main

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const consoleToken = "ann's-own-secret-token"

// usersFile is a file of who may change limits.
func usersFile(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "users")
	require.NoError(t, os.WriteFile(path, []byte("write ann "+consoleToken+"\n"), 0o600))
	return path
}

// ask asks a console as ann.
func ask(method, url, token, body string) (int, string, error) {
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	r.SetBasicAuth("ann", consoleToken)
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Sec-Fetch-Site", "same-origin")
		r.Header.Set("X-Csrf-Token", token)
	}
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return res.StatusCode, string(text), err
}

var pageToken, rowVersion = regexp.MustCompile(`name="csrf" content="([^"]+)"`), regexp.MustCompile(`data-from="([^"]+)"`)

// change sets a limit's rate as the page does.
func change(t *testing.T, console, name, rate string) {
	status, page, err := ask("GET", console+"change?name="+name, "", "")
	require.NoError(t, err)
	require.Equal(t, 200, status, page)
	token, version := pageToken.FindStringSubmatch(page), rowVersion.FindStringSubmatch(page)
	require.NotNil(t, token, page)
	require.NotNil(t, version, page)
	order := fmt.Sprintf(`{"name":%q,"from":%q,"values":{"rate":%q},"why":"a test"}`, name, version[1], rate)
	status, said, err := ask("POST", console+"api/save", token[1], order)
	require.NoError(t, err)
	require.Equal(t, 200, status, said)
}

// shows waits until a page has a text.
func shows(t *testing.T, url, text string) {
	t.Helper()
	eventually(t, func() error {
		status, _, page, err := get(url)
		if err == nil && !strings.Contains(page, text) {
			err = fmt.Errorf("%s: %d, without %q: %.3000s", url, status, text, page[max(0, strings.Index(page, "<main")):])
		}
		return err
	})
}

// A gateway's admin port has the console of the whole fleet, and a limit that is changed there is in force in another gateway.
func TestConsoleOfAGateway(t *testing.T) {
	t.Parallel()
	_, _, args := newShared(t, 5)
	args = append(args, "--interval", "200ms", "--create-table")
	one := startGateway(t, append(args, "--console-users", usersFile(t), "--trusted-proxy", "127.0.0.1")...)
	two := startGateway(t, append(args, "--console=false")...)
	status, _, text, err := get(two.admin + "/console/")
	require.NoError(t, err)
	require.Equal(t, 503, status)
	require.Contains(t, text, "there is no console")

	console := one.admin + "/console/"
	shows(t, one.admin+"/console", "<title>Limits")
	shows(t, console+"health", "script: replies")
	eventually(t, func() error {
		_, _, _, err := get(two.url + "/a")
		return err
	})
	shows(t, console, "/a")
	shows(t, console, `data-total="instances">2<`)
	failToSignIn(t, one, console)
	change(t, console, "/a", "7")
	shows(t, console+"limit?name=/a", "7/s, saves up 7, does not wait")
	shows(t, console+"changes", "Rate 5/s → 7/s")
	_, _, _, err = get(two.url + "/a") // the reply names the limit in force
	require.NoError(t, err)
	shows(t, console+"limit?name=/a", `<dt>Rate in force</dt><dd class="number">7<`)
}

// failToSignIn tries a token that is none: the log says from where, and there is a metric.
func failToSignIn(t *testing.T, p *process, console string) {
	r, err := http.NewRequest("GET", console, nil)
	require.NoError(t, err)
	r.SetBasicAuth("ann", "a token that is none")
	r.Header.Set("X-Forwarded-For", "192.0.2.7")
	res, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusUnauthorized, res.StatusCode)
	p.waitFor(t, `msg="console: a sign-in failed" client=192.0.2.7 user="\"ann\""`)
	require.NotContains(t, p.out.String(), "a token that is none")
	family := p.scrape(t)["tokenbucket_gateway_console_failed_sign_ins_total"]
	require.NotNil(t, family)
	require.Equal(t, 1., family.GetMetric()[0].GetCounter().GetValue())
}

// The console by itself shows the gateways' publications, and changes the same table.
func TestConsoleByItself(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	db, dsn := newLimits(t)
	require.NoError(t, sqlsource.CreateTable(t.Context(), db, sqlsource.SQLite))
	execSQL(t, db, `INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/a', 5, 0)`)
	ctx, stop := context.WithCancel(t.Context())
	log, ended := new(output), make(chan int)
	args := []string{"console", "--redis", server.Addr, "--limits", dsn, "--create-table", "--console-users", usersFile(t), "--console-listen", "127.0.0.1:0"}
	go func() { ended <- run(ctx, patient, args, new(bytes.Buffer), log) }()
	var console string
	eventually(t, func() error {
		m := regexp.MustCompile(`console=(http://\S+)`).FindStringSubmatch(log.String())
		if m == nil {
			return fmt.Errorf("it has not printed its address: %s", log)
		}
		console = m[1]
		return nil
	})
	shows(t, console, "No instance has reported yet")
	shows(t, console, "5/s, saves up 5, does not wait")
	change(t, console, "/a", "7")
	shows(t, console+"changes", "Rate 5/s → 7/s")
	var rate float64
	require.NoError(t, db.QueryRow("SELECT rate FROM t_ratelimite_conf").Scan(&rate))
	require.Equal(t, 7., rate)
	require.NotContains(t, log.String(), consoleToken)
	stop()
	require.Equal(t, exitOK, <-ended)
}

// The demo's console has limits, and ends when it should.
func TestDemoConsole(t *testing.T) {
	t.Parallel()
	out := new(output)
	ended, over := make(chan int), make(chan int)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		ended <- run(ctx, patient, []string{"demo", "--console", "--console-listen", "127.0.0.1:0"}, out, out)
	}()
	go func() { // while no page is open
		over <- run(t.Context(), patient, []string{"demo", "--console", "--duration", "12s", "--console-listen", "127.0.0.1:0"}, new(output), new(output))
	}()
	var console string
	eventually(t, func() error {
		m := regexp.MustCompile(`console +(http://\S+)`).FindStringSubmatch(out.String())
		if m == nil {
			return fmt.Errorf("it has not printed its address: %s", out)
		}
		console = m[1]
		return nil
	})
	began := time.Now()
	shows(t, console, "/ibe/AvailFare")
	shows(t, console, `data-total="instances">3<`)
	shows(t, console+"holders", "nightly exports")
	t.Logf("instances are shown after %v", time.Since(began).Round(100*time.Millisecond))
	stop()
	require.Equal(t, exitOK, <-ended)
	require.Equal(t, exitOK, <-over)
}

// One of three gateways is killed, Redis is restarted, and the table is gone: the console reports each fault, and goes on. With
// TOKENBUCKET_WRK=1 it must do so within five seconds, and the load is wrk's, as much as there is room for. Otherwise the time is only logged:
// the kernel's load does not show what a hypervisor takes.
func TestConsoleTellsOfFaults(t *testing.T) {
	t.Parallel()
	server, db, args := newShared(t, 50)
	args = append(args, "--interval", "500ms")
	var fleet []*process
	for range 3 {
		fleet = append(fleet, startGateway(t, args...))
	}
	strict, wrk := os.Getenv("TOKENBUCKET_WRK") != "", ""
	if strict {
		wrk = redistest.Program(t, "wrk")
	}
	keepBusy(t, fleet, wrk)
	console := fleet[0].admin + "/console/"
	shows(t, console, `data-total="instances">3<`)
	showsInTime := func(text string) {
		t.Helper()
		began := time.Now()
		shows(t, console, text)
		took := time.Since(began)
		t.Logf("%q after %v", text, took.Round(100*time.Millisecond))
		if strict {
			require.Less(t, took, 5*time.Second, text)
		}
	}
	require.NoError(t, fleet[2].Process.Kill())
	showsInTime("no report for ")
	execSQL(t, db, "ALTER TABLE t_ratelimite_conf RENAME TO elsewhere")
	showsInTime("loads fail, the limits loaded ")
	execSQL(t, db, "ALTER TABLE elsewhere RENAME TO t_ratelimite_conf")
	require.NoError(t, server.Kill())
	showsInTime("The state of the fleet cannot be read")
	require.NoError(t, server.Restart())
	shows(t, console, `data-total="instances">2<`)
	eventually(t, func() error {
		_, _, page, err := get(console + "limit?name=/a")
		if err == nil && !strings.Contains(page, `<dt>Granted</dt><dd class="number good">`) {
			err = fmt.Errorf("nothing is granted: %.2000s", page[max(0, strings.Index(page, "<main")):])
		}
		return err
	})
}

// keepBusy calls each gateway of a fleet until the test ends: with wrk, or without it at a low rate.
func keepBusy(t *testing.T, fleet []*process, wrk string) {
	ctx, stop := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	t.Cleanup(func() { stop(); callers.Wait() })
	for _, p := range fleet {
		callers.Go(func() {
			for ctx.Err() == nil {
				if wrk != "" {
					_ = exec.CommandContext(ctx, wrk, "-t1", "-c12", "-d1s", p.url+"/a").Run() // one gateway is killed
					continue
				}
				_, _, _, _ = get(p.url + "/a") // some of them are refused
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
}

// newShared is what gateways share: Redis, an upstream, and a table in which /a has that rate.
func newShared(t *testing.T, rate float64) (server *redistest.Server, db *sql.DB, args []string) {
	server = redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	db, dsn := newLimits(t)
	require.NoError(t, sqlsource.CreateTable(t.Context(), db, sqlsource.SQLite))
	execSQL(t, db, fmt.Sprintf("INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/a', %v, 0)", rate))
	return server, db, []string{"--upstream", upstream.URL, "--limits", dsn, "--redis", server.Addr, "--store-timeout", "20s"} // a busy machine is no outage
}
