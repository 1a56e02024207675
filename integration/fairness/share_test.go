package fairness

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// Three processes 0, 5 and 20 ms away share a bucket of 1000/s. It comes first and alone, as it keeps a machine busy.
func TestThreeDistances(t *testing.T) {
	distances := []time.Duration{100 * time.Microsecond, 5 * time.Millisecond, 20 * time.Millisecond}
	lasts, least := 20*time.Second, 0.75
	if faultlab.Long() {
		lasts, least = time.Minute, 0.85
	}
	share := func(rate float64, callers int, lasts time.Duration, least float64) {
		t.Run(fmt.Sprint(rate), func(t *testing.T) {
			j := busy(rate, callers)
			f := startAway(t, distances, j, j, j)
			time.Sleep(lasts)
			f.fair(f.end(), 0, lasts, least)
		})
	}
	share(1000, 5000, lasts, least)
	if faultlab.Long() {
		share(5, 300, lasts, 0.75)
	}
}

// A process that is 5 ms farther from the server gets its share all the same, at the rate of an airline's interface, too.
func TestTwoDistances(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		rate    float64
		callers int
		lasts   time.Duration
	}{{200, 2000, 10 * time.Second}, {5, 300, faultlab.Lasting(20*time.Second, 30*time.Second)}} {
		t.Run(fmt.Sprint(test.rate), func(t *testing.T) {
			t.Parallel()
			j := busy(test.rate, test.callers)
			f := startAway(t, []time.Duration{0, 5 * time.Millisecond}, j, j)
			time.Sleep(test.lasts)
			f.fair(f.end(), 0, test.lasts, 0.8)
		})
	}
}

// It does not matter with which verb callers wait, though one of them says how long it would wait at most.
func TestVerbs(t *testing.T) {
	t.Parallel()
	lasts := faultlab.Lasting(20*time.Second, 30*time.Second)
	// So many that the bucket is asked for 15 s ahead, whichever process gets it.
	acquires := mixed(200, 3000)
	tries := acquires
	tries.Verb, tries.Timeout, tries.Pause = "try", 15*time.Second, time.Second
	f := start(t, acquires, tries)
	time.Sleep(lasts)
	f.fair(f.end(), 0, lasts, 0.8)
}

// Requests for 100 permits and for 1, on a bucket that warms up: neither process starves, by what they use. It runs alone: the process of
// the small ones wakes a hundred times as many callers, so a busy machine takes more from it.
func TestSizes(t *testing.T) {
	const warm = 4 * time.Second // it is then, as it has handed out what it had stored
	lasts := faultlab.Lasting(10*time.Second, time.Minute)
	small := busy(1000, 12_000)
	small.Warmup = 2 * time.Second
	large := small
	large.Callers, large.Permits = 200, 100
	f := start(t, small, large)
	time.Sleep(warm + lasts)
	f.fair(f.end(), warm, lasts, 0.3)
}

// Callers who would wait for a while, three times as many as the rate allows: those who cannot be served in time are refused. A
// process does not know who waits in others: it goes by how fast its own line moves. Most of those whom it refuses are refused early.
func TestLateRefusals(t *testing.T) {
	t.Parallel()
	const rate = 20
	timeout := faultlab.Lasting(4*time.Second, 15*time.Second)
	j := busy(rate, int(3*rate*timeout.Seconds())/2) // each asks once in about a timeout
	j.Verb, j.Timeout, j.Pause, j.Spread = "try", timeout, timeout, timeout
	f := start(t, j, j)
	time.Sleep(3 * timeout)
	told := f.end()
	asked, refused, late, latest := 0, 0, 0, time.Duration(0)
	for _, permits := range told {
		for _, p := range permits {
			asked++
			if p.Refused {
				refused++
				took := time.Duration(p.Used-p.Asked) * time.Microsecond
				latest = max(latest, took)
				if took > time.Second {
					late++
				}
			}
		}
	}
	share := float64(late) / float64(max(1, refused))
	t.Logf("%d asked, %d were refused, %d of them later than after a second, at most after %v", asked, refused, late, latest)
	faultlab.Figure(t, "% of the refused who were refused later than after a second", 100*share)
	require.Greater(t, refused, asked/4, "the demand was too small")
	// A call that the store is asked for is refused when that has answered.
	require.LessOrEqual(t, latest, timeout+100*time.Millisecond+wakings*f.woken(slices.Concat(told...)))
	stalled := f.stalled(f.began, 3*timeout).Seconds() / (3 * timeout).Seconds() // then no call was refused early
	require.LessOrEqual(t, share, 0.4+stalled)
	_, used := f.used(told, f.began+time.Second.Microseconds(), 3*timeout-time.Second)
	faultlab.Figure(t, "% of the rate", 100*used)
	require.GreaterOrEqual(t, used, 0.95)
}
