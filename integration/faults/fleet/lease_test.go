package fleet

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// spend is a process whose callers take permits, with leases, and call the upstream with each.
func spend(ctx context.Context, j *job, _ func(spent)) error {
	client := j.client()
	defer func() { _ = client.Close() }()
	l, err := j.limiter(client, tokenbucket.WithStoreTimeout(10*time.Second))
	if err != nil {
		return err
	}
	up, err := faultlab.Dial(j.Upstream)
	if err != nil {
		return err
	}
	defer func() { _ = up.Close() }()
	var callers sync.WaitGroup
	failures := make(chan error, j.Callers)
	for range j.Callers {
		callers.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				ok, err := l.TryAcquire(background, 1, 0)
				if ok {
					err = up.Call()
				}
				if err != nil {
					failures <- err
					return
				}
				if !ok || n%20 == 19 {
					time.Sleep(5 * time.Millisecond)
				}
			}
		})
	}
	callers.Wait()
	close(failures)
	if err := <-failures; err != nil {
		return err
	}
	return l.Close(background)
}

// Of eight processes that lease, four are killed. What they held is lost, no more than a block each, and nothing is spent that
// was not taken from the bucket.
func TestH2KilledHolders(t *testing.T) {
	t.Parallel()
	const processes, killed = 8, 4
	server := redistest.Start(t)
	for store := range faultlab.Stores {
		t.Run(store, func(t *testing.T) {
			up := faultlab.StartUpstream(t)
			// So large a bucket is neither full nor empty: the permits that it lacks were taken.
			j := job{Do: "spend", Rate: 1000, Burst: 1e7, Lease: 50 * time.Millisecond, Callers: 4, Upstream: up.Addr}.on(t, server, store)
			const initial = 1e6
			plain := *j
			plain.Lease = 0 // or the one who looks would lease too
			look := plain.open(t, server.Client(t), tokenbucket.WithInitialPermits(initial), tokenbucket.WithStoreTimeout(10*time.Second))
			ok, err := look.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
			begun, err := look.State(background)
			require.NoError(t, err)
			var all []*worker.Worker[spent]
			for range processes {
				all = append(all, worker.Start[spent](t, jobEnv, j))
			}
			time.Sleep(faultlab.Lasting(1500*time.Millisecond, 10*time.Second))
			faultlab.Soon(t, time.Minute, func() bool { return up.Count() > 1000 }) // processes begin when the machine lets them
			before := up.Count()
			for _, w := range all[:killed] {
				require.NoError(t, w.Kill())
			}
			time.Sleep(faultlab.Lasting(500*time.Millisecond, 5*time.Second))
			for _, w := range all {
				w.End()
			}
			used := 0
			for _, e := range up.End() {
				used += e.Permits
			}
			faultlab.Bit(t, before, used-before)
			b, err := look.State(background)
			require.NoError(t, err)
			scripts := scriptsOf(t, server.Client(t))
			accrued := float64(b.SeenMicros-begun.SeenMicros) / 1e6 * j.Rate
			taken := begun.StoredPermits + accrued - b.StoredPermits
			block := j.Rate * j.Lease.Seconds()
			t.Logf("taken %.1f, used %d by %d scripts in all", taken, used, scripts)
			faultlab.Figure(t, fmt.Sprintf("permits lost with the dead, of %.0f", killed*(block+float64(j.Callers))), taken-float64(used))
			require.GreaterOrEqual(t, taken, float64(used)-0.01, "more was used than taken")
			// A caller that is killed between its permit and its call has used it unseen.
			require.LessOrEqual(t, taken-float64(used), killed*(block+float64(j.Callers))+0.01)
			require.Greater(t, 2*used, scripts, "hardly anything came from leases")
		})
	}
}

// scriptsOf is how many scripts a server has run.
func scriptsOf(t *testing.T, client *redis.Client) (n int) {
	t.Helper()
	info, err := client.InfoMap(background, "commandstats").Result()
	require.NoError(t, err)
	_, err = fmt.Sscanf(info["Commandstats"]["cmdstat_evalsha"], "calls=%d", &n)
	require.NoError(t, err)
	return n
}

// origin is where times of the monotonic clock count from.
var origin = time.Now()

// trips is a client that records its trips. With a delay, it receives replies that much later, as a process does that is stopped meanwhile.
type trips struct {
	tokenbucket.RedisClient
	delay atomic.Int64
	// under way, and how many have begun.
	flying, begun atomic.Int64
	sent          atomic.Int64 // when the last one whose answer has come was sent, by the monotonic clock, in nanoseconds
}

func (c *trips) Process(ctx context.Context, cmd redis.Cmder) error {
	sent := time.Since(origin)
	c.begun.Add(1)
	c.flying.Add(1)
	defer c.flying.Add(-1)
	err := c.RedisClient.Process(ctx, cmd)
	time.Sleep(time.Duration(c.delay.Load()))
	c.sent.Store(max(c.sent.Load(), int64(sent)))
	return err
}

// age of a permit that is had at once.
type age struct {
	// Local: nothing was sent for it, so it came from a lease, which was requested at the latest that long before the call.
	Local   bool
	Granted time.Duration
}

// take takes a permit and returns its origin.
func (c *trips) take(l *tokenbucket.RateLimiter) (a age, ok bool, err error) {
	began, trips, flying := time.Since(origin), c.begun.Load(), c.flying.Load()
	a.Granted = began - time.Duration(c.sent.Load())
	ok, err = l.TryAcquire(background, 1, 0)
	a.Local = flying == 0 && trips == c.begun.Load()
	return a, ok, err
}

// watchLease is a process that takes permits, one after another, and sends the largest age of those from leases since its last event.
func watchLease(ctx context.Context, j *job, tell func(spent)) error {
	client := j.client()
	defer func() { _ = client.Close() }()
	c := &trips{RedisClient: client}
	l, err := j.limiter(c, tokenbucket.WithStoreTimeout(10*time.Second))
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		s := spent{}
		for began := time.Now(); time.Since(began) < 20*time.Millisecond; {
			a, ok, err := c.take(l)
			if err != nil {
				return err
			}
			if ok && a.Local {
				s.Local++
				s.Oldest = max(s.Oldest, a.Granted)
			}
			time.Sleep(100 * time.Microsecond)
		}
		tell(s)
	}
	return l.Close(background)
}

// spent describes the permits from leases for a while: their number, and how long before, at most, their lease had been requested.
type spent struct {
	Local  int
	Oldest time.Duration
}

// A process that is stopped for longer than its leases last spends nothing from them when it goes on.
func TestH2StoppedHolder(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for store := range faultlab.Stores {
		t.Run(store, func(t *testing.T) {
			random := faultlab.Seed(t)
			j := job{Do: "watch", Rate: 10_000, Burst: 10_000, Lease: 100 * time.Millisecond}.on(t, server, store)
			w := worker.Start[spent](t, jobEnv, j)
			local := func() (n int) {
				for _, s := range w.Events() {
					n += s.Local
				}
				return n
			}
			require.NoError(t, redistest.Poll(30*time.Second, func() error {
				if n := local(); n < 100 {
					return fmt.Errorf("%d permits came from leases", n)
				}
				return nil
			}))
			before, stops := local(), int(faultlab.Lasting(8, 60))
			for range stops {
				time.Sleep(time.Duration(random.IntN(150)) * time.Millisecond)
				require.NoError(t, w.Stop())
				time.Sleep(250 * time.Millisecond)
				require.NoError(t, w.Continue())
			}
			all := 0
			oldest := time.Duration(0)
			for _, s := range w.End() {
				all += s.Local
				oldest = max(oldest, s.Oldest)
			}
			faultlab.Bit(t, before, all-before)
			t.Logf("%d stops; %d permits from leases", stops, all)
			faultlab.Figure(t, fmt.Sprintf("age of a lease that was used, of %v", j.Lease), oldest)
			require.LessOrEqual(t, oldest, j.Lease)
		})
	}
}

// A lease lasts from before its request: a reply that arrives late, because the network was slow or the process stood still, brings a lease
// that is over already.
func TestH2LeaseIsAsOldAsItsRequest(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for store := range faultlab.Stores {
		t.Run(store, func(t *testing.T) {
			j := job{Rate: 10_000, Burst: 10_000, Lease: 100 * time.Millisecond, LockTTL: 10 * time.Second}.on(t, server, store)
			c := &trips{RedisClient: server.Client(t)}
			l := j.open(t, c, tokenbucket.WithStoreTimeout(10*time.Second))
			// Many at once, so that there is demand while an answer is under way.
			spend := func(d time.Duration) (s spent) {
				var mu sync.Mutex
				var callers sync.WaitGroup
				began := time.Now()
				for range 32 {
					callers.Go(func() {
						for time.Since(began) < d {
							a, ok, err := c.take(l)
							if err != nil {
								t.Error(err)
								return
							}
							mu.Lock()
							if ok && a.Local {
								s.Local++
								s.Oldest = max(s.Oldest, a.Granted)
							}
							mu.Unlock()
						}
					})
				}
				callers.Wait()
				return s
			}
			before := spend(500 * time.Millisecond)
			for began := time.Now(); before.Local < 100 && time.Since(began) < 30*time.Second; {
				more := spend(500 * time.Millisecond)
				before.Local, before.Oldest = before.Local+more.Local, max(before.Oldest, more.Oldest)
			}
			trips := c.begun.Load()
			c.delay.Store(int64(3 * j.Lease))
			late := spend(faultlab.Lasting(2*time.Second, 10*time.Second))
			c.delay.Store(0)
			trips = c.begun.Load() - trips
			require.NoError(t, l.Close(background))
			t.Logf("at once: %+v; heard %v late in %d trips: %+v", before, 3*j.Lease, trips, late)
			faultlab.Figure(t, "permits from leases that were heard of too late", late.Local)
			faultlab.Bit(t, before.Local, int(trips))
			require.LessOrEqual(t, before.Oldest, j.Lease)
			require.LessOrEqual(t, late.Oldest, j.Lease)
		})
	}
}

// The rate is lowered while four processes hold leases of the old one, which they do not spend at once: when those are over,
// the new rate is kept to.
func TestH3RateLoweredUnderLeases(t *testing.T) {
	t.Parallel()
	const processes, lower = 4, 1000.0
	server := redistest.Start(t)
	for store := range faultlab.Stores {
		t.Run(store, func(t *testing.T) {
			j := job{Rate: 20_000, Burst: 20_000, Lease: 200 * time.Millisecond}.on(t, server, store)
			type use struct{ asked, used int64 }
			var mu sync.Mutex
			var uses []use
			ctx, cancel := context.WithCancel(background)
			defer cancel()
			var callers sync.WaitGroup
			var limiters []*tokenbucket.RateLimiter
			var local atomic.Int64
			var hold atomic.Bool
			for range processes {
				c := &trips{RedisClient: server.Client(t)}
				l := j.open(t, c, tokenbucket.WithStoreTimeout(10*time.Second))
				limiters = append(limiters, l)
				callers.Go(func() {
					var mine []use
					for n := 0; ctx.Err() == nil; n++ {
						if hold.Load() {
							time.Sleep(time.Millisecond)
							continue
						}
						asked := faultlab.Micros()
						a, ok, err := c.take(l)
						if err != nil {
							t.Error(err)
							break
						}
						if ok {
							mine = append(mine, use{asked, faultlab.Micros()})
							if a.Local {
								local.Add(1)
							}
						}
						if !ok || n%10 == 9 {
							time.Sleep(time.Millisecond)
						}
					}
					mu.Lock()
					defer mu.Unlock()
					uses = append(uses, mine...)
				})
			}
			require.Eventually(t, func() bool { return local.Load() >= 1000 }, 30*time.Second, 10*time.Millisecond, "leases are in use")
			before := int(local.Load())
			hold.Store(true)
			require.NoError(t, limiters[0].SetRate(background, lower))
			set := faultlab.Micros()
			time.Sleep(j.Lease + time.Millisecond)
			hold.Store(false)
			time.Sleep(faultlab.Lasting(2*time.Second, 20*time.Second))
			cancel()
			callers.Wait()
			for _, l := range limiters {
				require.NoError(t, l.Close(background))
			}
			var after []faultlab.Span // each was taken in between
			for _, u := range uses {
				if u.asked > set+j.Lease.Microseconds() {
					after = append(after, faultlab.Span{From: u.asked, To: u.used})
				}
			}
			faultlab.Bit(t, before, len(after))
			burst := j.Burst * lower / j.Rate
			most := burst + processes*j.Lease.Seconds()*lower
			worst := faultlab.Surely(after, lower)
			t.Logf("%d permits from leases before; %d permits after", before, len(after))
			faultlab.Figure(t, fmt.Sprintf("fullest window after one lease, above the new rate × T, of %v", most), worst)
			require.LessOrEqual(t, worst, most+faultlab.Noise(lower))
		})
	}
}
