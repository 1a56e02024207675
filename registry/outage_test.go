package registry

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// One call in a second asks a backend that was away, by a clock that nobody sets.
func TestOutageAsksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o outage
		require.NoError(t, o.known())
		away := errors.New("away")
		o.began(away)
		require.LessOrEqual(t, time.Duration(o.until.Load()), clock.Mono()+askAgain, "it is not the time of day")
		require.ErrorIs(t, o.known(), away)
		time.Sleep(askAgain)
		require.NoError(t, o.known())
		require.ErrorIs(t, o.known(), away, "one asks")
		o.ended()
		require.NoError(t, o.known())
	})
}
