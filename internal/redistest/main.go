package redistest

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9/logging"
	"go.uber.org/goleak"
)

// Dialing makes goleak ignore a goroutine of go-redis: after a client was closed whose server was unreachable, the goroutine tries to connect
// for another second.
var Dialing = goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial")

// Quiet disables the logger of go-redis, which is global and logs every failed dial. Main calls it. A TestMain without Main must call it once,
// before the first client is created.
func Quiet() { logging.Disable() }

// Main is the body of TestMain. It runs the tests, stops the shared server and calls stop, fails if a goroutine is left, prints the number of
// skipped tests, and exits. The output of slog.Default() is printed only if a test failed, because on a busy machine limiters may log short
// outages.
func Main(m *testing.M, stop ...func()) {
	Quiet()
	log := keepLog()
	code := m.Run()
	StopShared()
	for _, s := range stop {
		s()
	}
	if code == 0 {
		// A batch without waiters ends with the timeout of its store, and clients may sleep between attempts.
		if err := Poll(time.Minute, func() error { return goleak.Find(Dialing) }); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL:", err)
			code = 1
		}
	}
	skips.print()
	if code != 0 {
		if lines := log.String(); lines != "" {
			fmt.Fprintf(os.Stderr, "logged meanwhile:\n%s", lines)
		}
	}
	os.Exit(code)
}

// keptLog is the output of slog.Default().
type keptLog struct {
	mu    sync.Mutex
	lines bytes.Buffer
}

// keepLog redirects slog.Default() to the log that it returns.
func keepLog() *keptLog {
	l := &keptLog{}
	slog.SetDefault(slog.New(slog.NewTextHandler(l, nil)))
	return l
}

func (l *keptLog) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines.Write(line)
}

func (l *keptLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines.String()
}

// skips counts the tests that were skipped, by the missing program.
var skips missing

type missing struct {
	mu    sync.Mutex
	tests map[string]int
}

func (s *missing) add(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tests == nil {
		s.tests = map[string]int{}
	}
	s.tests[err.Error()]++
}

// print prints a line for each missing program. If the package passes, go test shows the line only with -v or when it runs in the directory
// of the package.
func (s *missing) print() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, cause := range slices.Sorted(maps.Keys(s.tests)) {
		fmt.Printf("skipped: %d tests: %s\n", s.tests[cause], cause)
	}
}

// InOneGoroutine skips a test of one goroutine if the race detector is on, which finds nothing there and takes ten times as long.
func InOneGoroutine(t *testing.T) {
	if Raced {
		t.Skip("one goroutine has no race")
	}
}
