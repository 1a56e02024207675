package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// told is a state of a gateway, as each of the six places has to report it.
type told struct {
	part, state, says string
	calls             string // of the part; /stats and /metrics have the worst of all parts in calls_are
	are               string
	ready             int
	level             string // in the log
	check             string // the words of tokenbucket check, if they differ
}

// lacks returns an error that names the place that does not report the state.
func (p *process) lacks(t *testing.T, want told, from int, args []string) error {
	if status, body := p.readiness(); status != want.ready || !strings.Contains(body, want.says) && want.state != "ok" {
		return fmt.Errorf("/readyz is %d %q", status, body)
	}
	var s struct {
		Are    string `json:"calls_are"`
		States []struct{ Part, State, Calls, Says string }
	}
	_, _, body, err := get(p.admin + "/stats")
	if err == nil {
		err = json.Unmarshal([]byte(body), &s)
	}
	found := false
	for _, one := range s.States {
		found = found || one.Part == want.part && one.State == want.state && one.Calls == want.calls && strings.Contains(one.Says, want.says)
	}
	if err != nil || !found || s.Are != want.are {
		return fmt.Errorf("/stats has %+v, %w", s, errors.Join(err, errors.New("not as wanted")))
	}
	m := p.scrape(t)
	if value(m, "tokenbucket_gateway_state", "part="+want.part, "state="+want.state) != 1 || value(m, "tokenbucket_gateway_state", "part="+want.part) != 1 ||
		value(m, "tokenbucket_gateway_calls_state", "state="+want.are) != 1 || value(m, "tokenbucket_gateway_calls_state") != 1 {
		return errors.New("/metrics has another state")
	}
	if want.state == "ok" {
		_, page := get4(p.admin + "/console/health")
		if strings.Contains(page, "This instance: ") {
			return fmt.Errorf("the console has a problem: %s", page)
		}
	} else {
		for _, path := range []string{"", "health"} {
			if _, page := get4(p.admin + "/console/" + path); !strings.Contains(strings.ToLower(html.UnescapeString(page)), want.says) {
				return fmt.Errorf("/console/%s has no %q", path, want.says)
			}
		}
		logged := false
		for line := range strings.Lines(p.out.String()[from:]) {
			has := strings.Contains(line, want.says)
			logged = logged || has && strings.Contains(line, "level="+want.level)
			if has && strings.Contains(line, "level=INFO") {
				return fmt.Errorf("INFO: %s", line)
			}
		}
		if !logged {
			return fmt.Errorf("the log has no %s of %q", want.level, want.says)
		}
	}
	says := want.says
	if want.check != "" {
		says = want.check
	}
	if _, out, _ := execute(context.Background(), append([]string{"check"}, args...)...); !strings.Contains(out, says) ||
		(want.state == "ok") != strings.Contains(out, "ok    "+says) {
		return fmt.Errorf("check prints %s", out)
	}
	return nil
}

// get4 returns the status and the body of a page, or the error as its body.
func get4(url string) (int, string) {
	status, _, body, err := get(url)
	if err != nil {
		return status, err.Error()
	}
	return status, body
}

// Every state of Redis, of the switch and of the rows is reported in the same words by /readyz, /stats, /metrics, the log, the console and
// tokenbucket check, under each policy, and what is said of calls is what happens to them.
func TestStatesAreToldAlike(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, "--maxmemory-policy", "noeviction")
	network := redistest.StartProxy(t, server.Addr)
	admin := server.Client(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	db, dsn := newLimits(t)
	common := []string{"--upstream", upstream.URL, "--limits", dsn, "--redis", network.Addr, "--switch", "sql", "--confirm-losses", "--interval", "200ms",
		"--store-timeout", "2s"}
	policies := []string{"closed", "open", "share:4"}
	var gateways []*process
	for _, policy := range policies {
		gateways = append(gateways, startGateway(t, append(common, "--create-table", "--fail", policy)...))
	}
	for i := range 40 {
		execSQL(t, db, fmt.Sprintf("INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/%d', 0.001, 0)", i))
	}
	row := 0 // each state has a row without earlier calls: of an earlier one a gateway may know that it has no permits
	is := func(want [3]told, change func()) {
		t.Helper()
		row++
		var all sync.WaitGroup
		var from [3]int
		for i, p := range gateways {
			from[i] = len(p.out.String())
		}
		change()
		for i, p := range gateways {
			all.Go(func() {
				args := append(common, "--fail", policies[i])
				if err := redistest.Poll(time.Minute, func() error { return p.lacks(t, want[i], from[i], args) }); err != nil {
					t.Errorf("%s, %s %s: %v", policies[i], want[i].part, want[i].state, err)
					return
				}
				if want[i].state == "slow" { // on a busy machine a call may take longer than --store-timeout
					return
				}
				passed, failed := 0, 0
				for range 3 {
					switch status, body := get4(fmt.Sprint(p.url, "/", row)); status {
					case http.StatusOK:
						passed++
					case http.StatusServiceUnavailable:
						failed++
					case http.StatusTooManyRequests:
					default:
						t.Errorf("%d %s", status, body)
					}
				}
				if want := map[string]bool{"limited": passed <= 1 && failed == 0, "shared": passed <= 1 && failed == 0, "failed": failed == 3, "unlimited": passed == 3}; !want[p.areCalls()] {
					t.Errorf("%s: %d passed and %d failed of 3, told as %s", policies[i], passed, failed, p.areCalls())
				}
			})
		}
		all.Wait()
		if t.Failed() {
			t.FailNow()
		}
	}
	alike := func(s told) [3]told { return [3]told{s, s, s} }
	is(alike(told{"redis", "ok", "redis: ok", "limited", "limited", 200, "INFO", ""}), func() {})
	well := func() {
		network.Delay(0, 0, nil)
		_ = server.Continue()
		if admin.Ping(t.Context()).Err() != nil {
			require.NoError(t, server.Restart())
		}
		require.NoError(t, admin.ConfigSet(t.Context(), "maxmemory", "0").Err())
		require.NoError(t, admin.Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
		execSQL(t, db, "DELETE FROM t_ratelimite_switch")
		for _, p := range gateways {
			eventually(t, func() error {
				if status, body := p.readiness(); status != 200 || strings.Count(body, "\n") != 2 || !strings.Contains(body, "redis: ok") {
					return fmt.Errorf("/readyz is %d %q", status, body)
				}
				return nil
			})
		}
	}
	// outage returns what a state of Redis is told as under the three policies.
	outage := func(state, says string) [3]told {
		return [3]told{
			{"redis", state, "redis " + says + ": calls are answered with 503 (--fail closed)", "failed", "failed", 503, "ERROR", ""},
			{"redis", state, "redis " + says + ": calls pass without limits (--fail open)", "unlimited", "unlimited", 200, "WARN", ""},
			{"redis", state, "redis " + says + ": calls use this gateway's local share of the limits (--fail share:4)", "shared", "shared", 200, "WARN", ""},
		}
	}
	config := func(name, value string) { require.NoError(t, admin.ConfigSet(t.Context(), name, value).Err()) }
	turnOff := func() { execSQL(t, db, "INSERT INTO t_ratelimite_switch (name, enabled) VALUES ('global', 0)") }

	is(outage("full", "is full"), func() { config("maxmemory", "1") })
	is(alike(told{"redis", "full", "redis is full: no call needs it while the switch is off", "limited", "unlimited", 200, "WARN", ""}), turnOff)
	well()
	is(outage("read_only", "is read-only"), func() { require.NoError(t, admin.Do(t.Context(), "REPLICAOF", "127.0.0.1", "1").Err()) })
	well()
	is(outage("hung", "does not reply"), func() { require.NoError(t, server.Stop()) })
	well()
	is(outage("away", "cannot be reached"), func() { require.NoError(t, server.Kill()) })
	well()
	is(alike(told{"redis", "slow", "redis is slow: limits apply, and calls wait for it", "limited", "limited", 200, "WARN", ""}), func() {
		network.Delay(600*time.Millisecond, 0, nil)
	})
	well()
	is(alike(told{"switch", "off", "the switch is off: every call passes", "unlimited", "unlimited", 200, "WARN", ""}), turnOff)
	is(alike(told{"switch", "unknown", "the switch cannot be read, so it stays off: every call passes", "unlimited", "unlimited", 200, "WARN", "the switch cannot be read"}), func() {
		execSQL(t, db, "ALTER TABLE t_ratelimite_switch RENAME TO elsewhere")
	})
	execSQL(t, db, "ALTER TABLE elsewhere RENAME TO t_ratelimite_switch")
	well()
	is(alike(told{"switch", "unknown", "the switch cannot be read, so it stays on: limits apply", "limited", "limited", 200, "WARN", ""}), func() {
		execSQL(t, db, "ALTER TABLE t_ratelimite_switch RENAME TO elsewhere")
	})
	execSQL(t, db, "ALTER TABLE elsewhere RENAME TO t_ratelimite_switch")
	well()
	is(alike(told{"rows", "bad", "bad rows: 1", "limited", "limited", 200, "WARN", ""}), func() {
		execSQL(t, db, "UPDATE t_ratelimite_conf SET rate = -5 WHERE name = '/0'")
	})
	is(alike(told{"rows", "held", "39 of 40 limits are gone from the table, and still in force", "limited", "limited", 200, "WARN", ""}), func() {
		execSQL(t, db, "DELETE FROM t_ratelimite_conf WHERE name <> '/0'")
	})
	is(alike(told{"rows", "stale", "limits cannot be loaded: the earlier limits stay in force", "limited", "limited", 200, "WARN", "limits cannot be loaded"}), func() {
		execSQL(t, db, "ALTER TABLE t_ratelimite_conf RENAME TO nowhere")
	})
}

// areCalls returns what /stats says of calls.
func (p *process) areCalls() string {
	var s struct {
		Are string `json:"calls_are"`
	}
	_, body := get4(p.admin + "/stats")
	_ = json.Unmarshal([]byte(body), &s)
	return s.Are
}
