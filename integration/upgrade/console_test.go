package upgrade

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/integration/upgrade/task"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// TestConsoles lets gateways of both releases publish their figures, and consoles of both read them: each sees all calls of all gateways,
// the history, and the events, also of a kind that only this release has. The calls of this release have a lower priority, which only its own
// consoles see.
func TestConsoles(t *testing.T) {
	t.Parallel()
	const calls = 50
	addr := redistest.Start(t).Addr // a fleet of its own
	fares := task.Task{Name: "/fares", Store: "script", Rate: 20, Burst: 1000, Calls: calls}
	publisher, reader := fares, fares
	publisher.Kind, publisher.Lowest, reader.Kind = task.Publish, true, task.Read

	client := redis.NewClient(&redis.Options{Addr: addr})
	defer func() { require.NoError(t, client.Close()) }()
	require.NoError(t, fleet.Announce(t.Context(), client, fleet.Event{Kind: fleet.LimitReset, Limit: fares.Name, Who: "operator", Why: "test"}))

	var publishers, readers [2]*worker.Worker[task.Event]
	for r := range readers {
		publishers[r] = release(r).start(t, task.Job{Redis: addr, Tasks: []task.Task{publisher}})
		readers[r] = release(r).start(t, task.Job{Redis: addr, Tasks: []task.Task{reader}})
	}
	for r, p := range readers {
		var v task.View
		require.NoError(t, redistest.Poll(patience, func() error {
			v = task.View{}
			for _, e := range p.Events() {
				switch e.What {
				case task.Failed:
					require.FailNow(t, "a console failed", "of the release %s: %s", release(r), e.Text)
				case task.Line:
					v = task.View{}
					require.NoError(t, json.Unmarshal([]byte(e.Text), &v))
				}
			}
			if len(v.Skipped) > 0 {
				require.FailNow(t, "a console skipped data", "of the release %s: %q", release(r), v.Skipped)
			}
			sum := int64(0)
			for _, n := range v.Instances {
				sum += n
			}
			if len(v.Instances) != 2 || sum != 2*calls || v.History != 2*calls {
				return fmt.Errorf("%+v", v)
			}
			return nil
		}), "a console of the release %s", release(r))
		t.Logf("a console of the release %s: %+v", release(r), v)
		require.EqualValues(t, fares.Rate, v.Rate)
		require.Contains(t, v.Events, string(fleet.LimitReset))
		require.Contains(t, v.Events, string(fleet.InstanceBegins))
	}
	snapshot, err := fleet.NewReader(client).Snapshot(t.Context())
	require.NoError(t, err)
	var lower []fleet.Priority
	for i := range snapshot.Instances {
		lower = append(lower, snapshot.Instances[i].Priorities...)
	}
	require.Equal(t, []fleet.Priority{{Limit: fares.Name, Name: "lowest", Counters: fleet.Counters{Granted: calls}}}, lower)
}
