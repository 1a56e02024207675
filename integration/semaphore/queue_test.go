package semaphore

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// Six hundred waiters arrive in four processes at known times, at a semaphore of one permit, and as many, for one to three permits, at one
// of three. They are served in the order of their arrival at the server, without exception. By the time of the call of Acquire, no waiter
// is overtaken by one that came later than the window between the call and the server's decision.
func TestFirstComeFirstServed(t *testing.T) {
	const waiters, processes, within = 600, 4, 3 * time.Second
	const window = 250 * time.Millisecond
	s, client := server(t)
	addr := client.Options().Addr
	random := faultlab.Seed(t)
	specs := []spec{{Name: "one", Permits: 1, Lease: 10 * time.Second}, {Name: "three", Permits: 3, Lease: 10 * time.Second}}
	jobs := make([]job, processes)
	for i := range jobs {
		jobs[i] = job{Do: "queue", Redis: addr, Label: fmt.Sprint("process ", i), Semaphores: specs}
	}
	for i := range waiters {
		at := int64(within) / 1000 * int64(i) / waiters
		for s := range specs {
			a := arrival{At: at + random.Int64N(2000), Semaphore: s, N: 1, Hold: 6 * time.Millisecond}
			if s == 1 {
				a.N = []int{1, 1, 1, 1, 2, 3}[random.IntN(6)]
				a.Hold = 10 * time.Millisecond
			}
			j := &jobs[random.IntN(processes)]
			j.Arrivals = append(j.Arrivals, a)
		}
	}
	truths := monitor(t, addr, specs...)
	var all []*process
	for _, j := range jobs {
		all = append(all, start(t, j, nil))
	}
	for _, p := range all {
		p.expect(t, "ready")
	}
	slow := faultlab.MeasureTrips(t, s.Addr)
	begin := fmt.Sprint("go ", now()+200_000)
	for _, p := range all {
		p.command(begin)
	}
	turns, worst := map[string][]event{}, time.Duration(0)
	for _, p := range all {
		for range p.Arrivals {
			e := p.expect(t, "turn")
			turns[e.Text] = append(turns[e.Text], e)
		}
		worst = max(worst, micros(int64(p.expect(t, "end").N)))
		p.end(t)
	}
	worst = max(worst, slow.Most())
	for _, s := range specs {
		m := truths[s.Name]
		m.end(t)
		require.Empty(t, m.wrong)
		require.Equal(t, s.Permits, m.most)
		served := turns[s.Name]
		require.Len(t, served, waiters)
		slices.SortFunc(served, func(a, b event) int { return int(a.Fence - b.Fence) })
		var windows, overtakings, waits []time.Duration
		overtaken := 0
		heards := make([]int64, waiters)
		for i, e := range served {
			heard := m.asked[e.ID]
			require.NotZero(t, heard)
			heards[i] = heard
			windows, waits = append(windows, micros(heard-e.Call)), append(waits, micros(e.At-e.Call))
			by := time.Duration(0) // how much later the latest came who was served before
			for k, before := range served[:i] {
				if heards[k] > heard {
					require.Fail(t, "out of order", "%+v was served before %+v", before, e)
				}
				by = max(by, micros(before.Call-e.Call))
			}
			if by > 0 {
				overtaken++
			}
			overtakings = append(overtakings, by)
		}
		t.Logf("%d permits, %d waits: p50 %v, longest %v", s.Permits, waiters, quantile(waits, 0.5), quantile(waits, 1))
		t.Logf("window from Acquire to the decision: p50 %v, p99 %v, maximum %v", quantile(windows, 0.5), quantile(windows, 0.99), quantile(windows, 1))
		t.Logf("overtaken %d, by one who came later by p99 %v, at most %v; slow by %v",
			overtaken, quantile(overtakings, 0.99), quantile(overtakings, 1), worst)
		require.LessOrEqual(t, quantile(overtakings, 1), quantile(windows, 1))
		require.Less(t, quantile(windows, 1), window+10*worst)
		require.Greater(t, quantile(waits, 1), 100*time.Millisecond, "there was no queue")
		if s.Permits == 1 {
			continue
		}
		small, big, passed := 0, 0, 0
		for i, e := range served {
			if e.N == 1 {
				small++
			}
			if e.N < 3 {
				continue
			}
			big++
			for k, before := range served[:i] {
				if before.N == 1 && heards[k] > heards[i] {
					passed++
				}
			}
		}
		t.Logf("%d requests for three permits among %d for one, which passed them %d times", big, small, passed)
		require.Greater(t, big, 50)
		require.Zero(t, passed)
	}
}

// quantile sorts all.
func quantile(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[int(q*float64(len(all)-1))]
}
