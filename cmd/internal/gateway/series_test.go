package gateway

import (
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Counters of events that alerts count exist before the first event: increase() does not see the first value of a series.
func TestCountersBeginAtZero(t *testing.T) {
	c := &config{routes: routes{}}
	require.Empty(t, c.routes.add("http://one:1"))
	require.Empty(t, c.routes.add("/two=http://two:2"))
	p, err := newProxy(c, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	limits, err := registry.New(registry.Static{{Name: "/a", Rate: 1}, {Name: "/off", Disabled: true}, {Name: "/x*", Rate: 1}}, tokenbucket.NewMemoryStore(),
		registry.WithLogger(slog.New(slog.DiscardHandler)), registry.WithLimiterOptions(tokenbucket.WithObserver(p.metrics.observer)))
	require.NoError(t, err)
	defer limits.Close()
	p.metrics.limits.Store(limits)
	series := func(name, label string) map[string]float64 {
		families, err := p.metrics.gatherCalls()
		require.NoError(t, err)
		all := map[string]float64{}
		for _, f := range families {
			for _, s := range f.GetMetric() {
				text := ""
				for _, l := range s.GetLabel() {
					if l.GetName() == label || l.GetName() == "kind" {
						text += l.GetValue() + " "
					}
				}
				if f.GetName() == name {
					all[text] = s.GetCounter().GetValue()
				}
			}
		}
		return all
	}
	require.Equal(t, map[string]float64{"/a ": 0, "/x* ": 0}, series("tokenbucket_gateway_penalties_total", "bucket"))
	require.Equal(t, map[string]float64{"name http://one:1 ": 0, "other http://one:1 ": 0, "refused http://one:1 ": 0, "timeout http://one:1 ": 0,
		"name http://two:2 ": 0, "other http://two:2 ": 0, "refused http://two:2 ": 0, "timeout http://two:2 ": 0},
		series("tokenbucket_gateway_upstream_errors_total", "upstream"))

	a, err := limits.Enter(t.Context(), "/a")
	require.NoError(t, err)
	a.Leave()
	require.Equal(t, map[string]float64{"/a timeout ": 0, "/a unavailable ": 0, "/a lock ": 0, "/a corrupt ": 0, "/a other ": 0, "/a crowded ": 0},
		series("tokenbucket_failures_total", "bucket"), "of a bucket in use")
}

// Rows that match no call are counted, and told by /readyz.
func TestUnmatchedRowsAreCounted(t *testing.T) {
	c := &config{routes: routes{}}
	require.Empty(t, c.routes.add("http://one:1"))
	quiet := slog.New(slog.DiscardHandler)
	p, err := newProxy(c, quiet)
	require.NoError(t, err)
	limits, err := registry.New(registry.Static{{Name: "/a", Rate: 1}, {Name: "b", Rate: 1}}, tokenbucket.NewMemoryStore(), registry.WithLogger(quiet),
		registry.WithNames(func(row string) string {
			if row == "b" {
				return "a path begins with a slash"
			}
			return ""
		}))
	require.NoError(t, err)
	defer limits.Close()
	p.metrics.limits.Store(limits)
	a := &admin{config: c, began: time.Now(), proxy: p}
	p.metrics.add(a)
	w := httptest.NewRecorder()
	p.metrics.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Contains(t, w.Body.String(), "\ntokenbucket_gateway_unmatched_rows 1\n")
}

// What operations.md quotes of logs and of /readyz is written so in the code.
func TestMessagesAreQuotedAsWritten(t *testing.T) {
	var code strings.Builder
	root := os.DirFS("../../..")
	require.NoError(t, fs.WalkDir(root, ".", func(file string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := fs.ReadFile(root, file)
		code.Write(text)
		return err
	}))
	verbs := regexp.MustCompile(`%[-+.#0-9]*[a-z]`)
	written := verbs.ReplaceAllString(code.String(), "…")
	page, err := os.ReadFile("../../../docs/operations.md")
	require.NoError(t, err)
	_, section, ok := strings.Cut(string(page), "## What you see when\n")
	require.True(t, ok)
	section, _, _ = strings.Cut(section, "\n## ")
	quoted := 0
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.ReplaceAll(strings.TrimSpace(line), `\|`, "¦"), "|")
		if len(cells) != 7 {
			continue
		}
		for _, cell := range []string{cells[2], cells[5]} {
			for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
				if strings.HasPrefix(m[1], "ALTER ") || strings.ContainsAny(m[1], "0123456789=") || strings.HasPrefix(m[1], "--") { // no message
					continue
				}
				for _, part := range strings.FieldsFunc(m[1], func(r rune) bool { return r == '…' || r == ';' }) {
					if part = strings.Trim(part, " :,"); len(part) > 3 {
						quoted++
						require.True(t, strings.Contains(written, part), "%q of the message %q", part, m[1])
					}
				}
			}
		}
	}
	require.Greater(t, quoted, 40)
}
