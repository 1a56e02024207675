package semaphore

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// A grant that is published just when the Pub/Sub connection is cut, or hangs, is found missing within two beats.
func TestLostWakeUp(t *testing.T) {
	t.Parallel()
	s, client := server(t)
	addr := client.Options().Addr
	kill := func(t *testing.T) {
		require.NoError(t, client.Do(ctx, "CLIENT", "KILL", "TYPE", "pubsub", "USER", fleetUser).Err())
	}
	// Each gets two moments, of less than two milliseconds.
	for name, fault := range map[string]func(t *testing.T, g *gate, release func(), one, other time.Duration){
		"cut": func(t *testing.T, g *gate, release func(), one, other time.Duration) {
			time.AfterFunc(one, release)
			time.Sleep(other)
			g.cut(messages)
		},
		"killed": func(t *testing.T, g *gate, release func(), _, _ time.Duration) {
			kill(t)
			release()
		},
		"killed about then": func(t *testing.T, g *gate, release func(), one, other time.Duration) {
			time.AfterFunc(one, release)
			time.Sleep(other)
			kill(t)
		},
		"hung": func(t *testing.T, g *gate, release func(), _, _ time.Duration) {
			g.stop(true, messages)
			release()
		},
	} {
		t.Run(name, func(t *testing.T) {
			slow := faultlab.MeasureTrips(t, s.Addr)
			random := faultlab.Seed(t)
			below := func(d time.Duration) time.Duration { return time.Duration(random.Int64N(int64(d))) }
			type wait struct{ Took, Slow time.Duration }
			waits := map[time.Duration][]wait{}
			var mu sync.Mutex
			var running sync.WaitGroup
			for i := range 15 {
				lease := []time.Duration{1500 * time.Millisecond, 3 * time.Second, 10 * time.Second}[i%3]
				pause, one, other := below(min(lease/3, time.Second)), below(2*time.Millisecond), below(2*time.Millisecond)
				running.Go(func() {
					g := startGate(t, addr)
					key := fmt.Sprintf("lost-%d-%d", len(name), i)
					waiter := open(t, g.addr, key, 1, semaphore.WithLease(lease))
					holder := open(t, addr, key, 1, semaphore.WithLease(20*time.Second)) // it releases, however late this machine is
					p, err := holder.Acquire(ctx, 1)
					assert.NoError(t, err)
					got := make(chan time.Time, 1)
					running.Go(func() {
						limited, cancel := context.WithTimeout(ctx, 20*time.Second)
						defer cancel()
						q, err := waiter.Acquire(limited, 1)
						got <- time.Now()
						if assert.NoError(t, err) {
							assert.NoError(t, q.Release(ctx))
						}
					})
					queued(t, client, key, 1)
					assert.Eventually(t, func() bool { return g.subscribed() > 0 }, 20*time.Second, 10*time.Millisecond)
					time.Sleep(pause)
					released := make(chan time.Time, 1)
					fault(t, g, func() {
						released <- time.Now()
						assert.NoError(t, p.Release(ctx))
					}, one, other)
					ended, began := <-got, <-released
					w := wait{ended.Sub(began).Round(10 * time.Microsecond), slow.Since(began).Round(10 * time.Microsecond)}
					mu.Lock()
					defer mu.Unlock()
					waits[lease] = append(waits[lease], w)
				})
			}
			running.Wait()
			for lease, all := range waits {
				bound := 2 * min(lease/3, time.Second) // of the ten beats after which it would be found anyway
				slices.SortFunc(all, func(a, b wait) int { return cmp.Compare(a.Took, b.Took) })
				t.Logf("lease %v, bound %v: %v", lease, bound, all)
				for _, w := range all {
					require.LessOrEqual(t, w.Took, bound+200*time.Millisecond+10*w.Slow)
				}
				if name == "hung" {
					require.Greater(t, all[len(all)-1].Took, bound/4, "the message must not have arrived")
				}
			}
		})
	}
}

// queued waits until n requests are in a queue.
func queued(t *testing.T, client *redis.Client, name string, n int64) {
	t.Helper()
	assert.Eventually(t, func() bool { return client.ZCard(ctx, base(name)+"queue").Val() == n }, 20*time.Second, 5*time.Millisecond)
}

// Redis loses its whole state, by FLUSHALL or by a kill and a restart, while five hold permits and fifty wait. The holders learn of it with
// their next renewal, and the waiters are served, those of a process in their old order.
func TestRedisForgets(t *testing.T) {
	t.Parallel()
	for name, forget := range map[string]func(t *testing.T, g *gate, s, empty *redistest.Server){
		"flushed": func(t *testing.T, _ *gate, s, _ *redistest.Server) {
			require.NoError(t, s.Client(t).FlushAll(ctx).Err())
		},
		"killed": func(_ *testing.T, g *gate, s, empty *redistest.Server) {
			g.lead(empty.Addr)
			s.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const lease = 6 * time.Second // a renewal that comes late still comes before its end
			s, client := server(t)
			empty, _ := server(t)
			g := startGate(t, s.Addr)
			slow := faultlab.MeasureTrips(t, s.Addr)
			holder := open(t, g.addr, "forgets", 5, semaphore.WithLease(lease))
			processes := []*semaphore.Semaphore{
				open(t, g.addr, "forgets", 5, semaphore.WithLease(lease)), open(t, g.addr, "forgets", 5, semaphore.WithLease(lease)),
			}
			var held []*semaphore.Permit
			for range 5 {
				p, err := holder.Acquire(ctx, 1)
				require.NoError(t, err)
				held = append(held, p)
			}
			type turn struct {
				arrived int
				fence   int64
				at      time.Time
			}
			turns := make(chan turn, 50)
			for i := range 50 {
				go func() {
					limited, cancel := context.WithTimeout(ctx, time.Minute)
					defer cancel()
					p, err := processes[i%2].Acquire(limited, 1)
					if !assert.NoError(t, err) {
						turns <- turn{}
						return
					}
					at := time.Now()
					time.Sleep(2 * time.Millisecond)
					assert.NoError(t, p.Release(ctx))
					turns <- turn{i, p.Fence(), at}
				}()
				queued(t, client, "forgets", int64(i+1))
			}
			began := time.Now()
			forget(t, g, s, empty)
			told := time.Duration(0)
			for _, p := range held {
				<-p.Context().Done()
				told = max(told, time.Since(began))
				require.ErrorIs(t, context.Cause(p.Context()), semaphore.ErrLost)
			}
			var all []turn
			for range 50 {
				all = append(all, <-turns)
			}
			slices.SortFunc(all, func(a, b turn) int { return int(a.fence - b.fence) })
			passed := 0
			for i, a := range all {
				require.Greater(t, a.fence, held[4].Fence(), "fences rise, though they were forgotten")
				for _, b := range all[:i] {
					if b.arrived > a.arrived {
						passed++
						require.NotEqual(t, a.arrived%2, b.arrived%2, "%d was served before %d of the same process", b.arrived, a.arrived)
					}
				}
			}
			worst := slow.Most()
			t.Logf("lease %v: holders told after %v; the first waiter served after %v, the last after %v; %d of %d pairs out of order, all of different processes; slow by %v",
				lease, told, all[0].at.Sub(began), all[49].at.Sub(began), passed, 50*49/2, worst)
			require.LessOrEqual(t, told, lease/3+500*time.Millisecond+10*worst, "a renewal comes every third of a lease")
			require.LessOrEqual(t, all[49].at.Sub(began), lease+500*time.Millisecond+50*worst)
		})
	}
}

// meddler is a client of which something is done before a request.
type meddler struct {
	*redis.Client
	before func(cmd redis.Cmder)
}

func (m *meddler) Process(ctx context.Context, cmd redis.Cmder) error {
	m.before(cmd)
	return m.Client.Process(ctx, cmd)
}

// Redis loses its state while a process with more waiters than fit in a batch sends them again: no waiter is left out.
func TestForgottenWhileAskingAgain(t *testing.T) {
	t.Parallel()
	const waiters = 2000
	const name = "again"
	_, client := server(t)
	addr := client.Options().Addr
	p, err := open(t, addr, name, 1).Acquire(ctx, 1)
	require.NoError(t, err)
	var cut atomic.Bool
	after := 0 // requests since then
	waiting := &meddler{
		Client: redis.NewClient(&redis.Options{Addr: addr, Username: fleetUser, Password: "any"}),
		before: func(cmd redis.Cmder) {
			if cut.Load() && len(cmd.Args()) > 1000 { // a full batch
				if after++; after == 3 {
					assert.NoError(t, client.FlushAll(ctx).Err())
				}
			}
		},
	}
	defer func() { _ = waiting.Close() }()
	s, err := semaphore.NewRedis(waiting, name, 1, semaphore.WithStoreTimeout(patient))
	require.NoError(t, err)
	limited, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var running sync.WaitGroup
	var served atomic.Int64
	for range waiters {
		running.Go(func() {
			if q, err := s.Acquire(limited, 1); err == nil {
				served.Add(1)
				assert.NoError(t, q.Release(ctx))
			}
		})
	}
	queued(t, client, name, waiters)
	time.Sleep(100 * time.Millisecond) // what asking at first there was is over
	cut.Store(true)
	require.NoError(t, client.Do(ctx, "CLIENT", "KILL", "TYPE", "pubsub", "USER", fleetUser).Err())
	<-p.Context().Done()
	require.ErrorIs(t, context.Cause(p.Context()), semaphore.ErrLost)
	running.Wait()
	require.NoError(t, s.Close(ctx))
	require.Equal(t, int64(waiters), served.Load())
}

// Two concurrent Releases return the same result, and neither returns before it is known.
func TestReleasedTwiceAtOnce(t *testing.T) {
	t.Parallel()
	const name = "twice"
	_, client := server(t)
	addr := client.Options().Addr
	var slow atomic.Bool
	under, goOn := make(chan struct{}), make(chan struct{})
	holding := &meddler{
		Client: redis.NewClient(&redis.Options{Addr: addr, Username: fleetUser, Password: "any"}),
		before: func(redis.Cmder) {
			if slow.CompareAndSwap(true, false) {
				close(under)
				<-goOn
			}
		},
	}
	defer func() { _ = holding.Close() }()
	s, err := semaphore.NewRedis(holding, name, 1, semaphore.WithStoreTimeout(patient))
	require.NoError(t, err)
	p, err := s.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, semaphore.NewGroup(open(t, addr, name, 1)).Done(ctx, p.ID()))
	slow.Store(true)
	answers := make(chan error, 2)
	go func() { answers <- p.Release(ctx) }()
	<-under
	go func() { answers <- p.Release(ctx) }()
	time.Sleep(100 * time.Millisecond) // nothing happens meanwhile
	assert.Empty(t, answers, "told before it is known")
	close(goOn)
	for range 2 {
		assert.ErrorIs(t, <-answers, semaphore.ErrLost)
	}
	require.NoError(t, s.Close(ctx))
}
