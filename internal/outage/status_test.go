package outage

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var errAway = errors.New("away")

// Every transition. The events before the last lead to the state from which it is tested.
func TestTransitions(t *testing.T) {
	reached := map[state][]event{
		up:         {},
		suspected:  {callFailed},
		down:       {callFailed, probeFailed},
		recovering: {callFailed, probeFailed, probeAnswered},
	}
	for _, c := range []struct {
		from  state
		event event
		to    state
	}{
		{up, callFailed, suspected},
		{up, probeFailed, down}, // in an owner without a Monitor, whose calls are the probes
		{up, probeAnswered, up},
		{up, abandoned, up},
		{up, notified, up},

		{suspected, callFailed, suspected},
		{suspected, probeFailed, down},
		{suspected, probeAnswered, up},
		{suspected, abandoned, up},
		{suspected, notified, suspected}, // a call has failed while watchers were being notified

		{down, callFailed, down},
		{down, probeFailed, down},
		{down, probeAnswered, recovering},
		{down, abandoned, recovering},
		{down, notified, down},

		{recovering, callFailed, suspected},
		{recovering, probeFailed, down},
		{recovering, probeAnswered, recovering},
		{recovering, abandoned, recovering},
		{recovering, notified, up},
	} {
		var s Status
		for _, e := range reached[c.from] {
			s.on(e, errAway)
		}
		require.Equal(t, c.from, s.state)
		outage := s.Down()
		require.Equal(t, c.from == down, outage != nil)
		require.Equal(t, c.from, s.on(c.event, errors.New("another")))
		require.Equal(t, c.to, s.state, "state %d, event %d", c.from, c.event)
		require.Equal(t, c.to == down, s.Down() != nil)
		if c.from == down && c.to == down {
			require.Same(t, outage, s.Down(), "further failures belong to the same outage")
			require.Equal(t, errAway, s.Down().Err)
		}
	}
}

// Mean pauses double within their bounds. Each pause is half to one and a half times the mean. The next outage begins with the shortest.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shortest, longest = 50 * time.Millisecond, time.Second
		var s Status
		for range 3 {
			for _, want := range []time.Duration{shortest, 100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond,
				800 * time.Millisecond, longest, longest} {
				s.ProbeFailed(errAway, shortest, longest)
				require.InDelta(t, want, s.UntilProbe(), float64(want/2))
				time.Sleep(s.UntilProbe() - 1)
				require.EqualValues(t, 1, s.UntilProbe())
				time.Sleep(time.Minute)
				require.Zero(t, s.UntilProbe())
			}
			began := s.Down()
			require.Same(t, began, s.ProbeAnswered())
			require.Nil(t, s.ProbeAnswered())
			require.Equal(t, up, s.state)
		}
		for range 10 {
			s.ProbeFailed(errAway, shortest, longest)
		}
		s.ProbeNow()
		require.Zero(t, s.UntilProbe())
		require.NotNil(t, s.Down())
		s.ProbeFailed(errAway, shortest, longest)
		require.InDelta(t, shortest, s.UntilProbe(), float64(shortest/2))
	})
}
