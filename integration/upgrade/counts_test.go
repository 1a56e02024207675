package upgrade

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/upgrade/task"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

// TestSemaphores replaces the processes of a fleet that share a semaphore. No more places are held at once than it has.
func TestSemaphores(t *testing.T) {
	t.Parallel()
	const permits = 4
	for store, each := range map[string]int{"redis": 50, "postgres": 25} { // PostgreSQL writes to a disk
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			directions(t, func(t *testing.T, from release) {
				places := task.Task{Kind: task.Semaphore, Name: "places " + t.Name(), Store: store, Limit: permits, Callers: 3}
				if store == "postgres" {
					places.DSN = dbtest.SharedPostgreSQL(t).DSN()
				}
				job := task.Job{Redis: redistest.Shared(t).Addr, Tasks: []task.Task{places}}
				h := roll(t, from, each, job, job, job)
				all, by := h.spans(places.Name)
				held := faultlab.Crowd(all)
				t.Logf("%s: held %d times by the previous release, %d times by this one; at most %d of %d at once", places.Name, by[previous], by[now], held, permits)
				require.LessOrEqual(t, held, permits, "places held at once")
				require.Greater(t, held, 1, "places held at once")
			})
		})
	}
}

// TestWindows replaces the processes of a fleet that share a sliding window. No window admits more than the limit, and full demand uses most of it.
func TestWindows(t *testing.T) {
	t.Parallel()
	const (
		limit      = 40
		length     = 500 * time.Millisecond
		resolution = 25 * time.Millisecond
	)
	directions(t, func(t *testing.T, from release) {
		window := task.Task{Kind: task.Window, Name: "window " + t.Name(), Limit: limit, Window: length, Resolution: resolution, Callers: 4}
		job := task.Job{Redis: redistest.Shared(t).Addr, Tasks: []task.Task{window}}
		h := roll(t, from, 40, job, job, job)
		all, by := h.spans(window.Name)
		most, had, awake := faultlab.Fullest(all, length.Microseconds()), h.within(all), h.awake()
		part := float64(had) / (awake / (length + resolution).Seconds() * limit)
		t.Logf("%d calls of the previous release, %d of this one; at most %d of %d in a window; %d in %.2f s without lateness, %.1f %% of what the limit allows",
			by[previous], by[now], most, limit, had, awake, 100*part)
		require.LessOrEqual(t, most, limit)
		require.GreaterOrEqual(t, part, 0.8)
	})
}
