package console_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// table is an Editor without a database: one row for each name.
type table struct {
	mu      sync.Mutex
	rows    map[string]editor.Values
	version int
	audit   []editor.AuditEntry
	err     error
	undone  func() (editor.AuditEntry, error) // the result of Undo, if set
}

func newTable() *table {
	return &table{rows: map[string]editor.Values{"/ibe/AvailFare": {"rate": editor.Text(5), "max_wait": nil, "disabled": editor.Text(0)}}}
}

func (t *table) Columns() sqlsource.Columns {
	return sqlsource.Columns{ID: "id", Name: "name", Rate: "rate", MaxWait: "max_wait", Disabled: "disabled", Modified: "modified", Shadow: "shadow", Penalty: "penalty"}
}

func (t *table) at(name string) editor.Version {
	if t.rows[name] == nil {
		return ""
	}
	return editor.Version(fmt.Sprint("v", t.version))
}

func (t *table) row(name string) editor.Row {
	r := editor.Row{Name: name, ID: "7", Version: t.at(name), Values: t.rows[name], Editable: []string{"rate", "max_wait", "disabled", "shadow", "penalty"}}
	r.Limit, _ = t.Limit(name, r.Values)
	return r
}

func (t *table) Get(_ context.Context, name string) (editor.Row, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rows[name] == nil {
		return editor.Row{}, editor.ErrNoRow
	}
	return t.row(name), t.err
}

// wanted returns the values that a field accepts, as the editor's errors have them.
func wanted(key string) string {
	for _, f := range registry.Fields() {
		if f.Key == key {
			return f.Want(registry.InTable)
		}
	}
	return ""
}

// Limit knows a rate and a wait.
func (t *table) Limit(name string, values editor.Values) (l registry.Limit, err error) {
	l = registry.Limit{Name: name, MaxWait: 500 * time.Millisecond, Disabled: values["disabled"] != nil && *values["disabled"] == "1"}
	seconds := l.MaxWait.Seconds()
	for column, to := range map[string]*float64{"rate": &l.Rate, "max_wait": &seconds} {
		if v := values[column]; v != nil && err == nil {
			if *to, err = strconv.ParseFloat(*v, 64); err != nil || *to < 0 {
				err = &registry.RowError{Row: "7", Name: name, Field: column, Value: *v, Want: wanted(column)}
			}
		}
	}
	l.MaxWait = time.Duration(seconds * float64(time.Second))
	return l, err
}

func (t *table) Change(_ context.Context, c editor.Change) (editor.AuditEntry, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch rate := c.To["rate"]; {
	case t.err != nil:
		return editor.AuditEntry{}, t.err
	case c.From != t.at(c.Name):
		now := t.row(c.Name)
		return editor.AuditEntry{}, &editor.ConflictError{Name: c.Name, Now: &now}
	case rate != nil && *rate == "-1":
		return editor.AuditEntry{}, &registry.RowError{Field: "rate", Value: "-1", Want: "a number of permits"}
	}
	t.version++
	was := t.rows[c.Name]
	if t.rows[c.Name] = c.To; c.To == nil {
		delete(t.rows, c.Name)
	}
	t.audit = append([]editor.AuditEntry{{ID: int64(t.version), At: time.Now(), Who: c.Who, Why: c.Why, Name: c.Name, From: was, To: c.To}}, t.audit...)
	return t.audit[0], nil
}

func (t *table) Undo(_ context.Context, id int64, _, _ string) (editor.AuditEntry, error) {
	if t.undone != nil {
		return t.undone()
	}
	if id != 1 {
		return editor.AuditEntry{}, fmt.Errorf("%w: %d", editor.ErrNoEntry, id)
	}
	return editor.AuditEntry{ID: 2}, nil
}

func (t *table) Act(ctx context.Context, a editor.Action, do func(context.Context) error) (editor.AuditEntry, error) {
	t.mu.Lock()
	err := t.err
	if err == nil {
		t.audit = append([]editor.AuditEntry{{ID: 1, At: time.Now(), Who: a.Who, Why: a.Why, Name: a.Name, Action: a.What}}, t.audit...)
	}
	t.mu.Unlock()
	if err != nil {
		return editor.AuditEntry{}, err
	}
	return editor.AuditEntry{ID: 1}, do(ctx)
}

func (t *table) History(context.Context, string, int) ([]editor.AuditEntry, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.audit), nil
}

// editable is a console in which everything can be changed, and what became of it.
type editable struct {
	*console.Console
	rows *table
	done []string
}

// lossy is the example's fleet, whose table has lost most of its limits.
func lossy() *fleettest.Fleet {
	source := fleettest.Example()
	source.Adjust(func(i *fleet.Instance) { i.Loads.Before, i.Loads.Gone, i.Loads.Lost = 10, 6, time.Now() })
	return source
}

func newEditable(t *testing.T, access console.Access) *editable {
	e := &editable{rows: newTable()}
	e.Console = newConsole(t, console.Config{
		Source: lossy(), Access: access, Editor: e.rows,
		Penalize: func(_ context.Context, name string, d time.Duration) error {
			e.done = append(e.done, fmt.Sprint("penalize ", name, " ", d))
			return nil
		},
		Reset: func(_ context.Context, name string) error {
			e.done = append(e.done, "reset "+name)
			return nil
		},
		Turn: func(_ context.Context, on bool, who, why string) error {
			e.done = append(e.done, fmt.Sprint("turn ", on, " ", who, " ", why))
			return nil
		},
		Confirm: func(_ context.Context, who, why string) error {
			e.done = append(e.done, "confirm "+who+" "+why)
			return nil
		},
	})
	return e
}

// token returns the token of a page for the user with these credentials.
func (e *editable) token(t *testing.T, user, secret string) string {
	r := local("GET", "/change?name=%2Fibe%2FAvailFare")
	r.SetBasicAuth(user, secret)
	m := regexp.MustCompile(`<meta name="csrf" content="([^"]*)">`).FindStringSubmatch(ask(e, r).Body.String())
	if m == nil {
		return ""
	}
	return m[1]
}

func post(path, body string, headers ...string) *http.Request {
	r := httptest.NewRequest("POST", "http://127.0.0.1:8081/api/"+path, strings.NewReader(body))
	r.RemoteAddr = "127.0.0.1:50000"
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

// orders are all that can be changed, as they are sent.
var orders = map[string]string{
	"save":     `{"name":"/ibe/AvailFare","from":"v0","values":{"rate":"7"},"why":"more"}`,
	"remove":   `{"name":"/ibe/AvailFare","from":"v0","why":"gone"}`,
	"shadow":   `{"name":"/ibe/AvailFare","from":"v0","on":true,"why":"try"}`,
	"undo":     `{"id":1,"why":"wrong"}`,
	"switch":   `{"on":false,"why":"incident"}`,
	"penalize": `{"name":"/ibe/AvailFare","seconds":30,"why":"incident"}`,
	"reset":    `{"name":"/ibe/AvailFare","why":"stuck"}`,
	"confirm":  `{"why":"moved"}`,
}

// Only a user with the right to write may write, and only from a page of this console that was made for that user.
func TestWhoMayWrite(t *testing.T) {
	for what, body := range orders {
		e := newEditable(t, console.Access{Users: users(), Proxies: networks("10.9.0.0/16")})
		ann, bob := e.token(t, "ann", writerToken), e.token(t, "bob", readerToken)
		require.NotEmpty(t, ann)
		require.Empty(t, bob, "who may only read gets no token")
		send := func(user, secret, token string, headers ...string) int {
			r := post(what, body, append([]string{"X-Csrf-Token", token}, headers...)...)
			if user != "" {
				r.SetBasicAuth(user, secret)
			}
			return ask(e, r).Code
		}
		require.Equal(t, 403, send("", "", ""), "nobody")
		require.Equal(t, 403, send("", "", ann), "nobody, with somebody's token")
		require.Equal(t, 403, send("bob", readerToken, ann), "a reader")
		require.Equal(t, 401, send("ann", "guessed-guessed-guessed", ann))
		require.Equal(t, 403, send("ann", writerToken, ""), "no token")
		require.Equal(t, 403, send("ann", writerToken, ann[1:]+"x"), "a wrong token")
		require.Equal(t, 403, send("ann", writerToken, ann, "Sec-Fetch-Site", "cross-site"), "another site's page")
		require.Equal(t, 403, send("ann", writerToken, ann, "Sec-Fetch-Site", "", "Origin", "http://evil.example"), "another site's page, in an old browser")
		require.Equal(t, 415, send("ann", writerToken, ann, "Content-Type", "text/plain"), "a form of another site")
		strangers := users()
		strangers[0].Token += "!"
		other := newEditable(t, console.Access{Users: strangers}).token(t, "ann", strangers[0].Token)
		require.Equal(t, 403, send("ann", writerToken, other), "a token of somebody else of that name")
		eve := post(what, body, "X-Forwarded-User", "eve", "X-Csrf-Token", ann)
		eve.RemoteAddr = "10.9.0.1:1"
		require.Equal(t, 403, ask(e, eve).Code, "another user's token")
		r := local("GET", "/api/"+what, "X-Csrf-Token", ann)
		r.SetBasicAuth("ann", writerToken)
		require.Equal(t, 404, ask(e, r).Code, "not by a link")
		require.Empty(t, e.done)
		require.Zero(t, e.rows.version)
		require.Equal(t, 200, send("ann", writerToken, ann))
		if what != "undo" {
			require.True(t, len(e.done) == 1 || e.rows.version == 1)
		}
	}
}

// A trusted proxy names the user who writes.
func TestProxyUserWrites(t *testing.T) {
	e := newEditable(t, console.Access{Proxies: networks("10.9.0.0/16")})
	r := local("GET", "/change?name=%2Fibe%2FAvailFare", "X-Forwarded-User", "eve")
	r.RemoteAddr = "10.9.0.1:1"
	m := regexp.MustCompile(`<meta name="csrf" content="([^"]*)">`).FindStringSubmatch(ask(e, r).Body.String())
	require.NotNil(t, m)
	w := post("save", orders["save"], "X-Forwarded-User", "eve", "X-Csrf-Token", m[1])
	w.RemoteAddr = "10.9.0.1:1"
	require.Equal(t, 200, ask(e, w).Code)
	require.Equal(t, "eve", e.rows.audit[0].Who)
	w = post("save", orders["save"], "X-Forwarded-User", "eve", "X-Csrf-Token", m[1])
	require.Equal(t, 403, ask(e, w).Code, "the same from elsewhere")
}

// A balancer may send a page's request to another console than the one that has made the page, if both have the same key. A console
// with the same users and another key takes none of its pages: what a page sends does not follow from a user's token.
func TestSeveralConsoles(t *testing.T) {
	access := console.Access{Users: users(), Proxies: networks("10.9.0.0/16"), Key: []byte("a key that both have")}
	by := func(r *http.Request, proxy bool) *http.Request {
		if proxy {
			r.RemoteAddr = "10.9.0.1:1"
			r.Header.Set("X-Forwarded-User", "eve")
			return r
		}
		r.SetBasicAuth("ann", writerToken)
		return r
	}
	one, other := newEditable(t, access), newEditable(t, access)
	access.Key = nil
	alone := newEditable(t, access)
	for _, proxy := range []bool{false, true} {
		m := regexp.MustCompile(`name="csrf" content="([^"]*)">`).FindStringSubmatch(ask(one, by(local("GET", "/"), proxy)).Body.String())
		require.NotNil(t, m)
		send := func(to http.Handler) int {
			return ask(to, by(post("reset", orders["reset"], "X-Csrf-Token", m[1]), proxy)).Code
		}
		require.Equal(t, 200, send(one))
		require.Equal(t, 200, send(other))
		require.Equal(t, 403, send(alone))
	}
}

// A user who has lost the right to write cannot use a page that was made before.
func TestWriterNoMore(t *testing.T) {
	access := console.Access{Users: users(), Key: []byte("a key that both have")}
	before := newEditable(t, access)
	token := before.token(t, "ann", writerToken)
	access.Users[0].Write = false
	now := newEditable(t, access)
	send := func(to http.Handler) *httptest.ResponseRecorder {
		r := post("reset", orders["reset"], "X-Csrf-Token", token)
		r.SetBasicAuth("ann", writerToken)
		return ask(to, r)
	}
	require.Equal(t, 403, send(now).Code)
	contains(t, send(now), "may only read")
	access.Users[0].Write = true
	require.Equal(t, 200, send(newEditable(t, access)).Code)
}

// Errors are reported, and nothing is written.
func TestChangesAreRefused(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	token := e.token(t, "ann", writerToken)
	for name, test := range map[string]struct {
		what, body string
		want       int
		says       string
	}{
		"somebody was faster":       {"save", `{"name":"/ibe/AvailFare","from":"old","values":{"rate":"7"},"why":"x"}`, 409, "meanwhile. The audit table has no entry for that change. Nothing was written."},
		"it is there already":       {"save", `{"name":"/ibe/AvailFare","from":"","values":{"rate":"7"},"why":"x"}`, 409, "meanwhile"},
		"a bad value":               {"save", `{"name":"/ibe/AvailFare","from":"v0","values":{"rate":"-1"},"why":"x"}`, 422, "Rate -1/s: want a number of permits"},
		"saved without values":      {"save", `{"name":"/ibe/AvailFare","from":"v0","why":"x"}`, 422, "has no values for the row"},
		"saved with no values":      {"save", `{"name":"/ibe/AvailFare","from":"v0","values":null,"why":"x"}`, 422, "has no values for the row"},
		"for a blank reason":        {"penalize", `{"name":"x","seconds":3,"why":" "}`, 422, "A reason is needed"},
		"removed without a version": {"remove", `{"name":"/ibe/AvailFare","why":"x"}`, 422, "has no version of the row"},
		"no such entry":             {"undo", `{"id":17,"why":"x"}`, 422, "no such audit entry"},
		"for too long":              {"penalize", `{"name":"x","seconds":3601,"why":"x"}`, 422, "at most 3600 seconds"},
		"for no time":               {"penalize", `{"name":"x","seconds":0,"why":"x"}`, 422, "at most 3600 seconds"},
		"for ever":                  {"penalize", `{"name":"x","seconds":1e300,"why":"x"}`, 422, "at most 3600 seconds"},
		"without a reason":          {"switch", `{"on":false}`, 422, "A reason is needed"},
		"without a reason, too":     {"reset", `{"name":"x"}`, 422, "A reason is needed"},
		"an unknown field":          {"reset", `{"name":"x","why":"y","all":true}`, 400, "cannot be read"},
		"no JSON":                   {"reset", `name=x`, 400, "cannot be read"},
		"a long name":               {"reset", `{"name":"` + strings.Repeat("x", 513) + `","why":"y"}`, 400, "512"},
		"too much":                  {"save", `{"why":"` + strings.Repeat("x", 70_000) + `"}`, 400, "cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			r := post(test.what, test.body, "X-Csrf-Token", token)
			r.SetBasicAuth("ann", writerToken)
			w := ask(e, r)
			require.Equal(t, test.want, w.Code, w.Body)
			require.Contains(t, w.Body.String(), test.says)
			require.Empty(t, e.done)
			require.Zero(t, e.rows.version)
		})
	}
	e.rows.err = &sqlsource.RightError{Right: "UPDATE", Table: "t", Err: errors.New("denied")}
	r := post("save", orders["save"], "X-Csrf-Token", token)
	r.SetBasicAuth("ann", writerToken)
	require.Equal(t, 403, ask(e, r).Code)
}

// The audit records penalties and resets with their author and reason, and cannot undo them. An action that cannot be recorded is not
// done, and one that fails gets a second entry.
func TestActionsAreAudited(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	token := e.token(t, "ann", writerToken)
	send := func(what string) *httptest.ResponseRecorder {
		r := post(what, orders[what], "X-Csrf-Token", token)
		r.SetBasicAuth("ann", writerToken)
		return ask(e, r)
	}
	for _, what := range []string{"penalize", "reset"} {
		require.Equal(t, 200, send(what).Code)
	}
	require.Len(t, e.rows.audit, 2)
	require.Equal(t, []string{"/ibe/AvailFare", "ann", "incident", "hold back for 30 s"},
		[]string{e.rows.audit[1].Name, e.rows.audit[1].Who, e.rows.audit[1].Why, e.rows.audit[1].Action})
	for _, path := range []string{"/change?name=%2Fibe%2FAvailFare", "/changes"} {
		r := local("GET", path)
		r.SetBasicAuth("ann", writerToken)
		w := ask(e, r)
		contains(t, w, "hold back for 30 s", "incident", "reset", "stuck")
		require.NotContains(t, w.Body.String(), "Undo …")
	}
	e.rows.err = editor.ErrNoAudit
	require.Equal(t, 422, send("penalize").Code)
	require.Len(t, e.done, 2)
}

// If the switch was turned and the audit could not be written, the log has the entry.
func TestTurnedWithoutAudit(t *testing.T) {
	var log bytes.Buffer
	c := newConsole(t, console.Config{
		Access: console.Access{Users: users()}, Log: slog.New(slog.NewTextHandler(&log, nil)),
		Turn: func(context.Context, bool, string, string) error {
			return fmt.Errorf("%w: connection refused", console.ErrNotAudited)
		},
	})
	r := local("GET", "/")
	r.SetBasicAuth("ann", writerToken)
	m := regexp.MustCompile(`name="csrf" content="([^"]*)">`).FindStringSubmatch(ask(c, r).Body.String())
	require.NotNil(t, m)
	r = post("switch", `{"on":false,"why":"an incident"}`, "X-Csrf-Token", m[1])
	r.SetBasicAuth("ann", writerToken)
	w := ask(c, r)
	require.Equal(t, 200, w.Code, w.Body)
	contains(t, w, "every call passes")
	for _, text := range []string{"level=WARN", "who=ann", "an incident", "connection refused"} {
		require.Contains(t, log.String(), text)
	}
}

// Without an editor no user can change anything.
func TestNothingToChange(t *testing.T) {
	c := newConsole(t, console.Config{Access: console.Access{Users: users()}})
	for _, path := range []string{"/change?name=x", "/changes", "/api/preview?name=x&values={}"} {
		r := local("GET", path)
		r.SetBasicAuth("ann", writerToken)
		require.Equal(t, 404, ask(c, r).Code)
	}
	r := local("GET", "/")
	r.SetBasicAuth("ann", writerToken)
	require.NotContains(t, ask(c, r).Body.String(), "csrf")
}

// The page has the row, its meaning and its history.
func TestChangePage(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	page := func(name string) *httptest.ResponseRecorder {
		r := local("GET", "/change?name="+name)
		r.SetBasicAuth("ann", writerToken)
		return ask(e, r)
	}
	contains(t, page("%2Fibe%2FAvailFare"), `data-from="v0"`, `value="5"`, "Rate", "Row 7", "shadow on", "No changes yet.")
	contains(t, page("%2Fnew"), `data-from=""`, "saving adds one", ">Add<")
	require.Equal(t, 400, page("").Code)
	_, err := e.rows.Change(t.Context(), editor.Change{Name: "/ibe/AvailFare", From: "v0", To: editor.Values{"rate": editor.Text(7)}, Who: "<b>ann</b>", Why: "<script>more</script>"})
	require.NoError(t, err)
	contains(t, page("%2Fibe%2FAvailFare"), "Rate 5/s → 7/s", "&lt;script&gt;more&lt;/script&gt;", "&lt;b&gt;ann")
	r := local("GET", "/change?name=%2Fibe%2FAvailFare")
	w := ask(e, r)
	contains(t, w, "This page is read-only for you", "readonly")
	require.NotContains(t, w.Body.String(), "Undo …")
}

// A preview describes the effect of a row on the last day's traffic.
func TestPreview(t *testing.T) {
	c := newConsole(t, console.Config{Editor: newTable(), Source: fleettest.New(1, fleettest.Limit{Name: "/ibe/AvailFare", Rate: 5, Granted: 5, Refused: 2})})
	w := ask(c, local("GET", "/api/preview?name=%2Fibe%2FAvailFare&values="+`{"rate":"1","max_wait":"0.25"}`))
	require.Equal(t, 200, w.Code, w.Body)
	contains(t, w, "1/s", "250 ms", "the last day", "refused")
	w = ask(c, local("GET", "/api/preview?name=x&values="+`{"rate":"many"}`))
	require.Equal(t, 200, w.Code, "a value that is half written is no failure")
	contains(t, w, `"error"`, "many")
	require.Equal(t, 400, ask(c, local("GET", "/api/preview?name=x&values=x")).Code)
}

// shadowed is a fleet in which a limit is only tried: a call a second would be refused.
type shadowed struct{ none }

func (shadowed) History(context.Context, string, time.Time) (points []fleet.Point, err error) {
	for i := range 60 {
		points = append(points, fleet.Point{Minute: time.Now().Add(time.Duration(i-60) * time.Minute), Published: true, WouldRefuse: 60})
	}
	return points, nil
}

// Calls that a shadow would refuse have passed: they are traffic of which a new row would refuse some.
func TestPreviewOfAShadow(t *testing.T) {
	c := newConsole(t, console.Config{Editor: newTable(), Source: shadowed{}})
	w := ask(c, local("GET", "/api/preview?name=%2Fibe%2FAvailFare&values="+`{"rate":"0.5","max_wait":"0"}`))
	require.Equal(t, 200, w.Code, w.Body)
	contains(t, w, "50 %")
}

// What a person does beside changing rows is announced to the fleet; that it cannot be announced does not undo it.
func TestActionsAreAnnounced(t *testing.T) {
	var told []fleet.Event
	var confirmed []string
	failing := false
	c := newConsole(t, console.Config{
		Source: lossy(), Access: console.Access{Users: users()}, Editor: newTable(),
		Penalize: func(context.Context, string, time.Duration) error { return nil },
		Reset:    func(context.Context, string) error { return nil },
		Turn:     func(context.Context, bool, string, string) error { return nil },
		Confirm:  func(_ context.Context, who, why string) error { confirmed = append(confirmed, who+" "+why); return nil },
		Announce: func(_ context.Context, e fleet.Event) error {
			told = append(told, e)
			if failing {
				return errors.New("connection refused")
			}
			return nil
		},
	})
	e := &editable{Console: c}
	token := e.token(t, "ann", writerToken)
	do := func(what, body string) int {
		r := post(what, body, "X-Csrf-Token", token)
		r.SetBasicAuth("ann", writerToken)
		return ask(c, r).Code
	}
	require.Equal(t, 200, do("penalize", `{"name":"x","seconds":30,"why":"they ring"}`))
	require.Equal(t, 200, do("reset", `{"name":"x","why":"over"}`))
	require.Equal(t, 200, do("switch", `{"on":false,"why":"incident"}`))
	failing = true
	require.Equal(t, 200, do("switch", `{"on":true,"why":"over"}`))
	require.Equal(t, 200, do("confirm", `{"why":"moved"}`))
	require.Equal(t, 422, do("confirm", `{"why":" "}`))
	require.Equal(t, []fleet.Event{
		{Kind: fleet.Penalized, Limit: "x", For: 30 * time.Second, Who: "ann", Why: "they ring"}, {Kind: fleet.LimitReset, Limit: "x", Who: "ann", Why: "over"},
		{Kind: fleet.SwitchOff, Who: "ann", Why: "incident"}, {Kind: fleet.SwitchOn, Who: "ann", Why: "over"}, {Kind: fleet.LossConfirmed, Who: "ann", Why: "moved"},
	}, told)
	require.Equal(t, []string{"ann moved"}, confirmed)
}

// as sends a change of ann.
func (e *editable) as(t *testing.T, what, body string) *httptest.ResponseRecorder {
	r := post(what, body, "X-Csrf-Token", e.token(t, "ann", writerToken))
	r.SetBasicAuth("ann", writerToken)
	return ask(e, r)
}

// The button that puts a row in shadow, or in force, saves the edit of the form with it, in one change.
func TestShadowKeepsTheEdit(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	w := e.as(t, "shadow", `{"name":"/ibe/AvailFare","from":"v0","on":true,"values":{"rate":"2","shadow":"0"},"why":"try 2/s"}`)
	require.Equal(t, 200, w.Code, w.Body)
	require.Equal(t, []string{"2", "1"}, []string{*e.rows.audit[0].To["rate"], *e.rows.audit[0].To["shadow"]})
	require.Len(t, e.rows.audit, 1)
	w = e.as(t, "shadow", `{"name":"/ibe/AvailFare","from":"v1","on":false,"values":{"rate":"3"},"why":"in earnest"}`)
	require.Equal(t, 200, w.Code, w.Body)
	require.Equal(t, []string{"3", "0"}, []string{*e.rows.audit[0].To["rate"], *e.rows.audit[0].To["shadow"]})
	require.Equal(t, 200, e.as(t, "shadow", `{"name":"/ibe/AvailFare","from":"v2","on":true,"why":"without an edit"}`).Code)
}

// A request that needs a field names it if it is missing. The switch and the shadow have no default.
func TestMissingFieldsAreNamed(t *testing.T) {
	for field, request := range map[string][2]string{
		"on":      {"switch", `{"why":"incident"}`},
		"seconds": {"penalize", `{"name":"x","why":"incident"}`},
		"why":     {"switch", `{"on":true}`},
		"from":    {"remove", `{"name":"x","why":"incident"}`},
		"values":  {"save", `{"name":"x","why":"incident"}`},
	} {
		e := newEditable(t, console.Access{Users: users()})
		w := e.as(t, request[0], request[1])
		require.Equal(t, 422, w.Code, w.Body)
		contains(t, w, `"field":"`+field+`"`)
		require.Empty(t, e.done)
	}
	e := newEditable(t, console.Access{Users: users()})
	w := e.as(t, "shadow", `{"name":"/ibe/AvailFare","from":"v0","why":"try"}`)
	require.Equal(t, 422, w.Code)
	contains(t, w, `"field":"on"`)
	require.Equal(t, 422, e.as(t, "switch", `{"on":null,"why":"incident"}`).Code)
	require.Zero(t, e.rows.version)
}

// A confirmation needs a loss that an instance reports: it would also count for the next loss, which nobody has seen yet.
func TestNothingToConfirm(t *testing.T) {
	source := lossy()
	e := &editable{rows: newTable()}
	e.Console = newConsole(t, console.Config{
		Source: source, Access: console.Access{Users: users()}, Editor: e.rows,
		Confirm: func(context.Context, string, string) error { e.done = append(e.done, "confirm"); return nil },
	})
	require.Equal(t, 200, e.as(t, "confirm", orders["confirm"]).Code)
	none := fleettest.Example()
	e.Console = newConsole(t, console.Config{Source: none, Access: console.Access{Users: users()}, Editor: e.rows, Confirm: func(context.Context, string, string) error {
		e.done = append(e.done, "confirm")
		return nil
	}})
	w := e.as(t, "confirm", orders["confirm"])
	require.Equal(t, 409, w.Code)
	contains(t, w, "nothing to confirm")
	none.Fail(errors.New("connection refused"))
	failing := newConsole(t, console.Config{Source: none, Access: console.Access{Users: users()}, Editor: e.rows, Confirm: func(context.Context, string, string) error { return nil }})
	e.Console = failing
	require.Equal(t, 502, e.as(t, "confirm", orders["confirm"]).Code, "the fleet cannot be read")
	require.Equal(t, []string{"confirm"}, e.done)
	require.Len(t, e.rows.audit, 1)
}

// The undo of a change of the switch names what it does to the fleet, before and after, and is an event like the change itself.
func TestUndoOfTheSwitch(t *testing.T) {
	row := func(on bool) editor.Values {
		return editor.Values{"name": editor.Text("global"), "enabled": editor.Text(on)}
	}
	rows := newTable()
	rows.audit = []editor.AuditEntry{
		{ID: 3, Who: "ann", Why: "over", Table: "t_switch", Name: "global", From: row(false), To: row(true)},
		{ID: 2, Who: "ann", Why: "incident", Table: "t_switch", Name: "global", From: row(true), To: row(false)},
		{ID: 1, Who: "ann", Why: "faster", Name: "/a", From: editor.Values{"rate": editor.Text(5)}, To: editor.Values{"rate": editor.Text(8)}},
	}
	var told []fleet.Event
	e := &editable{rows: rows, Console: newConsole(t, console.Config{
		Access: console.Access{Users: users()}, Editor: rows, Announce: func(_ context.Context, e fleet.Event) error { told = append(told, e); return nil },
	})}
	r := local("GET", "/changes")
	r.SetBasicAuth("ann", writerToken)
	w := ask(e, r)
	contains(t, w, `data-id="3" data-turns="off"`, `data-id="2" data-turns="on"`, `data-id="1">`)
	rows.undone = func() (editor.AuditEntry, error) {
		return editor.AuditEntry{ID: 4, Table: "t_switch", Name: "global", From: row(true), To: row(false)}, nil
	}
	contains(t, e.as(t, "undo", `{"id":3,"why":"it was right"}`), "Undone by change 4. The switch is off: every call passes.")
	require.Equal(t, []fleet.Event{{Kind: fleet.SwitchOff, Who: "ann", Why: "it was right"}}, told)
	rows.undone = func() (editor.AuditEntry, error) {
		return editor.AuditEntry{ID: 5, Name: "/a", From: rows.audit[2].To, To: rows.audit[2].From}, nil
	}
	contains(t, e.as(t, "undo", `{"id":1,"why":"too fast"}`), `"Undone by change 5."`)
	require.Len(t, told, 1)
}

// An undo that comes too late names who has changed the row or the switch since, why, and what differs.
func TestUndoConflict(t *testing.T) {
	value := func(column string, v any) editor.Values { return editor.Values{column: editor.Text(v)} }
	at := time.Date(2026, 3, 1, 9, 30, 0, 0, time.UTC)
	rows := newTable()
	rows.audit = []editor.AuditEntry{
		{ID: 5, At: at, Who: "eve", Why: "no relation", Name: "/other", From: value("rate", 1), To: value("rate", 2)},
		{ID: 4, At: at, Who: "dan", Why: "peak hour", Name: "/a", From: value("rate", 8), To: value("rate", 9)},
		{ID: 3, At: at, Who: "ann", Why: "faster", Name: "/a", From: value("rate", 5), To: value("rate", 8)},
		{ID: 2, At: at, Who: "dan", Why: "all is well", Table: "t_switch", Name: "global", From: value("enabled", 0), To: value("enabled", 1)},
		{ID: 1, At: at, Who: "ann", Why: "incident", Table: "t_switch", Name: "global", From: value("enabled", 1), To: value("enabled", 0)},
	}
	e := &editable{rows: rows, Console: newConsole(t, console.Config{Access: console.Access{Users: users()}, Editor: rows})}
	conflict := func(name string, now editor.Values) {
		rows.undone = func() (editor.AuditEntry, error) {
			c := &editor.ConflictError{Name: name}
			if now != nil {
				c.Now = &editor.Row{Name: name, Values: now}
			}
			return editor.AuditEntry{}, c
		}
	}
	conflict("/a", value("rate", 9))
	w := e.as(t, "undo", `{"id":3,"why":"x"}`)
	require.Equal(t, 409, w.Code)
	contains(t, w, "The row was changed meanwhile by dan on ", "(peak hour). Nothing was written.", `"changes":["Rate 8/s → 9/s"]`)
	conflict("/a", value("rate", 7))
	contains(t, e.as(t, "undo", `{"id":3,"why":"x"}`), "The audit table has no entry for that change", "Rate 8/s → 7/s")
	conflict("/a", nil)
	contains(t, e.as(t, "undo", `{"id":3,"why":"x"}`), "The row was removed meanwhile")
	conflict("global", value("enabled", 1))
	contains(t, e.as(t, "undo", `{"id":1,"why":"x"}`), "The switch was changed meanwhile by dan on ", "(all is well)", "enabled 0 → 1")
}

// A confirmation is in the audit first.
func TestConfirmationIsAudited(t *testing.T) {
	rows := newTable()
	confirmed := 0
	c := newConsole(t, console.Config{Source: lossy(), Access: console.Access{Users: users()}, Editor: rows, Confirm: func(context.Context, string, string) error { confirmed++; return nil }})
	token := (&editable{Console: c}).token(t, "ann", writerToken)
	do := func() int {
		r := post("confirm", `{"why":"moved"}`, "X-Csrf-Token", token)
		r.SetBasicAuth("ann", writerToken)
		return ask(c, r).Code
	}
	require.Equal(t, 200, do())
	require.Equal(t, "confirm that limits are gone from the table", rows.audit[0].Action)
	require.Equal(t, []string{"ann", "moved"}, []string{rows.audit[0].Who, rows.audit[0].Why})
	rows.err = errors.New("connection refused")
	require.Equal(t, 502, do())
	require.Equal(t, 1, confirmed)
}

// The pages Changes and Change show the fleet's problems, too. The switch among the changes does not link to a limit of that
// name.
func TestProblemsOnEveryPage(t *testing.T) {
	source := fleettest.Example()
	source.Adjust(func(i *fleet.Instance) { i.Store = fleet.Store{Down: true, Policy: "closed"} })
	rows := newTable()
	on, off := editor.Values{"name": editor.Text("global"), "enabled": editor.Text(1)}, editor.Values{"name": editor.Text("global"), "enabled": editor.Text(0)}
	rows.audit = []editor.AuditEntry{
		{ID: 2, Who: "ann", Why: "incident", Table: "t_ratelimite_switch", Name: "global", From: on, To: off},
		{ID: 1, Who: "ann", Why: "first", Table: "t_ratelimite_switch", Name: "global", To: on},
	}
	c := newConsole(t, console.Config{Source: source, Access: console.Access{Users: users()}, Editor: rows})
	for _, page := range []string{"/", "/limit?name=%2Fibe%2FAvailFare", "/health", "/holders", "/changes", "/change?name=%2Fibe%2FAvailFare"} {
		contains(t, ask(c, local("GET", page)), "the store does not reply")
	}
	contains(t, ask(c, local("GET", "/changes")), "switch global")
	changes := ask(c, local("GET", "/changes")).Body.String()
	require.NotContains(t, changes, `?name=global"`)
	require.Contains(t, changes, "<div>enabled 1 → 0</div>")
	require.Contains(t, changes, "<div>added</div><div>enabled not set → 1</div>", "it is no row of limits that is rejected")
	contains(t, ask(c, local("GET", "/changes?q=switch+enabled")), "switch global")
}

// The time of a conflict is in the reply as text in UTC, and by itself, for a page to convert it to the reader's zone.
func TestConflictHasItsTime(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	at := time.Date(2026, 3, 1, 9, 30, 0, 0, time.UTC)
	e.rows.audit = []editor.AuditEntry{{ID: 4, At: at, Who: "dan", Why: "peak", Name: "/ibe/AvailFare", From: e.rows.rows["/ibe/AvailFare"], To: e.rows.rows["/ibe/AvailFare"]}}
	w := e.as(t, "save", `{"name":"/ibe/AvailFare","from":"old","values":{"rate":"7"},"why":"x"}`)
	require.Equal(t, 409, w.Code)
	contains(t, w, "by dan on 1 Mar 09:30:00 UTC (peak)", `"at":"2026-03-01T09:30:00Z"`, `"clock":"1 Mar 09:30:00 UTC"`)
}

// The page of a change has a title of its own, and an error in an empty column does not quote NULL.
func TestChangeHasATitle(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	contains(t, ask(e, local("GET", "/change?name=%2Fibe%2FAvailFare")), "<title>Change /ibe/AvailFare · tokenbucket</title>")
	e.rows.err = &registry.RowError{Row: "7", Name: "/ibe/AvailFare", Field: "rate", Value: registry.ShortValue(nil), Want: wanted("rate")}
	w := e.as(t, "save", orders["save"])
	contains(t, w, "Rate has no value: want ")
	require.NotContains(t, w.Body.String(), "NULL")
}

// A word of the filter that begins with a slash is a part of a name, not of a rate.
func TestFilterOfNames(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	change := func(id int64, name string) editor.AuditEntry {
		return editor.AuditEntry{ID: id, Who: "ann", Why: "more", Name: name, From: editor.Values{"rate": editor.Text(5)}, To: editor.Values{"rate": editor.Text(8)}}
	}
	e.rows.audit = []editor.AuditEntry{change(2, "/search"), change(1, "/book")}
	for filter, ids := range map[string][]string{"%2Fs": {"#2"}, "5%2Fs": {"#2", "#1"}, "rate+%2Fb": {"#1"}, "%2Fx": nil} {
		body := ask(e, local("GET", "/changes?q="+filter)).Body.String()
		require.Equal(t, len(ids), strings.Count(body, `<span class="muted">#`), filter)
		for _, id := range ids {
			require.Contains(t, body, id, filter)
		}
	}
}

// A user who has signed in can sign out: the browser's name and token are refused once, so that it drops them.
func TestSignOut(t *testing.T) {
	c := newConsole(t, console.Config{Access: console.Access{Users: users(), Proxies: networks("10.9.0.0/16")}})
	by := func(user, secret, path string) *httptest.ResponseRecorder {
		r := local("GET", path)
		if user != "" {
			r.SetBasicAuth(user, secret)
		}
		return ask(c, r)
	}
	contains(t, by("ann", writerToken, "/"), `<a class="user" href="signout?was=ann">Sign out</a>`)
	require.NotContains(t, by("", "", "/").Body.String(), "signout")
	w := by("ann", writerToken, "/signout?was=ann")
	require.Equal(t, 401, w.Code)
	require.NotEmpty(t, w.Header().Get("WWW-Authenticate"))
	contains(t, w, "You are signed out.")
	require.Equal(t, 303, by("bob", readerToken, "/signout?was=ann").Code, "another user has signed in")
	require.Equal(t, 303, by("", "", "/signout?was=ann").Code)
	r := local("GET", "/signout?was=eve", "X-Forwarded-User", "eve")
	r.RemoteAddr = "10.9.0.1:1"
	require.Equal(t, 303, ask(c, r).Code, "the proxy signs in")
	require.Zero(t, c.FailedSignIns())
}
