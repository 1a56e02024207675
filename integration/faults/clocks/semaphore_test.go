package clocks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

const (
	permits = 4
	lease   = 6 * time.Second // renewed every two, which a machine that stands still for as long does not end
	// longLease is one that a standstill hardly shortens.
	longLease = 12 * time.Second
)

// belief is a time during which a caller believed to hold a permit: from the acquisition to the release, or to the end of its context. By
// this machine's monotonic clock.
type belief struct{ from, to time.Time }

// crowd is gateways that want more permits than there are, all the time.
type crowd struct {
	t    *testing.T
	late *faultlab.Lateness

	mu      sync.Mutex
	beliefs []belief

	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	failed  atomic.Int64
	lost    atomic.Int64 // permits whose context ended before they were released
}

// gateways starts three of them, with four callers each, which hold a permit for up to 150 ms, and waits until they have begun.
func gateways(t *testing.T, addr string, lease time.Duration) *crowd {
	t.Helper()
	c := &crowd{t: t, late: faultlab.MeasureTrips(t, addr)}
	c.ctx, c.cancel = context.WithCancel(background)
	r := faultlab.Seed(t)
	for range 3 {
		s := open(t, addr, lease)
		for range 4 {
			seed := r.Int64N(1 << 40)
			c.running.Go(func() {
				for n := seed; c.ctx.Err() == nil; n = (n*1103515245 + 12345) % (1 << 31) {
					c.hold(s, time.Duration(n/7%150)*time.Millisecond)
				}
			})
		}
	}
	require.Eventually(t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.beliefs) > 40
	}, time.Minute, 10*time.Millisecond)
	return c
}

func open(t *testing.T, addr string, lease time.Duration) *semaphore.Semaphore {
	t.Helper()
	job := faultlab.Job{Addrs: []string{addr}}
	client := job.Client()
	s, err := semaphore.NewRedis(client, bucket, permits, semaphore.WithLease(lease), semaphore.WithKeyPrefix(prefix),
		semaphore.WithStoreTimeout(patient))
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = s.Close(background)
		_ = client.Close()
	})
	return s
}

func (c *crowd) hold(s *semaphore.Semaphore, d time.Duration) {
	p, err := s.TryAcquire(c.ctx, 1, time.Second)
	if err != nil {
		if !errors.Is(err, semaphore.ErrRefused) && c.ctx.Err() == nil {
			c.failed.Add(1)
		}
		return
	}
	from := time.Now()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.Context().Done():
	}
	to := time.Now()
	if err := p.Release(background); errors.Is(err, semaphore.ErrLost) || errors.Is(err, semaphore.ErrExpired) {
		c.lost.Add(1)
	}
	c.mu.Lock()
	c.beliefs = append(c.beliefs, belief{from, to})
	c.mu.Unlock()
}

// most is how long it may take who waits for a permit.
func (c *crowd) most(d time.Duration) time.Duration { return most(d, c.late.Most()) }

// end ends the crowd.
func (c *crowd) end() {
	c.cancel()
	c.running.Wait()
	c.late.Stop()
	c.t.Logf("%d times held, %d lost, %d failures; sleepers at most %v late", len(c.beliefs), c.lost.Load(), c.failed.Load(), c.late.Most())
}

// crowded is how many believed to hold a permit at once at most, and for how long altogether more than there are.
func crowded(beliefs []belief) (most int, over time.Duration) {
	type change struct {
		at time.Time
		by int
	}
	var all []change
	for _, b := range beliefs {
		all = append(all, change{b.from, 1}, change{b.to, -1})
	}
	slices.SortFunc(all, func(a, b change) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.by, b.by)) })
	held := 0
	for i, c := range all {
		if held > permits {
			over += c.at.Sub(all[i-1].at)
		}
		held += c.by
		most = max(most, held)
	}
	return most, over
}

func TestCrowded(t *testing.T) {
	began := time.Now()
	at := func(from, to int) belief {
		return belief{began.Add(time.Duration(from)), began.Add(time.Duration(to))}
	}
	most, over := crowded([]belief{at(0, 10), at(0, 10), at(0, 10), at(5, 8), at(8, 9), at(10, 12)})
	require.Equal(t, 4, most)
	require.Zero(t, over)
	most, over = crowded([]belief{at(0, 10), at(0, 10), at(0, 10), at(0, 10), at(3, 5), at(4, 6)})
	require.Equal(t, 6, most)
	require.EqualValues(t, 3, over)
}

// denial returns the longest time after the step without an admission.
func (c *crowd) denial(step, end time.Time) time.Duration {
	var at []int64
	for _, b := range c.beliefs {
		if b.from.After(step) && b.from.Before(end) {
			at = append(at, b.from.Sub(step).Microseconds())
		}
	}
	return longestGap(0, end.Sub(step).Microseconds(), at)
}

// bit requires that permits were held before the step and after it.
func (c *crowd) bit(step time.Time) {
	c.t.Helper()
	before, after := 0, 0
	for _, b := range c.beliefs {
		if b.from.Before(step) {
			before++
		} else {
			after++
		}
	}
	faultlab.Bit(c.t, before, after)
}

// J1: the server's clock is set back by an hour while permits are held, one of them by a process that has just died. The holders never
// exceed the permits, none of them loses its permit, and the dead one's is free after its lease, not after an hour.
func TestJ1SemaphoreClockBack(t *testing.T) {
	t.Parallel()
	server, clock := faultlab.StartStepped(t)
	dead := server.Client(t)
	s, err := semaphore.NewRedis(dead, bucket, permits, semaphore.WithLease(lease), semaphore.WithKeyPrefix(prefix), semaphore.WithStoreTimeout(patient))
	require.NoError(t, err)
	_, err = s.Acquire(background, 1)
	require.NoError(t, err)
	c := gateways(t, server.Addr, lease)
	require.NoError(t, dead.Close())
	step := time.Now()
	clock.Step(-time.Hour)
	time.Sleep(500 * time.Millisecond) // renewals meet the new time

	ctx, cancel := context.WithTimeout(background, 10*lease)
	defer cancel()
	all, err := open(t, server.Addr, lease).Acquire(ctx, permits) // all of them: the dead one's too
	require.NoError(t, err)
	back := time.Since(step)
	require.NoError(t, all.Release(background))
	time.Sleep(faultlab.Lasting(time.Second, 10*time.Second))
	end := time.Now()
	c.end()
	c.bit(step)
	held, over := crowded(c.beliefs)
	t.Logf("%v more than %d", over, permits)
	faultlab.Figure(t, fmt.Sprintf("back: held at once, of %d", permits), held)
	faultlab.Figure(t, "a dead holder's place free after", back)
	assert.LessOrEqual(t, held, permits)
	assert.Zero(t, c.lost.Load())
	assert.Zero(t, c.failed.Load())
	assert.LessOrEqual(t, back, c.most(lease))
	assert.LessOrEqual(t, c.denial(step, end), c.most(lease))
	faultlab.CleanUp(t, server.Client(t), prefix)
}

// J1: the server's clock is set forward by an hour. By that clock all leases have ended, so the server admits others at once. A holder
// learns that with the next renewal, at a third of the lease, and until then twice as many may believe to hold one: no store can
// distinguish such a step from an hour without renewals. Only the fence then protects the resource. Afterwards the count is exact again.
func TestJ1SemaphoreClockForward(t *testing.T) {
	t.Parallel()
	server, clock := faultlab.StartStepped(t)
	c := gateways(t, server.Addr, lease)

	// Holders who work for longer than all others, and their fences.
	s := open(t, server.Addr, lease)
	long, err := s.Acquire(background, permits)
	require.NoError(t, err)
	from := time.Now()
	clock.Step(time.Hour)
	step := time.Now()
	ctx, cancel := context.WithTimeout(background, 10*lease)
	defer cancel()
	next, err := open(t, server.Addr, lease).Acquire(ctx, 1)
	require.NoError(t, err)
	assert.Greater(t, next.Fence(), long.Fence(), "a resource can tell them apart")
	require.NoError(t, next.Release(background))
	select {
	case <-long.Context().Done():
	case <-time.After(lease):
		t.Error("the holder was not told")
	}
	told := time.Since(step)
	assert.ErrorIs(t, context.Cause(long.Context()), semaphore.ErrLost)
	c.mu.Lock()
	for range permits {
		c.beliefs = append(c.beliefs, belief{from, time.Now()})
	}
	c.mu.Unlock()
	time.Sleep(faultlab.Lasting(1500*time.Millisecond, 10*time.Second))
	end := time.Now()
	c.end()
	c.bit(step)
	held, over := crowded(c.beliefs)
	faultlab.Figure(t, fmt.Sprintf("forwards: held at once, of %d", 2*permits), held)
	faultlab.Figure(t, fmt.Sprintf("more than %d for", permits), over)
	faultlab.Figure(t, "holders told after", told)
	assert.LessOrEqual(t, told, c.most(lease/3))
	assert.LessOrEqual(t, held, 2*permits)
	assert.LessOrEqual(t, over, c.most(lease/3))
	settled := slices.DeleteFunc(slices.Clone(c.beliefs), func(b belief) bool { return b.from.Before(step.Add(told)) })
	held, _ = crowded(settled)
	assert.LessOrEqual(t, held, permits)
	assert.LessOrEqual(t, c.denial(step, end), c.most(0))
	faultlab.CleanUp(t, server.Client(t), prefix)
}

// J1: the server's clock falls behind by two seconds and catches up, again and again. A lease that is granted or renewed in a standstill
// ends earlier by the rest of the standstill. As long as renewals, at a third of the lease, come sooner, there is no additional admission
// and no holder loses its permit.
func TestJ1SemaphoreClockSawTooth(t *testing.T) {
	t.Parallel()
	server, clock := faultlab.StartStepped(t)
	c := gateways(t, server.Addr, longLease)
	step := time.Now()
	sawTooth(clock, 100*time.Millisecond)
	end := time.Now()
	c.end()
	c.bit(step)
	held, over := crowded(c.beliefs)
	t.Logf("%v more than %d", over, permits)
	faultlab.Figure(t, fmt.Sprintf("to and fro: held at once, of %d", permits), held)
	assert.LessOrEqual(t, held, permits)
	assert.Zero(t, c.lost.Load())
	assert.LessOrEqual(t, c.denial(step, end), c.most(0))
}
