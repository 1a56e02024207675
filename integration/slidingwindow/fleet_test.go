// Package slidingwindow tests sliding windows that four processes share on a real redis-server, which is killed and comes back
// empty in the middle.
package slidingwindow

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

const workerEnv = "TOKENBUCKET_WINDOW_WORKER"

func TestMain(m *testing.M) {
	worker.Main(workerEnv, work)
	faultlab.Parallel(6)
	redistest.Main(m)
}

const (
	processes  = 4
	callers    = 4
	limit      = 40
	window     = time.Second
	resolution = 50 * time.Millisecond
	timeout    = 300 * time.Millisecond
)

// job is what a worker does until its standard input ends: Callers call at ten times the limit, all processes together.
type job struct {
	Redis string
}

// event is a line of a worker's output: a call that was allowed, or an error that the hook received. The decision was made between two
// times, in microseconds of this machine's clock.
type event struct {
	faultlab.Span
	Fault string
}

func work(ctx context.Context, j *job, tell func(event)) error {
	redis.SetLogger(silent{})
	client := redis.NewClient(&redis.Options{Addr: j.Redis})
	defer func() { _ = client.Close() }()
	l, err := slidingwindow.New("/fares", limit, window, resolution, slidingwindow.WithRedis(client),
		slidingwindow.WithStoreTimeout(timeout), slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(limit/processes)),
		withFailures(func(err error) {
			now := time.Now().UnixMicro()
			if tell(event{faultlab.Span{From: now, To: now}, fmt.Sprint(err)}); err == nil {
				tell(event{faultlab.Span{From: now, To: now}, "back"})
			}
		}))
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			pace := time.NewTicker(window * processes * callers / (10 * limit))
			defer pace.Stop()
			for ctx.Err() == nil {
				<-pace.C
				from := time.Now().UnixMicro()
				ok, err := l.Allow(context.Background())
				if err != nil {
					tell(event{faultlab.Span{From: from, To: from}, "returned: " + err.Error()})
				} else if ok {
					tell(event{Span: faultlab.Span{From: from, To: time.Now().UnixMicro()}})
				}
			}
		})
	}
	wg.Wait()
	return nil
}

// silent discards the log: the hook reports outages.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// Four processes at ten times the limit. In no window that the outage does not touch more than the limit is admitted; in
// one that it does touch, the bound that is stated holds.
func TestFleet(t *testing.T) {
	t.Parallel()
	length := faultlab.Lasting(8*time.Second, 30*time.Second)
	server := redistest.Start(t)
	late := faultlab.MeasureLateness(t)
	var ends []func() []event
	for range processes {
		ends = append(ends, worker.Start[event](t, workerEnv, job{server.Addr}).End)
	}
	began := time.Now()
	time.Sleep(length * 2 / 5)
	killed := time.Now()
	require.NoError(t, server.Kill())
	time.Sleep(length / 5)
	require.NoError(t, server.Restart())
	back := time.Now()
	time.Sleep(length * 2 / 5)
	var all []faultlab.Span
	faults := 0
	// The outage, and what a process took for one: on a busy machine a round trip may take too long as well.
	outages := []faultlab.Span{{From: killed.UnixMicro(), To: back.UnixMicro()}}
	took := time.Since(began)
	events := make([][]event, len(ends))
	var ending sync.WaitGroup
	for i, end := range ends {
		ending.Go(func() { events[i] = end() })
	}
	ending.Wait()
	settle := window.Microseconds() // until the processes that are back have reported the permits that they admitted
	for i := range events {
		found, away := 0, int64(0)
		for _, e := range events[i] {
			switch {
			case e.Fault == "":
				all = append(all, e.Span)
			case e.Fault == "back":
				found++
				if away == 0 {
					away = e.From - timeout.Microseconds()
				}
				outages = append(outages, faultlab.Span{From: away, To: e.To + settle})
				away = 0
			case e.Fault != "<nil>":
				faults++
				if away == 0 {
					away = e.From - timeout.Microseconds() // it went by what it knew since then
				}
			}
		}
		if away != 0 {
			outages = append(outages, faultlab.Span{From: away, To: math.MaxInt64})
		}
		require.Positive(t, found, "process %d has found Redis again", i)
	}
	require.GreaterOrEqual(t, faults, processes)

	// Windows begin with a call. A call is certainly in a window if it was sent and answered in it.
	calm, touched, away := 0, 0, 0
	for e, n := range faultlab.Windows(all, window.Microseconds()+1) {
		until := e.From + window.Microseconds()
		if !slices.ContainsFunc(outages, func(o faultlab.Span) bool { return until >= o.From && e.From <= o.To }) {
			calm = max(calm, n)
		} else {
			touched = max(touched, n)
		}
		if e.From > killed.UnixMicro() && e.To < back.UnixMicro() {
			away++
		}
	}
	t.Logf("%d allowed in %v; at most %d of %d in a window, %d in one that the outage touched; %d while Redis was away for %v",
		len(all), took.Round(time.Millisecond), calm, limit, touched, away, back.Sub(killed).Round(time.Millisecond))
	require.Positive(t, calm)
	require.LessOrEqual(t, calm, limit)
	require.LessOrEqual(t, touched, 2*limit+(processes-1)*callers)
	require.Positive(t, away, "the share")
	first := slices.MinFunc(all, func(a, b faultlab.Span) int { return cmp.Compare(a.From, b.From) }).From
	last := slices.MaxFunc(all, func(a, b faultlab.Span) int { return cmp.Compare(a.To, b.To) }).To
	ran := time.Duration(last-first)*time.Microsecond - late.Stalls(100*time.Millisecond, first, last)
	require.Greater(t, len(all), int(0.7*limit*ran.Seconds()/window.Seconds()))
}
