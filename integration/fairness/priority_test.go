package fairness

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// waits are the sorted waits of the callers of Normal that asked from a time on.
func waits(told [][]faultlab.Permit, from int64) (sorted []time.Duration) {
	for _, p := range slices.Concat(told...) {
		if p.Priority == tokenbucket.Normal && p.Asked >= from {
			sorted = append(sorted, time.Duration(p.Used-p.Asked)*time.Microsecond)
		}
	}
	slices.Sort(sorted)
	return sorted
}

// of returns the permits of a priority.
func of(told [][]faultlab.Permit, priority tokenbucket.Priority) [][]faultlab.Permit {
	only := make([][]faultlab.Permit, len(told))
	for i, permits := range told {
		only[i] = slices.Clone(permits)
		only[i] = slices.DeleteFunc(only[i], func(p faultlab.Permit) bool { return p.Priority != priority })
	}
	return only
}

// Three thousand callers of the lowest priority keep a bucket busy. A caller of Normal in one of their processes, about every 0.3 s, waits
// for a tenth of a horizon, and what they own. The whole rate is used.
func TestHigherPriorityPasses(t *testing.T) {
	t.Parallel()
	const callers, rate = 3000, 200.0
	for _, processes := range []int{2, 10} {
		t.Run(fmt.Sprintf("%d processes", processes), func(t *testing.T) {
			t.Parallel()
			var jobs []faultlab.Job
			for range processes {
				j := mixed(rate, callers/processes)
				j.Priority = tokenbucket.Lowest
				jobs = append(jobs, j)
			}
			jobs[0].Higher, jobs[0].HigherEvery = 1, 300*time.Millisecond
			f := start(t, jobs...)
			time.Sleep(2 * time.Second)
			from, lasts := faultlab.Micros(), faultlab.Lasting(15*time.Second, time.Minute)
			time.Sleep(lasts)
			told := f.end()
			higher := waits(told, from)
			require.Greater(t, len(higher), 20)
			most := higher[len(higher)*99/100]
			_, share := f.used(told, from, lasts)
			faultlab.Figure(t, "half of the waits of the higher priority", higher[len(higher)/2])
			faultlab.Figure(t, "99 % of the waits of the higher priority, within 0.3 s", most)
			faultlab.Figure(t, "% of the rate", 100*share)
			woken := f.woken(slices.Concat(told...))
			require.Less(t, higher[len(higher)/2], horizon/5+woken)
			require.Less(t, most, 3*horizon/10+4*woken)
			require.GreaterOrEqual(t, share, leastUsed(0.99, woken))
		})
	}
}

// The process whose callers of Normal use the whole rate is killed. Within two horizons the callers of a low priority in the other process
// have all of it.
func TestLowerPriorityTakesOver(t *testing.T) {
	t.Parallel()
	const rate, after = 200.0, 6 * time.Second
	higher, lower := mixed(rate, 500), mixed(rate, 1000)
	lower.Priority = tokenbucket.Lowest
	f := start(t, higher, lower)
	time.Sleep(4 * time.Second)
	killed := faultlab.Micros()
	require.NoError(t, f.Fleet[0].Kill())
	time.Sleep(2*horizon + after)
	told := f.end()
	before, _ := f.used(told, killed-(2*time.Second).Microseconds(), 2*time.Second)
	each, share := f.used(told, killed+(2*horizon).Microseconds(), after)
	t.Logf("permits of both in the 2 s before %v, in the %v after two horizons %v", before, after, each)
	faultlab.Figure(t, "% of the rate for the higher priority before", 100*before[0]/(rate*2))
	faultlab.Figure(t, "% of the rate for the lower priority, two horizons after", 100*share)
	require.Greater(t, before[0], 8*before[1])
	require.GreaterOrEqual(t, share, leastUsed(0.98, f.woken(slices.Concat(told...))))
}

// leastUsed returns the share of the rate that callers of Lowest must use at least. They look a tenth of a horizon ahead, so a process that
// is woken later than that loses permits.
func leastUsed(usual float64, woken time.Duration) float64 {
	if woken > horizon/10 {
		return usual - 0.2
	}
	return usual
}

// Two processes have callers of Normal only, as those of a version without priorities have. Two others have callers of both priorities. All
// that is Normal shares the rate, and the lower priority gets its floor.
func TestFleetHalfOfWhichHasPriorities(t *testing.T) {
	t.Parallel()
	const rate = 200.0
	without, both := mixed(rate, 400), mixed(rate, 400)
	both.Priority, both.Higher = tokenbucket.Low, 400
	f := start(t, without, both, without, both)
	lasts := faultlab.Lasting(15*time.Second, time.Minute)
	time.Sleep(2*time.Second + lasts)
	told := f.end()
	from := f.began + (2 * time.Second).Microseconds()
	_, share := f.used(told, from, lasts)
	normal, of4 := f.used(of(told, tokenbucket.Normal), from, lasts)
	low, lowest := f.used(of(told, tokenbucket.Low), from, lasts)
	t.Logf("permits of Normal %v, of Low %v", normal, low)
	faultlab.Figure(t, "% of the rate", 100*share)
	faultlab.Figure(t, "% of the rate for the lower priority", 100*lowest)
	require.GreaterOrEqual(t, share, 0.98)
	require.LessOrEqual(t, lowest, 0.1)
	require.Positive(t, lowest)
	require.GreaterOrEqual(t, 4*slices.Min(normal), 0.8*rate*of4*(lasts-f.stalled(from, lasts)).Seconds())
}
