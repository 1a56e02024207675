package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Actions in the console that change no row are in the audit table, those on a switch in Redis too. --create-table creates the table, even
// at a gateway whose console is read-only.
func TestConsoleAudit(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	db, dsn := newLimits(t)
	args := []string{"--upstream", upstream.URL, "--limits", dsn, "--redis", server.Addr, "--interval", "200ms", "--switch", "redis:the-switch"}
	startGateway(t, append(args, "--create-table")...)
	audited := func() (n int) {
		require.NoError(t, db.QueryRow("SELECT COUNT(*) FROM t_ratelimite_audit").Scan(&n))
		return n
	}
	require.Zero(t, audited())
	execSQL(t, db, `INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/a', 5, 0)`)
	console := startGateway(t, append(args, "--console-users", usersFile(t))...).admin + "/console/"
	shows(t, console, "/a")
	status, page, err := ask("GET", console, "", "")
	require.NoError(t, err)
	require.Equal(t, 200, status)
	token := pageToken.FindStringSubmatch(page)
	require.NotNil(t, token, page)
	for i, order := range []string{
		`penalize {"name":"/a","seconds":30,"why":"the upstream is down"}`, `reset {"name":"/a","why":"it is back"}`, `switch {"on":false,"why":"an incident"}`,
	} {
		var what, body string
		_, err := fmt.Sscanf(order, "%s", &what)
		require.NoError(t, err)
		body = order[len(what)+1:]
		status, said, err := ask("POST", console+"api/"+what, token[1], body)
		require.NoError(t, err)
		require.Equal(t, 200, status, said)
		require.Equal(t, i+1, audited())
	}
	_, page, err = ask("GET", console+"changes", "", "")
	require.NoError(t, err)
	for _, text := range []string{"hold back for 30 s", "the upstream is down", "it is back", "switch off: every call passes", "an incident", ">ann</td>"} {
		require.Contains(t, page, text)
	}
	shows(t, console, "The switch is off")
}
