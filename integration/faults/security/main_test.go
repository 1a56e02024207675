// Package security tests the claims on which the guard of a fleet depends: which rights in Redis the library needs, that it works over TLS,
// and that no password gets into an error or a log.
package security

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

// secret is the password of all users in these tests, and wrong is one that is not.
const (
	secret = "c0rrect-h0rse"
	wrong  = "battery-st4ple"
)

// logged is all that the library, the client of Redis and the drivers have written to their default logs.
var logged log

type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Printf makes it a logger of go-redis.
func (l *log) Printf(_ context.Context, format string, v ...any) {
	_, _ = fmt.Fprintf(l, format+"\n", v...)
}

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug})))
	redis.SetLogger(&logged)
	code := m.Run()
	redistest.StopShared()
	dbtest.StopShared()
	fail := func(why any) { fmt.Fprintln(os.Stderr, "FAIL:", why); code = 1 }
	if text := logged.String(); strings.Contains(text, secret) || strings.Contains(text, wrong) {
		fail("a password was logged:\n" + text)
	}
	if code == 0 {
		if err := goleak.Find(redistest.Dialing); err != nil {
			fail(err)
		}
	}
	os.Exit(code)
}
