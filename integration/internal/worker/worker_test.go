package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

const (
	countEnv = "TOKENBUCKET_WORKER_COUNT"
	extraEnv = "TOKENBUCKET_WORKER_EXTRA"
)

type counting struct{ Each, Goroutines int }

type counted struct {
	N     int
	Extra string
}

func TestMain(m *testing.M) {
	Main(countEnv, count)
	redistest.Main(m)
}

// count sends numbers from many goroutines, and one more when it is to end.
func count(ctx context.Context, j *counting, tell func(counted)) error {
	var all sync.WaitGroup
	for g := range j.Goroutines {
		all.Go(func() {
			for i := range j.Each {
				tell(counted{N: g*j.Each + i})
			}
		})
	}
	all.Wait()
	<-ctx.Done()
	tell(counted{N: -1, Extra: os.Getenv(extraEnv)})
	return nil
}

func await(t *testing.T, w *Worker[counted], n int) {
	t.Helper()
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		if got := len(w.Events()); got != n {
			return fmt.Errorf("%d events", got)
		}
		return nil
	}))
}

// A worker does its job, sends all of its events, and learns that it is to end, even if it was stopped.
func TestWorker(t *testing.T) {
	w := Start[counted](t, countEnv, counting{100, 4}, extraEnv+"=more")
	await(t, w, 400)
	seen := map[int]bool{}
	for _, e := range w.Events() {
		seen[e.N] = true
	}
	require.Len(t, seen, 400, "each was told once, and whole")
	require.NoError(t, w.Stop())
	all := w.End()
	require.Len(t, all, 401)
	require.Equal(t, counted{-1, "more"}, all[400])
}

// The events of a killed worker are kept.
func TestKilledWorker(t *testing.T) {
	w := Start[counted](t, countEnv, counting{10, 1})
	await(t, w, 10)
	require.NoError(t, w.Kill())
	require.Len(t, w.End(), 10)
}

// A job that cannot be read, and one that fails, are errors.
func TestBadJob(t *testing.T) {
	require.Error(t, do("{", count))
	failed := errors.New("failed")
	require.ErrorIs(t, do("{}", func(context.Context, *counting, func(counted)) error { return failed }), failed)
}
