package slidingwindow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The longest windows are counted to the microsecond, in Redis as in Go.
func TestLongestWindow(t *testing.T) {
	clock := &handClock{micros: begin}
	client := redistest.Shared(t).Client(t)
	inRedis, err := New(unique(t), 5, maxWindow, maxWindow/10, WithRedis(client), WithLocalTime(), WithClock(clock))
	require.NoError(t, err)
	here, err := New("x", 5, maxWindow, maxWindow/10, WithClock(clock))
	require.NoError(t, err)
	for i, c := range []struct {
		after   time.Duration // since the first permits
		n       int
		allowed bool
	}{
		{0, 2, true},
		{maxWindow/10 + 1, 1, true},
		{maxWindow / 2, 2, true},
		{maxWindow / 2, 1, false},
		{maxWindow, 1, false}, // the first two count up to and with this microsecond
		{maxWindow + time.Microsecond, 3, false},
		{maxWindow + time.Microsecond, 2, true},
		{maxWindow + time.Microsecond, 1, false},
	} {
		clock.micros = begin + c.after.Microseconds()
		want, err := here.Take(ctx, c.n)
		require.NoError(t, err)
		require.Equal(t, c.allowed, want.Allowed, i)
		got, err := inRedis.Take(ctx, c.n)
		require.NoError(t, err)
		want.receipt, got.receipt = nil, nil
		require.Equal(t, want, got, i)
	}
}
