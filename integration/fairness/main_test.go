// Package fairness tests that the processes of a fleet share a bucket, whatever their distance from the server, the verbs of
// their callers and the sizes of their requests, and that hardly anything is lost when one of them is stopped or killed.
package fairness

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) {
	faultlab.Main()
	faultlab.Parallel(8)
	redistest.Main(m)
}

// fleet is processes at full demand on one bucket, whose largest burst is one request. Whatever happens to them, what they use
// keeps to the bucket's bound.
type fleet struct {
	faultlab.Fleet
	t     *testing.T
	jobs  []faultlab.Job
	late  *faultlab.Lateness
	began int64 // when all of them had asked
}

const (
	// wakings is how many processes and goroutines an answer of the store wakes at most, one after the other, each as late as the
	// machine is.
	wakings = 40
	// horizon is about how far ahead a process asks.
	horizon = time.Second
)

// busy returns the job of one of its processes: the given number of callers, which wait as long as it takes. A busy machine is no outage.
func busy(rate float64, callers int) faultlab.Job {
	return faultlab.Job{
		Store: "script", StoreTimeout: 30 * time.Second, Verb: "acquire", Rate: rate, Burst: 1, Callers: callers,
	}
}

// mixed is the job of one process whose callers come so slowly that at first they get their turns among those of others.
func mixed(rate float64, callers int) faultlab.Job {
	j := busy(rate, callers)
	j.Spread = time.Second
	return j
}

// start starts a process for each job, on a bucket of their own, one when the one before has asked the server.
func start(t *testing.T, jobs ...faultlab.Job) *fleet {
	t.Helper()
	return startAway(t, make([]time.Duration, len(jobs)), jobs...)
}

// startAway is start for processes which are so far from the server, one way.
func startAway(t *testing.T, distances []time.Duration, jobs ...faultlab.Job) *fleet {
	t.Helper()
	server := redistest.Start(t)
	f := &fleet{t: t, jobs: jobs, late: faultlab.MeasureLateness(t)}
	for i, j := range jobs {
		proxy := faultlab.StartProxy(t, server.Addr)
		proxy.Delay(distances[i], 0, nil)
		j.Addrs, j.Prefix, j.Bucket = []string{proxy.Addr}, "fairness:", "x"
		proxy.Match(j.Prefix, func(int64, []string) faultlab.Fault { return faultlab.None })
		f.Fleet = append(f.Fleet, faultlab.StartProcess(t, j))
		require.NoError(t, redistest.Poll(30*time.Second, func() error {
			if proxy.Seen() == 0 {
				return fmt.Errorf("process %d has not asked", i)
			}
			return nil
		}))
	}
	f.began = faultlab.Micros()
	return f
}

// end ends the processes. It requires that none of their calls failed, and that in every window no more was used than the bucket and the
// rate allow, even of the permits due 100 ms before it. It returns the events of each process.
func (f *fleet) end() [][]faultlab.Permit {
	f.t.Helper()
	told := make([][]faultlab.Permit, len(f.Fleet))
	var ending sync.WaitGroup
	for i, p := range f.Fleet {
		ending.Go(func() { told[i] = p.End() })
	}
	ending.Wait()
	all := slices.Concat(told...)
	require.Empty(f.t, faultlab.Failures(all))
	rate, burst := f.jobs[0].Rate, 1
	for _, j := range f.jobs {
		burst = max(burst, j.Permits)
	}
	worst := faultlab.Worst(faultlab.Used(all), rate)
	woken := f.woken(all)
	late := 100*time.Millisecond + 2*woken // and late again by the others who were woken
	f.t.Logf("this machine wakes up to %v late", woken)
	faultlab.Figure(f.t, fmt.Sprintf("fullest window by use above rate × T, of %.4g", float64(burst)+rate*0.1), worst)
	require.LessOrEqual(f.t, worst, float64(burst)+rate*late.Seconds()+faultlab.Noise(rate))
	return told
}

// stalled returns for how long other programs on this machine have delayed sleepers, in a time, each by so much that replies come later
// than a process asks ahead: permits that fall due then may lapse.
func (f *fleet) stalled(from int64, lasts time.Duration) time.Duration {
	return f.late.Stalls(horizon/wakings, from, from+lasts.Microseconds())
}

// woken is how late sleepers were woken at most, here or in a process.
func (f *fleet) woken(all []faultlab.Permit) time.Duration {
	return max(f.late.Most(), faultlab.MostWoken(all))
}

// used is how many permits each process has used in a time, and what share that is of all that the rate allows in it, without
// what this machine was stalled for.
func (f *fleet) used(told [][]faultlab.Permit, from int64, lasts time.Duration) (each []float64, share float64) {
	sum := 0.0
	for _, permits := range told {
		n := 0
		for _, e := range faultlab.Used(permits) {
			if e.At >= from && e.At < from+lasts.Microseconds() {
				n += e.Permits
			}
		}
		each = append(each, float64(n))
		sum += float64(n)
	}
	return each, sum / (f.jobs[0].Rate * (lasts - f.stalled(from, lasts)).Seconds())
}

// fair requires that each process has used at least the given part of an equal share in a time, which begins after another, and all of them
// hardly less than the rate. If the machine has stalled for more than a tenth of the time, the shares are only logged: permits that fall due
// in a stall lapse, in whichever process owns them.
func (f *fleet) fair(told [][]faultlab.Permit, after, lasts time.Duration, least float64) {
	f.t.Helper()
	each, share := f.used(told, f.began+after.Microseconds(), lasts)
	worst, sum := slices.Min(each), 0.0
	for _, n := range each {
		sum += n
	}
	worst *= float64(len(each)) / sum
	f.t.Logf("permits of each: %v", each)
	faultlab.Figure(f.t, fmt.Sprintf("the worst of the fair share, at least %v", least), worst)
	faultlab.Figure(f.t, "% of the rate", 100*share)
	require.GreaterOrEqual(f.t, share, 0.95)
	if stalled := f.stalled(f.began+after.Microseconds(), lasts); stalled > lasts/10 {
		f.t.Logf("the shares are not judged: this machine has stalled for %v", stalled)
		return
	}
	require.GreaterOrEqual(f.t, worst, least, "%v", each)
}
