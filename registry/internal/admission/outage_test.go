package admission

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// During an outage one call in a second asks the backend, by the monotonic clock.
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

// The loss of a place is logged once a minute, by the monotonic clock.
func TestLostPlacesAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		a := &attempt{env: &Env{Log: slog.New(slog.NewTextHandler(&text, nil))}, slot: new(Slot)}
		defer func() { require.Contains(t, text.String(), "registry: the place of a call was lost before it ended") }()
		for _, lines := range []int{1, 2} {
			for range 3 {
				a.lost(errors.New("expired"))
				require.Equal(t, lines, strings.Count(text.String(), "\n"))
			}
			require.LessOrEqual(t, time.Duration(a.slot.logged.Load()), clock.Mono(), "it is not the time of day")
			time.Sleep(lostAgain)
		}
	})
}
