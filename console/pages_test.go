package console_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// none is a fleet of which nothing is known.
type none struct{ err error }

func (n none) Snapshot(context.Context) (*fleet.Snapshot, error) {
	return &fleet.Snapshot{At: time.Now()}, n.err
}

func (n none) History(context.Context, string, time.Time) ([]fleet.Point, error) { return nil, n.err }
func (n none) Events(context.Context, time.Time) ([]fleet.Event, error)          { return nil, n.err }

// hangs never answers.
type hangs struct{ none }

func (hangs) Snapshot(ctx context.Context) (*fleet.Snapshot, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// The vendored files are those of npm: see SHA256SUMS.
func TestVendored(t *testing.T) {
	list, err := os.Open("assets/vendor/SHA256SUMS")
	require.NoError(t, err)
	defer list.Close()
	named := map[string]bool{"SHA256SUMS": true}
	for lines := bufio.NewScanner(list); lines.Scan(); {
		sum, name, _ := strings.Cut(lines.Text(), "  ")
		text, err := os.ReadFile(filepath.Join("assets/vendor", name))
		require.NoError(t, err)
		is := sha256.Sum256(text)
		require.Equal(t, sum, hex.EncodeToString(is[:]), name)
		named[name] = true
	}
	files, err := os.ReadDir("assets/vendor")
	require.NoError(t, err)
	for _, f := range files {
		require.True(t, named[f.Name()], "%s has no checksum", f.Name())
	}
	require.True(t, named["LICENSE.uplot"])
}

// All modules are small, and name nothing outside.
func TestModules(t *testing.T) {
	files, err := filepath.Glob("assets/js/*.js")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		require.LessOrEqual(t, strings.Count(string(text), "\n"), 300, f)
		for _, m := range regexp.MustCompile(`from "([^"]+)"|import\("([^"]+)"\)`).FindAllStringSubmatch(string(text), -1) {
			require.FileExists(t, filepath.Join("assets/js", m[1]+m[2]), f)
		}
		require.NotRegexp(t, `innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(`, string(text), f)
		require.NotRegexp(t, `https?://`, strings.ReplaceAll(string(text), "http://www.w3.org/2000/svg", ""), f)
	}
}

// Each address in a page is relative, is answered under any prefix, and may be kept if it is a file.
func TestUnderAPrefix(t *testing.T) {
	c := newConsole(t, console.Config{})
	mux := http.NewServeMux()
	mux.Handle("/deep/er/", http.StripPrefix("/deep/er", c))
	server := httptest.NewServer(mux)
	defer server.Close()
	get := func(path string) (*http.Response, string) {
		res, err := http.Get(server.URL + path)
		require.NoError(t, err)
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		return res, string(text)
	}
	for _, page := range []string{"", "limit?name=%2Fibe%2FAvailFare", "health"} {
		res, text := get("/deep/er/" + page)
		require.Equal(t, 200, res.StatusCode)
		for _, m := range regexp.MustCompile(`(?:href|src)="([^"]*)"`).FindAllStringSubmatch(text, -1) {
			address := strings.ReplaceAll(m[1], "&amp;", "&")
			if strings.HasPrefix(address, "#") {
				continue
			}
			require.NotRegexp(t, `^(/|[a-z]+:)`, address)
			res, body := get("/deep/er/" + address)
			require.Equal(t, 200, res.StatusCode, address)
			if strings.HasPrefix(address, "assets/") {
				require.Contains(t, res.Header.Get("Cache-Control"), "immutable")
				require.NotEmpty(t, body)
			}
		}
	}
	res, _ := get("/deep/er/assets/old/console.css")
	require.Equal(t, 404, res.StatusCode)
	require.Equal(t, "no-store", res.Header.Get("Cache-Control"))

	bare := httptest.NewServer(http.StripPrefix("/x", c))
	defer bare.Close()
	res, err := http.Get(bare.URL + "/x?y=//evil.example")
	require.NoError(t, err)
	require.Equal(t, "/x/", res.Request.URL.Path)
}

// The page of a limit and its stream have a table by priority if there are calls below Normal.
func TestPriorities(t *testing.T) {
	const card = `id="priorities-card" aria-labelledby="priorities-title"`
	synctest.Test(t, func(t *testing.T) {
		source := fleettest.Example()
		c := newConsole(t, console.Config{Source: source})
		contains(t, ask(c, local("GET", "/limit?name=%2Fibe%2FAvailFare")), card+" hidden>")
		source.Adjust(func(i *fleet.Instance) {
			i.Priorities = []fleet.Priority{{Limit: "/ibe/AvailFare", Name: "lowest", Waiting: 1000}}
		})
		v := &viewer{}
		leave, _ := look(c, "/stream/limit?name=%2Fibe%2FAvailFare", v)
		time.Sleep(5 * time.Second)
		contains(t, ask(c, local("GET", "/limit?name=%2Fibe%2FAvailFare")), card+">", `<td data-title="Priority">normal</td>`, `<td data-title="Priority">lowest</td>`, `class="number">3,000</td>`)
		contains(t, ask(c, local("GET", "/limit?name=%2Fcold%2FReport")), card+" hidden>")
		leave()
		c.Close()
		v.mu.Lock()
		defer v.mu.Unlock()
		require.Contains(t, v.text.String(), `{"name":"lowest","granted":0,"refused":0,"waiting":3000,"p99_ms":0}`)
	})
}

// A page names its problem, and is served all the same.
func TestProblemsAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fail := fleettest.Example()
		fail.Fail(errors.New("dial tcp 10.0.0.1:6379: connection refused"))
		silent := fleettest.New(0)
		for says, source := range map[string]console.Source{
			"The state of the fleet cannot be read: dial tcp 10.0.0.1:6379: connection refused": fail,
			"Redis has not replied in time": hangs{},
			"No instance has reported yet":  silent,
			"1 row is rejected":             fleettest.Example(),
		} {
			c := newConsole(t, console.Config{Source: source})
			for _, path := range []string{"/", "/limit?name=%2Fibe%2FAvailFare", "/health"} {
				began := time.Now()
				w := ask(c, local("GET", path))
				require.Contains(t, []int{200, 404}, w.Code)
				contains(t, w, says, "</html>")
				require.LessOrEqual(t, time.Since(began), time.Second)
			}
			c.Close()
		}
	})
}

var (
	hostile = regexp.MustCompile(`<img|<script>|<[^>]*\son[a-z]+=`)
	quoted  = regexp.MustCompile(`"[^"]*"`)
)

// bare is a page without the values of attributes.
func bare(w *httptest.ResponseRecorder) string { return quoted.ReplaceAllString(w.Body.String(), `""`) }

// Names are others' words, wherever they stand.
func TestHostileNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, name := range []string{
			`<img src=x onerror="alert(1)">`, `"><script>alert(1)</script>`, `'onmouseover='alert(1)`, "</title><script>", "{{.Token}}", "javascript:alert(1)", `\u003cscript\u003e`, "a&name=b#c%00", " data: x", "\u202eetouq",
		} {
			c := newConsole(t, console.Config{Source: fleettest.New(1, fleettest.Limit{
				Name: name, Rate: 1, Granted: 1, Refused: 1, Keys: []string{name}, Rejected: nil,
			}, fleettest.Limit{Name: name + "2", Rejected: &fleet.Rejected{Row: name, Name: name, Field: name, Value: name, Want: name, Consequence: name}})})
			list := ask(c, local("GET", "/"))
			require.Equal(t, 200, list.Code)
			m := regexp.MustCompile(`<a href="(limit\?name=[^"]*)">`).FindStringSubmatch(list.Body.String())
			require.NotNil(t, m, list.Body.String())
			page := ask(c, local("GET", "/"+strings.ReplaceAll(m[1], "&amp;", "&")))
			require.Equal(t, 200, page.Code, "the link of %q is not the page's", name)
			health := ask(c, local("GET", "/health"))
			for _, w := range []*httptest.ResponseRecorder{list, page, health} {
				markup := bare(w)
				require.False(t, hostile.MatchString(markup), "%q: %q", name, hostile.FindString(markup))
				require.NotRegexp(t, `(?:href|src)="javascript:`, w.Body.String())
				require.Equal(t, 1, strings.Count(w.Body.String(), "</title>"))
			}
		}
	})
}

func TestNoSuchPage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newConsole(t, console.Config{})
		require.Equal(t, 404, ask(c, local("GET", "/nowhere")).Code)
		require.Equal(t, 404, ask(c, local("GET", "/limit?name=nobody")).Code)
		require.Equal(t, 400, ask(c, local("GET", "/limit")).Code)
		require.Equal(t, 400, ask(c, local("GET", "/limit?name="+strings.Repeat("x", 513))).Code)
		require.NotEqual(t, 200, ask(c, local("GET", "/assets/../console.go")).Code)
		require.Equal(t, 404, ask(c, local("GET", "/assets/x/doc.go")).Code)
	})
}

// Ten thousand limits: the page has the first of them, those that are refused most first.
func TestManyLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newConsole(t, console.Config{Source: fleettest.New(3, fleettest.Many(10_000)...)})
		w := ask(c, local("GET", "/"))
		require.Equal(t, 50, strings.Count(w.Body.String(), `<a href="limit?name=`))
		contains(t, w, "10,000 limits")
		require.Less(t, w.Body.Len(), 100_000)
	})
}

// While no instance reports, the state of the switch is not known: it is as it was in the last report, and not missing.
func TestSwitchOfASilentFleet(t *testing.T) {
	source := fleettest.Example()
	was := fleet.Switch{}
	source.Adjust(func(i *fleet.Instance) { i.Beat, i.Switch = i.Beat.Add(-3*time.Minute), was })
	text := func() string {
		c := newConsole(t, console.Config{Source: source})
		body := ask(c, local("GET", "/health")).Body.String()
		_, body, _ = strings.Cut(body, `<p id="switch">`)
		body, _, _ = strings.Cut(body, "</p>")
		return body
	}
	require.Equal(t, "Not known: no instance reports.", text())
	was = fleet.Switch{Known: true, Off: true, Read: time.Now().Add(-3 * time.Minute)}
	require.Equal(t, "Not known: no instance reports. It was off in the last report, 3 min ago.", text())
	was.Off = false
	require.Equal(t, "Not known: no instance reports. It was on in the last report, 3 min ago.", text())
	source.Adjust(nil)
	require.Equal(t, "No switch is configured: limits always apply.", text())
}

// withoutEvents is a fleet whose events cannot be read.
type withoutEvents struct{ *fleettest.Fleet }

func (withoutEvents) Events(context.Context, time.Time) ([]fleet.Event, error) {
	return nil, errors.New("connection refused")
}

// Pages show events without scripts, too, and do not say that there are none if they cannot be read.
func TestEventsAreNotNone(t *testing.T) {
	c := newConsole(t, console.Config{Source: fleettest.Example()})
	contains(t, ask(c, local("GET", "/limit?name=%2Fibe%2FAvailFare")), "held back for 30 s as an upstream asked")
	contains(t, ask(c, local("GET", "/limit?name=%2Fibe%2FBook")), "None in the last 15 minutes.")
	lost := newConsole(t, console.Config{Source: withoutEvents{fleettest.Example()}})
	for _, page := range []string{"/limit?name=%2Fibe%2FAvailFare", "/health"} {
		body := ask(lost, local("GET", page)).Body.String()
		_, list, _ := strings.Cut(body, `<ol class="marks"`)
		list, _, _ = strings.Cut(list, "</ol>")
		require.Contains(t, list, "What happened cannot be read: connection refused", page)
		require.NotContains(t, list, "None", page)
	}
	away := fleettest.Example()
	away.Fail(errors.New("connection refused"))
	body := ask(newConsole(t, console.Config{Source: away}), local("GET", "/limit?name=%2Fibe%2FAvailFare")).Body.String()
	require.Contains(t, body, "Not known: no figures are available.")
	require.NotContains(t, body, "None in")
}
