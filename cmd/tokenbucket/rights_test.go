package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// userCommand returns the rights that docs/security.md gives to the command.
func userCommand(t *testing.T) (rights []string) {
	text, err := os.ReadFile("../../docs/security.md")
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if given, ok := strings.CutPrefix(line, "ACL SETUSER command reset on >PASSWORD "); ok {
			rights = strings.Fields(given)
		}
	}
	require.NotEmpty(t, rights)
	return rights
}

// A gateway with the rights of security.md does everything, and Redis refuses it nothing: limits of each kind, waiters, an outage's share,
// what its console reads and changes, check and confirm. Without the channels of semaphores the log says what is missing, once, and without a
// command for a person's action the console does.
func TestRightsOfTheCommand(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	admin := server.Client(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/places" {
			time.Sleep(200 * time.Millisecond)
		}
	}))
	defer upstream.Close()
	start := func(user string, rights []string) (p *process, do func(what, order string) (int, string)) {
		args := []any{"ACL", "SETUSER", user, "reset", "on", ">hush"}
		for _, r := range rights {
			args = append(args, r)
		}
		require.NoError(t, admin.Do(t.Context(), args...).Err())
		file := newLimitsFile(t, "limits:\n  - {name: /rate, rate: 1000}\n  - {name: /window, rate: 1000, window: 1h, window_limit: 1000}\n"+
			"  - {name: /places, rate: none, concurrent: 1, concurrent_wait: 20}\n")
		p = startGateway(t, "--upstream", upstream.URL, "--limits", "file://"+string(file), "--redis", "redis://"+user+":hush@"+server.Addr, "--interval", "100ms",
			"--switch", "redis:tokenbucket:switch", "--fail", "share:2", "--console-users", usersFile(t), "--store-timeout", "20s")
		for _, path := range []string{"/rate", "/window", "/none"} {
			status, body := get4(p.url + path)
			require.Equal(t, 200, status, body)
		}
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() { _, _ = get4(p.url + "/places") })
		}
		all.Wait()
		return p, func(what, order string) (int, string) {
			_, page, err := ask("GET", p.admin+"/console/", "", "")
			require.NoError(t, err)
			status, said, err := ask("POST", p.admin+"/console/api/"+what, pageToken.FindStringSubmatch(page)[1], order)
			require.NoError(t, err)
			return status, said
		}
	}
	refused := func(user string) (all []string) {
		entries, err := admin.Do(t.Context(), "ACL", "LOG").Slice()
		require.NoError(t, err)
		for _, e := range entries {
			if text := fmt.Sprint(e); strings.Contains(text, "username:"+user+" ") || strings.Contains(text, "username "+user+" ") {
				all = append(all, text)
			}
		}
		return all
	}
	rights := userCommand(t)
	p, do := start("command", rights)
	for what, order := range map[string]string{"penalize": `{"name":"/rate","seconds":1,"why":"x"}`, "reset": `{"name":"/rate","why":"x"}`} {
		status, said := do(what, order)
		require.Equal(t, 200, status, said)
	}
	for _, on := range []string{"false", "true"} {
		status, said := do("switch", `{"on":`+on+`,"why":"x"}`)
		require.Equal(t, 200, status, said)
	}
	for _, page := range []string{"", "health", "holders", "limit?name=%2Fplaces"} {
		shows(t, p.admin+"/console/"+page, "<main")
	}
	status, out, errs := execute(context.Background(), "check", "--upstream", "http://u:1", "--limits", "sqlite:///nowhere", "--redis", "redis://command:hush@"+server.Addr)
	require.NotContains(t, strings.ReplaceAll(out+errs, "FAIL  table", ""), "FAIL", status)
	require.Contains(t, out, "ok    redis: evicts nothing")
	require.Empty(t, refused("command"))
	require.NotContains(t, p.out.String(), "SUBSCRIBE")

	without := func(drop ...string) []string {
		return slices.DeleteFunc(slices.Clone(rights), func(r string) bool { return slices.Contains(drop, r) })
	}
	p, _ = start("deaf", without("&tokenbucket:*"))
	require.Equal(t, 1, strings.Count(p.out.String(), "give the user +subscribe and the channels &tokenbucket:semaphore:{/places}"), p.out.String())
	_, do = start("weak", rights)
	require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", "weak", "-set").Err())
	code, said := do("reset", `{"name":"/rate","why":"x"}`)
	require.Equal(t, 502, code, said)
	require.Contains(t, said, "the user of Redis needs all of +exists +get +getrange +mget +pexpire +pttl +set +time")
}
