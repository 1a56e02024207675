package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// named is an upstream that answers its name.
func named(t *testing.T, name string) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, name) }))
	t.Cleanup(server.Close)
	return server.URL
}

// SIGHUP applies the settings that can change, ignores wrong ones, and never ends a gateway.
func TestGatewayReloads(t *testing.T) {
	t.Parallel()
	db, dsn := newLimits(t)
	path := filepath.Join(t.TempDir(), "gateway.yaml")
	h, held := newHold(t)
	settings := func(upstream, more string) {
		t.Helper()
		text := fmt.Sprintf("limits: %s\nstore: memory\ncreate-table: true\nupstream: [%s, /held=%s]\n%s", dsn, upstream, held, more)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	hangUp := func(p *process, text string) {
		t.Helper()
		n := strings.Count(p.out.String(), text)
		require.NoError(t, p.Process.Signal(syscall.SIGHUP))
		eventually(t, func() error {
			if strings.Count(p.out.String(), text) == n {
				return errors.New("it has not printed " + text)
			}
			return nil
		})
	}
	settings(named(t, "first"), "interval: 1h\nlog-level: info\n")
	p := startGateway(t, "--config", path)
	is := func(want string) {
		t.Helper()
		_, _, body, err := get(p.url + "/x")
		require.NoError(t, err)
		require.Equal(t, want, body)
	}
	is("first")
	underWay := h.ask(p)

	execSQL(t, db, "INSERT INTO t_ratelimite_conf (name, rate) VALUES ('/y', 5)")
	settings(named(t, "second"), "interval: 1h\nlog-level: debug\n")
	hangUp(p, `level=INFO msg="the settings were reloaded" changed=log-level,upstream`)
	is("second")
	eventually(t, func() error {
		if p.rate(t) != 5 {
			return errors.New("the limits are not loaded")
		}
		return nil
	})
	settings("ftp://nowhere", "")
	hangUp(p, `level=ERROR msg="the settings could not be reloaded, so the previous ones stay in force" error="`+path)
	is("second")
	settings(named(t, "third"), "interval: 30m\ninbound: true\nlog-level: debug\n")
	hangUp(p, `level=WARN msg="changed settings take effect only after a restart" settings=inbound,interval`)
	is("third")
	close(h.release)
	require.Equal(t, answer{http.StatusOK, "in the end", nil}, <-underWay, "nobody was cut off")
	for range 20 {
		require.NoError(t, p.Process.Signal(syscall.SIGHUP))
	}
	is("third")
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	require.Equal(t, exitOK, p.exit(t))
}

// Not while it waits for its limits, nor while it drains.
func TestHangUpNeverKills(t *testing.T) {
	t.Parallel()
	db, dsn := newLimits(t)
	execSQL(t, db, "CREATE TABLE other (x)")
	h, upstream := newHold(t)
	p := launch(t, nil, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", upstream, "--limits", dsn, "--store", "memory", "--drain", "1m")
	p.waitFor(t, "cannot be loaded yet")
	require.NoError(t, p.Process.Signal(syscall.SIGHUP))
	_ = startGateway(t, "--upstream", upstream, "--limits", dsn, "--store", "memory", "--create-table")
	p.waitFor(t, "msg=ready")
	p.findAddresses()
	underWay := h.ask(p)
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	p.waitFor(t, "msg=draining")
	require.NoError(t, p.Process.Signal(syscall.SIGHUP))
	close(h.release)
	require.Equal(t, http.StatusOK, (<-underWay).status)
	require.Equal(t, exitOK, p.exit(t))
}

// A log in JSON has durations that people read.
func TestJSONLog(t *testing.T) {
	t.Parallel()
	h, upstream := newHold(t)
	close(h.release)
	p := launch(t, nil, append(memoryArgs(t, upstream, "--log-format", "json", "--drain", "1m30s"), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")...)
	p.waitFor(t, `"msg":"ready"`)
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	require.Equal(t, exitOK, p.exit(t))
	found := false
	for line := range strings.Lines(p.out.String()) {
		var entry map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &entry))
		found = found || entry["msg"] == "draining" && entry["atMost"] == "1m30s" && entry["delay"] == "0s"
	}
	require.True(t, found, "%s", p.out)
}

func TestVersion(t *testing.T) {
	for _, args := range [][]string{{"version"}, {"--version"}} {
		status, out, _ := execute(context.Background(), args...)
		require.Equal(t, exitOK, status)
		require.Regexp(t, `^tokenbucket \S+ \(.*go1\.\d+.*\)\n$`, out)
	}
}

// A shell learns the values of flags.
func TestCompletion(t *testing.T) {
	for flag, want := range map[string]string{
		"--store": "script\nlock\nmemory\n", "--fail": "closed\nopen\nshare:\n", "--log-level": "debug\ninfo\nwarn\nerror\n", "--config": "yaml\nyml\n",
	} {
		status, out, _ := execute(context.Background(), "__complete", "gateway", flag, "")
		require.Equal(t, exitOK, status)
		require.Contains(t, out, want)
	}
	status, out, _ := execute(context.Background(), "gateway", "--help")
	require.Equal(t, exitOK, status)
	require.Contains(t, out, "143")
}
