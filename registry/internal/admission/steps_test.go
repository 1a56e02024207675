package admission

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The steps of a call that is granted everything, by the limits that its row has and by whether it must queue first.
func TestSteps(t *testing.T) {
	for name, c := range map[string]struct {
		from progress
		want []step
	}{
		"all three":              {progress{wanted, untried, uncounted}, []step{toReserve, toApproach, toTake, toAwait}},
		"all three, full":        {progress{wanted, full, uncounted}, []step{toQueue, toReserve, toApproach, toTake, toAwait}},
		"rate and window":        {progress{wanted, taken, uncounted}, []step{toReserve, toApproach, toTake, toAwait}},
		"rate and concurrency":   {progress{wanted, untried, inWindow}, []step{toReserve, toApproach, toTake, toAwait}},
		"the same, full":         {progress{wanted, full, inWindow}, []step{toQueue, toReserve, toApproach, toAwait}},
		"concurrency":            {progress{due, untried, inWindow}, []step{toTake}},
		"concurrency, full":      {progress{due, full, inWindow}, []step{toQueue}},
		"window":                 {progress{due, taken, uncounted}, []step{toTake}},
		"postponed by a penalty": {progress{ahead, untried, uncounted}, []step{toApproach, toTake, toAwait}},
	} {
		p := c.from
		var steps []step
		for s := p.next(); s != toBegin; s = p.next() {
			steps = append(steps, s)
			require.Less(t, len(steps), 10, name)
			switch s { // what each step leaves if it succeeds
			case toQueue:
				require.NotContains(t, []permits{ahead, near}, p.permits, "%s: a call queues with empty hands", name)
				p.place = taken
			case toReserve:
				p.permits = ahead
			case toApproach:
				p.permits = near
			case toTake:
				p.place, p.count = taken, inWindow
			case toAwait:
				p.permits = due
			}
		}
		require.Equal(t, c.want, steps, name)
	}
	require.Equal(t, "approach", toApproach.String())
}
