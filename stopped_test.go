package tokenbucket

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// stoppable is a process whose timers fire only when it runs.
type stoppable struct {
	*RateLimiter
	calls []*stoppedCall // that were not answered yet
}

type stoppedCall struct {
	*call
	permits int64
	order   int
}

func (p *stoppable) settled() {
	for {
		p.line.mu.Lock()
		flying := p.line.flying
		p.line.mu.Unlock()
		if !flying {
			return
		}
		runtime.Gosched()
	}
}

// run lets the process look at the clock, and returns who was let go.
func (p *stoppable) run() (used []*stoppedCall) {
	p.line.tick()
	p.settled()
	p.line.tick() // those who asked again and need not wait
	p.settled()
	p.calls = slices.DeleteFunc(p.calls, func(c *stoppedCall) bool {
		select {
		case <-c.ready:
			if !c.refused && c.err == nil {
				used = append(used, c)
			}
			return true
		default:
			return false
		}
	})
	return used
}

func (p *stoppable) ask(kind int, n, maxWait int64, order int) {
	c := &call{limiter: p.RateLimiter, permits: n, maxWait: maxWait, ready: make(chan struct{})}
	switch kind {
	case 0:
		c.acquire, c.maxWait = true, p.reach(n)
	case 1:
		c.reserved, c.maxWait = true, maxExact
	}
	p.calls = append(p.calls, &stoppedCall{call: c, permits: n, order: order})
	p.line.submit(background, c)
	p.settled()
}

// Processes that are stopped again and again, at full demand, with Acquires, TryAcquires and reservations of several sizes:
// whatever the moments, what is used keeps to the bound in every window, judged by when it is used; within a process nobody
// overtakes who came before, and everybody is served or refused.
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
			l.line.paces = true
			fleet = append(fleet, &stoppable{RateLimiter: l})
		}
		var events []event
		largest, order, late := 0.0, 0, int64(0)
		look := func(running ...*stoppable) {
			for _, p := range running {
				last := 0
				for _, c := range p.run() {
					if c.call.reserved || c.call.acquire {
						require.Greater(t, c.order, last, "nobody overtakes")
						last = c.order
					}
					events = append(events, event{clock.Since(start).Microseconds(), float64(c.permits)})
					largest = max(largest, float64(c.permits))
					late = max(late, p.line.now()-c.due)
					passed++
				}
			}
		}
		for range rapid.IntRange(3, 8).Draw(t, "steps") {
			for range rapid.IntRange(0, 60).Draw(t, "asks") {
				order++
				rapid.SampledFrom(fleet).Draw(t, "process").ask(rapid.IntRange(0, 2).Draw(t, "kind"),
					rapid.Int64Range(1, biggest).Draw(t, "permits"), rapid.Int64Range(0, 1_000_000).Draw(t, "timeout"), order)
			}
			look(fleet...)
			if rapid.IntRange(0, 2).Draw(t, "stop") == 0 {
				stops++
				stopped := rapid.SampledFrom(fleet).Draw(t, "stopped")
				stopped.line.mu.Lock() // so that its timers do nothing, either
				for range rapid.IntRange(101, 1500).Draw(t, "ms") {
					clock.Advance(tick)
					for _, p := range fleet {
						if p != stopped {
							look(p)
						}
					}
				}
				stopped.line.mu.Unlock()
				look(stopped)
			}
			for range rapid.IntRange(0, 300).Draw(t, "ms") {
				clock.Advance(tick)
				look(fleet...)
			}
		}
		for left := true; left; {
			clock.Advance(tick)
			look(fleet...)
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
		require.LessOrEqual(t, late, int64(tolerated))
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
		l.line.paces = true
		return l
	}
	mine, others := &stoppable{RateLimiter: open()}, &stoppable{RateLimiter: open()}
	mine.ask(1, 1, 0, 0)
	c := &call{limiter: mine.RateLimiter, permits: 1, maxWait: maxExact, reserved: true, ready: make(chan struct{}),
		deadline: time.Now().Add(10 * time.Second)}
	mine.calls = append(mine.calls, &stoppedCall{call: c, permits: 1})
	mine.line.submit(background, c)
	mine.settled()
	mine.run()
	require.False(t, c.done)
	mine.line.mu.Lock()            // so that its timer does nothing, either
	c.deadline = time.Now()        // the context has ended
	clock.Advance(5 * time.Second) // while the process was stopped
	others.ask(1, 300, 0, 0)       // and another took what came meanwhile, and more
	mine.line.mu.Unlock()
	mine.line.tick()
	mine.settled()
	select {
	case <-c.ready:
		t.Fatalf("ready without a permit: refused %v", c.refused)
	default:
	}
	for i := 0; !c.done; i++ {
		require.Less(t, i, 10_000)
		clock.Advance(10 * time.Millisecond)
		mine.run()
	}
	<-c.ready
	require.False(t, c.refused)
	require.NotZero(t, c.id)
}
