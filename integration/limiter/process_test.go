package limiter

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// workerEnv holds the job of a process that TestProcesses starts: this test binary, run again.
const workerEnv = "TOKENBUCKET_TEST_WORKER"

// job is what one process does until it is ended: callers that each wait for a permit and call the upstream with it, again and again.
type job struct {
	Redis    []string // one address, or a cluster's
	Bucket   string
	Store    string
	Rate     float64
	Burst    float64
	Callers  int
	Upstream string
}

func (j *job) open() (tb.RedisClient, io.Closer) {
	if len(j.Redis) > 1 {
		c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: j.Redis})
		return c, c
	}
	c := redis.NewClient(&redis.Options{Addr: j.Redis[0]})
	return c, c
}

func (j *job) limiter(client tb.RedisClient) (*tb.RateLimiter, error) {
	return tb.NewSmoothBursty(j.Bucket, j.Rate, tb.WithMaxPermits(j.Burst), tb.WithInitialPermits(j.Burst),
		tb.WithStore(redisStores(client)[j.Store]), tb.WithStoreTimeout(30*time.Second)) // a busy machine is no outage
}

// permit is a worker's event for each permit, in microseconds: its due time by faultlab.Micros, and by how much that may be late, which is
// the duration of the round trip.
type permit struct {
	Due, Took int64
	// Again is how often at most the permit was asked for again: a process that has no turn for 100 ms when a permit is due asks
	// for all those again that its callers wait for, and each of these is put off if the first was lost.
	Again int
	// WokenLate is the longest time by which the process was woken late; it is sent in the last event, which is of no permit.
	WokenLate int64
}

const tolerated = 100 * time.Millisecond

func work(ctx context.Context, j *job, tell func(permit)) error {
	client, closer := j.open()
	defer func() { _ = closer.Close() }()
	l, err := j.limiter(client)
	if err != nil {
		return err
	}
	upstream, err := faultlab.Dial(j.Upstream)
	if err != nil {
		return err
	}
	defer func() { _ = upstream.Close() }()
	call := func() error {
		asked := faultlab.Micros()
		r, err := l.TryReserve(background, 1, 500*time.Millisecond)
		if err != nil {
			return err
		}
		if !r.OK() {
			time.Sleep(r.RetryAfter())
			return nil
		}
		answered := faultlab.Micros()
		delay := r.Delay()
		<-r.Ready()
		p := permit{Due: answered + delay.Microseconds(), Took: answered - asked}
		if r.Delay() > delay || p.Took > tolerated.Microseconds() { // it may have been asked for again before its delay was seen
			p.Again = 1 + int((faultlab.Micros()-asked)/tolerated.Microseconds())
		}
		tell(p)
		return upstream.Call()
	}
	late := faultlab.StartLateness()
	defer late.Stop()
	var callers sync.WaitGroup
	failures := make(chan error, j.Callers)
	for range j.Callers {
		callers.Go(func() {
			for ctx.Err() == nil {
				if err := call(); err != nil {
					failures <- err
					return
				}
			}
		})
	}
	callers.Wait()
	close(failures)
	if err := <-failures; err != nil {
		return err
	}
	tell(permit{WokenLate: late.Most().Microseconds()})
	return nil
}

// account follows a bucket's state: in any window between two looks, no more was granted than was stored at its beginning, and than
// the rate makes in the time by which that has moved the bucket ahead.
type account struct {
	rate  float64
	first int64   // microseconds
	least float64 // of all windows, what their beginnings leave to be granted
	most  float64 // that any window had too many
	looks int
}

func (a *account) look(b tb.PermitBucket) {
	if a.looks++; a.looks == 1 {
		a.first = b.NextFreeTicketMicros
		a.least = math.Inf(-1)
	}
	ahead := float64(b.Seq) - a.rate*float64(b.NextFreeTicketMicros-a.first)/1e6
	a.most = max(a.most, ahead+a.least)
	a.least = max(a.least, -ahead-b.StoredPermits)
}

// Four processes, two with the lock store and two with the script store, on one bucket of a real server and of a real
// cluster, at full demand for ten seconds: the bound holds by the bucket's account, which is the server's clock, and by the
// upstream's clock, nothing is lost, and at least 98 % of the rate is handed out.
func TestProcesses(t *testing.T) {
	t.Parallel()
	const seconds = 10
	cluster := redistest.StartCluster(t)
	for name, addrs := range map[string][]string{"server": {redistest.Start(t).Addr}, "cluster": cluster.Addrs} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			late := faultlab.MeasureLateness(t)
			u := faultlab.StartUpstream(t)
			j := job{
				Redis: addrs, Bucket: fmt.Sprint("b", rand.Uint64()), Rate: 2000, Burst: 200, Callers: 64, Upstream: u.Addr, Store: "script",
			}
			client, closer := j.open()
			defer func() { _ = closer.Close() }()
			l, err := j.limiter(client)
			require.NoError(t, err)
			books := account{rate: j.Rate}
			look := func() {
				b, err := l.State(background)
				require.NoError(t, err)
				if b.Seq > 1 { // the bucket has been used
					books.look(b)
				}
			}

			var processes [4]*worker.Worker[permit]
			for i := range processes {
				mine := j
				mine.Store = faultlab.Kinds[i%2]
				processes[i] = worker.Start[permit](t, workerEnv, mine)
			}
			faultlab.Soon(t, time.Minute, func() bool { // they have begun
				return !slices.ContainsFunc(processes[:], func(p *worker.Worker[permit]) bool { return len(p.Events()) == 0 })
			})
			for began := time.Now(); time.Since(began) < seconds*time.Second; time.Sleep(20 * time.Millisecond) {
				look()
			}
			var told [len(processes)][]permit
			var ending sync.WaitGroup
			for i, p := range processes { // all at once
				ending.Go(func() { told[i] = p.End() })
			}
			ending.Wait()
			look()
			arrivals := u.End()

			var due []faultlab.Event
			slowest := int64(0) // answer
			mayBe := 0          // permits that were asked for again
			wokenLate := late.Most()
			for i, permits := range told {
				t.Logf("process %d (%s store): %d permits", processes[i].Pid, faultlab.Kinds[i%2], len(permits)-1)
				for _, p := range permits {
					if p.WokenLate > 0 {
						wokenLate = max(wokenLate, time.Duration(p.WokenLate)*time.Microsecond)
						continue
					}
					due = append(due, faultlab.Event{At: p.Due, Permits: 1})
					slowest = max(slowest, p.Took)
					mayBe += p.Again
				}
			}
			slices.SortFunc(due, func(a, b faultlab.Event) int { return cmp.Compare(a.At, b.At) })

			b, err := l.State(background)
			require.NoError(t, err)
			taken := int(b.Seq) - 1
			lost := taken - len(due)
			// A second request for the same permits changes the bucket once more, and so does the refund of the first. Of each process,
			// some calls may have been postponed before it could read the change.
			changes := 2 * mayBe
			if mayBe > 0 {
				changes += 2 * len(processes) * j.Callers
			}
			t.Logf("%d changes of the bucket that nobody received, allowed %d; the machine wakes sleepers up to %v late", lost, changes, wokenLate)
			require.GreaterOrEqual(t, lost, 0)
			require.LessOrEqual(t, lost, changes)
			if wokenLate < tolerated/2 {
				require.Less(t, lost, taken/50, "no process had to wait so long for its turn")
			}
			require.EqualValues(t, 0, client.(redis.Cmdable).Exists(background, "tokenbucket:{"+j.Bucket+"}:lock").Val())

			estimated := faultlab.Worst(due, j.Rate)
			span := float64(due[len(due)-1].At-due[0].At) / 1e6
			t.Logf("%d permits in %.2f s: %.1f %% of rate × T; %d looks at the account, %.3f too many in the worst of their windows; worst window by when callers were told %.1f of %v + rate × T",
				len(due), span, 100*float64(len(due))/(j.Rate*span), books.looks, books.most, estimated, j.Burst)
			require.Greater(t, books.looks, 5)
			require.LessOrEqual(t, books.most, float64(changes)+j.Rate*1e-6+1e-3, "that is, none but what was given back, which the account counts as taken twice")
			unsure := j.Rate * float64(slowest) / 1e6
			require.LessOrEqual(t, estimated, j.Burst+unsure+faultlab.Noise(j.Rate))
			if late.Most() < tolerated { // else callers had not the time to ask for as much
				// Nor had they while the machine was late: what it takes to ask is some ten to forty wakings one after the other.
				stalls := late.Stalls(10*time.Millisecond, due[0].At, due[len(due)-1].At).Seconds()
				require.GreaterOrEqual(t, float64(taken)-j.Burst, 0.98*j.Rate*(span-stalls), "%.3f s of stalls", stalls)
			}
			require.GreaterOrEqual(t, span, seconds-2.0)

			arrived := faultlab.Worst(arrivals, j.Rate)
			total, earliest, latest := 0, int64(1<<62), int64(0)
			for _, a := range arrivals { // in both orders the k-th due is the k-th to arrive
				for range a.Permits {
					behind := a.At - due[total].At
					earliest, latest = min(earliest, behind), max(latest, behind)
					total++
				}
			}
			spread := float64(latest-earliest) / 1e6
			t.Logf("upstream: %v arrived, between %d and %d µs after they were due; worst window %.3f, allowed %.3f",
				total, earliest, latest, arrived, j.Burst+unsure+j.Rate*spread)
			require.EqualValues(t, len(due), total)
			require.GreaterOrEqual(t, earliest, -1000-slowest, "none before it was due")
			require.LessOrEqual(t, arrived, j.Burst+unsure+j.Rate*spread+faultlab.Noise(j.Rate))
		})
	}
}
