// Package clocks tests limits of fleets on a real redis-server whose clock is stepped while it runs, and gateways whose own
// clocks are wrong.
package clocks

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

func TestMain(m *testing.M) {
	faultlab.Main()
	faultlab.Parallel(4)
	redistest.Main(m)
}

var background = context.Background()

const (
	rate    = 200.0
	burst   = 20.0
	timeout = 300 * time.Millisecond
	prefix  = "clocks:"
	bucket  = "b"
	// standstill is how far back a server's clock may be set before it is believed, and so for how long it may refuse.
	standstill = 2 * time.Second
	// breath is what a denial may take longer than it must: the round trips of a slow machine. See run.most.
	breath = time.Second
	// patient is the stores' timeout: with the default of a second a slow machine is a fault of its own.
	patient = 20 * time.Second
)

// fleets are the processes on one bucket: alone with it they decide by what they remember, together they find it changed, and
// meet the other's lock.
var fleets = map[string][]string{"script": {"script"}, "lock": {"lock"}, "mixed": {"script", "lock", "script", "lock"}}

// run is a fleet at full demand: all permits that there can be within the timeout are reserved at any time.
type run struct {
	t    *testing.T
	job  faultlab.Job
	all  faultlab.Fleet
	late *faultlab.Lateness // of this process, and of the server's answers
	told []faultlab.Permit
}

func start(t *testing.T, addr string, stores []string, change ...func(i int, j *faultlab.Job)) *run {
	t.Helper()
	r := &run{t: t, late: faultlab.MeasureTrips(t, addr), job: faultlab.Job{
		Addrs: []string{addr}, Prefix: prefix, Bucket: bucket, Rate: rate, Burst: burst, Callers: 80 / len(stores),
		Timeout: timeout, StoreTimeout: patient, Store: "script",
	}}
	var jobs []faultlab.Job
	for i, store := range stores {
		j := r.job
		j.Store = store
		for _, c := range change {
			c(i, &j)
		}
		jobs = append(jobs, j)
	}
	r.all = faultlab.StartFleet(t, jobs...)
	require.Eventually(t, func() bool {
		for _, p := range r.all {
			if len(faultlab.Used(p.Permits())) < 5 {
				return false
			}
		}
		return len(r.all.Permits()) > 100
	}, time.Minute, 10*time.Millisecond, "all processes are at work")
	return r
}

// most returns the longest time for something that takes d, on a machine that is late by the given times: a batch wakes some ten processes
// and goroutines on its way, one after the other.
func most(d time.Duration, late ...time.Duration) time.Duration {
	return d + breath + 10*slices.Max(late)
}

// most is that for who waits for a permit of the fleet.
func (r *run) most(d time.Duration) time.Duration {
	return most(d, r.late.Most(), faultlab.MostWoken(r.told))
}

// last lets the fleet go on for a while.
func (r *run) last(short, long time.Duration) { time.Sleep(faultlab.Lasting(short, long)) }

// goOn is the last step. It waits until some calls have been served that were made after a fault, or until denial would show that none is.
func (r *run) goOn(fault int64, short, long time.Duration) {
	began := time.Now()
	r.last(short, long)
	_ = redistest.Poll(standstill+20*breath-time.Since(began), func() error {
		served := 0
		for _, p := range r.all.Permits() {
			if p.Err == "" && p.Asked > fault {
				served++
			}
		}
		if served <= 20 {
			return errors.New("few are served")
		}
		return nil
	})
}

// end ends the fleet and checks its events.
func (r *run) end() {
	r.t.Helper()
	r.told = r.all.End()
	r.late.Stop()
	r.t.Logf("%d permits, failures %v; woken late by at most %v, others on this machine by %v", len(faultlab.Used(r.told)),
		faultlab.Failures(r.told), faultlab.MostLate(r.told), r.late.Most())
}

// bound requires that of the permits granted between two times no window, by due times, holds more than rate × its length plus most. There
// is no allowance for lateness. what describes the permits.
func (r *run) bound(what string, from, to int64, most float64) {
	r.t.Helper()
	var those []faultlab.Permit
	for _, p := range r.told {
		if p.Asked >= from && p.Granted <= to {
			those = append(those, p)
		}
	}
	due := faultlab.Surely(faultlab.Due(those), rate)
	r.t.Logf("%s: %d permits; fullest window when due %.2f", what, len(those), due)
	faultlab.Figure(r.t, "fullest window by use above rate × T (+ rate × late), "+what, faultlab.Worst(faultlab.Used(those), rate))
	assert.LessOrEqual(r.t, due, most+faultlab.Noise(rate), what)
}

// denial is the longest time from the fault on in which no permit was used, the time after the last one included.
func (r *run) denial(fault, end int64) (longest time.Duration) {
	at := []int64{}
	for _, p := range r.told {
		if p.Err == "" && p.Used > fault && p.Used < end {
			at = append(at, p.Used)
		}
	}
	return longestGap(fault, end, at)
}

// complete requires that the bucket has handed out what its callers were granted, and nothing else but what they had given up
// by the time of the answer, or whose answer was cut off.
func (r *run) complete(client clientOf) {
	r.t.Helper()
	limiter, err := r.job.Limiter(client)
	require.NoError(r.t, err)
	state, err := limiter.State(background)
	require.NoError(r.t, err)
	lost := int(state.Seq) - 1 - len(faultlab.Used(r.told)) // each permit taken is a change of the bucket
	assert.GreaterOrEqual(r.t, lost, 0, "what was granted was taken, once")
	failed := len(r.told) - len(faultlab.Used(r.told))
	r.t.Logf("%d permits were taken that nobody received, with %d failures", lost, failed)
	if faultlab.MayLapse(r.told) {
		r.t.Logf("answers were late, or callers, by so much that they may have taken others; put off by up to %v", faultlab.MostPutOff(r.told))
	} else {
		assert.LessOrEqual(r.t, lost, 2*failed, "what was taken reached its caller; or that had given up, and it may be given back")
	}
	faultlab.CleanUp(r.t, client, prefix)
}

// always is all times.
const always = 1 << 62

func micros() int64 { return time.Now().UnixMicro() }
