// Package worker runs the test binary again as another process of a fleet.
package worker

import (
	"encoding/json"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Worker is a process that does a job until it is ended.
type Worker[Event any] struct {
	Pid int
	// End ends it, and returns the events that it has written to its standard output, one JSON value each.
	End func() []Event
}

// Start starts the test binary with the job, as JSON, in an environment variable. Its TestMain does the job until its standard
// input ends.
func Start[Event any](t *testing.T, variable string, job any) *Worker[Event] {
	t.Helper()
	text, err := json.Marshal(job)
	require.NoError(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), variable+"="+string(text))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var events []Event
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines := json.NewDecoder(out); ; {
			var e Event
			if lines.Decode(&e) != nil {
				return
			}
			events = append(events, e)
		}
	}()
	end := sync.OnceValue(func() []Event {
		_ = in.Close()
		<-read
		require.NoError(t, cmd.Wait())
		return events
	})
	t.Cleanup(func() { end() })
	return &Worker[Event]{cmd.Process.Pid, end}
}
