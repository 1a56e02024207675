package fairness

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// One of two processes is stopped for 150 ms, as a container's CPU quota does, once, and then every two seconds. What fell due
// meanwhile is lost, and hardly more.
func TestG7bShortPauses(t *testing.T) {
	t.Parallel()
	const rate, pause, once = 100.0, 150 * time.Millisecond, 8 * time.Second
	f := start(t, mixed(rate, 300), mixed(rate, 300))
	stop := func() (from int64) {
		from = faultlab.Micros()
		require.NoError(t, f.Fleet[0].Stop())
		time.Sleep(pause)
		require.NoError(t, f.Fleet[0].Continue())
		return from
	}
	time.Sleep(2 * time.Second)
	first := stop()
	time.Sleep(once)
	second, often := faultlab.Micros(), faultlab.Lasting(8*time.Second, 30*time.Second)
	for range int(often / (2 * time.Second)) {
		stop()
		time.Sleep(2*time.Second - pause)
	}
	told := f.end()
	before, _ := f.used(told, f.began, 2*time.Second)
	require.Greater(t, slices.Min(before), 20.0, "one of them was not served before")
	alone, share := f.used(told, first, once)
	again, shares := f.used(told, second, often)
	t.Logf("after one pause %v, with one every two seconds %v", alone, again)
	faultlab.Figure(t, "% of the rate after one pause", 100*share)
	faultlab.Figure(t, "% of the rate with a pause every two seconds", 100*shares)
	require.GreaterOrEqual(t, share, 0.98)
	require.GreaterOrEqual(t, shares, 0.95)
}

// One of two processes is killed. What it had reserved is lost, no more than a second of it and its first trip: all else is the
// other's.
func TestKilledProcess(t *testing.T) {
	t.Parallel()
	const rate, after = 100.0, 5 * time.Second
	f := start(t, mixed(rate, 300), mixed(rate, 300))
	time.Sleep(3 * time.Second)
	killed := faultlab.Micros()
	require.NoError(t, f.Fleet[0].Kill())
	time.Sleep(after)
	told := f.end()
	before, _ := f.used(told, f.began, time.Duration(killed-f.began)*time.Microsecond)
	each, _ := f.used(told, killed, after)
	require.Greater(t, slices.Min(before), 20.0, "one of them was not served before")
	least := rate * (after - 1200*time.Millisecond - f.stalled(killed, after)).Seconds()
	faultlab.Figure(t, fmt.Sprintf("permits of the other in the 5 s after it, at least %.0f", least), each[1])
	require.GreaterOrEqual(t, each[1], least)
}
