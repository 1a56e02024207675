package clock

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOffset(t *testing.T) {
	var o Offset
	require.Zero(t, o.Micros())
	show := func(difference, trip, want int64) {
		t.Helper()
		o.Observe(difference, trip)
		require.Equal(t, want, o.Micros())
	}
	show(1000, 100, 1000)
	show(1020, 100, 1000) // a longer way back
	show(990, 50, 990)
	show(151_000, 150_100, 990) // the reply waited in a socket for 150 ms
	for range 2 {
		show(1500, 1200, 990) // the way back has become longer
	}
	show(1500, 1200, 1500)       // for good
	show(900_000, 1200, 900_000) // a clock was set: the difference exceeds the round trip
	show(-5000, 1200, -5000)     // and back
}

// A round trip that takes longer than those shortly before says nothing about the distance.
func TestOffsetTrip(t *testing.T) {
	var o Offset
	require.Zero(t, o.Trip())
	for i, trip := range []int64{100, 3_000_000, 90, 200, 300, 300, 300} {
		o.Observe(50, trip)
		require.Equal(t, []int64{100, 100, 90, 90, 90, 90, 200}[i], o.Trip())
	}
}
