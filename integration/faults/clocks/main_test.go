// Package clocks tests limits of fleets on a real redis-server whose clock is stepped while it runs, and gateways whose own
// clocks are wrong.
package clocks

import (
	"context"
	"errors"
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
	// breath is what a denial may take longer than it must: the round trips of a slow machine.
	breath = time.Second
)

// fleets are the processes on one bucket: alone with it they decide by what they remember, together they find it changed, and
// meet the other's lock.
var fleets = map[string][]string{"script": {"script"}, "lock": {"lock"}, "mixed": {"script", "lock", "script", "lock"}}

// run is a fleet at full demand: all permits that there can be within the timeout are reserved at any time.
type run struct {
	t    *testing.T
	job  faultlab.Job
	all  faultlab.Fleet
	late *faultlab.Lateness
	told []faultlab.Permit
}

func start(t *testing.T, addr string, stores []string, change ...func(i int, j *faultlab.Job)) *run {
	t.Helper()
	r := &run{t: t, late: faultlab.MeasureLateness(t), job: faultlab.Job{
		Addrs: []string{addr}, Prefix: prefix, Bucket: bucket, Rate: rate, Burst: burst, Callers: 80 / len(stores),
		Timeout: timeout, Store: "script",
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
	}, 20*time.Second, 10*time.Millisecond, "all processes are at work")
	return r
}

// last lets the fleet go on for a while.
func (r *run) last(short, long time.Duration) { time.Sleep(faultlab.Lasting(short, long)) }

// goOn is last, and waits until some have been served who asked after a fault, or so long that denial shows that nobody is.
func (r *run) goOn(fault int64, short, long time.Duration) {
	began := time.Now()
	r.last(short, long)
	_ = redistest.Poll(standstill+10*breath-time.Since(began), func() error {
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

// end ends the fleet and looks at what it tells.
func (r *run) end() {
	r.t.Helper()
	r.told = r.all.End()
	r.late.Stop()
	r.t.Logf("%d permits, failures %v; overslept by at most %v, others on this machine by %v", len(faultlab.Used(r.told)),
		faultlab.Failures(r.told), faultlab.MostOverslept(r.told), r.late.Most())
}

// lateness is how much later than due a permit may have been used on this machine: those who sleep are woken late, and on the
// way from the server's decision to the end of the wait are a few more who may have to wait for a processor.
func (r *run) lateness() time.Duration {
	return 30*time.Millisecond + 2*max(r.late.Most(), faultlab.MostOverslept(r.told))
}

// bound requires that of the permits that were granted between two times no window holds more than rate × its length, and so
// many: by the clock by which they were used, so what was late comes on top. What tells which permits, and how many.
func (r *run) bound(what string, from, to int64, most float64) {
	r.t.Helper()
	var those []faultlab.Permit
	for _, p := range r.told {
		if p.Asked >= from && p.Granted <= to {
			those = append(those, p)
		}
	}
	worst := faultlab.Worst(faultlab.Used(those), rate)
	r.t.Logf("%s: %d permits", what, len(those))
	faultlab.Figure(r.t, "fullest window by use above rate × T (+ rate × late), "+what, worst)
	assert.LessOrEqual(r.t, worst, most+rate*r.lateness().Seconds()+faultlab.Noise(rate), what)
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
	if off := faultlab.MostPutOff(r.told); off > 50*time.Millisecond {
		r.t.Logf("a process stood still, so its callers were put off by up to %v and have taken others", off)
	} else {
		assert.LessOrEqual(r.t, lost, 2*failed, "what was taken reached its caller; or that had given up, and it may be given back")
	}
	faultlab.CleanUp(r.t, client, prefix)
}

// always is all times.
const always = 1 << 62

func micros() int64 { return time.Now().UnixMicro() }
