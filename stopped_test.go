package tokenbucket

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	mono "github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// stoppable is a process whose timers fire only when it runs.
type stoppable struct {
	*RateLimiter
	calls []*stoppedCall // that were not answered yet
}

// String is short: rapid prints each draw.
func (p *stoppable) String() string { return fmt.Sprintf("%d calls", len(p.calls)) }

type stoppedCall struct {
	*engine.Call
	verb    asks
	permits int64
	order   int
}

// asks is what a stoppedCall does.
type asks string

const (
	tries    asks = "try"
	acquires asks = "acquire"
	reserves asks = "reserve"
)

func (p *stoppable) settled() {
	for look(p.RateLimiter).Busy {
		runtime.Gosched()
	}
}

// result returns the result of a call, and whether the call is over.
func (c *stoppedCall) result() (engine.Result, bool) { return c.Coordinator().Result(c.Call) }

// answered reports whether the caller was woken.
func (c *stoppedCall) answered() bool {
	select {
	case <-c.Ready():
		return true
	default:
		return false
	}
}

// promised reports whether a reservation was granted and waits for its permits.
func (c *stoppedCall) promised() bool {
	r, over := c.result()
	return r.Granted && !over
}

// run lets the process look at the clock, and returns who was let go.
func (p *stoppable) run() (used []*stoppedCall) {
	p.limiter.Coordinator.Ring()
	p.settled()
	p.limiter.Coordinator.Ring() // those who asked again and need not wait
	p.settled()
	p.calls = slices.DeleteFunc(p.calls, func(c *stoppedCall) bool { // whose callers are woken later, when the scheduler likes
		r, over := c.result()
		if over && r.Granted {
			used = append(used, c)
		}
		return over
	})
	return used
}

func (p *stoppable) ask(v asks, n, timeout int64, order int) *stoppedCall {
	c := &stoppedCall{verb: v, permits: n, order: order}
	switch v {
	case tries:
		c.Call = engine.NewCall(&p.limiter, n, timeout, 0)
	case acquires:
		c.Call = engine.NewCall(&p.limiter, n, maxExact, 0)
	case reserves:
		c.Call = engine.NewReservation(&p.limiter, n, maxExact, 0)
	}
	return p.submit(c)
}

func (p *stoppable) submit(c *stoppedCall) *stoppedCall {
	p.calls = append(p.calls, c)
	p.limiter.Coordinator.Submit(background, c.Call)
	p.settled()
	return c
}

// Processes are stopped again and again, at full demand, with Acquires, TryAcquires and reservations of several sizes. At whatever moments,
// the uses keep to the bound in every window. Within a process no caller is overtaken, and every caller is served or refused.
func TestStoppedProcesses(t *testing.T) {
	stops, passed := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		const rate, tick = 100.0, time.Millisecond
		clock := clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))
		start := clock.Now()
		size := rapid.SampledFrom([]float64{0, 1, 10}).Draw(t, "bucket size")
		payment := rapid.SampledFrom([]Payment{PayNow, PayLater}).Draw(t, "payment")
		biggest := rapid.SampledFrom([]int64{1, 5}).Draw(t, "largest")
		shared := newApart()
		var fleet []*stoppable
		for range rapid.SampledFrom([]int{1, 2}).Draw(t, "processes") {
			// A store of its own for each, so that the processes share the buckets and not the line.
			l, err := NewSmoothBursty("x", rate, WithStore(&apart{shared.slow}), WithClock(clock), WithMaxPermits(size), WithPayment(payment))
			require.NoError(t, err)
			l.limiter.Coordinator.LapseOverdue()
			fleet = append(fleet, &stoppable{RateLimiter: l})
		}
		var events []event
		largest, order, late := 0.0, 0, int64(0)
		watch := func(running ...*stoppable) {
			for _, p := range running {
				last := 0
				for _, c := range p.run() {
					if c.verb == acquires {
						require.Greater(t, c.order, last, "nobody overtakes")
						last = c.order
					}
					events = append(events, event{clock.Since(start).Microseconds(), float64(c.permits)})
					largest = max(largest, float64(c.permits))
					r, _ := c.result()
					late = max(late, p.limiter.Coordinator.Now()-r.Due)
					passed++
				}
			}
		}
		for range rapid.IntRange(3, 8).Draw(t, "steps") {
			for range rapid.IntRange(0, 60).Draw(t, "asks") {
				order++
				rapid.SampledFrom(fleet).Draw(t, "process").ask(rapid.SampledFrom([]asks{tries, acquires, reserves}).Draw(t, "verb"),
					rapid.Int64Range(1, biggest).Draw(t, "permits"), rapid.Int64Range(0, 1_000_000).Draw(t, "timeout"), order)
			}
			watch(fleet...)
			if rapid.IntRange(0, 2).Draw(t, "stop") == 0 {
				stops++
				stopped := rapid.SampledFrom(fleet).Draw(t, "stopped")
				ms := rapid.IntRange(101, 1500).Draw(t, "ms")
				whileStopped(stopped.RateLimiter, func() {
					for range ms {
						clock.Advance(tick)
						for _, p := range fleet {
							if p != stopped {
								watch(p)
							}
						}
					}
				})
				watch(stopped)
			}
			for range rapid.IntRange(0, 300).Draw(t, "ms") {
				clock.Advance(tick)
				watch(fleet...)
			}
		}
		for left := true; left; {
			clock.Advance(tick)
			watch(fleet...)
			left = false
			for _, p := range fleet {
				left = left || len(p.calls) > 0
			}
			require.Less(t, clock.Since(start), 10*time.Minute, "somebody is not served")
		}
		bound := max(size, largest)
		if payment == PayLater {
			bound = size + largest
		}
		w := Worst(len(events), func(i int) (int64, float64) { return events[i].at, events[i].n }, rate)
		require.LessOrEqual(t, late, int64(schedule.Tolerated))
		require.LessOrEqual(t, w, bound+rate*(float64(late+2)/1e6+2*tick.Seconds())+1e-6, fmt.Sprint(size, payment))
	})
	t.Logf("%d stops, %d calls passed", stops, passed)
	require.Greater(t, stops, 20)
}

// A reservation is promised whatever becomes of the context that it was made with: when its process was stopped, it is ready no
// sooner than the bucket has granted its permits once more.
func TestStoppedReservation(t *testing.T) {
	clock := clockwork.NewFakeClock()
	store := NewMemoryStore()
	open := func() *RateLimiter {
		l, err := NewSmoothBursty("x", 100, WithStore(&distant{Store: store}), WithClock(clock))
		require.NoError(t, err)
		l.limiter.Coordinator.LapseOverdue()
		return l
	}
	mine, others := &stoppable{RateLimiter: open()}, &stoppable{RateLimiter: open()}
	mine.ask(reserves, 1, 0, 0)
	c := mine.submit(&stoppedCall{Call: engine.NewReservation(&mine.limiter, 1, maxExact, mono.Mono()+10*time.Second), verb: reserves, permits: 1})
	mine.run()
	require.True(t, c.promised())
	whileStopped(mine.RateLimiter, func() {
		clock.Advance(5 * time.Second)
		others.ask(reserves, 300, 0, 0) // and another process took the permits that fell due meanwhile, and more
	})
	mine.limiter.Coordinator.Ring()
	mine.settled()
	require.False(t, c.answered(), "ready without a permit")
	for i := 0; !c.answered(); i++ {
		require.Less(t, i, 10_000)
		clock.Advance(10 * time.Millisecond)
		mine.run()
	}
	r, over := c.result()
	require.True(t, r.Granted && over)
}

// ahead is a store for one bucket whose clock can leap.
type ahead struct {
	mu    sync.Mutex
	leapt time.Duration
	state []byte
}

// Apply implements Store.
func (s *ahead) Apply(_ context.Context, b *Batch) error {
	time.Sleep(time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	next, _, err := b.Decide(time.Now().Add(s.leapt).UnixMicro(), [][]byte{s.state})
	if err == nil && next[0] != nil {
		s.state = next[0]
	}
	return err
}

// A virtual machine is paused for a minute, and its clock with it: for the process, the store's clock leaps. What the process owned fell
// due meanwhile, and it cannot know: it uses that on top of what the bucket grants, which has filled up. From then on it keeps to the rate.
func TestMachinePaused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const rate, size, callers = 100.0, 10.0, 300
		s := &ahead{}
		l, err := NewSmoothBursty("x", rate, WithMaxPermits(size), WithStore(s), Logged(t))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(background)
		var mu sync.Mutex
		var used []event
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				for ctx.Err() == nil {
					if _, err := l.Acquire(ctx, 1); err == nil {
						mu.Lock()
						used = append(used, event{time.Now().UnixMicro(), 1})
						mu.Unlock()
					}
				}
			})
		}
		time.Sleep(5 * time.Second)
		s.mu.Lock()
		s.leapt = time.Minute
		s.mu.Unlock()
		paused := time.Now().UnixMicro()
		time.Sleep(10 * time.Second)
		cancel()
		all.Wait()
		extra := worst(used, rate) - size
		t.Logf("%d permits used; %.1f in a window on top of the bound", len(used), extra)
		require.LessOrEqual(t, extra, rate*1.0, "what the process owned: a second at most")
		var later []event
		for _, e := range used {
			if e.at > paused+2_000_000 {
				later = append(later, e)
			}
		}
		require.LessOrEqual(t, worst(later, rate), size+1)
		require.InDelta(t, 8*rate, float64(len(later)), rate/10)
	})
}
