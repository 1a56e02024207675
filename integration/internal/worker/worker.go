// Package worker runs the test binary again as another process of a fleet.
package worker

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Worker is a process that runs a job until it is ended. Its methods are safe for concurrent use.
type Worker[Event any] struct {
	Pid int
	// End ends the process, also a stopped one, and returns the events that it has written to its standard output, one JSON value each. The
	// test fails if the process fails, unless the process was killed.
	End func() []Event

	process *os.Process
	killed  atomic.Bool

	mu     sync.Mutex
	events []Event
}

// Start starts the test binary with the job, as JSON, in an environment variable, and with any further variables, given as "NAME=value".
// Its TestMain runs the job until its standard input ends. The process does not outlive the test.
func Start[Event any](t testing.TB, variable string, job any, env ...string) *Worker[Event] {
	t.Helper()
	return StartProgram[Event](t, os.Args[0], variable, job, env...)
}

// StartProgram is Start for a program whose main function calls Main, at a path.
func StartProgram[Event any](t testing.TB, path, variable string, job any, env ...string) *Worker[Event] {
	t.Helper()
	text, err := json.Marshal(job)
	require.NoError(t, err)
	cmd := exec.Command(path)
	cmd.Env = append(append(os.Environ(), "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=10"), env...) // not a second
	cmd.Env = append(cmd.Env, variable+"="+string(text))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	w := &Worker[Event]{Pid: cmd.Process.Pid, process: cmd.Process}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines := json.NewDecoder(out); ; {
			var e Event
			if lines.Decode(&e) != nil {
				return
			}
			w.mu.Lock()
			w.events = append(w.events, e)
			w.mu.Unlock()
		}
	}()
	w.End = sync.OnceValue(func() []Event {
		_ = in.Close()
		_ = w.Continue()
		<-read
		if err := cmd.Wait(); !w.killed.Load() {
			assert.NoError(t, err) // of any goroutine
		}
		return w.Events()
	})
	t.Cleanup(func() { w.End() })
	return w
}

// Events returns what the process has written so far.
func (w *Worker[Event]) Events() []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.events)
}

// Stop makes the process hang (SIGSTOP) until Continue.
func (w *Worker[Event]) Stop() error { return w.process.Signal(syscall.SIGSTOP) }

// Continue ends Stop.
func (w *Worker[Event]) Continue() error { return w.process.Signal(syscall.SIGCONT) }

// Kill kills the process (SIGKILL). Its output so far is kept.
func (w *Worker[Event]) Kill() error {
	w.killed.Store(true)
	return w.process.Kill()
}
