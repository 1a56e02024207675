package gateway

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// The origin of a switch has the name and the reason that a console has announced, unless the table of switches has a name.
func TestOriginOfASwitch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var off atomic.Bool
		own := ""
		sw, err := killswitch.New(func(context.Context) (bool, error) { return !off.Load(), nil }, killswitch.WithInterval(time.Second),
			killswitch.WithOrigin(func() string { return own }))
		require.NoError(t, err)
		defer sw.Close()
		var events []fleet.Event
		var failed error
		asked := 0
		s := &namedSwitch{Switch: sw, events: func(context.Context, time.Time) ([]fleet.Event, error) { asked++; return events, failed }}
		by := fleet.Event{Kind: fleet.SwitchOff, Who: "ann", Why: "incident 7"}
		events = []fleet.Event{by}
		require.Empty(t, s.Origin())
		require.Zero(t, asked, "it is on")
		off.Store(true)
		time.Sleep(3 * time.Second)
		require.Equal(t, "by ann: incident 7", s.Origin())
		require.Equal(t, "by ann: incident 7", s.Origin())
		require.Equal(t, 1, asked)
		time.Sleep(3 * time.Second)
		own, failed = "at 12:00", errors.New("connection refused")
		require.Equal(t, "at 12:00 by ann: incident 7", s.Origin(), "what was known stays")
		failed, events = nil, []fleet.Event{by, {Kind: fleet.SwitchOn}, {Kind: fleet.SwitchOff}}
		time.Sleep(3 * time.Second)
		require.Equal(t, "at 12:00", s.Origin(), "no person has turned it off again")
		own = "at 12:00 by bob"
		require.Equal(t, "at 12:00 by bob", s.Origin())
	})
}
