package telemetry

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// A limiter that notices an outage and is used no more does not keep the store away for ever. One that is still used does, though others
// are answered: theirs may be another server.
func TestLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type turn struct {
			begins, ends bool
			away         time.Duration
		}
		var l Link
		trip := func(err error) (is turn) {
			is.begins, is.ends, is.away = l.Tripped(err)
			return is
		}
		away, denied := slidingwindow.ErrAway, errors.New("NOPERM")
		require.Equal(t, turn{}, trip(away), "its Health follows")
		begins, ends := l.Noticed(true)
		require.True(t, begins && !ends)
		for range 100 { // it is used, and others are answered
			time.Sleep(time.Second)
			require.Equal(t, turn{}, trip(away))
			require.Equal(t, turn{}, trip(nil))
			require.True(t, l.Down)
		}
		time.Sleep(forgotten)
		require.Equal(t, turn{}, trip(denied))
		require.Equal(t, turn{}, trip(nil))
		time.Sleep(time.Nanosecond)
		require.Equal(t, turn{ends: true, away: 100*time.Second + forgotten + 1}, trip(nil))
		require.False(t, l.Down)
		require.Equal(t, turn{}, trip(denied), "no outage")
		require.Equal(t, turn{begins: true}, trip(away), "it was not back")
		require.True(t, l.Down)
		begins, ends = l.Noticed(false)
		require.True(t, !begins && ends)
		require.Equal(t, turn{}, trip(away), "Health tells of an outage")
		require.False(t, l.Down)
	})
}
