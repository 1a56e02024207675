package schedule

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A pace is known once it was measured for a while, follows what changes, and is forgotten with the demand.
func TestPace(t *testing.T) {
	var p Pace
	const over, least = 4_000_000, 1_000_000
	now := int64(1)
	serve := func(every, lasts int64) {
		for end := now + lasts; now < end; now += every {
			p.Serve(now, 1, over)
		}
	}
	cost := func() int64 {
		micros, known := p.Cost(10, least)
		require.True(t, known)
		return int64(micros)
	}
	serve(100_000, 900_000)
	_, known := p.Cost(10, least)
	require.False(t, known, "it was measured for 0.8 s")
	serve(100_000, 10_000_000)
	require.InEpsilon(t, 1_000_000, cost(), 0.03)
	serve(50_000, 2_000_000)
	between := cost()
	require.Less(t, between, int64(900_000))
	require.Greater(t, between, int64(550_000))
	serve(50_000, 20_000_000)
	require.InEpsilon(t, 500_000, cost(), 0.03)
	p.Forget()
	_, known = p.Cost(10, least)
	require.False(t, known)
	serve(2_000_000, 6_000_000)
	_, known = p.Cost(10, least)
	require.False(t, known, "of three permits")
}
