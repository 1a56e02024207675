package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
)

// Main does the job and exits, if this process is one that Start has started with that variable. If not, it returns. It is for
// TestMain:
//
//	func TestMain(m *testing.M) {
//		worker.Main(variable, work)
//		redistest.Main(m)
//	}
//
// The context ends when the process is to end. Each event is one write to the standard output, so none is lost with a process that is
// killed. tell is safe for concurrent use.
func Main[Job, Event any](variable string, work func(ctx context.Context, job *Job, tell func(Event)) error) {
	text := os.Getenv(variable)
	if text == "" {
		return
	}
	if err := do(text, work); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func do[Job, Event any](text string, work func(context.Context, *Job, func(Event)) error) error {
	job := new(Job)
	if err := json.Unmarshal([]byte(text), job); err != nil {
		return err
	}
	var mu sync.Mutex
	out := json.NewEncoder(os.Stdout)
	tell := func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		_ = out.Encode(e)
	}
	ctx, end := context.WithCancel(context.Background())
	defer end()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		end()
	}()
	return work(ctx, job, tell)
}
