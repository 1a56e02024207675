package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// limitsFile is a file of limits that is replaced as an editor does it.
type limitsFile string

func newLimitsFile(t *testing.T, text string) limitsFile {
	t.Helper()
	f := limitsFile(filepath.Join(t.TempDir(), "limits.yaml"))
	f.write(t, text)
	return f
}

func (f limitsFile) write(t *testing.T, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(string(f)+"~", []byte(text), 0o600))
	require.NoError(t, os.Rename(string(f)+"~", string(f)))
}

// start runs a gateway of its own memory before an upstream that answers 200.
func (f limitsFile) start(t *testing.T, more ...string) *process {
	t.Helper()
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	return startGateway(t, append([]string{"--upstream", upstream.URL, "--limits", "file://" + string(f), "--store", "memory", "--interval", "50ms"}, more...)...)
}

// A gateway follows its file, keeps the good rows, and reports the bad ones as it does those of a table.
func TestLimitsFromFile(t *testing.T) {
	t.Parallel()
	passes, refused := map[int]int{http.StatusOK: 8}, map[int]int{http.StatusServiceUnavailable: 8}
	file := newLimitsFile(t, "limits:\n  - {name: /a, rate: 0.001, cache: 0}\n  - {name: /bad, rate: -5}\n")
	p := file.start(t)
	require.Equal(t, map[int]int{http.StatusOK: 1, http.StatusTooManyRequests: 7}, p.calls(t, "/a"))
	require.Equal(t, refused, p.calls(t, "/bad"))
	require.Equal(t, passes, p.calls(t, "/no/row"))
	p.becomes(t, http.StatusOK, `bad row: registry: row limits.yaml:3: bucket "/bad": rate "-5": want a number of permits per second from 1e-9 to 2^53, or 0: nothing passes; its calls are refused`)
	require.Equal(t, passes, file.start(t, "--bad-rows", "pass").calls(t, "/bad"))

	file.write(t, "limits:\n  - {name: /a, rate: 0.001, cache: 0}\n  - {name: /bad, rate: 100000}\n  - {name: /zero, rate: 0}\n")
	p.loads(t, 2)
	require.Equal(t, passes, p.calls(t, "/bad"))
	require.Equal(t, refused, p.calls(t, "/zero"))
	file.write(t, "limits:\n  - {name: /zero, rate: 10000\n")
	p.waitFor(t, "registry: limits could not be loaded, so the earlier limits stay in force")
	require.Contains(t, p.out.String(), "limits.yaml: line 2: did not find expected ',' or '}': want YAML")
	require.Equal(t, refused, p.calls(t, "/zero"))
	file.write(t, "limits: []\n")
	p.becomes(t, http.StatusOK, "there are no limits")
	require.Contains(t, p.out.String(), "more than half of the limits are gone from the table; they stay in force until further loads agree")
	require.NoError(t, os.Remove(string(file)))
	eventually(t, func() error {
		if p.stats(t).Loads.Failed < 2 {
			return fmt.Errorf("no load has failed")
		}
		return nil
	})
	require.Equal(t, passes, p.calls(t, "/a"))
}

func TestCheckFile(t *testing.T) {
	t.Parallel()
	check := func(limits string, more ...string) (int, string) {
		status, out, errs := execute(context.Background(), append([]string{"check", "--upstream", "http://u:1", "--store", "memory", "--wait", "1s", "--limits", limits}, more...)...)
		return status, out + errs
	}
	file := newLimitsFile(t, "limits:\n  - {name: /a, rate: 2.5, cache: 0.3}\n")
	good := "file://" + string(file)
	status, out := check(good)
	require.Equal(t, exitOK, status, out)
	require.Equal(t, "ok    settings\nok    file "+string(file)+"\nok    row limits.yaml: /a: 2.5/s, saves up 2.5, waits up to 300 ms\nok    rows: ok\n", out)
	status, out = check(good, "--quota")
	require.Equal(t, 1, status, out)
	require.Contains(t, out, `FAIL  registry: row limits.yaml:2: bucket "/a": rate "2.5": want a whole number of calls in any second`)
	for _, c := range []struct{ want, limits, flag, value string }{
		{`want file://FILE without parameters`, "file://", "", ""},
		{`want file://FILE without parameters`, good + "?mode=ro", "", ""},
		{`--switch "sql": want none or redis:KEY: the limits are in a file`, good, "--switch", "sql"},
		{`--table limits: want none: the limits are in a file`, good, "--table", "limits"},
		{`no such file`, "file:///no/such/file", "--fail", "open"},
	} {
		args := []string{}
		if c.flag != "" {
			args = []string{c.flag, c.value}
		}
		status, out = check(c.limits, args...)
		require.NotEqual(t, exitOK, status, out)
		require.Contains(t, out, c.want)
	}
	file.write(t, "limits: {}\n")
	status, out = check(good)
	require.Equal(t, 1, status, out)
	require.Contains(t, out, "line 1: limits a map: want a list, [] for none")
}
