package registry_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// patient is a row of one place, for which a call waits up to two seconds, with a rate and a window that are never full.
func patient(change ...func(*registry.Limit)) registry.Limit {
	return bounded("/a", append([]func(*registry.Limit){func(l *registry.Limit) {
		size := 100.0
		l.Rate, l.Burst, l.Window, l.WindowLimit = 100, &size, time.Hour, 100
		l.Concurrent, l.ConcurrentWait = 1, 2*time.Second
	}}, change...)...)
}

// ending is the result of a call that was made in the background.
type ending struct {
	*gate.Admission
	err error
	at  time.Duration // since the beginning of the test
}

// calling makes a call in the background.
func calling(ctx context.Context, r *registry.Registry, began time.Time) <-chan ending {
	done := make(chan ending, 1)
	go func() {
		a, err := r.Enter(ctx, "/a")
		done <- ending{a, err, time.Since(began)}
	}()
	synctest.Wait()
	return done
}

// A call waits for a place in turn, and holds nothing meanwhile. It is refused once it has waited for as long as its row says.
func TestWaitForAPlace(t *testing.T) {
	for name, change := range map[string]func(*registry.Limit){
		"with a rate": func(*registry.Limit) {},
		"without":     func(l *registry.Limit) { l.NoRate, l.Rate, l.Burst = true, 0, nil },
		"place alone": func(l *registry.Limit) {
			*l = registry.Limit{Name: "/a", NoRate: true, Concurrent: 1, ConcurrentWait: l.ConcurrentWait}
		},
		"rate is slow":  func(l *registry.Limit) { one := 1.0; l.Rate, l.Burst, l.MaxWait = 1, &one, time.Second },
		"nothing saved": func(l *registry.Limit) { none := 0.0; l.Rate, l.Burst, l.MaxWait = 100, &none, 500*time.Millisecond },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				row := patient(change)
				r := openLocal(t, registry.Static{row})
				began := time.Now()
				first := enter(t, r, "/a")
				require.True(t, first.OK)
				time.Sleep(time.Second - time.Since(began))
				var waiting []<-chan ending
				for range 3 {
					waiting = append(waiting, calling(ctx, r, began))
					time.Sleep(time.Millisecond)
				}
				if l, err := r.Limiter("/a"); err == nil && l != nil && row.Rate > 1 && *row.Burst > 0 {
					b, err := l.State(ctx)
					require.NoError(t, err)
					require.Equal(t, 100.0, b.StoredPermits, "a call in the queue holds no permit")
				}
				if u, ok, err := r.Usage(ctx, "/a"); row.Window != 0 {
					require.NoError(t, err)
					require.True(t, ok)
					require.Equal(t, 1, u.WindowUsed, "nor is it counted")
				}
				time.Sleep(time.Until(began.Add(2500 * time.Millisecond)))
				first.Leave()
				second := <-waiting[0]
				require.NoError(t, second.err)
				require.True(t, second.OK, second.By)
				require.GreaterOrEqual(t, second.at, 2500*time.Millisecond)
				require.LessOrEqual(t, second.at, 2520*time.Millisecond)
				for i, c := range waiting[1:] {
					refused := <-c
					require.NoError(t, refused.err)
					require.False(t, refused.OK)
					require.Equal(t, gate.ByConcurrency, refused.By)
					require.Equal(t, time.Second, refused.RetryAfter)
					require.Equal(t, 3*time.Second+time.Duration(i+1)*time.Millisecond, refused.at, "two seconds after it came")
				}
				second.Leave()
				time.Sleep(2 * time.Second)
				require.True(t, enter(t, r, "/a").OK, "nothing is left behind")
				r.Close()
			})
		})
	}
}

// Calls get places in the order in which they came, whether or not the row has a rate.
func TestPlacesInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := openLocal(t, registry.Static{patient(func(l *registry.Limit) { l.ConcurrentWait = time.Minute })})
		began := time.Now()
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				a, err := r.Enter(ctx, "/a")
				require.NoError(t, err)
				require.True(t, a.OK)
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				time.Sleep(100 * time.Millisecond)
				a.Leave()
			})
			time.Sleep(time.Millisecond)
			synctest.Wait()
		}
		wg.Wait()
		for i, n := range order {
			require.Equal(t, i, n, order)
		}
		require.InDelta(t, 2*time.Second, time.Since(began), float64(100*time.Millisecond))
		r.Close()
	})
}

// A call that gives up in the queue, or is held back by a penalty once it has its place, leaves nothing behind.
func TestQueueIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, change := range map[string]func(*registry.Limit){
			"with a rate": func(*registry.Limit) {},
			"without":     func(l *registry.Limit) { l.NoRate, l.Rate, l.Burst = true, 0, nil },
		} {
			r := openLocal(t, registry.Static{patient(change)})
			began := time.Now()
			first := enter(t, r, "/a")
			gone, cancel := context.WithCancel(ctx)
			second, third := calling(gone, r, began), calling(ctx, r, began)
			cancel()
			left := <-second
			require.ErrorIs(t, left.err, context.Canceled, name)
			require.NoError(t, r.Penalize(ctx, "/a", 10*time.Second))
			first.Leave()
			held := <-third
			require.NoError(t, held.err, name)
			require.False(t, held.OK, name)
			require.Contains(t, []gate.Decider{gate.ByLimit, gate.ByPenalty}, held.By, name)
			require.InDelta(t, 10*time.Second, held.RetryAfter, float64(20*time.Millisecond), name)
			time.Sleep(10*time.Second + 20*time.Millisecond)
			u, _, err := r.Usage(ctx, "/a")
			require.NoError(t, err)
			require.Equal(t, []int{0, 0, 1}, []int{u.Inside, u.Places, u.WindowUsed}, name)
			require.True(t, enter(t, r, "/a").OK, name)
			r.Close()
		}
	})
}

// While another process has the place, a call gives its permits back before it waits, and those behind it take none.
func TestQueueForAPlaceElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		places, err := semaphore.NewMemory(1)
		require.NoError(t, err)
		elsewhere, err := places.Acquire(ctx, 1)
		require.NoError(t, err)
		reserved := 0
		r := open(t, registry.Static{patient(func(l *registry.Limit) { l.Window, l.WindowLimit = 0, 0 })}, tokenbucket.NewMemoryStore(),
			registry.WithSemaphores(func(string, int, ...semaphore.Option) (*semaphore.Semaphore, error) { return places, nil }),
			registry.WithLimiterOptions(tokenbucket.WithInitialPermits(100), tokenbucket.WithObserver(tokenbucket.Observer{
				Decision: func(context.Context, tokenbucket.Decision) { reserved++ },
			})))
		began := time.Now()
		first := calling(ctx, r, began)
		second := calling(ctx, r, began)
		require.Equal(t, 1, reserved, "the second has not asked for permits that it could not use")
		l, err := r.Limiter("/a")
		require.NoError(t, err)
		b, err := l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 100.0, b.StoredPermits)
		time.Sleep(time.Second)
		require.NoError(t, elsewhere.Release(ctx))
		a := <-first
		require.True(t, a.OK)
		require.Equal(t, time.Second, a.at)
		a.Leave()
		a = <-second
		require.True(t, a.OK)
		a.Leave()
		b, err = l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 98.0, b.StoredPermits)
		r.Close()
	})
}

// A call in shadow does not wait for a place. A change of the wait alone takes effect, and keeps the row's version.
func TestWaitOfPlacesFollowsRow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := new(fake)
		source.set(patient(func(l *registry.Limit) { l.Shadow = true }))
		r := openLocal(t, source)
		began := time.Now()
		inShadow := enter(t, r, "/a")
		require.Equal(t, gate.ByShadow, enter(t, r, "/a").By)
		require.Equal(t, began, time.Now())
		inShadow.Leave()
		source.set(patient())
		require.NoError(t, r.Reload(ctx))
		enter(t, r, "/a").Leave()
		version := func() int64 {
			l, err := r.Limiter("/a")
			require.NoError(t, err)
			_, err = l.State(ctx)
			require.NoError(t, err)
			return l.InForce().Version
		}
		before := version()
		time.Sleep(time.Second) // a new bucket had one permit
		for _, wait := range []time.Duration{3 * time.Second, time.Second, 0, math.MaxInt64 / 1000 * 1000 / 1024} {
			source.set(patient(func(l *registry.Limit) { l.ConcurrentWait = wait }))
			require.NoError(t, r.Reload(ctx))
			began = time.Now()
			first := enter(t, r, "/a")
			require.True(t, first.OK)
			if wait > time.Hour {
				time.AfterFunc(20*time.Second, first.Leave) // longer than any wait was before
				require.True(t, enter(t, r, "/a").OK)
				require.Equal(t, 20*time.Second, time.Since(began))
				break
			}
			require.Equal(t, gate.ByConcurrency, enter(t, r, "/a").By)
			require.Equal(t, wait, time.Since(began))
			require.Equal(t, before, version())
			first.Leave()
		}
		r.Close()
	})
}

// A call may wait for its permits longer than ten seconds.
func TestLongWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, change := range map[string]func(*registry.Limit){
			"rate alone": func(l *registry.Limit) { *l = registry.Limit{Name: "/a", Rate: 1, MaxWait: 60 * time.Second} },
			"all three": func(l *registry.Limit) {
				l.Rate, l.Burst, l.MaxWait, l.Window, l.WindowLimit, l.Concurrent = 1, nil, time.Minute, time.Hour, 100, 90
			},
		} {
			r := openLocal(t, registry.Static{bounded("/a", change)})
			began := time.Now()
			var calls []<-chan ending
			for range 70 {
				calls = append(calls, calling(ctx, r, began))
			}
			for i, c := range calls {
				o := <-c
				require.NoError(t, o.err, name)
				require.Equal(t, i <= 60, o.OK, "%s: call %d", name, i)
				if o.OK {
					require.Equal(t, time.Duration(i)*time.Second, o.at.Round(time.Millisecond), name)
				} else {
					require.Zero(t, o.at.Round(time.Millisecond), "refused at once")
				}
			}
			r.Close()
		}
	})
}

// Processes share the queue for places in Redis, and all calls get one if they may wait.
func TestPlacesOfFleet(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	row := registry.Limit{Name: fmt.Sprint("/places/", rand.Uint64()), Row: "1", NoRate: true, Concurrent: 2, ConcurrentWait: 2 * time.Minute, Version: 1}
	var processes []*registry.Registry
	for range 2 {
		processes = append(processes, open(t, registry.Static{row}, tokenbucket.NewMemoryStore(),
			registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
				return semaphore.NewRedis(client, name, n, append(opts, semaphore.WithStoreTimeout(20*time.Second))...)
			})))
	}
	var mu sync.Mutex
	inside, most := 0, 0
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			a, err := processes[i%2].Enter(ctx, row.Name)
			require.NoError(t, err)
			require.True(t, a.OK, a.By)
			mu.Lock()
			inside++
			most = max(most, inside)
			mu.Unlock()
			runtime.Gosched()
			mu.Lock()
			inside--
			mu.Unlock()
			a.Leave()
		})
	}
	wg.Wait()
	require.Equal(t, 2, most)
}
