package console_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
)

// A failed sign-in is logged with the client's address and without a token. Successful ones are not, nor are requests without
// credentials.
func TestFailedSignIns(t *testing.T) {
	for name, test := range map[string]struct {
		headers      []string
		user, secret string
		want         string // the end of the log line; "" if there is none
	}{
		"a wrong token":              {user: "ann", secret: "a guess of a token", want: `client=192.0.2.7 user="\"ann\"" why="There is no user with this name and token." omitted=0`},
		"another user's token":       {user: "ann", secret: readerToken, want: `user="\"ann\""`},
		"a token in place of a name": {user: readerToken, want: `user="\"(a token)\""`},
		"a name of several lines":    {user: "ann\nlevel=INFO " + strings.Repeat("x", 100), secret: "a guess", want: `user="\"(no user's name, 115 bytes)\"" why`},
		"a token after a blank":      {user: " " + readerToken, secret: "a guess", want: `user="\"(no user's name, 23 bytes)\""`},
		"a token with a typo":        {user: readerToken + "x", want: `user="\"(no user's name, 23 bytes)\""`},
		"a line of the users' file":  {user: "read bob " + readerToken, want: `user="\"(no user's name, 31 bytes)\""`},
		"a wrong bearer token":       {headers: []string{"Authorization", "Bearer a guess of a token"}, want: `client=192.0.2.7 user="\"\""`},
		"no header of ours":          {headers: []string{"Authorization", "a guess of a token"}, want: `user="\"\""`},
		"a proxy without one name":   {headers: []string{"X-Forwarded-User", ""}, want: "The proxy's X-Forwarded-User is not one name."},
		"nobody":                     {},
		"who is known":               {user: "bob", secret: readerToken},
		"a host that is not known":   {headers: []string{"Host", "evil.example"}, user: "ann", secret: "a guess"},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			c := newConsole(t, console.Config{
				Access: console.Access{Users: users(), Proxies: networks("10.9.0.0/16"), Forwarders: networks("10.8.0.0/16")},
				Log:    slog.New(slog.NewTextHandler(&log, nil)),
			})
			r := local("GET", "/", append(test.headers, "X-Forwarded-For", "203.0.113.1, 192.0.2.7, 10.8.0.1")...)
			r.RemoteAddr, r.Host = "10.9.0.1:1", "10.0.0.1"
			if h := r.Header.Get("Host"); h != "" {
				r.Host = h
			}
			if test.user != "" {
				r.SetBasicAuth(test.user, test.secret)
			}
			ask(c, r)
			for _, secret := range []string{"guess", readerToken, writerToken} {
				require.NotContains(t, log.String(), secret)
			}
			if test.want == "" {
				require.Empty(t, log.String())
				require.Zero(t, c.FailedSignIns())
				return
			}
			require.Contains(t, log.String(), "level=WARN msg=\"console: a sign-in failed\" client=")
			require.Contains(t, log.String(), test.want)
			require.Equal(t, 1, strings.Count(log.String(), "\n"))
			require.EqualValues(t, 1, c.FailedSignIns())
		})
	}
	_, err := console.New(console.Config{Source: none{}, Access: console.Access{Forwarders: make([]netip.Prefix, 1)}})
	require.ErrorIs(t, err, console.ErrInvalid)
}

// Many attempts do not flood the log: it has at most five lines in any second, and counts the others.
func TestManyFailedSignIns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		c := newConsole(t, console.Config{Access: console.Access{Users: users()}, Log: slog.New(slog.NewTextHandler(&log, nil))})
		lines := func(tries int) (lines int) {
			was := strings.Count(log.String(), "\n")
			for i := range tries {
				w := ask(c, local("GET", "/api/history?name=x", "Authorization", fmt.Sprint("Bearer guess ", i)))
				require.Equal(t, http.StatusUnauthorized, w.Code)
			}
			return strings.Count(log.String(), "\n") - was
		}
		require.Equal(t, 3, lines(3))
		time.Sleep(900 * time.Millisecond)
		require.Equal(t, 2, lines(100))
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, 3, lines(100), "three of the last second's are older than that")
		require.Contains(t, log.String(), "omitted=98")
		time.Sleep(time.Hour)
		require.Equal(t, 1, lines(1))
		require.True(t, strings.HasSuffix(log.String(), "omitted=97\n"), log.String())
		require.EqualValues(t, 204, c.FailedSignIns())
	})
}

// A refused change is logged with its sender, also if the sender has no right to write or the body cannot be read; many of them
// do not flood the log.
func TestRefusedWritesAreLogged(t *testing.T) {
	for name, test := range map[string]struct {
		user, secret, body string
		headers            []string
		want               []string
	}{
		"nobody":            {body: orders["switch"], want: []string{`who=""`, "client=127.0.0.1", "Changes need a name and a token"}},
		"a reader":          {user: "bob", secret: readerToken, body: orders["switch"], want: []string{"who=bob", "may only read"}},
		"another site":      {user: "ann", secret: writerToken, body: orders["switch"], headers: []string{"Sec-Fetch-Site", "cross-site"}, want: []string{"who=ann", "did not come from it"}},
		"no JSON":           {user: "ann", secret: writerToken, body: "on=false", want: []string{"who=ann", "cannot be read"}},
		"a field is absent": {user: "ann", secret: writerToken, body: `{"why":"incident"}`, want: []string{"who=ann", "is missing"}},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			c := newConsole(t, console.Config{
				Access: console.Access{Users: users()}, Editor: newTable(), Turn: func(context.Context, bool, string, string) error { return nil },
				Log: slog.New(slog.NewTextHandler(&log, nil)),
			})
			send := func() int {
				r := post("switch", test.body, append([]string{"X-Csrf-Token", (&editable{Console: c}).token(t, "ann", writerToken)}, test.headers...)...)
				if test.user != "" {
					r.SetBasicAuth(test.user, test.secret)
				}
				return ask(c, r).Code
			}
			require.GreaterOrEqual(t, send(), 400)
			require.Equal(t, 1, strings.Count(log.String(), `level=WARN msg="console: change refused" what=switch`), log.String())
			for _, text := range test.want {
				require.Contains(t, log.String(), text)
			}
			if test.user != "" {
				return
			}
			for range 100 {
				send()
			}
			require.Less(t, strings.Count(log.String(), "\n"), 100, "the lines are bounded")
		})
	}
}
