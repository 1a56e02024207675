package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/go-tokenbucket/tokenbucket/cmd/internal/bound"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

// Gateways here are processes: this test binary, as the command.

// output is what a process has printed so far.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// process is a gateway that runs.
type process struct {
	*exec.Cmd
	out        *output
	ended      chan struct{}
	url, admin string
}

func launch(t *testing.T, environ []string, args ...string) *process {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	p := &process{Cmd: exec.Command(self, append([]string{"gateway"}, args...)...), out: new(output), ended: make(chan struct{})}
	p.Env = append(append(os.Environ(), commandEnv+"=1"), environ...)
	p.Stdout, p.Stderr = p.out, p.out
	require.NoError(t, p.Start())
	go func() { _ = p.Wait(); close(p.ended) }()
	t.Cleanup(func() {
		_ = p.Process.Kill()
		<-p.ended
		if t.Failed() {
			t.Logf("gateway %q:\n%s", args, p.out)
		}
	})
	return p
}

var listening = regexp.MustCompile(`msg=listening for=(\w+) address=(\S+)`)

// startGateway waits until a gateway serves.
func startGateway(t *testing.T, args ...string) *process {
	t.Helper()
	p := launch(t, nil, append([]string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, args...)...)
	p.waitFor(t, "msg=ready")
	p.findAddresses()
	return p
}

func (p *process) waitFor(t *testing.T, text string) {
	t.Helper()
	eventually(t, func() error {
		select {
		case <-p.ended:
			return fmt.Errorf("it has ended without printing %q", text)
		default:
		}
		if !strings.Contains(p.out.String(), text) {
			return fmt.Errorf("it has not printed %q", text)
		}
		return nil
	})
}

func (p *process) findAddresses() {
	for _, m := range listening.FindAllStringSubmatch(p.out.String(), -1) {
		if m[1] == "admin" {
			p.admin = "http://" + m[2]
		} else {
			p.url = "http://" + m[2]
		}
	}
}

// exit waits for the end.
func (p *process) exit(t *testing.T) int {
	t.Helper()
	select {
	case <-p.ended:
		return p.ProcessState.ExitCode()
	case <-time.After(time.Minute):
		t.Fatal("the gateway does not end")
		return 0
	}
}

// eventually is generous: the machine may be busy.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	require.NoError(t, redistest.Poll(time.Minute, f))
}

// get asks on a connection of its own.
func get(url string) (status int, header http.Header, body string, err error) {
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get(url)
	if err != nil {
		return 0, nil, "", err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, response.Header, string(text), err
}

func (p *process) readiness() (int, string) {
	status, _, body, err := get(p.admin + "/readyz")
	if err != nil {
		return 0, err.Error()
	}
	return status, body
}

func (p *process) becomes(t *testing.T, want int, text string) {
	t.Helper()
	eventually(t, func() error {
		if status, body := p.readiness(); status != want || !strings.Contains(body, text) {
			return fmt.Errorf("/readyz is %d %q", status, body)
		}
		return nil
	})
}

type limitStats struct {
	Name                     string
	Rate                     float64
	Granted, Refused, Failed float64
	Bypassed                 float64
	WouldRefuse              float64 `json:"would_refuse"`
	Shadow                   bool
	RateInForce              float64   `json:"rate_in_force"`
	WaitedSeconds            float64   `json:"waited_seconds"`
	HeldUntil                time.Time `json:"held_until"`
}

type stats struct {
	Calls struct{ Received, Refused, Failed int }
	Loads struct {
		Tried, Failed int
		BadNames      int `json:"bad_names"`
		Held          int
		Shadow, Keys  int
		AllShadow     bool `json:"all_shadow"`
	}
	Limits   []limitStats
	Others   limitStats
	Rejected []struct{ Row, Name, Error, Consequence string }
	Switch   *struct {
		On     bool
		Origin string
	}
}

func (p *process) stats(t *testing.T) (s stats) {
	t.Helper()
	_, _, body, err := get(p.admin + "/stats")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal([]byte(body), &s))
	return s
}

func (p *process) rate(t *testing.T) float64 {
	if limits := p.stats(t).Limits; len(limits) == 1 {
		return limits[0].Rate
	}
	return 0
}

// limits is a SQLite file with a table of limits.
func newLimits(t *testing.T) (db *sql.DB, dsn string) {
	path := filepath.Join(t.TempDir(), "limits.db")
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(10000)")
	require.NoError(t, err)
	t.Cleanup(func() { _ = db.Close() })
	return db, "sqlite://" + path
}

func execSQL(t *testing.T, db *sql.DB, statement string) {
	t.Helper()
	_, err := db.Exec(statement)
	require.NoError(t, err)
}

const insertLimit = "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/ibe/AvailFare', %d, %v)"

// visits is an upstream that notes when it was called.
type visits struct {
	began time.Time
	mu    sync.Mutex
	times []time.Duration
}

func (v *visits) ServeHTTP(http.ResponseWriter, *http.Request) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.times = append(v.times, time.Since(v.began))
}

func (v *visits) so() []time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	return bound.Sorted(v.times, func(d time.Duration) time.Duration { return d })
}

// within counts visits from one time to another.
func within(times []time.Duration, from, to time.Duration) (n int) {
	for _, t := range times {
		if t >= from && t < to {
			n++
		}
	}
	return n
}

// load makes calls until the context ends, a few at once for each gateway, and returns how many got each status. It counts those
// that were answered.
func load(ctx context.Context, fleet []*process, answered *atomic.Int64) map[int]int {
	var mu sync.Mutex
	statuses := map[int]int{}
	var callers sync.WaitGroup
	for _, p := range fleet {
		for range 2 {
			callers.Go(func() {
				client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{}}
				defer client.CloseIdleConnections()
				for ctx.Err() == nil {
					status := 0
					if response, err := client.Get(p.url + "/ibe/AvailFare"); err == nil {
						status = response.StatusCode
						_ = response.Body.Close()
					}
					mu.Lock()
					statuses[status]++
					mu.Unlock()
					answered.Add(1)
					time.Sleep(5 * time.Millisecond)
				}
			})
		}
	}
	callers.Wait()
	return statuses
}

// Three gateways, one Redis, one table. A rate is changed in the table while they are under load, and all follow.
func TestGatewaysFollowTheTable(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	db, dsn := newLimits(t)
	upstream := &visits{began: time.Now()}
	server := httptest.NewServer(upstream)
	defer server.Close()
	const interval = 300 * time.Millisecond
	args := []string{"--upstream", server.URL, "--limits", dsn, "--redis", redis.Addr, "--create-table", "--interval", interval.String(), "--switch", "sql",
		"--store-timeout", "20s"} // a busy machine is no outage
	var fleet []*process
	for range 3 {
		fleet = append(fleet, startGateway(t, args...))
	}
	const before, after = 10, 60
	execSQL(t, db, fmt.Sprintf(insertLimit, before, 0.0))
	follow := func(rate float64) time.Duration {
		began := time.Now()
		for _, p := range fleet {
			p.loads(t, 2) // the first of them may have begun before
			require.Equal(t, rate, p.rate(t))
		}
		return time.Since(began)
	}
	follow(before)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	done := make(chan map[int]int, 1)
	first := time.Since(upstream.began)
	var answered atomic.Int64
	go func() { done <- load(ctx, fleet, &answered) }()
	loads := fleet[0].stats(t).Loads.Tried
	time.Sleep(3 * time.Second) // the rate is measured for that time, or longer on a busy machine
	earlier := loads
	eventually(t, func() error {
		if loads = fleet[0].stats(t).Loads.Tried - earlier; loads < 3 {
			return fmt.Errorf("%d loads", loads)
		}
		return nil
	})
	changed, demand := time.Since(upstream.began), answered.Load()
	execSQL(t, db, fmt.Sprintf("UPDATE t_ratelimite_conf SET rate = %d", after))
	took := follow(after)
	followed, more := time.Since(upstream.began), answered.Load()
	time.Sleep(3 * time.Second)
	last := time.Since(upstream.began)
	more = answered.Load() - more
	stop()
	statuses := <-done

	times := upstream.so()
	slow, fast := within(times, first, changed), within(times, followed, last)
	t.Logf("all followed within %v; %d loads and %d calls in %v, then %d in %v; %v", took, loads, slow, changed-first, fast, last-followed, statuses)
	require.LessOrEqual(t, loads, int((changed-first)/(interval*8/10))+1)
	require.LessOrEqual(t, float64(slow), before*((changed-first).Seconds()+0.2)+before, "the fleet keeps to the old rate")
	require.GreaterOrEqual(t, float64(slow), 0.7*min(before*(changed-first).Seconds(), float64(demand)), "of what a busy machine asks for")
	require.LessOrEqual(t, float64(fast), after*((last-followed).Seconds()+0.2)+after, "and to the new one")
	require.GreaterOrEqual(t, float64(fast), 0.6*min(after*(last-followed).Seconds(), float64(more)))
	require.Zero(t, statuses[0]+statuses[502]+statuses[503], "nothing else went wrong")
	require.Positive(t, statuses[429])

	// Off, for the whole fleet, and on again.
	switched := func(on bool) {
		for _, p := range fleet {
			eventually(t, func() error {
				if p.stats(t).Switch.On != on {
					return errors.New("not switched yet")
				}
				return nil
			})
		}
	}
	const seldom = 0.01 // so that of 30 calls some are refused, however long they take
	execSQL(t, db, fmt.Sprintf("UPDATE t_ratelimite_conf SET rate = %v", seldom))
	follow(seldom)
	execSQL(t, db, "INSERT INTO t_ratelimite_switch (name, enabled) VALUES ('global', 0)")
	switched(false)
	for range 30 {
		status, _, _, err := get(fleet[0].url + "/ibe/AvailFare")
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, status)
	}
	execSQL(t, db, "UPDATE t_ratelimite_switch SET enabled = 1")
	switched(true)
	refused := 0
	for range 30 {
		status, header, _, err := get(fleet[1].url + "/ibe/AvailFare")
		require.NoError(t, err)
		if status == http.StatusTooManyRequests {
			refused++
			require.NotEmpty(t, header.Get("Retry-After"))
		}
	}
	require.Positive(t, refused)

	// A bad row leaves the earlier one in force.
	execSQL(t, db, "UPDATE t_ratelimite_conf SET rate = -5")
	eventually(t, func() error {
		if s := fleet[2].stats(t); len(s.Rejected) != 1 || len(s.Limits) != 1 || s.Limits[0].Rate != seldom {
			return fmt.Errorf("stats %+v", s)
		}
		return nil
	})
	for _, p := range fleet {
		require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	}
	for _, p := range fleet {
		require.Equal(t, exitOK, p.exit(t))
	}
}

func redisWithPassword(t *testing.T, password string) *redistest.Server {
	t.Helper()
	s := redistest.Start(t)
	client := s.Client(t)
	require.NoError(t, client.ConfigSet(t.Context(), "requirepass", password).Err())
	return s
}

// The same with database servers, whose passwords are never shown, and settings from a file.
func TestGatewayWithDatabaseServers(t *testing.T) {
	t.Parallel()
	const insert = "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/x', 1, 0)"
	t.Run("MariaDB", func(t *testing.T) {
		t.Parallel()
		server := dbtest.MariaDB(t)
		db, err := sql.Open("mysql", server.DSN())
		require.NoError(t, err)
		t.Cleanup(func() { _ = db.Close() })
		execSQL(t, db, "CREATE USER gateway@'%' IDENTIFIED BY 'hush@/:?'")
		execSQL(t, db, "GRANT ALL ON test.* TO gateway@'%'")
		followServer(t, server, db, "mysql://gateway:hush%40%2F%3A%3F@"+server.Addr+"/test", insert)
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		server := dbtest.PostgreSQL(t)
		db, err := sql.Open("pgx", server.DSN())
		require.NoError(t, err)
		t.Cleanup(func() { _ = db.Close() })
		followServer(t, server, db, "postgres://postgres:hush@"+server.Addr+"/postgres?sslmode=disable", insert)
	})
}

func followServer(t *testing.T, server *dbtest.Server, db *sql.DB, dsn, insert string) {
	redis := redisWithPassword(t, "hush")
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer upstream.Close()

	path := filepath.Join(t.TempDir(), "gateway.yaml")
	settings := "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nupstream:\n  - " + upstream.URL + "\ncreate-table: true\ninterval: 1h\nlog-level: debug\n" +
		"limits: " + dsn + "\nredis: redis://:hush@" + redis.Addr + "\n"
	require.NoError(t, os.WriteFile(path, []byte(settings), 0o600))
	p := launch(t, []string{"TOKENBUCKET_INTERVAL=200ms"}, "--config", path)
	p.waitFor(t, "msg=ready")
	p.findAddresses()
	p.becomes(t, http.StatusOK, "redis: ok")
	for _, change := range []struct {
		statement string
		rate      float64
	}{{insert, 1}, {"UPDATE t_ratelimite_conf SET rate = 7", 7}} {
		execSQL(t, db, change.statement)
		eventually(t, func() error {
			if r := p.rate(t); r != change.rate {
				return fmt.Errorf("rate %v", r)
			}
			return nil
		})
	}
	statuses := map[int]int{}
	for began := time.Now(); statuses[http.StatusTooManyRequests] == 0 && time.Since(began) < 20*time.Second; {
		answers := make(chan int, 20)
		for range cap(answers) { // at once, so that even a slow machine asks for more than seven a second
			go func() {
				status, _, _, err := get(p.url + "/x")
				assert.NoError(t, err)
				answers <- status
			}()
		}
		for range cap(answers) {
			statuses[<-answers]++
		}
	}
	require.Positive(t, statuses[http.StatusOK])
	require.Positive(t, statuses[http.StatusTooManyRequests])

	server.Kill() // the loaded rows stay in force
	p.waitFor(t, "limits could not be loaded")
	require.EqualValues(t, 7, p.rate(t))
	_, _, text, err := get(p.admin + "/stats")
	require.NoError(t, err)
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	require.Equal(t, exitOK, p.exit(t))
	require.NotContains(t, p.out.String()+text, "hush")
}

// hold is an upstream that keeps its replies until release is closed.
type hold struct {
	arrived chan struct{}
	release chan struct{}
}

func newHold(t *testing.T) (*hold, string) {
	h := &hold{make(chan struct{}, 100), make(chan struct{})}
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	return h, server.URL
}

func (h *hold) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/quick" {
		return
	}
	h.arrived <- struct{}{}
	select {
	case <-h.release:
		_, _ = io.WriteString(w, "in the end")
	case <-r.Context().Done():
	}
}

type answer struct {
	status int
	body   string
	err    error
}

// ask sends a request that the upstream holds.
func (h *hold) ask(p *process) chan answer {
	done := make(chan answer, 1)
	go func() {
		status, _, body, err := get(p.url + "/held")
		done <- answer{status, body, err}
	}()
	<-h.arrived
	return done
}

func memoryArgs(t *testing.T, upstream string, more ...string) []string {
	_, dsn := newLimits(t)
	return append([]string{"--upstream", upstream, "--limits", dsn, "--create-table", "--store", "memory"}, more...)
}

// While a gateway drains, calls in flight end, no new one begins, and the load balancer is told first.
func TestGatewayDrains(t *testing.T) {
	t.Parallel()
	h, upstream := newHold(t)
	p := startGateway(t, memoryArgs(t, upstream, "--drain", "1m", "--drain-delay", "8s")...)
	held := h.ask(p)
	p.becomes(t, http.StatusOK, "limits")
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	p.becomes(t, http.StatusServiceUnavailable, "draining")
	status, _, _, err := get(p.url + "/quick")
	require.NoError(t, err, "new calls are served for a while yet")
	require.Equal(t, http.StatusOK, status)
	eventually(t, func() error {
		if c, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://")); err == nil {
			_ = c.Close()
			return errors.New("new connections are accepted")
		}
		return nil
	})
	status, _, _, err = get(p.admin + "/healthz")
	require.NoError(t, err, "it lives")
	require.Equal(t, http.StatusOK, status)
	select {
	case a := <-held:
		t.Fatalf("the request under way was cut off: %+v", a)
	default:
	}
	close(h.release)
	require.Equal(t, answer{http.StatusOK, "in the end", nil}, <-held)
	require.Equal(t, exitOK, p.exit(t))
}

func TestGatewayCutsOff(t *testing.T) {
	t.Parallel()
	h, upstream := newHold(t)
	p := startGateway(t, memoryArgs(t, upstream, "--drain", "300ms")...)
	held := h.ask(p)
	require.NoError(t, p.Process.Signal(syscall.SIGINT))
	require.Equal(t, exitBroken, p.exit(t))
	require.NotEqual(t, http.StatusOK, (<-held).status)
	require.Contains(t, p.out.String(), "cutOff=1")
}

func TestGatewaySecondSignal(t *testing.T) {
	t.Parallel()
	h, upstream := newHold(t)
	p := startGateway(t, memoryArgs(t, upstream, "--drain", "10m")...)
	held := h.ask(p)
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	p.waitFor(t, "msg=draining")
	eventually(t, func() error { // one in the same instant as the first is part of that
		_ = p.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
			return nil
		default:
			return errors.New("it still runs")
		}
	})
	require.Equal(t, syscall.SIGTERM, p.ProcessState.Sys().(syscall.WaitStatus).Signal())
	require.Error(t, (<-held).err)
}

// Redis hangs and comes back; then its password is another, which opens no gate.
func TestGatewayWithoutRedis(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	db, dsn := newLimits(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer upstream.Close()
	args := []string{"--upstream", upstream.URL, "--limits", dsn, "--create-table", "--redis", redis.Addr, "--store-timeout", "2s", "--interval", "100ms"}
	closed := startGateway(t, args...)
	open := startGateway(t, append(args, "--fail", "open")...)
	share := startGateway(t, append(args, "--fail", "share:3")...)
	all := []*process{closed, open, share}
	execSQL(t, db, fmt.Sprintf(insertLimit, 1000, 5.0)) // a second of which goes by while the store is asked whether it is there
	for _, p := range all {
		p.becomes(t, http.StatusOK, "redis: ok")
		eventually(t, func() error {
			if p.rate(t) != 1000 {
				return errors.New("no limit yet")
			}
			return nil
		})
	}
	check := func(p *process, want int) {
		t.Helper()
		status, _, _, err := get(p.url + "/ibe/AvailFare")
		require.NoError(t, err)
		require.Equal(t, want, status)
	}
	began := time.Now()
	require.NoError(t, redis.Stop())
	closed.becomes(t, http.StatusServiceUnavailable, "redis does not reply: calls are answered with 503 (--fail closed); for ")
	open.becomes(t, http.StatusOK, "calls pass without limits")
	share.becomes(t, http.StatusOK, "calls use this gateway's local share")
	for range 2 {
		check(closed, http.StatusServiceUnavailable)
		check(open, http.StatusOK)
		check(share, http.StatusOK)
	}
	status, _, body, err := get(closed.admin + "/healthz")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status, body)
	require.NoError(t, redis.Continue())
	for _, p := range all {
		p.becomes(t, http.StatusOK, "redis: ok")
		eventually(t, func() error { // what the calls before took is still being given back
			if status, _, _, err := get(p.url + "/ibe/AvailFare"); err != nil || status != http.StatusOK {
				return fmt.Errorf("%d %v", status, err)
			}
			return nil
		})
	}
	lines := strings.Count(closed.out.String(), "the limiter failed")
	require.Positive(t, lines)
	require.LessOrEqual(t, lines, 1+int(time.Since(began)/(10*time.Second)), "one line in ten seconds for many calls")
	require.NotContains(t, open.out.String(), "the limiter failed")
	require.Contains(t, open.out.String(), `msg="tokenbucket: an outage of the store has begun`)

	admin := redis.Client(t)
	require.NoError(t, admin.ConfigSet(t.Context(), "requirepass", "another").Err())
	require.NoError(t, admin.Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err())
	for _, p := range all {
		p.becomes(t, http.StatusServiceUnavailable, "redis refuses this gateway: calls are answered with 503; for ")
		check(p, http.StatusServiceUnavailable)
	}
}

// Until there are limits the gateway lives, but is not ready; and it need not be started again.
func TestGatewayWaitsForTheTable(t *testing.T) {
	t.Parallel()
	db, dsn := newLimits(t)
	execSQL(t, db, "CREATE TABLE other (x)")
	p := launch(t, nil, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--limits", dsn, "--store", "memory")
	p.waitFor(t, "no such table")
	p.findAddresses()
	p.becomes(t, http.StatusServiceUnavailable, "limits: not loaded yet")
	status, header, _, err := get(p.url + "/")
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.NotEmpty(t, header.Get("Retry-After"))

	other := startGateway(t, "--upstream", "http://127.0.0.1:1", "--limits", dsn, "--store", "memory", "--create-table")
	p.becomes(t, http.StatusOK, "limits: loaded")
	for _, p := range []*process{p, other} {
		require.NoError(t, p.Process.Signal(syscall.SIGTERM))
		require.Equal(t, exitOK, p.exit(t))
	}

	// Or it ends: what it waited for has not come in time.
	missing := launch(t, nil, "--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--limits", dsn, "--table", "missing", "--store", "memory",
		"--wait", "4s", "--admin", "127.0.0.1:0") // within which a slow machine has asked the database, too
	require.Equal(t, exitUsage, missing.exit(t))
	require.Contains(t, missing.out.String(), "no such table: missing")
	absent := launch(t, nil, "--upstream", "http://127.0.0.1:1", "--limits", dsn+"x", "--store", "memory", "--listen", "127.0.0.1:0", "--admin", "")
	require.Equal(t, exitUsage, absent.exit(t))
	require.Contains(t, absent.out.String(), "--create-table creates it")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	taken := launch(t, nil, "--upstream", "http://127.0.0.1:1", "--limits", dsn, "--store", "memory", "--listen", l.Addr().String(), "--admin", "")
	require.Equal(t, exitUsage, taken.exit(t))
	require.Contains(t, taken.out.String(), "address already in use")
}

// Passwords that are right or wrong, of servers that are there or not: no line has them.
func TestGatewayKeepsSecrets(t *testing.T) {
	t.Parallel()
	redis := redisWithPassword(t, "other")
	_, dsn := newLimits(t)
	for _, args := range [][]string{
		{"--limits", "mysql://me:hush@127.0.0.1:1/limits", "--store", "memory"},
		{"--limits", "postgres://me:hush@127.0.0.1:1/limits", "--store", "memory"},
		{"--limits", "postgres://me:hush@127.0.0.1:port/limits", "--store", "memory"},
		{"--limits=mysql://me:hush@h", "--store", "memory"},
		{"-limits=mysql://me:hush@127.0.0.1:1/limits"},
		{"--limits", dsn, "--redis", "", "redis://:hush@127.0.0.1:1"},
		{"--limits", dsn, "--redis", "redis://:hush@127.0.0.1:port"},
	} {
		p := launch(t, nil, append([]string{"--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--wait", "500ms",
			"--log-level", "debug", "--create-table"}, args...)...)
		require.Equal(t, exitUsage, p.exit(t), "%q", args)
		require.NotContains(t, p.out.String(), "hush")
		require.NotEmpty(t, p.out.String())
	}
	p := startGateway(t, "--upstream", "http://127.0.0.1:1", "--limits", dsn, "--create-table", "--redis", "redis://:hush@"+redis.Addr, "--unknown", "5",
		"--switch", "redis:on", "--log-level", "debug")
	require.Regexp(t, `level=WARN msg=ready .*redis="WRONGPASS`, p.out.String())
	p.becomes(t, http.StatusServiceUnavailable, "WRONGPASS")
	status, _, answered, err := get(p.url + "/x")
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, status)
	_, _, text, err := get(p.admin + "/stats")
	require.NoError(t, err)
	require.Contains(t, text, "WRONGPASS")
	require.NotContains(t, p.out.String()+answered+text, "hush")
}

// Streams that are not one request and one response: events as they come, and connections that are no longer HTTP.
func TestGatewayStreams(t *testing.T) {
	t.Parallel()
	next := make(chan struct{})
	var forwarded atomic.Value
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		forwarded.Store(r.Header.Get("X-Forwarded-For"))
		if r.Header.Get("Upgrade") == "echo" {
			conn, buf, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer func() { _ = conn.Close() }()
			_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			_, _ = io.Copy(conn, buf)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	}))
	defer upstream.Close()
	p := startGateway(t, memoryArgs(t, upstream.URL, "--drain", "1m", "--unknown", "100", "--upgrade", "echo")...)

	curl, missing := exec.LookPath("curl")
	require.False(t, missing != nil && os.Getenv("CI") == "true", "curl is not installed; on Debian: apt-get install curl")
	response, err := http.Get(p.url + "/events")
	require.NoError(t, err)
	lines := bufio.NewScanner(response.Body)
	for i := range 3 {
		require.True(t, lines.Scan())
		require.Equal(t, fmt.Sprintf("data: %d", i), lines.Text(), "it has come, and the next one has not been sent yet")
		require.True(t, lines.Scan())
		next <- struct{}{}
	}
	_ = response.Body.Close()
	require.Equal(t, "127.0.0.1", forwarded.Load())

	if missing == nil {
		cmd := exec.Command(curl, "--silent", "--show-error", "--no-buffer", "--include", "--max-time", "60", "--noproxy", "*", p.url+"/events")
		go func() {
			for range 3 {
				next <- struct{}{}
			}
		}()
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "HTTP/1.1 200 OK")
		require.Contains(t, string(out), "data: 0\n\ndata: 1\n\ndata: 2\n\n")
	}

	conn, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.WriteString(conn, "GET /socket HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	require.NoError(t, err)
	r := bufio.NewReader(conn)
	upgraded, err := http.ReadResponse(r, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusSwitchingProtocols, upgraded.StatusCode)
	say := func(word string) {
		_, err := io.WriteString(conn, word+"\n")
		require.NoError(t, err)
		line, err := r.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, word+"\n", line)
	}
	say("hello")
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	p.waitFor(t, "msg=draining")
	say("still here") // it is under way, as any request
	_ = conn.Close()
	require.Equal(t, exitOK, p.exit(t))
}
