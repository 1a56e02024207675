package main

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// pageRow is a row of the table "What you see when" of operations.md.
type pageRow struct{ condition, log, metric, stats, ready string }

// pageRows returns the rows of that table.
func pageRows(t *testing.T) (rows []pageRow) {
	t.Helper()
	page, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	_, section, ok := strings.Cut(string(page), "## What you see when\n")
	require.True(t, ok)
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(section) {
		if cells := strings.Split(strings.TrimSpace(line), " |"); len(cells) == 6 && !strings.HasPrefix(line, "| ---") && !strings.HasPrefix(line, "| condition") {
			rows = append(rows, pageRow{strings.TrimPrefix(cells[0], "| "), cells[1], cells[2], cells[3], cells[4]})
		}
	}
	require.Greater(t, len(rows), 30)
	return rows
}

var quotedText = regexp.MustCompile("`([^`]+)`")

// quotesOf returns what a cell quotes.
func quotesOf(cell string) (all []string) {
	for _, m := range quotedText.FindAllStringSubmatch(cell, -1) {
		all = append(all, m[1])
	}
	return all
}

// parts returns the words of a message that stay the same whatever the state.
func parts(message string) (all []string) {
	for _, part := range strings.FieldsFunc(message, func(r rune) bool { return r == '…' }) {
		if part = strings.Trim(part, " :;,"); len(part) > 3 {
			all = append(all, part)
		}
	}
	return all
}

var metricText = regexp.MustCompile("`([a-z_]*)(?:{([^}]*)})?`( 0)?")

// shows returns an error that names the first of the row's quotes that the gateway does not show. Those in but are excepted.
func (p *process) shows(t *testing.T, r pageRow, but ...string) error {
	t.Helper()
	excepted := func(text string) bool {
		return slices.ContainsFunc(but, func(b string) bool { return strings.Contains(text, b) })
	}
	log, level := p.out.String(), regexp.MustCompile(`\b(ERROR|WARN|INFO|DEBUG)\b`).FindString(r.log)
	for i, message := range quotesOf(r.log) {
		if excepted(message) || !strings.Contains(message, " ") || strings.HasPrefix(message, "ALTER ") || strings.HasPrefix(message, "tokenbucket check") {
			continue
		}
		found := false
		for line := range strings.Lines(log) {
			all := i > 0 || strings.Contains(line, "level="+level)
			for _, part := range parts(message) {
				all = all && strings.Contains(line, part)
			}
			found = found || all
		}
		if !found {
			return fmt.Errorf("the log has no %s %q", level, message)
		}
	}
	families, name := p.scrape(t), ""
	for _, m := range metricText.FindAllStringSubmatch(r.metric, -1) {
		if m[1] != "" {
			name = m[1]
		}
		var labels []string
		for label := range strings.SplitSeq(m[2], ",") {
			if strings.Contains(label, "=") {
				labels = append(labels, strings.ReplaceAll(label, `"`, ""))
			}
		}
		if excepted(m[0]) {
			continue
		}
		if v := value(families, name, labels...); families[name] == nil || (v == 0) != (m[3] != "") {
			return fmt.Errorf("%s is %v", m[0], v)
		}
	}
	_, body := get4(p.admin + "/stats")
	for _, path := range quotesOf(r.stats) {
		if key := path[strings.LastIndex(path, ".")+1:]; !excepted(path) && !strings.Contains(body, `"`+key+`":`) {
			return fmt.Errorf("/stats has no %q", path)
		}
	}
	status, body := p.readiness()
	for _, message := range quotesOf(r.ready) {
		for _, part := range parts(message) {
			if !excepted(message) && !strings.Contains(body, part) {
				return fmt.Errorf("/readyz is %q and has no %q", body, part)
			}
		}
	}
	if want := map[bool]int{false: http.StatusOK, true: http.StatusServiceUnavailable}[strings.HasPrefix(strings.TrimPrefix(r.ready, "| "), "503 ")]; status != want {
		return fmt.Errorf("/readyz is %d", status)
	}
	return nil
}

// pageCase brings about what a row is about, or names the test that does so and that has words of the row.
type pageCase struct {
	make     func(*pageGateway)
	but      []string // quotes of the row that belong to another condition of it, or that come after a minute
	args     []string // of a gateway of the case's own, with the limits of file
	file     string
	by, says string // the test, with its file, and the row's words in it
}

// pageGateway is the gateway that the cases share.
type pageGateway struct {
	*testing.T
	*process
	redis *redis.Client
	limit limitsFile
}

// ask makes calls of a path.
func (g *pageGateway) ask(path string, n int) {
	for range n {
		_, _ = get4(g.url + path)
	}
}

// raw sends a request as it is, and waits for the end of the connection.
func (g *pageGateway) raw(text string) {
	c, err := net.Dial("tcp", strings.TrimPrefix(g.url, "http://"))
	require.NoError(g, err)
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	_, err = c.Write([]byte(text))
	require.NoError(g, err)
	_, _ = c.Read(make([]byte, 1000))
}

const fourRows = "limits:\n  - {name: /1, rate: 5}\n  - {name: /2, rate: 5}\n  - {name: /3, rate: 5}\n  - {name: /4, rate: 5}\n"

const pageFile = `limits:
  - {name: /fault, rate: 5}
  - {name: /bad, rate: -5}
  - {name: /burst, rate: 5, burst: 0, max_wait: 100ms}
  - {name: /a*b, rate: 5}
  - {name: ibe/x, rate: 5}
  - {name: /shadow, rate: 0.001, max_wait: 0, shadow: true}
  - {name: /off, rate: 5, disabled: DISABLED}
  - {name: /later, rate: 5, penalty: "429"}
  - {name: /penalty, rate: none, window: 1h, window_limit: 100, penalty: "429"}
  - {name: /window, rate: none, window: 1h, window_limit: 1}
  - {name: /place, rate: none, concurrent: 1}
  - {name: /other, rate: none, window: 1h, window_limit: 7}
`

// pageCases are the rows of the table by the beginning of their condition.
var pageCases = map[string]pageCase{
	"a key of another type": {make: func(g *pageGateway) {
		require.NoError(g, g.redis.LPush(g.Context(), "tokenbucket:{/fault}", "x").Err())
		g.ask("/fault", 1)
	}},
	"a row is invalid":            {},
	"a row stores less than one":  {},
	"the name of a row has a `*`": {},
	"no call can match a row":     {},
	"a limit was disabled by its row": {make: func(g *pageGateway) {
		g.limit.write(g.T, strings.Replace(pageFile, "DISABLED", "true", 1))
		g.waitFor(g.T, "off: every call passes")
		g.loads(g.T, 2) // the line comes before the row is in force
		g.ask("/off", 1)
	}},
	"a row is in shadow":               {make: func(g *pageGateway) { g.ask("/shadow", 3) }, but: []string{"still in shadow", "no limit is in shadow", "every limit is in shadow", `by="shadow"`, "loads.all_shadow"}},
	"an upstream fails":                {make: func(g *pageGateway) { g.ask("/dead", 1) }},
	"an upstream answers 429":          {make: func(g *pageGateway) { g.ask("/later", 2) }},
	"calls have no row":                {make: func(g *pageGateway) { g.ask("/nowhere", 1) }},
	"a kept connection to an upstream": {make: func(g *pageGateway) { g.ask("/kept", 8) }},
	"a client sends a malformed body": {make: func(g *pageGateway) {
		g.raw("POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n")
	}},
	"the path of a request is ambiguous": {make: func(g *pageGateway) { g.raw("GET /%2e%2e%2f HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") }},
	"a row's window or concurrency refuses": {make: func(g *pageGateway) {
		g.ask("/window", 2)
		g.ask("/penalty", 2)
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() { g.ask("/place", 1) })
		}
		both.Wait()
	}, but: []string{"concurrent_used"}},
	"the table was created by an earlier release: a name": {by: "cmd/tokenbucket/page_test.go TestPageAltersOldTables", says: "ALTER"},
	"the table was created by an earlier release: 2.5":    {by: "cmd/tokenbucket/page_test.go TestPageAltersOldTables", says: "ALTER"},
	"the database does not reply":                         {by: "cmd/tokenbucket/loss_test.go TestTableIsLost", says: "limits could not be loaded"},
	"rows have an earlier time":                           {by: "cmd/internal/gateway/conditions_test.go TestRowsOffAndOutdated", says: "rows are earlier than others that a table has given, which stay in force"},
	"the database cannot be used at the start":            {by: "cmd/tokenbucket/messages_test.go TestStartErrorHasItsCause", says: "limits cannot be loaded yet"},
	"Redis cannot be reached":                             {by: "cmd/tokenbucket/states_test.go TestStatesAreToldAlike", says: "calls pass without limits (--fail open)"},
	"Redis replies late":                                  {by: "cmd/tokenbucket/states_test.go TestStatesAreToldAlike", says: "limits apply, and calls wait for it"},
	"Redis refuses the password":                          {by: "cmd/tokenbucket/serve_test.go TestGatewayWithoutRedis", says: "calls are answered with 503"},
	"a client reads its response too slowly":              {by: "cmd/internal/gateway/clients_test.go TestPlacesOfSlowClients", says: "--response-timeout"},
	"a table of hundreds of thousands":                    {by: "registry/slow_test.go TestSlowLoad", says: "registry: a load takes long and goes on"},
	"calls of a row with a concurrency outlast":           {by: "registry/internal/admission/outage_test.go TestLostPlacesAreTold", says: "registry: the place of a call was lost before it ended"},
	"another program has changed":                         {by: "registry/bounds_test.go TestRowWins", says: "registry: the bucket has differed from its row for two loads; the row is put in force again"},
	"the table is empty":                                  {args: []string{"--confirm-losses"}, file: fourRows, make: func(g *pageGateway) { g.limit.write(g.T, "limits: []\n") }},
	"the same, after three loads": {file: fourRows, make: func(g *pageGateway) { g.limit.write(g.T, "limits: []\n") },
		but: []string{"`tokenbucket_gateway_limits`"}},
	"every limit is off": {file: strings.ReplaceAll(fourRows, "rate: 5", "rate: 5, disabled: true"), make: func(g *pageGateway) { g.ask("/1", 1) }},
	"clients have used more keys": {args: []string{"--key", "path+header:X-Tenant", "--max-keys", "1"}, file: "limits:\n  - {name: \"/*\", rate: 5, per_key: true}\n", make: func(g *pageGateway) {
		for _, tenant := range []string{"a", "b", "c"} {
			g.answers(g.T, "/x", tenant)
		}
	}},
	"sign-ins at the console fail": {make: func(g *pageGateway) { failToSignIn(g.T, g.process, g.admin+"/console/") }},
	"settings were reloaded": {make: func(g *pageGateway) {
		require.NoError(g, g.Process.Signal(syscall.SIGHUP))
	}, but: []string{"changed settings take effect", "could not be reloaded"}},
	"a setting is misspelt": {},
	"the switch is off":     {but: []string{"still off", "switch.origin"}, make: func(g *pageGateway) { require.NoError(g, g.redis.Set(g.Context(), "tokenbucket:switch", "0", 0).Err()) }},
	"the switch cannot be read": {make: func(g *pageGateway) {
		require.NoError(g, g.redis.Del(g.Context(), "tokenbucket:switch").Err())
		require.NoError(g, g.redis.LPush(g.Context(), "tokenbucket:switch", "x").Err())
	}},
	"the file of the limits is missing": {make: func(g *pageGateway) { require.NoError(g, os.Remove(string(g.limit))); g.waitFor(g.T, "filesource:") }},
}

// Each row of the table "What you see when" is brought about on a real gateway, whose log, metrics, /stats and /readyz have what the row quotes, or
// by the test that the list names.
func TestPageSaysWhatIsSeen(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var served sync.Map
	var places atomic.Int64
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, before := served.LoadOrStore(r.RemoteAddr, true)
		switch {
		case r.URL.Path == "/dead", r.URL.Path == "/kept" && before:
			panic(http.ErrAbortHandler)
		case r.URL.Path == "/later", r.URL.Path == "/penalty":
			w.Header().Set("Retry-After", "30")
			w.WriteHeader(http.StatusTooManyRequests)
		case r.URL.Path == "/place":
			for places.Add(1); places.Load() < 1; { // the other call is refused meanwhile
				time.Sleep(time.Millisecond)
			}
			time.Sleep(200 * time.Millisecond)
		}
	}))
	t.Cleanup(upstream.Close)
	file := newLimitsFile(t, strings.Replace(pageFile, "DISABLED", "false", 1))
	p := launch(t, []string{"TOKENBUCKET_FIAL=open"}, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", upstream.URL, "--limits", "file://"+string(file),
		"--redis", server.Addr, "--switch", "redis:tokenbucket:switch", "--interval", "100ms", "--console-users", usersFile(t), "--log-level", "debug", "--trusted-proxy", "127.0.0.1")
	p.waitFor(t, "msg=ready")
	p.findAddresses()
	g := &pageGateway{T: t, process: p, redis: server.Client(t), limit: file}
	used := map[string]bool{}
	rows := pageRows(t)
	slices.SortStableFunc(rows, func(a, b pageRow) int { return pageOrder(a) - pageOrder(b) })
	var missing []error
	for _, r := range rows {
		begin := ""
		for b := range pageCases {
			if strings.HasPrefix(r.condition, b) {
				begin = b
			}
		}
		if begin == "" {
			missing = append(missing, fmt.Errorf("no case for %q", r.condition))
			continue
		}
		used[begin] = true
		c := pageCases[begin]
		if file, test, ok := strings.Cut(c.by, " "); ok {
			text, err := os.ReadFile("../../" + file)
			require.NoError(t, err)
			require.Contains(t, string(text), "func "+test+"(t *testing.T)", r.condition)
			require.Contains(t, string(text), c.says, r.condition)
			require.Contains(t, r.log+r.metric+r.stats+r.ready+r.condition, c.says)
			continue
		}
		at := g
		if c.file != "" {
			own := newLimitsFile(t, c.file)
			at = &pageGateway{T: t, process: own.start(t, c.args...), limit: own}
		}
		if c.make != nil {
			c.make(at)
		}
		if err := redistest.Poll(20*time.Second, func() error { return at.shows(t, r, c.but...) }); err != nil {
			missing = append(missing, fmt.Errorf("%s: %w", r.condition, err))
		}
	}
	require.NoError(t, errors.Join(missing...))
	status, _, told := execute(t.Context(), "gateway", "--uptream", "http://u:1")
	require.NotEqual(t, exitOK, status)
	require.Contains(t, told, "--upstream", "the nearest name of a misspelt setting")
	require.Len(t, used, len(pageCases), "a case without a row")
}

// pageOrder puts last what ends other states.
func pageOrder(r pageRow) int {
	return max(slices.IndexFunc([]string{"the switch is off", "the switch cannot be read", "the file of"}, func(b string) bool { return strings.HasPrefix(r.condition, b) }), -1)
}

// The ALTER statements of the page bring a table of an earlier release to what a gateway needs: fractions, and long names.
func TestPageAltersOldTables(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		at := "DATETIME"
		if table.server == "PostgreSQL" {
			at = "TIMESTAMP"
		}
		execSQL(t, table.DB, "CREATE TABLE t_ratelimite_conf (interfaceUrl VARCHAR(128), rateLimit INT, lastModifyTime "+at+")")
		insert := "INSERT INTO t_ratelimite_conf (interfaceUrl, rateLimit) VALUES ('" + strings.Repeat("n", 512) + "', 2.5)"
		_, err := table.Exec(insert)
		require.Error(t, err)
		altered := 0
		for _, r := range pageRows(t) {
			for _, statement := range quotesOf(r.log) {
				if clause, ok := strings.CutPrefix(statement, "ALTER COLUMN "); ok && table.server == "PostgreSQL" {
					statement = "ALTER TABLE t_ratelimite_conf ALTER COLUMN " + clause
				} else if !strings.HasPrefix(statement, "ALTER TABLE ") || table.server == "PostgreSQL" {
					continue
				}
				execSQL(t, table.DB, statement)
				altered++
			}
		}
		require.Equal(t, 2, altered)
		execSQL(t, table.DB, insert)
		var rate float64
		require.NoError(t, table.QueryRow("SELECT rateLimit FROM t_ratelimite_conf").Scan(&rate))
		require.Equal(t, 2.5, rate)
	})
}
