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
	*call
	permits int64
	order   int
}

func (p *stoppable) settled() {
	for {
		p.coordinator.mu.Lock()
		flying := p.coordinator.sending.flying
		p.coordinator.mu.Unlock()
		if !flying {
			return
		}
		runtime.Gosched()
	}
}

// run lets the process look at the clock, and returns who was let go.
func (p *stoppable) run() (used []*stoppedCall) {
	p.coordinator.onAlarm()
	p.settled()
	p.coordinator.onAlarm() // those who asked again and need not wait
	p.settled()
	p.coordinator.mu.Lock() // callers are woken behind it, when the scheduler likes
	defer p.coordinator.mu.Unlock()
	p.calls = slices.DeleteFunc(p.calls, func(c *stoppedCall) bool {
		if c.state == done {
			used = append(used, c)
		}
		return c.state.over()
	})
	return used
}

func (p *stoppable) ask(v verb, n, timeout int64, order int) *call {
	q := &call{limiter: &p.limiter, verb: v, timeout: timeout, ready: make(chan struct{}), promise: new(promise)}
	if q.Permits = n; v != tryAcquire {
		q.timeout = maxExact
	}
	p.calls = append(p.calls, &stoppedCall{call: q, permits: n, order: order})
	p.coordinator.submit(background, q)
	p.settled()
	return q
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
			l.coordinator.waiters.line.Strict = true
			fleet = append(fleet, &stoppable{RateLimiter: l})
		}
		var events []event
		largest, order, late := 0.0, 0, int64(0)
		look := func(running ...*stoppable) {
			for _, p := range running {
				last := 0
				for _, c := range p.run() {
					if c.verb == acquire {
						require.Greater(t, c.order, last, "nobody overtakes")
						last = c.order
					}
					events = append(events, event{clock.Since(start).Microseconds(), float64(c.permits)})
					largest = max(largest, float64(c.permits))
					late = max(late, p.coordinator.now()-c.due)
					passed++
				}
			}
		}
		for range rapid.IntRange(3, 8).Draw(t, "steps") {
			for range rapid.IntRange(0, 60).Draw(t, "asks") {
				order++
				rapid.SampledFrom(fleet).Draw(t, "process").ask(rapid.SampledFrom([]verb{tryAcquire, acquire, reserve}).Draw(t, "verb"),
					rapid.Int64Range(1, biggest).Draw(t, "permits"), rapid.Int64Range(0, 1_000_000).Draw(t, "timeout"), order)
			}
			look(fleet...)
			if rapid.IntRange(0, 2).Draw(t, "stop") == 0 {
				stops++
				stopped := rapid.SampledFrom(fleet).Draw(t, "stopped")
				stopped.coordinator.mu.Lock() // so that its timers do nothing, either
				for range rapid.IntRange(101, 1500).Draw(t, "ms") {
					clock.Advance(tick)
					for _, p := range fleet {
						if p != stopped {
							look(p)
						}
					}
				}
				stopped.coordinator.mu.Unlock()
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
		l.coordinator.waiters.line.Strict = true
		return l
	}
	mine, others := &stoppable{RateLimiter: open()}, &stoppable{RateLimiter: open()}
	mine.ask(reserve, 1, 0, 0)
	c := &call{limiter: &mine.limiter, verb: reserve, timeout: maxExact, ready: make(chan struct{}), promise: new(promise), deadline: mono() + 10*time.Second}
	c.Permits = 1
	mine.calls = append(mine.calls, &stoppedCall{call: c, permits: 1})
	mine.coordinator.submit(background, c)
	mine.settled()
	mine.run()
	require.Equal(t, waiting, c.state)
	mine.coordinator.mu.Lock()     // so that its timer does nothing, either
	clock.Advance(5 * time.Second) // while the process was stopped
	others.ask(reserve, 300, 0, 0) // and another took what came meanwhile, and more
	mine.coordinator.mu.Unlock()
	mine.coordinator.onAlarm()
	mine.settled()
	select {
	case <-c.ready:
		t.Fatalf("ready without a permit: state %v", c.state)
	default:
	}
	for i := 0; !c.state.over(); i++ {
		require.Less(t, i, 10_000)
		clock.Advance(10 * time.Millisecond)
		mine.run()
	}
	<-c.ready
	require.Equal(t, done, c.state)
}
