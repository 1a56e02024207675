package outage

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var errAway = errors.New("away")

// What each event makes of each state. A state is reached by the events before the last.
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
		{up, probeFailed, down}, // of one who takes calls for probes
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
			require.Same(t, outage, s.Down(), "one outage, whatever fails in it")
			require.Equal(t, errAway, s.Down().Err)
		}
	}
}

// Pauses double within their bounds, each half as long or half as long again, and are short again in the next outage.
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
