package main

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// answers counts the answers to eight calls of a tenant.
func (p *process) answers(t *testing.T, path, tenant string) map[int]int {
	t.Helper()
	statuses := map[int]int{}
	for range 8 {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url+path, nil)
		require.NoError(t, err)
		request.Header.Set("X-Tenant", tenant)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		statuses[response.StatusCode]++
	}
	return statuses
}

// of are the figures of a limit.
func (s *stats) of(name string) limitStats {
	for _, l := range s.Limits {
		if l.Name == name {
			return l
		}
	}
	return limitStats{}
}

var (
	allPass = map[int]int{http.StatusOK: 8}
	onePass = map[int]int{http.StatusOK: 1, http.StatusTooManyRequests: 7}
	noPass  = map[int]int{http.StatusTooManyRequests: 8}
)

// A row in shadow refuses nothing, counts the calls that it would have refused, and is marked wherever an operator may look.
func TestShadowRow(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		p := table.start(t)
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait, shadow) VALUES ('/dry', 0.001, 0, 1), ('/real', 0.001, 0, 0), ('/zero', 0, 0, 1), ('/bad', -5, 0, 1)")
		p.loads(t, 2)
		for _, path := range []string{"/dry", "/zero", "/bad"} {
			require.Equal(t, allPass, p.calls(t, path), path)
		}
		require.Equal(t, onePass, p.calls(t, "/real"))
		s := p.stats(t)
		dry, zero, real := s.of("/dry"), s.of("/zero"), s.of("/real")
		require.Equal(t, [3]float64{1, 0, 7}, [3]float64{dry.Granted, dry.Refused, dry.WouldRefuse})
		require.Equal(t, [3]float64{0, 0, 8}, [3]float64{zero.Granted, zero.Bypassed, zero.WouldRefuse})
		require.Equal(t, [3]float64{1, 7, 0}, [3]float64{real.Granted, real.Refused, real.WouldRefuse})
		require.True(t, dry.Shadow)
		require.False(t, real.Shadow)
		require.Equal(t, 3, s.Loads.Shadow)
		require.Equal(t, 7, s.Calls.Refused)
		require.Contains(t, p.out.String(), `level=WARN msg="registry: limits are in shadow: they count calls and refuse none" limits=3 buckets="/bad, /dry, /zero"`)
		_, text := p.readiness()
		require.Contains(t, text, "shadow: 3 limits refuse no call: /bad, /dry, /zero")
		require.Contains(t, text, "its calls pass, and count as refused: it is in shadow")
		_, _, metrics, err := get(p.admin + "/metrics")
		require.NoError(t, err)
		for _, line := range []string{"tokenbucket_gateway_limits_in_shadow 3", `tokenbucket_decisions_total{bucket="/dry",by="snapshot",outcome="refused",priority="",shadow="true"} `,
			`tokenbucket_gateway_bypassed_total{bucket="/zero",by="shadow",result="passed"} 8`} {
			if !strings.Contains(metrics, strings.Replace(line, "snapshot", "store", 1)) {
				require.Contains(t, metrics, line)
			}
		}

		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET shadow = 0")
		p.waitFor(t, `level=WARN msg="registry: no limit is in shadow any longer: all refuse calls"`)
		require.Equal(t, onePass, p.calls(t, "/dry"), "the bucket of a shadow is its own")
		require.Equal(t, map[int]int{http.StatusServiceUnavailable: 8}, p.calls(t, "/bad"))

		all := table.start(t, "--shadow", "--unknown", "refuse")
		for _, path := range []string{"/dry", "/real", "/zero", "/bad", "/no/row"} {
			require.Equal(t, allPass, all.calls(t, path), path)
		}
		s = all.stats(t)
		require.True(t, s.Loads.AllShadow)
		require.Equal(t, 7.0, s.of("/dry").WouldRefuse)
		require.Equal(t, 8.0, s.Others.WouldRefuse)
		require.Contains(t, all.out.String(), `level=WARN msg="registry: every limit is in shadow: it counts calls and refuses none" limits=3`)
		_, text = all.readiness()
		require.Contains(t, text, "shadow: all limits, by --shadow: calls are counted, none is refused")
	})
}

// Rows with a * limit all below together, or each tenant by itself, and a change of the row reaches the buckets of all tenants.
func TestTenants(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		p := table.start(t, "--key", "path+header:X-Tenant")
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait, per_key) VALUES ('/ibe/*', 0.001, 0, 1), ('/ibe/Book', 0.001, 0, 0), ('/shop/*', 0.001, 0, 0), ('/ibe/Book|vip', 1000000, 0, 0)")
		p.loads(t, 2)
		require.Equal(t, onePass, p.answers(t, "/ibe/AvailFare", "acme"))
		require.Equal(t, noPass, p.answers(t, "/ibe/Price", "acme"), "one bucket for a tenant, whatever the path")
		require.Equal(t, onePass, p.answers(t, "/ibe/Price", "zenith"))
		require.Equal(t, onePass, p.answers(t, "/ibe/Price", "acme|zenith"))
		require.Equal(t, onePass, p.answers(t, "/ibe/Book", "acme"), "a row of its own, for all together")
		require.Equal(t, noPass, p.answers(t, "/ibe/Book/", "zenith"))
		require.Equal(t, allPass, p.answers(t, "/ibe/Book", "vip"))
		require.Equal(t, onePass, p.answers(t, "/shop/a", "acme"))
		require.Equal(t, noPass, p.answers(t, "/shop/b/c", "zenith"))
		require.Equal(t, allPass, p.answers(t, "/SHOP/b", "acme"), "letter case counts")
		for i := range 50 {
			require.Positive(t, p.answers(t, "/ibe/x", fmt.Sprint("tenant ", i))[http.StatusOK])
		}
		s := p.stats(t)
		require.Equal(t, 53, s.Loads.Keys)
		require.Equal(t, 53.0, s.of("/ibe/*").Granted, "counted by the row")
		_, _, metrics, err := get(p.admin + "/metrics")
		require.NoError(t, err)
		require.NotContains(t, metrics, "acme")
		require.NotContains(t, metrics, "tenant")
		require.Contains(t, metrics, `bucket="/ibe/*"`)
		require.Contains(t, metrics, "tokenbucket_gateway_limit_keys 53")

		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET rate = 1000000 WHERE name = '/ibe/*'")
		p.loads(t, 2)
		for _, tenant := range []string{"acme", "zenith", "tenant 1"} {
			eventually(t, func() error { // the next permit was 1000 s away
				if got := p.answers(t, "/ibe/Price", tenant); got[http.StatusOK] != 8 {
					return fmt.Errorf("%v", got)
				}
				return nil
			})
		}
	})
}

// With one part, a row for each key is one for each value of what its * stands for.
func TestEachClient(t *testing.T) {
	t.Parallel()
	file := newLimitsFile(t, "limits:\n  - {name: '*', rate: 0.001, cache: 0, per_key: true}\n  - {name: vip, rate: 1000000}\n")
	p := file.start(t, "--key", "header:X-Tenant", "--unknown", "refuse")
	require.Equal(t, onePass, p.answers(t, "/a", "acme"))
	require.Equal(t, noPass, p.answers(t, "/b", "acme"))
	require.Equal(t, onePass, p.answers(t, "/a", "zenith"))
	require.Equal(t, onePass, p.answers(t, "/a", "zen|ith"))
	require.Equal(t, allPass, p.answers(t, "/a", "vip"))
	file.write(t, "limits:\n  - {name: 'a*b', rate: 1}\n  - {name: '*', rate: 0.001, cache: 0, per_key: true}\n")
	p.waitFor(t, "want a * at its end only, for all names that begin so")
	p.waitFor(t, `consequence="it limits nothing: such a name matches no call"`)
}

// What names a bucket can change while a gateway runs, but not from one part to several: that needs a new process.
func TestKeyIsReloaded(t *testing.T) {
	t.Parallel()
	file := newLimitsFile(t, "limits:\n  - {name: acme, rate: 0.001, cache: 0}\n")
	settings := newLimitsFile(t, "key: header:X-Other\n")
	p := file.start(t, "--config", string(settings))
	require.Equal(t, allPass, p.answers(t, "/a", "acme"))
	settings.write(t, "key: header:X-Tenant\n")
	require.NoError(t, p.Process.Signal(syscall.SIGHUP))
	p.waitFor(t, `msg="the settings were reloaded" changed=key`)
	require.Equal(t, onePass, p.answers(t, "/a", "acme"))
	settings.write(t, "key: path+header:X-Tenant\n")
	require.NoError(t, p.Process.Signal(syscall.SIGHUP))
	p.waitFor(t, `level=WARN msg="changed settings take effect only after a restart" settings=key`)
	require.Equal(t, noPass, p.answers(t, "/a", "acme"), "the key from before")
}
