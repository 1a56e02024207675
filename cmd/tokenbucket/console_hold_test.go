package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// A console by itself holds back what it says it holds back: also rows that name more than a rate. It does not say so of names that have
// no bucket that calls use.
func TestConsoleHoldsBack(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	db, dsn := newLimits(t)
	require.NoError(t, sqlsource.CreateTable(t.Context(), db, sqlsource.SQLite))
	execSQL(t, db, `INSERT INTO t_ratelimite_conf (name, rate, max_wait, "window", window_limit, concurrent, disabled, per_key) VALUES
		('/a', 100, 0, NULL, NULL, NULL, 0, 0), ('/w', 100, 0, 60, 1000, 50, 0, 0), ('/k/*', 100, 0, NULL, NULL, NULL, 0, 1), ('/off', 5, 0, NULL, NULL, NULL, 1, 0)`)
	shared := []string{"--redis", server.Addr, "--limits", dsn, "--interval", "200ms"}
	gateway := startGateway(t, append([]string{"--upstream", upstream.URL}, shared...)...)
	console, _ := startConsole(t, append(shared, "--create-table", "--console-users", usersFile(t))...)
	status, page, err := ask("GET", console, "", "")
	require.NoError(t, err)
	require.Equal(t, 200, status)
	token := pageToken.FindStringSubmatch(page)
	require.NotNil(t, token, page)
	for name, want := range map[string]string{"/a": "", "/w": "", "/k/*": "each key", "/off": "disabled", "/none": "unknown"} {
		for _, order := range []string{`penalize {"name":%q,"seconds":300,"why":"x"}`, `reset {"name":%q,"why":"x"}`, `penalize {"name":%q,"seconds":300,"why":"x"}`} {
			what, body, _ := strings.Cut(fmt.Sprintf(order, name), " ")
			status, said, err := ask("POST", console+"api/"+what, token[1], body)
			require.NoError(t, err)
			if want != "" {
				require.NotEqual(t, 200, status, "%s %s: %s", what, name, said)
				require.Contains(t, said, want)
				continue
			}
			require.Equal(t, 200, status, "%s %s: %s", what, name, said)
		}
		if want == "" {
			eventually(t, func() error {
				status, _, _, err := get(gateway.url + (&url.URL{Path: name}).EscapedPath())
				if err == nil && status != http.StatusTooManyRequests {
					err = fmt.Errorf("%s: %d", name, status)
				}
				return err
			})
		}
	}
}

// The console offers the changes that are possible: none without limits, and the switch where there is one.
func TestConsoleTellsWhatItChanges(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	args := []string{"--redis", server.Addr, "--console-users", usersFile(t)}
	_, log := startConsole(t, args...)
	require.Contains(t, log.String(), `changes="none: there are no --limits"`)
	file := filepath.Join(t.TempDir(), "limits.yaml")
	require.NoError(t, os.WriteFile(file, []byte("limits: []\n"), 0o600))
	_, log = startConsole(t, append(args, "--limits", "file://"+file, "--switch", "redis:the-switch")...)
	require.Contains(t, log.String(), `changes="penalties, resets, switch"`)
}

// startConsole runs a console by itself, and returns its address and its log.
func startConsole(t *testing.T, args ...string) (address string, log *output) {
	ctx, stop := context.WithCancel(t.Context())
	log = new(output)
	ended := make(chan int)
	go func() {
		ended <- run(ctx, patient, append([]string{"console", "--console-listen", "127.0.0.1:0"}, args...), new(bytes.Buffer), log)
	}()
	t.Cleanup(func() { stop(); <-ended })
	eventually(t, func() error {
		m := regexp.MustCompile(`console=(http://\S+)`).FindStringSubmatch(log.String())
		if m == nil {
			return fmt.Errorf("it has not printed its address: %s", log)
		}
		address = m[1]
		return nil
	})
	return address, log
}
