package telemetry

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A limiter that reports an outage and is never used again does not keep the store down. A limiter that is still used does, even if batches of
// others succeed, because those may go to another server.
func TestLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type change struct {
			begins, ends bool
			lasted       time.Duration
		}
		var l link
		trip := func(kind Kind) (c change) {
			c.begins, c.ends, c.lasted = l.tripped(kind)
			return c
		}
		require.Equal(t, change{}, trip(KindUnavailable), "the limiter will report the outage itself")
		begins, ends := l.reported(true)
		require.True(t, begins && !ends)
		for range 100 { // the limiter is in use, and batches of others succeed
			time.Sleep(time.Second)
			require.Equal(t, change{}, trip(KindTimeout))
			require.Equal(t, change{}, trip(KindNone))
			require.True(t, l.down)
		}
		time.Sleep(recovery)
		require.Equal(t, change{}, trip(KindOther))
		require.Equal(t, change{}, trip(KindNone))
		time.Sleep(time.Nanosecond)
		require.Equal(t, change{ends: true, lasted: 100*time.Second + recovery + 1}, trip(KindNone))
		require.False(t, l.down)
		require.Equal(t, change{}, trip(KindOther), "the server replied")
		require.Equal(t, change{begins: true}, trip(KindUnavailable), "the outage was not over")
		require.True(t, l.down)
		begins, ends = l.reported(false)
		require.True(t, !begins && ends)
		require.Equal(t, change{}, trip(KindUnavailable), "the limiter will report the outage itself")
		require.False(t, l.down)
	})
}
