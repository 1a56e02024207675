package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// A gateway that cannot start says why, not that time is over.
func TestStartErrorHasItsCause(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, table limitsTable) {
		nobody := strings.Replace(strings.Replace(table.dsn, "root:@", "gateway:hush@", 1), "postgres@", "gateway:hush@", 1)
		nowhere := strings.Replace(table.dsn, "/limits_", "/nowhere_", 1)
		for _, c := range []struct {
			dsn    string
			create bool
			want   string
		}{
			{nobody, false, map[string]string{"MariaDB": "Access denied for user 'gateway'@", "PostgreSQL": `role "gateway" does not exist`}[table.server]},
			{nowhere, true, map[string]string{"MariaDB": "Unknown database 'nowhere_", "PostgreSQL": `database "nowhere_`}[table.server]},
			{table.dsn, false, "--create-table creates a missing table"},
		} {
			args := []string{"--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--store", "memory", "--wait", "4s", "--limits", c.dsn} // within which a slow machine has asked, too
			if c.create {
				args = append(args, "--create-table")
			}
			p := launch(t, nil, args...)
			require.Equal(t, exitUsage, p.exit(t))
			lines := strings.Split(strings.TrimSpace(p.out.String()), "\n")
			last := lines[len(lines)-1]
			require.Contains(t, last, "tokenbucket: --limits ")
			require.Contains(t, last, c.want)
			require.NotContains(t, last, "deadline exceeded")
			require.NotContains(t, p.out.String(), "what was before stays in force", "there was nothing before")
			require.NotContains(t, p.out.String(), "hush")
		}
	})
}

// The first load is no second one, even if it was waited for.
func TestFirstLoadIsNoSecond(t *testing.T) {
	t.Parallel()
	db, dsn := newLimits(t)
	execSQL(t, db, "CREATE TABLE other (x)")
	p := launch(t, nil, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--limits", dsn, "--store", "memory")
	p.waitFor(t, `level=ERROR msg="registry: limits cannot be loaded yet"`)
	other := startGateway(t, "--upstream", "http://127.0.0.1:1", "--limits", dsn, "--store", "memory", "--create-table")
	p.waitFor(t, "msg=ready")
	require.NotContains(t, p.out.String(), "loaded again")
	require.NotContains(t, other.out.String(), "ERROR")
}

// "ready" says whether Redis is there, and why not.
func TestReadyTellsOfRedis(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	hung := redistest.Start(t)
	require.NoError(t, hung.Stop())
	for addr, want := range map[string]string{
		redis.Addr:             `level=INFO msg=ready .* redis=ok`,
		"127.0.0.1:1":          `level=WARN msg=ready .* redis="dial tcp 127.0.0.1:1: connect: connection refused"`,
		"nowhere.invalid:6379": `level=WARN msg=ready .* redis=".*nowhere.invalid.*"`,
		hung.Addr:              `level=WARN msg=ready .* redis="no reply yet"`,
	} {
		t.Run(want, func(t *testing.T) {
			_, dsn := newLimits(t)
			p := startGateway(t, "--upstream", "http://127.0.0.1:1", "--limits", dsn, "--create-table", "--redis", addr)
			require.Regexp(t, want, p.out.String())
		})
	}
}

// A dead upstream is logged once, not once for each call.
func TestDeadUpstreamIsToldOnce(t *testing.T) {
	t.Parallel()
	p := startGateway(t, memoryArgs(t, "http://127.0.0.1:1", "--upstream", "/other=http://127.0.0.1:2")...)
	for range 100 {
		for _, path := range []string{"/x", "/other/x"} {
			status, _, _, err := get(p.url + path)
			require.NoError(t, err)
			require.Equal(t, http.StatusBadGateway, status)
		}
	}
	require.LessOrEqual(t, strings.Count(p.out.String(), "an upstream failed"), 4, "two upstreams, and the test may take longer than ten seconds")
	require.Contains(t, p.out.String(), "upstream=http://127.0.0.1:1 kind=refused calls=1 status=502")
	require.Contains(t, p.out.String(), "upstream=http://127.0.0.1:2 kind=refused calls=1 status=502")
	require.Equal(t, 200.0, value(p.scrape(t), "tokenbucket_gateway_upstream_errors_total"))
}
