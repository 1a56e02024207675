package fleet

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// upstream enforces a limit of its own, and replies with a 429 to calls above it.
type upstream struct {
	*httptest.Server

	late    *faultlab.Lateness
	mu      sync.Mutex
	admit   func(now time.Time) bool
	retry   string // Retry-After of a refusal
	arrived []arrival
}

type arrival struct {
	at      time.Time
	refused bool
	from    string
}

func startUpstream(t *testing.T, admit func(now time.Time) bool) *upstream {
	u := &upstream{admit: admit, late: faultlab.MeasureLateness(t)}
	u.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if sent, err := strconv.ParseInt(r.Header.Get(sentHeader), 10, 64); err == nil { // nothing limits it
			fmt.Fprint(w, time.Since(time.UnixMicro(sent)))
			return
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		a := arrival{at: time.Now(), from: r.Header.Get("X-Gateway")}
		a.refused = !u.admit(a.at)
		u.arrived = append(u.arrived, a)
		if a.refused {
			if u.retry != "" {
				w.Header().Set("Retry-After", u.retry)
			}
			w.WriteHeader(http.StatusTooManyRequests)
		}
	}))
	t.Cleanup(u.Close)
	return u
}

// awaits waits until the calls that have arrived are enough.
func (u *upstream) awaits(t *testing.T, enough func(arrived []arrival) bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		return enough(u.arrived)
	}, 30*time.Second, time.Millisecond)
}

// bucket is a token bucket that holds one second's worth, full at first.
func bucket(rate float64) func(time.Time) bool {
	level, last := rate, time.Time{}
	return func(now time.Time) bool {
		if !last.IsZero() {
			level = min(rate, level+rate*now.Sub(last).Seconds())
		}
		last = now
		if level < 1 {
			return false
		}
		level--
		return true
	}
}

// sliding admits never more than n in any second.
func sliding(n int) func(time.Time) bool {
	var admitted []time.Time
	return func(now time.Time) bool {
		for len(admitted) > 0 && now.Sub(admitted[0]) >= time.Second {
			admitted = admitted[1:]
		}
		if len(admitted) >= n {
			return false
		}
		admitted = append(admitted, now)
		return true
	}
}

func gateways(t *testing.T, u *upstream, limit registry.Limit) []*worker.Worker[event] {
	prefix := fmt.Sprintf("%s:%d:", t.Name(), time.Now().UnixNano())
	var workers []*worker.Worker[event]
	for range 3 {
		workers = append(workers, worker.Start[event](t, workerEnv, job{
			Redis: redistest.Shared(t).Addr, Prefix: prefix, Fixed: &limit,
			Interval: time.Hour, Upstream: u.URL, Path: limit.Name, Callers: 8,
		}))
	}
	return workers
}

// slowest ends the workers, of whose calls none has failed, and returns how slow they and the upstream were at most, and for how long,
// together, the one was stalled that was for longest.
func (u *upstream) slowest(t *testing.T, workers []*worker.Worker[event]) (slow slowness, stalled time.Duration) {
	var failed []string
	for _, w := range workers {
		events := w.End()
		for _, e := range events {
			switch e.What {
			case "slowest":
				slow = slow.most(e.Slow)
			case "stalled":
			default:
				failed = append(failed, fmt.Sprintf("%d: %+v", w.Pid, e))
			}
		}
		stalled = max(stalled, stalls(t, events, 0, 1<<62))
	}
	require.Empty(t, failed)
	slow.Woken = max(slow.Woken, u.late.Most())
	return slow, stalled
}

// stalls is for how long, together, a process was woken late from one time to another.
func stalls(t *testing.T, events []event, from, to int64) (sum time.Duration) {
	for _, e := range events {
		if e.What == "stalled" {
			d, err := time.ParseDuration(e.Text)
			require.NoError(t, err)
			within := min(e.At+d.Microseconds(), to) - max(e.At, from)
			sum += time.Duration(max(0, within)) * time.Microsecond
		}
	}
	return sum
}

// Three gateways under overload, thirty seconds, against an upstream that enforces its quota with a hard 429: not one of
// them, and at least 95 % of the quota is used.
func TestQuotaIsUsedAndNeverExceeded(t *testing.T) {
	t.Parallel()
	const quota, seconds = 20, 30
	const jitter = 40 * time.Millisecond
	limit := registry.Limit{Name: "/ibe/AvailFare", Rate: quota, MaxWait: 500 * time.Millisecond}
	counted := limit
	counted.Quota, counted.Jitter = true, jitter
	for _, c := range []struct {
		name  string
		admit func(time.Time) bool
		limit registry.Limit
	}{
		{"token bucket", bucket(quota), limit},
		{"sliding second", sliding(quota), counted},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			u := startUpstream(t, c.admit)
			workers := gateways(t, u, c.limit)
			u.awaits(t, func(arrived []arrival) bool { return len(arrived) > 0 })
			time.Sleep(seconds * time.Second)
			slow, stalled := u.slowest(t, workers)
			calls, refused := 0, 0
			processes := map[string]int{}
			for _, a := range u.arrived {
				if a.at.Sub(u.arrived[0].at) <= seconds*time.Second {
					calls++
				}
				if a.refused {
					refused++
				}
				processes[a.from]++
			}
			t.Logf("%d calls in %d s, %.1f %% of the quota; %d refused; %+v; stalled for %v; by process %v",
				calls, seconds, 100*float64(calls)/(quota*seconds), refused, slow, stalled, processes)
			require.Len(t, processes, 3)
			require.GreaterOrEqual(t, float64(calls), 0.95*quota*(seconds-max(5*slow.Woken, stalled).Seconds())) // it may be late more than once
			if late := slow.Woken + slow.Way; 2*late < jitter {                                                  // samples: a call in between may have been later
				require.Zero(t, refused)
			} else { // the machine may have been later than the jitter that was provided for, in each second again
				require.LessOrEqual(t, float64(refused), 5+seconds*quota*late.Seconds())
			}
		})
	}
}

// The quota is halved in the middle, without a change of the gateways' rows: the first 429 with Retry-After holds all three back.
func TestRetryAfterHoldsTheFleet(t *testing.T) {
	t.Parallel()
	const quota, retry = 40, 3 * time.Second
	full, half := bucket(quota), bucket(quota/2)
	u := startUpstream(t, full)
	u.retry = "3"
	workers := gateways(t, u, registry.Limit{Name: "/ibe/Ticket", Rate: quota, MaxWait: 500 * time.Millisecond})
	u.awaits(t, func(arrived []arrival) bool {
		from := map[string]bool{}
		for _, a := range arrived {
			from[a.from] = true
		}
		return len(arrived) > 2*quota && len(from) == len(workers)
	})
	u.mu.Lock()
	before := len(u.arrived)
	u.admit = half
	u.mu.Unlock()
	refused := func(a arrival) bool { return a.refused }
	u.awaits(t, func(arrived []arrival) bool { // the halved quota is exceeded, and then they go on
		calls := arrived[before:]
		first := slices.IndexFunc(calls, refused)
		return first >= 0 && len(calls) > quota && calls[len(calls)-quota].at.Sub(calls[first].at) > retry
	})
	slow, _ := u.slowest(t, workers)
	calls := u.arrived[before:]
	first := slices.IndexFunc(calls, refused)
	told := calls[first].at
	held := map[string]int{}
	last := time.Duration(0)
	again := 0
	for _, a := range calls[first+1:] {
		switch since := a.at.Sub(told); {
		case since < retry-100*time.Millisecond:
			held[a.from]++
			last = max(last, since)
		default:
			again++
		}
	}
	// The refusal takes a way, too. Then its penalty waits for the trip in flight, and makes one; another process receives it by one.
	late := slow.Woken + 2*slow.Way + 3*slow.Trip
	t.Logf("told after %d calls; while held back %v came, the last after %v; later %d; %+v", first, held, last, again, slow)
	for from, n := range held {
		require.LessOrEqual(t, float64(n), quota/10+quota*late.Seconds(), "what %s had on its way, and was due before its next answer", from)
	}
	require.Less(t, last, 600*time.Millisecond+late)
	require.Greater(t, again, quota/2, "and then they go on")
}
