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

// Dialing has goleak overlook what go-redis leaves for a second after a client was closed whose server was away: a goroutine
// that still tries to reach it.
var Dialing = goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial")

// Quiet silences go-redis, which has one logger in a program and writes a line for every failed dial. TestMain calls it, once
// and before any client is made; Main does so itself.
func Quiet() { logging.Disable() }

// Main is what TestMain does: it runs the tests, stops the shared server and what else there is to stop, fails if a goroutine is
// left, tells how many tests were skipped, and exits. What is logged to slog.Default() is printed only if a test failed: on a busy
// machine a store may be away for a moment, and a limiter that was given no logger says so.
func Main(m *testing.M, stop ...func()) {
	Quiet()
	log := keepLog()
	code := m.Run()
	StopShared()
	for _, s := range stop {
		s()
	}
	if code == 0 {
		// A batch that nobody waits for any more ends when its store's timeout does, and clients may sleep between their attempts.
		if err := Poll(time.Minute, func() error { return goleak.Find(Dialing) }); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL:", err)
			code = 1
		}
	}
	skips.tell()
	if code != 0 {
		if lines := log.String(); lines != "" {
			fmt.Fprintf(os.Stderr, "logged meanwhile:\n%s", lines)
		}
	}
	os.Exit(code)
}

// keptLog is what was logged to slog.Default().
type keptLog struct {
	mu    sync.Mutex
	lines bytes.Buffer
}

// keepLog has slog.Default() write to the log that it returns.
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

// skips are the tests that were skipped for want of a program, by what was missing.
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

// tell prints a line for each program that was missing. If the package passes, go test shows it only with -v or when it is
// run in the package's directory.
func (s *missing) tell() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, what := range slices.Sorted(maps.Keys(s.tests)) {
		fmt.Printf("skipped: %d tests: %s\n", s.tests[what], what)
	}
}
