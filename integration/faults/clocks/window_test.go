package clocks

import (
	"context"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

const (
	limit      = 40
	window     = time.Second
	resolution = 100 * time.Millisecond
)

// passed is a request that passed; it was decided between two times of this machine's monotonic clock.
type passed struct{ asked, answered time.Duration }

// visitors is gateways that let as many through as the window allows.
type visitors struct {
	t     *testing.T
	began time.Time
	late  *faultlab.Lateness

	mu     sync.Mutex
	passed []passed
	failed int

	cancel  context.CancelFunc
	running sync.WaitGroup
}

// visit begins with three gateways of four callers each.
func visit(t *testing.T, addr string) *visitors {
	t.Helper()
	v := &visitors{t: t, began: time.Now(), late: faultlab.MeasureTrips(t, addr)}
	ctx, cancel := context.WithCancel(background)
	v.cancel = cancel
	for range 3 {
		job := faultlab.Job{Addrs: []string{addr}}
		client := job.Client()
		t.Cleanup(func() { _ = client.Close() })
		l, err := slidingwindow.New(bucket, limit, window, resolution, slidingwindow.WithRedis(client), slidingwindow.WithKeyPrefix(prefix),
			slidingwindow.WithStoreTimeout(patient))
		require.NoError(t, err)
		for range 4 {
			v.running.Go(func() {
				for ctx.Err() == nil {
					asked := v.now()
					ok, err := l.Allow(background)
					p := passed{asked, v.now()}
					v.mu.Lock()
					if ok {
						v.passed = append(v.passed, p)
					} else if err != nil {
						v.failed++
					}
					v.mu.Unlock()
					if !ok {
						time.Sleep(time.Millisecond)
					}
				}
			})
		}
	}
	return v
}

func (v *visitors) now() time.Duration { return time.Since(v.began) }

// end ends the visits.
func (v *visitors) end() {
	v.cancel()
	v.running.Wait()
	v.late.Stop()
	v.t.Logf("%d passed, %d failures; sleepers at most %v late", len(v.passed), v.failed, v.late.Most())
}

// fullest is the most that have passed for certain in any window of a length: those that were asked for and answered within
// one.
func fullest(all []passed, window time.Duration) int {
	spans := make([]faultlab.Span, len(all))
	for i, p := range all {
		spans[i] = faultlab.Span{From: int64(p.asked), To: int64(p.answered)}
	}
	return faultlab.Fullest(spans, int64(window))
}

func TestFullest(t *testing.T) {
	at := func(from, to time.Duration) passed { return passed{from * time.Millisecond, to * time.Millisecond} }
	require.Equal(t, 0, fullest(nil, window))
	require.Equal(t, 2, fullest([]passed{at(900, 901), at(0, 10), at(990, 1000), at(2500, 2501)}, window), "the third may have passed in the next")
	require.Equal(t, 3, fullest([]passed{at(900, 901), at(1, 10), at(990, 1000)}, window))
	require.Equal(t, 2, fullest([]passed{at(900, 901), at(1, 10), at(990, 1000)}, 200*time.Millisecond))
}

// after are those that were asked for after a time.
func (v *visitors) after(at time.Duration) (rest []passed) {
	for _, p := range v.passed {
		if p.asked > at {
			rest = append(rest, p)
		}
	}
	return rest
}

// denial is the longest time after the step in which none passed.
func (v *visitors) denial(step, end time.Duration) time.Duration {
	var at []int64
	for _, p := range v.after(step) {
		at = append(at, min(p.answered, end).Microseconds())
	}
	return longestGap(step.Microseconds(), end.Microseconds(), at)
}

// step lets the visitors go on for a while, sets the clock, and again.
func (v *visitors) step(set func()) (before, after, end time.Duration) {
	time.Sleep(faultlab.Lasting(1200*time.Millisecond, 5*time.Second))
	faultlab.Soon(v.t, time.Minute, func() bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return len(v.passed) >= limit
	})
	before = v.now()
	set()
	after = v.now()
	time.Sleep(faultlab.Lasting(2500*time.Millisecond, 10*time.Second))
	end = v.now()
	v.end()
	faultlab.Bit(v.t, len(v.passed)-len(v.after(before)), len(v.after(after)))
	return before, after, end
}

// J3: the server's clock is set back by an hour under an exact window, and its counts move along. No window has more than the limit, and no
// call is refused for longer than a window and a standstill of the clock.
func TestJ3WindowClockBack(t *testing.T) {
	t.Parallel()
	server, clock := faultlab.StartStepped(t)
	v := visit(t, server.Addr)
	_, after, end := v.step(func() { clock.Step(-time.Hour) })
	denied := v.denial(after, end)
	faultlab.Figure(t, fmt.Sprintf("back: fullest window, of %d", limit), fullest(v.passed, window))
	faultlab.Figure(t, "back: none passed for", denied)
	assert.LessOrEqual(t, fullest(v.passed, window), limit)
	assert.LessOrEqual(t, denied, most(window+resolution+standstill, v.late.Most()))
	assert.Zero(t, v.failed)
	faultlab.CleanUp(t, server.Client(t), prefix)
}

// J3, an exact window, and the server's clock is set forward by an hour: the window is empty, once. So some window has up to
// twice the limit, and both before and after none has more than the limit.
func TestJ3WindowClockForward(t *testing.T) {
	t.Parallel()
	server, clock := faultlab.StartStepped(t)
	v := visit(t, server.Addr)
	before, after, end := v.step(func() { clock.Step(time.Hour) })
	denied := v.denial(after, end)
	var early []passed
	for _, p := range v.passed {
		if p.answered < before {
			early = append(early, p)
		}
	}
	faultlab.Figure(t, fmt.Sprintf("forwards: fullest window, of %d", 2*limit), fullest(v.passed, window))
	faultlab.Figure(t, fmt.Sprintf("before and after it, of %d", limit), max(fullest(early, window), fullest(v.after(after), window)))
	faultlab.Figure(t, "forwards: none passed for", denied)
	assert.LessOrEqual(t, fullest(early, window), limit)
	assert.LessOrEqual(t, fullest(v.after(after), window), limit)
	assert.LessOrEqual(t, fullest(v.passed, window), 2*limit)
	assert.LessOrEqual(t, denied, most(window+resolution, v.late.Most()))
	assert.Zero(t, v.failed)
	faultlab.CleanUp(t, server.Client(t), prefix)
}

// J3, an exact window, and the server's clock falls behind by two seconds and catches up, again and again. What passes in a
// standstill passes at its beginning, by the server's clock; so a window that is shorter by as long as it lasted has no more
// than the limit, none has more than twice the limit (if the clock
// is not behind for longer than a window), and it does not stay shut.
func TestJ3WindowClockSawTooth(t *testing.T) {
	t.Parallel()
	server, clock := faultlab.StartStepped(t)
	v := visit(t, server.Addr)
	var stood time.Duration
	before, _, end := v.step(func() {
		_, stood = sawTooth(clock, 130*time.Millisecond) // out of step with the window
	})
	denied := v.denial(before, end)
	faultlab.Figure(t, fmt.Sprintf("to and fro: fullest window, of %d", 2*limit), fullest(v.passed, window))
	faultlab.Figure(t, fmt.Sprintf("of those shorter by the standstill, of %d", limit), fullest(v.passed, window-stood))
	faultlab.Figure(t, "to and fro: none passed for", denied)
	assert.LessOrEqual(t, fullest(v.passed, window-stood), limit)
	assert.LessOrEqual(t, fullest(v.passed, window), limit*(1+int(math.Ceil(float64(stood)/float64(window)))))
	assert.LessOrEqual(t, denied, most(window+resolution+standstill, v.late.Most()))
	assert.Zero(t, v.failed)
}
