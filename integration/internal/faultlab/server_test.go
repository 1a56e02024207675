package faultlab

import (
	"encoding/json"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// off is by how much a server's TIME differs from this machine's, within what the answer took.
func off(t *testing.T, client *redis.Client) (by, within time.Duration) {
	t.Helper()
	began := time.Now()
	server, err := client.Time(background).Result()
	require.NoError(t, err)
	took := time.Since(began)
	return server.Sub(began), took + time.Microsecond
}

func requireOff(t *testing.T, client *redis.Client, want time.Duration) {
	t.Helper()
	by, within := off(t, client)
	require.GreaterOrEqual(t, by, want-time.Microsecond)
	require.LessOrEqual(t, by, want+within)
}

// The server's clock goes where it is set while the server runs: what TIME says, in scripts too, and when keys expire. Its
// timers do not notice.
func TestSteppedServer(t *testing.T) {
	server, clock := StartStepped(t)
	client := server.Client(t)
	requireOff(t, client, 0)
	for _, step := range []time.Duration{1, -1, time.Hour, -2 * time.Hour, time.Hour, -500 * time.Millisecond, 999_999 * time.Microsecond} {
		clock.Step(step)
		requireOff(t, client, clock.Offset())
		clock.Set(step)
		require.Equal(t, step.Truncate(time.Microsecond), clock.Offset())
		requireOff(t, client, clock.Offset())
		inScript, err := client.Eval(background, "return redis.call('TIME')[1]", nil).Int64()
		require.NoError(t, err)
		require.InDelta(t, time.Now().Add(clock.Offset()).Unix(), inScript, 30)
		clock.Set(0)
	}
	require.NoError(t, client.Set(background, "key", "", time.Minute).Err())
	require.EqualValues(t, 1, client.Exists(background, "key").Val())
	clock.Set(2 * time.Minute)
	require.EqualValues(t, 0, client.Exists(background, "key").Val(), "the key has expired")

	right, other := StartStepped(t)
	requireOff(t, right.Client(t), 0)
	other.Set(-time.Hour)
	requireOff(t, client, 2*time.Minute)
	requireOff(t, right.Client(t), -time.Hour)
}

// sample is what a process takes the time to be.
type sample struct{ Wall int64 }

func tellTime() {
	_ = json.NewEncoder(os.Stdout).Encode(sample{time.Now().UnixMicro()})
}

// What clocks of processes stand on: a program of the C library's is an hour ahead under the shim, this one is not. Should
// that change one day, processes can have skewed clocks as servers do.
func TestGoDoesNotAskTheLibrary(t *testing.T) {
	clock := NewClock(t)
	clock.Set(time.Hour)
	ask := func(program string, args ...string) []byte {
		cmd := exec.Command(program, args...)
		cmd.Env = append(append(os.Environ(), clock.Env()...), askEnv+"=1")
		out, err := cmd.Output()
		require.NoError(t, err)
		return out
	}
	began := time.Now()
	date := ask("date", "+{\"Wall\": %s000000}")
	own := ask(os.Args[0])
	var c, g sample
	require.NoError(t, json.Unmarshal(date, &c))
	require.NoError(t, json.Unmarshal(own, &g))
	took := time.Since(began)
	assert.InDelta(t, time.Hour.Seconds(), time.UnixMicro(c.Wall).Sub(began).Seconds(), took.Seconds()+1)
	assert.InDelta(t, 0, time.UnixMicro(g.Wall).Sub(began).Seconds(), took.Seconds())
}
