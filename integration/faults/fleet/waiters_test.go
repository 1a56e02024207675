package fleet

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// waiter is a caller in the queue, and a context that signals when it has joined: a call asks for Done when it begins to wait.
type waiter struct {
	context.Context
	cancel  context.CancelFunc
	once    sync.Once
	joined  chan struct{}
	permits int

	asked, cancelled, left int64 // microseconds; 0 if it did not happen
	waited                 time.Duration
	err                    error
}

func newWaiter(permits int) *waiter {
	ctx, cancel := context.WithCancel(background)
	return &waiter{Context: ctx, cancel: cancel, joined: make(chan struct{}), permits: permits}
}

// Done implements context.Context.
func (w *waiter) Done() <-chan struct{} {
	w.once.Do(func() { close(w.joined) })
	return w.Context.Done()
}

// memory returns the memory in use, on the heap and as stacks.
func memory() (heap, stacks float64) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc), float64(m.StackInuse)
}

// processor is the processor time that this process has used.
func processor(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// overtaken counts the waiters that were overtaken by a request of the same size: permits that do not suffice for the head may serve a
// smaller request behind it.
func overtaken(served []*waiter) (n int) {
	bySize := map[int][]*waiter{}
	for _, w := range served {
		bySize[w.permits] = append(bySize[w.permits], w)
	}
	for _, same := range bySize {
		n += passed(same)
	}
	return n
}

// passed counts the waiters whose permits were certainly due after a later waiter had left. A permit was due as long after the call as the
// call returned that it had waited; a millisecond is for the clocks. The order in which the scheduler runs callers that were woken together
// does not matter: no caller leaves before its due time.
func passed(served []*waiter) (n int) {
	earliest := int64(math.MaxInt64)
	for _, w := range slices.Backward(served) {
		if w.asked+(w.waited-time.Millisecond).Microseconds() > earliest {
			n++
		}
		earliest = min(earliest, w.left)
	}
	return n
}

// Ten thousand callers, and a hundred thousand with TOKENBUCKET_LONG=1, wait for one bucket, for 1 to 50 permits each, and three in ten of
// them leave at random. A waiter costs hardly any memory and no processor time, and leaves at once; all others are served in the order of
// their arrival, among requests of the same size.
func TestG6ManyWaiters(t *testing.T) {
	server := redistest.Start(t)
	counts := []int{10_000}
	if faultlab.Long() {
		counts = append(counts, 100_000)
	}
	for _, count := range counts {
		for store := range faultlab.Stores {
			t.Run(fmt.Sprintf("%d, %s store", count, store), func(t *testing.T) {
				r := faultlab.Seed(t)
				j := job{Rate: 6 * float64(count), Burst: 1000}.on(t, server, store)
				l := j.open(t, server.Client(t), tokenbucket.WithStoreTimeout(time.Minute))
				ahead, err := l.Reserve(background, 600*int(j.Rate)) // no waiter behind it is served until it is cancelled
				require.NoError(t, err)

				var all []*waiter
				for range count {
					all = append(all, newWaiter(1+r.IntN(50)))
				}
				var waiting sync.WaitGroup
				for _, w := range all { // what goroutines cost that wait for anything
					c := make(chan struct{})
					waiting.Go(func() {
						select {
						case <-w.Context.Done():
						case <-c:
						}
					})
				}
				heapBare, stacksBare := memory()
				for _, w := range all {
					w.cancel()
				}
				waiting.Wait()
				for i, w := range all {
					all[i] = newWaiter(w.permits)
				}
				_, stacksBefore := memory()

				for _, w := range all {
					waiting.Go(func() {
						w.asked = faultlab.Micros()
						w.waited, w.err = l.Acquire(w, w.permits)
						w.left = faultlab.Micros()
					})
					<-w.joined
				}
				heap, stacks := memory()
				each := (heap - heapBare) / float64(count)
				t.Logf("stacks %.0f bytes each, of a goroutine that waits %.0f", (stacks-stacksBefore)/float64(count), stacksBare/float64(count))
				faultlab.Figure(t, "bytes for a waiter beside its goroutine, of 2048", each)
				require.LessOrEqual(t, each, 2048.0)

				began, idle := processor(t), time.Second
				time.Sleep(idle)
				used := processor(t) - began
				faultlab.Figure(t, fmt.Sprintf("processor time in %v of waiting, of %v", idle, idle/20), used)
				require.Less(t, used, idle/20)

				late := faultlab.MeasureLateness(t)
				leave := func(share int) (n int) {
					for _, w := range all {
						if w.cancelled == 0 && r.IntN(100) < share {
							w.cancelled = faultlab.Micros()
							w.cancel()
							n++
						}
					}
					return n
				}
				gone := leave(20) // while they wait
				require.NoError(t, ahead.Cancel(background))
				for range 10 { // and while the others are served
					time.Sleep(200 * time.Millisecond)
					gone += leave(1)
				}
				waiting.Wait()
				var served []*waiter // in the order in which they came
				var goings []time.Duration
				for i, w := range all {
					w.cancel()
					switch {
					case w.err == nil:
						served = append(served, w)
					case errors.Is(w.err, context.Canceled) && w.cancelled != 0:
						goings = append(goings, time.Duration(w.left-w.cancelled)*time.Microsecond)
					default:
						t.Errorf("waiter %d: %v", i, w.err)
					}
				}
				slices.Sort(goings)
				p99, slowest := goings[len(goings)*99/100], goings[len(goings)-1]
				t.Logf("%d were told to go, %d of them went, p99 %v later, at most %v; %d were served; this machine wakes up to %v late",
					gone, len(goings), p99, slowest, len(served), late.Most())
				faultlab.Figure(t, "gone after a cancel", slowest)
				require.Greater(t, len(goings), count/10)
				require.Zero(t, overtaken(served), "were overtaken")
				// A fifth of all are woken at the same moment, which takes its time on a busy machine.
				told := time.Duration(count/10_000) * time.Second
				require.LessOrEqual(t, slowest, 50*time.Millisecond+told+10*late.Most())
				faultlab.CleanUp(t, server.Client(t), j.Prefix)
			})
		}
	}
}

// patience is how long a caller waits, in microseconds: up to most, and one in ten as long as it takes, or on a slow machine all
// would go away.
func patience(r *rand.Rand, most int) time.Duration {
	if r.IntN(10) == 0 {
		return time.Minute
	}
	return time.Duration(r.IntN(most)) * time.Microsecond
}

// Callers go away at random instants: before they ask, while their request is under way, when they are answered. Nothing is
// minted by it, and each of them loses no more than it asked for.
func TestG9CancelRaces(t *testing.T) {
	server := redistest.Start(t)
	calls := int(faultlab.Lasting(20_000, 400_000))
	for store := range faultlab.Stores {
		t.Run(store, func(t *testing.T) {
			const callers = 64
			random := faultlab.Seed(t)
			j := job{Rate: 1.0 / 86_400, Burst: 1e7}.on(t, server, store)
			l := j.open(t, server.Client(t), tokenbucket.WithStoreTimeout(10*time.Second))
			began := time.Now()
			var granted, gone, asked atomic.Int64
			var running sync.WaitGroup
			for range callers {
				r := rand.New(rand.NewPCG(random.Uint64(), 0))
				running.Go(func() {
					for range calls / callers {
						n := 1 + r.IntN(3)
						ctx, cancel := context.WithCancel(background)
						timer := time.AfterFunc(patience(r, 1500), cancel)
						_, err := l.Acquire(ctx, n)
						switch {
						case err == nil:
							granted.Add(int64(n))
						case errors.Is(err, context.Canceled):
							gone.Add(1)
							asked.Add(int64(n))
						default:
							t.Error(err)
						}
						timer.Stop()
						cancel()
					}
				})
			}
			running.Wait()
			left := 0.0
			require.NoError(t, redistest.Poll(10*time.Second, func() error { // refunds may still be in flight
				b, err := l.State(background)
				moved := math.Abs(b.StoredPermits-left) > 0.01
				if left = b.StoredPermits; err == nil && moved {
					err = errors.New("permits are still given back")
				}
				return err
			}))
			lost := j.Burst - float64(granted.Load()) - left
			t.Logf("%d permits granted; %d callers went away who had asked for %d", granted.Load(), gone.Load(), asked.Load())
			faultlab.Figure(t, "% lost of what was cancelled", 100*lost/float64(asked.Load()))
			require.Greater(t, gone.Load(), int64(100))
			require.Greater(t, granted.Load(), int64(100))
			refilled := j.Rate*time.Since(began).Seconds() + 1e-6
			require.GreaterOrEqual(t, lost, -refilled, "permits were minted")
			require.LessOrEqual(t, lost, float64(asked.Load()))
			require.InDelta(t, math.Round(lost), lost, refilled, "a part of a permit")
			faultlab.CleanUp(t, server.Client(t), j.Prefix)
		})
	}
}

// The same of a semaphore: in the end all of its permits can be had again.
func TestG9CancelRacesSemaphore(t *testing.T) {
	server := redistest.Start(t)
	random := faultlab.Seed(t)
	const permits = 8
	s, err := semaphore.NewRedis(server.Client(t), "x", permits, semaphore.WithLease(30*time.Second), semaphore.WithStoreTimeout(20*time.Second))
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close(background)) }()
	var held, granted, gone atomic.Int64
	var running sync.WaitGroup
	for range 32 {
		r := rand.New(rand.NewPCG(random.Uint64(), 0))
		running.Go(func() {
			for range int(faultlab.Lasting(150, 3000)) {
				n := 1 + r.IntN(2)
				ctx, cancel := context.WithCancel(background)
				timer := time.AfterFunc(patience(r, 5000), cancel)
				p, err := s.Acquire(ctx, n)
				switch {
				case err == nil:
					if now := held.Add(int64(n)); now > permits {
						t.Errorf("%d permits are held", now)
					}
					granted.Add(1)
					held.Add(-int64(n))
					if err := p.Release(background); err != nil {
						t.Error(err)
					}
				case errors.Is(err, context.Canceled):
					gone.Add(1)
				default:
					t.Error(err)
				}
				timer.Stop()
				cancel()
			}
		})
	}
	running.Wait()
	ctx, cancel := context.WithTimeout(background, 10*time.Second) // far less than the lease
	defer cancel()
	began := time.Now()
	p, err := s.Acquire(ctx, permits)
	require.NoError(t, err, "a permit is lost")
	t.Logf("%d granted, %d went away", granted.Load(), gone.Load())
	faultlab.Figure(t, "all permits of a semaphore free after", time.Since(began))
	require.Greater(t, gone.Load(), int64(100))
	require.Greater(t, granted.Load(), int64(100))
	require.NoError(t, p.Release(background))
}
