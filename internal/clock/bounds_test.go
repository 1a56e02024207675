package clock

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestBounds(t *testing.T) {
	var b Bounds
	require.False(t, b.Known())
	const ahead = 1_000_000
	show := func(micros, sent, received, least, most int64) {
		t.Helper()
		b.Observe(micros, sent, received)
		require.True(t, b.Known())
		require.Equal(t, []int64{least, most}, []int64{b.Earliest(0), b.Latest(0)})
	}
	show(ahead+100, 0, 300, ahead-200, ahead+100)
	require.EqualValues(t, ahead-200+5, b.Earliest(5))
	require.EqualValues(t, ahead+100+5, b.Latest(5))
	show(ahead+420, 400, 440, ahead-20, ahead+20)    // a faster round trip, within the bounds
	show(ahead+600, 500, 1500, ahead-21, ahead+21)   // a slower one narrows nothing; 1060 µs later the clocks may be 1 µs apart
	show(ahead+1590, 1520, 1600, ahead-10, ahead+22) // only its lower bound is narrower
	const later = 1600 + 100*8192
	show(ahead+later, later-500, later+500, ahead-10-101, ahead+22+101) // 1 µs of drift in 2^13 µs, and one for rounding
	const set = later + 1000
	show(ahead+set+5000, set-10, set+10, ahead+4990, ahead+5010) // the server's clock was set ahead
	show(ahead+set+60, set+50, set+70, ahead-10, ahead+10)       // and back
	b.Stepped()
	require.True(t, b.Known())
	show(ahead+set+30, set-400, set+200, ahead-170, ahead+430) // by another local clock: the earlier bounds do not count
	show(ahead+set+300, set+290, set+310, ahead-10, ahead+10)
	// The clocks may have moved apart since a reply was received, not since its request was sent.
	const slow = set + 310 + 10*8192
	show(ahead+slow-10, set+310, slow, ahead-10, ahead+10+11)
	show(ahead+slow+100, slow, slow+200, ahead-11, ahead+22)
}

// While neither clock is set, the server's clock stays within the bounds, and they are never wider than those of the last reply.
func TestBoundsHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ahead, now := rapid.Int64Range(-1e15, 1e15).Draw(t, "ahead"), int64(0)
		var b Bounds
		for range rapid.IntRange(1, 20).Draw(t, "replies") {
			sent := now + rapid.Int64Range(0, 1e9).Draw(t, "pause")
			read := sent + rapid.Int64Range(0, 1e6).Draw(t, "out")
			now = read + rapid.Int64Range(0, 1e6).Draw(t, "back")
			b.Observe(read+ahead, sent, now)
			if e, l := b.Earliest(now), b.Latest(now); e > now+ahead || l < now+ahead || l-e > now-sent {
				t.Fatalf("%d to %d, server %d, round trip %d", e, l, now+ahead, now-sent)
			}
		}
	})
}
