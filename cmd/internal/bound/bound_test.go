package bound

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var histories = rapid.Custom(func(t *rapid.T) []time.Duration {
	const us, ms = time.Microsecond, time.Millisecond
	gap := rapid.SampledFrom([]time.Duration{0, us, ms, 199 * ms, 200 * ms, time.Second})
	jitter := rapid.Int64Range(0, int64(3*ms))
	var times []time.Duration
	at := time.Duration(0)
	for range rapid.IntRange(1, 40).Draw(t, "events") {
		at += gap.Draw(t, "gap") + time.Duration(jitter.Draw(t, "jitter"))
		times = append(times, at)
	}
	return times
})

// allWindows calls f with every window that begins and ends with an event.
func allWindows(times []time.Duration, f func(Window)) {
	for i := range times {
		for j := i; j < len(times); j++ {
			f(Window{j - i + 1, times[i], times[j]})
		}
	}
}

func TestFullestAgainstAllWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		times := histories.Draw(t, "times")
		rate := rapid.SampledFrom([]float64{0.1, 1, 5, 5.01, 1000}).Draw(t, "rate")
		most := math.Inf(-1)
		allWindows(times, func(w Window) { most = max(most, w.Excess(rate)) })
		got := Fullest(times, rate)
		require.InDelta(t, most, got.Excess(rate), Noise)
		require.Contains(t, times, got.From)
		require.Contains(t, times, got.To)
	})
}

func TestBusiestAgainstAllWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		times := histories.Draw(t, "times")
		most := 0
		allWindows(times, func(w Window) {
			if w.Length() <= time.Second {
				most = max(most, w.Events)
			}
		})
		got := Busiest(times, time.Second)
		require.Equal(t, most, got.Events)
		require.LessOrEqual(t, got.Length(), time.Second)
	})
}

// Events that come no sooner than due never exceed the bound of the due times by more than rate × lateness, whichever caller got which
// permit, and however late each was.
func TestLatenessCoversWhatIsLate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		due := histories.Draw(t, "due")
		late := rapid.Int64Range(0, int64(300*time.Millisecond))
		arrivals := Sorted(due, func(d time.Duration) time.Duration { return d + time.Duration(late.Draw(t, "late")) })
		const rate = 5
		allowed := Fullest(due, rate).Excess(rate) + rate*Lateness(arrivals, due).Seconds()
		require.LessOrEqual(t, Fullest(arrivals, rate).Excess(rate), allowed+2*Noise)
	})
}

func TestNoEvents(t *testing.T) {
	require.Zero(t, Fullest(nil, 5))
	require.Zero(t, Busiest(nil, time.Second))
	require.Zero(t, Lateness(nil, []time.Duration{1}))
}
