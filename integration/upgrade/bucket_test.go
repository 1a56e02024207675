package upgrade

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/integration/upgrade/task"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// TestBuckets replaces the processes of a fleet that share two buckets. One is at full demand, also by requests that are larger than it; all of
// its rate must be used. The other fills up again and again, and some of its grants are refunded. The bound must hold in every window of both.
func TestBuckets(t *testing.T) {
	t.Parallel()
	const rate = 200.0
	for name, stores := range map[string][3]string{
		"script store": {"script", "script", "script"},
		"lock store":   {"lock", "lock", "lock"},
		"both stores":  {"script", "lock", "script"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			directions(t, func(t *testing.T, from release) {
				demand, bursts := "demand "+t.Name(), "bursts "+t.Name()
				var jobs []task.Job
				for _, store := range stores {
					jobs = append(jobs, task.Job{Redis: redistest.Shared(t).Addr, Tasks: []task.Task{
						{Kind: task.Bucket, Name: demand, Store: store, Rate: rate, Burst: 5, Sizes: []int{1, 1, 1, 10}, Timeout: time.Second, Callers: 8},
						{Kind: task.Bucket, Name: bursts, Store: store, Rate: rate, Burst: 40, Sizes: []int{1, 5, 20, 1}, Timeout: 200 * time.Millisecond,
							Callers: 8, CancelEvery: 5, RestEvery: 1500 * time.Millisecond, Rest: 800 * time.Millisecond},
					}})
				}
				h := roll(t, from, 60, jobs...)
				for _, b := range []struct {
					name  string
					bound float64
				}{{demand, 10}, {bursts, 40}} {
					all, by := h.spans(b.name)
					worst := faultlab.Surely(all, rate)
					t.Logf("%s: %d permits of the previous release, %d of this one; the fullest window of %v + rate × T had %.2f + rate × T",
						b.name, by[previous], by[now], b.bound, worst)
					require.LessOrEqual(t, worst, b.bound+faultlab.Noise(rate), "%s: permits in some window, less rate × T", b.name)
				}
				h.fullyUsed(t, demand, rate)
			})
		})
	}
}

// Processes of the previous release, which knows no priorities, are those of the highest: callers of the lowest in processes of this release
// leave them the rate, but for the floor, and have all of it when they have gone.
func TestPrioritiesBesideThePreviousRelease(t *testing.T) {
	t.Parallel()
	const rate, lasts = 200.0, 6 * time.Second
	for _, store := range []string{"script", "lock"} {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			job := func(lowest bool) task.Job {
				return task.Job{Redis: redistest.Shared(t).Addr, Tasks: []task.Task{
					{Kind: task.Waiting, Name: t.Name(), Store: store, Rate: rate, Burst: 1, Callers: 400, Lowest: lowest}}}
			}
			var old, young []*worker.Worker[task.Event]
			for range 2 {
				old, young = append(old, previous.start(t, job(false))), append(young, now.start(t, job(true)))
			}
			for i := range old {
				await(t, previous, old[i], job(false), 20)
				await(t, now, young[i], job(true), 1)
			}
			used := func() (oldest, youngest float64) {
				time.Sleep(2 * time.Second) // what the others own lasts for a horizon
				from := task.Micros()
				time.Sleep(lasts)
				to := task.Micros()
				return permits(old, from, to) / (rate * lasts.Seconds()), permits(young, from, to) / (rate * lasts.Seconds())
			}
			oldest, youngest := used()
			faultlab.Figure(t, "% of the rate for the previous release", 100*oldest)
			faultlab.Figure(t, "% of the rate for the lowest priority beside it", 100*youngest)
			require.Greater(t, oldest, 5*youngest)
			require.Positive(t, youngest)
			for _, p := range old {
				p.End()
			}
			_, youngest = used()
			faultlab.Figure(t, "% of the rate for the lowest priority alone", 100*youngest)
			require.Greater(t, youngest, 0.75)
			for _, p := range young {
				p.End()
			}
		})
	}
}

// permits counts those that processes have used between two times.
func permits(processes []*worker.Worker[task.Event], from, to int64) (n float64) {
	for _, p := range processes {
		for _, e := range p.Events() {
			if e.What == task.Used && from <= e.To && e.To < to {
				n += float64(e.Permits)
			}
		}
	}
	return n
}
