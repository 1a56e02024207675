package clocks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// each runs a test for each kind of fleet.
func each(t *testing.T, test func(t *testing.T, stores []string)) {
	t.Parallel()
	for name, stores := range fleets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, stores)
		})
	}
}

// E1: the server's clock is set forward by an hour while all permits within the look-ahead are reserved. To the bucket that is an hour
// without demand: it forgives its debt and is full, once. The earlier reservations are used in addition. From then on it is exact, and the
// early end of the lock does no harm: every permit that was returned was granted.
func TestE1ServerClockForward(t *testing.T) {
	each(t, func(t *testing.T, stores []string) {
		server, clock := faultlab.StartStepped(t)
		r := start(t, server.Addr, stores, func(_ int, j *faultlab.Job) { j.Version = 1 }) // otherwise the key expires, and the count of permits with it
		r.last(300*time.Millisecond, 5*time.Second)
		before := micros()
		clock.Step(time.Hour)
		after := micros()
		r.goOn(after, 1200*time.Millisecond, 10*time.Second)
		end := micros()
		r.end()
		r.bit(before, after)
		r.bound("before, of 20", 0, before, burst)
		r.bound("after, of 20", after, always, burst)
		r.bound("of 100", 0, always, 2*burst+rate*timeout.Seconds())
		denied := r.denial(after, end)
		faultlab.Figure(t, "no permit for", denied)
		assert.LessOrEqual(t, denied, r.most(0))
		r.fewFailures(1)
		r.complete(server.Client(t))
	})
}

// E2: the server's clock is set back by an hour, or by so little that the bucket waits for it. Nothing is granted in addition, and no
// caller waits for that hour.
func TestE2ServerClockBack(t *testing.T) {
	each(t, func(t *testing.T, stores []string) { setBack(t, stores, -time.Hour, 0) })
}

func TestE2ServerClockBackALittle(t *testing.T) {
	each(t, func(t *testing.T, stores []string) { setBack(t, stores, -1900*time.Millisecond, standstill) })
}

func setBack(t *testing.T, stores []string, by, denial time.Duration) {
	server, clock := faultlab.StartStepped(t)
	r := start(t, server.Addr, stores)
	r.last(300*time.Millisecond, 5*time.Second)
	before := micros()
	clock.Step(by)
	after := micros()
	r.goOn(after, time.Second, 10*time.Second)
	end := micros()
	r.end()
	r.bit(before, after)
	r.bound("of 20", 0, always, burst)
	denied := r.denial(after, end)
	faultlab.Figure(t, "no permit for", denied)
	assert.LessOrEqual(t, denied, r.most(denial))
	r.fewFailures(1)
	r.complete(server.Client(t))
}

// E2, with a lock whose holder has died: it would last for an hour and half a second. That it was there half a second before the
// step, with the time to live that it had then, is the same to the server as that it gets this one after the step.
func TestE2DeadHoldersLock(t *testing.T) {
	each(t, func(t *testing.T, stores []string) {
		server, clock := faultlab.StartStepped(t)
		client := server.Client(t)
		r := start(t, server.Addr, stores)
		lock := prefix + "{" + bucket + "}:lock"
		clock.Step(-time.Hour)
		require.Eventually(t, func() bool { // while no process holds it
			return client.SetNX(background, lock, "of the dead", time.Hour+500*time.Millisecond).Val()
		}, time.Minute, 100*time.Microsecond)
		after := micros()
		left := client.PTTL(background, lock).Val()
		r.goOn(after, 1500*time.Millisecond, 10*time.Second)
		end := micros()
		r.end()
		r.bit(after, after)
		r.bound("of 20", 0, always, burst)
		denied := r.denial(after, end)
		t.Logf("the lock was to live for %v", left) // half a second if another process has clipped it by then
		faultlab.Figure(t, "no permit behind a dead holder's lock for", denied)
		assert.LessOrEqual(t, denied, r.most(standstill))
		assert.Empty(t, faultlab.Failures(r.told))
		faultlab.CleanUp(t, client, prefix)
	})
}

// sawTooth sets a clock back by two seconds and forward again, every so often, for two seconds (twenty if there is time). It
// returns the number of steps and for how long the clock was behind at most.
func sawTooth(clock *faultlab.Clock, every time.Duration) (steps int, stood time.Duration) {
	for began := time.Now(); time.Since(began) < faultlab.Lasting(2*time.Second, 20*time.Second); steps += 2 {
		down := time.Now()
		clock.Step(-standstill)
		time.Sleep(every)
		clock.Step(standstill)
		stood = max(stood, time.Since(down))
		time.Sleep(every)
	}
	return steps, stood
}

// E3: the server's clock falls behind by two seconds and catches up again, ten times a second. While it is behind, time stands still for
// the bucket, for at most two seconds, and goes on from where it would be: no permits are minted. A permit that is granted in a standstill
// is used later than due by the rest of the standstill, because its caller waits for the wait in the reply.
func TestE3ServerClockSawTooth(t *testing.T) {
	each(t, func(t *testing.T, stores []string) {
		server, clock := faultlab.StartStepped(t)
		r := start(t, server.Addr, stores)
		before := micros()
		steps, stood := sawTooth(clock, 100*time.Millisecond)
		r.goOn(before, 0, 0)
		end := micros()
		r.end()
		r.bit(before, before)
		t.Logf("%d steps; the clock was behind for at most %v", steps, stood)
		r.bound("of 20 + rate × standstill", 0, always, burst+rate*min(stood, standstill).Seconds())
		denied := r.denial(before, end)
		faultlab.Figure(t, "no permit for", denied)
		assert.LessOrEqual(t, denied, r.most(standstill))
		r.fewFailures(1) // few steps meet a batch that is under way, and those are small
		r.complete(server.Client(t))
	})
}

// bit requires that the fleet was at work before the fault and after it.
func (r *run) bit(before, after int64) {
	r.t.Helper()
	var early, later int
	for _, p := range r.told {
		if p.Err == "" && p.Granted < before {
			early++
		}
		if p.Err == "" && p.Asked > after {
			later++
		}
	}
	faultlab.Bit(r.t, early, later)
}

// fewFailures requires that at most one batch a step has failed, which read the time before it and was to write after it.
func (r *run) fewFailures(steps int) {
	r.t.Helper()
	failures := faultlab.Failures(r.told)
	assert.LessOrEqual(r.t, failures["timeout"], steps*80)
	assert.Empty(r.t, others(failures, "timeout"))
}

// others leaves failures of none of these kinds.
func others(failures map[string]int, kinds ...string) map[string]int {
	for _, k := range kinds {
		delete(failures, k)
	}
	return failures
}
