package upgrade

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
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
