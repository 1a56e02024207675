package faultlab

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Processes of both stores on one bucket keep to its bound by their own account, and that account has all grants of the bucket. They stop,
// go on and die on command.
func TestFleet(t *testing.T) {
	server := redistest.Start(t)
	job := Job{
		Addrs: []string{server.Addr}, Prefix: "p:", Bucket: "b", Store: "script", Rate: 200, Burst: 20, Callers: 4,
		Timeout: 200 * time.Millisecond, StoreTimeout: 20 * time.Second, // a stop or a slow machine must not cause a timeout
	}
	locked := job
	locked.Store, locked.Skew = "lock", []time.Duration{time.Hour, -time.Hour}
	fleet := StartFleet(t, job, locked)
	a, b := fleet[0], fleet[1]
	enough := func(p *Process) {
		t.Helper()
		before := len(p.Permits())
		Soon(t, 20*time.Second, func() bool { return len(p.Permits()) >= before+30 })
	}
	enough(a)
	enough(b)
	require.NoError(t, a.Stop())
	enough(b)
	stopped := len(a.Permits())
	enough(b)
	require.Len(t, a.Permits(), stopped)
	require.NoError(t, a.Continue())
	enough(a)
	limiter, err := job.Limiter(server.Client(t))
	require.NoError(t, err)

	all := fleet.End()
	require.Empty(t, Failures(all))
	state, err := limiter.State(background)
	require.NoError(t, err)
	require.GreaterOrEqual(t, state.Seq-1, int64(len(all)), "what was granted was taken, once") // a process that was stopped takes others
	level := Surely(Due(all), job.Rate)
	t.Logf("%d permits; worst window %.2f of %v + rate × T, by use %.2f; at most %v late", len(all), level, job.Burst,
		Worst(Used(all), job.Rate), MostLate(all))
	require.LessOrEqual(t, level, job.Burst+Noise(job.Rate))
	require.LessOrEqual(t, MostLate(all), 20*time.Millisecond+2*MostWoken(all))
	for _, p := range all {
		require.LessOrEqual(t, p.Asked, p.Granted)
		require.LessOrEqual(t, p.Granted, p.Used)
		require.GreaterOrEqual(t, p.Used, p.Due-1000, "none before it is due")
	}
	CleanUp(t, server.Client(t), "p:")
}

func TestMosts(t *testing.T) {
	permits := []Permit{
		{Permits: 1, Asked: 0, Granted: 5, Told: 10, Due: 10, Used: 17, Woken: 4}, // let go 7 late, of which 5 are the way of the answer
		{Permits: 1, Asked: 0, Granted: 0, Told: 10, Due: 90, Used: 93, Way: 20, Woken: 6},
		{Permits: 1, Asked: 0, Granted: 8, Told: 10, Due: 10, Used: 12},
		{Permits: 1, Asked: 0, Granted: 9, Told: 0, Due: 0, Used: 9, Err: "no", Kind: "other"},
	}
	refused := Permit{Permits: 1, Asked: 0, Granted: 99, Told: 99, Due: 99, Used: 99, Refused: true}
	permits = append(permits, refused)
	require.Equal(t, 6*time.Microsecond, MostWoken(permits))
	require.Equal(t, []Span{{10, 15}, {70, 90}, {10, 12}}, Due(permits))
	require.Equal(t, 3*time.Microsecond, MostLate(permits))
	require.Equal(t, 80*time.Microsecond, MostPutOff(permits))
	require.False(t, MayLapse(permits))
	require.True(t, MayLapse([]Permit{{Permits: 1, Told: 10, Due: 60_000, Used: 60_000}}), "put off")
	require.True(t, MayLapse([]Permit{{Permits: 1, Way: 100_000}}), "an answer was late")
	require.Equal(t, []Event{{17, 1}, {93, 1}, {12, 1}}, Used(permits))
	require.Equal(t, map[string]int{"other": 1}, Failures(permits))
}

func TestFleetSurvivesFailuresAndDies(t *testing.T) {
	server := redistest.Start(t)
	p := StartProcess(t, Job{
		Addrs: []string{server.Addr}, Bucket: "b", Store: "script", Rate: 200, Burst: 20, Callers: 4, Timeout: 200 * time.Millisecond,
		StoreTimeout: 20 * time.Second,
	})
	Soon(t, 20*time.Second, func() bool { return len(p.Permits()) > 30 })
	client := server.Client(t)
	key := client.Keys(background, "tokenbucket:*").Val()[0]
	require.NoError(t, client.Set(background, key, "what?", time.Minute).Err())
	Soon(t, 20*time.Second, func() bool { return Failures(p.Permits())["corrupt"] > 3 })
	require.NoError(t, client.Del(background, key).Err())
	before := len(Used(p.Permits()))
	Soon(t, 20*time.Second, func() bool { return len(Used(p.Permits())) > before+30 })
	require.NoError(t, p.Stop()) // and a stopped process dies too
	require.NoError(t, p.Kill())
	all := p.End()
	require.GreaterOrEqual(t, len(Used(all)), before+30)
	require.Equal(t, map[string]int{"corrupt": Failures(all)["corrupt"]}, Failures(all))
}

// A skewed clock differs in what it says, not in how time passes.
func TestSkewed(t *testing.T) {
	clock := Skewed(time.Hour, -time.Hour)
	began := time.Now()
	first := clock.Now().Sub(began).Seconds() // ahead, unless 100 ms have passed already
	require.InDelta(t, time.Hour.Seconds(), math.Abs(first), 30)
	require.NoError(t, redistest.Poll(10*time.Second, func() error {
		if clock.Now().Sub(began).Seconds()*first > 0 {
			return errors.New("it does not step")
		}
		return nil
	}))
	time.Sleep(100 * time.Millisecond)
	require.GreaterOrEqual(t, clock.Since(began), 100*time.Millisecond)
	require.Less(t, clock.Since(began), time.Minute)
	timer := clock.NewTimer(time.Millisecond)
	<-timer.Chan()
}
