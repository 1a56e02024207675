//go:build !race

package tokenbucket

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// busy returns a fleet at full demand: processes at given distances from the bucket, each with a number of callers that ask again at once.
func busy(seed uint64, c config, distances []int64, callers int, largest int64) *world {
	w := newWorld(seed, c)
	lossRate = 0
	for _, d := range distances {
		a := w.actor(func() int64 { return d + w.random.Int64N(1+d/10) })
		a.line.Strict = true
		for range callers {
			n := 1 + w.random.Int64N(largest)
			w.at(w.now+w.random.Int64N(1_000_000), func() { a.ask(n, -1, 1) })
		}
	}
	return w
}

// usedIn is the share of the rate that was used from a time on, and that of each process in it.
func (w *world) usedIn(from int64) (share float64, each []float64) {
	each = make([]float64, len(w.fleet))
	total := 0.0
	for _, u := range w.used {
		if u.at >= from {
			each[u.by] += u.n
			total += u.n
		}
	}
	for i := range each {
		each[i] /= total / float64(len(each))
	}
	return total / (w.terms.Rate * float64(w.now-from) / 1e6), each
}

// Three processes of different distance at full demand share the rate: the farthest gets nearly as much as the nearest.
func TestScheduleIsFair(t *testing.T) {
	for _, test := range []struct {
		rate, least float64
	}{{1000, 0.85}, {5, 0.75}} {
		t.Run(fmt.Sprint(test.rate), func(t *testing.T) {
			w := busy(1, config{Rate: test.rate, Size: 1}, []int64{100, 5000, 20_000}, 300, 1)
			begin := w.now
			w.run(begin + 60_000_000)
			require.Empty(t, w.wrong)
			used, each := w.usedIn(begin)
			t.Logf("%.1f %% used, shares %.2f, %d asks", 100*used, each, w.asks)
			for _, share := range each {
				require.GreaterOrEqual(t, share, test.least)
			}
			require.GreaterOrEqual(t, used, 0.98)
		})
	}
}

// One of two processes is stopped for 150 ms, once or every two seconds: what falls due in the pause is lost, and hardly more.
func TestSchedulePauses(t *testing.T) {
	for _, rate := range []float64{100, 1000} {
		w := busy(2, config{Rate: rate, Size: 1}, []int64{100, 100}, 300, 1)
		begin := w.now
		w.run(begin + 4_000_000)
		w.fleet[0].asleep = w.now + 150_000
		paused := w.now
		w.run(paused + 8_000_000)
		require.Empty(t, w.wrong)
		once, _ := w.usedIn(paused)
		lost := rate*8 - once*rate*8
		often := w.now
		for range 5 {
			w.fleet[0].asleep = w.now + 150_000
			w.run(w.now + 2_000_000)
		}
		again, each := w.usedIn(often)
		t.Logf("%v/s: one pause: %.1f %% used, %.1f permits lost; one every 2 s: %.1f %%, shares %.2f", rate, 100*once, lost, 100*again, each)
		require.Empty(t, w.wrong)
		require.GreaterOrEqual(t, once, 0.98)
		require.GreaterOrEqual(t, again, 0.95)
	}
}

// At full demand three in ten callers give up at some time: the others use what they leave.
func TestScheduleUsesWhatIsCancelled(t *testing.T) {
	for _, processes := range []int{1, 3} {
		for _, largest := range []int64{1, 5} {
			t.Run(fmt.Sprintf("%d processes, up to %d permits", processes, largest), func(t *testing.T) {
				w := busy(3, config{Rate: 1000, Size: 1}, []int64{100, 1000, 5000}[:processes], 0, 1)
				for _, a := range w.fleet {
					for range 1000 {
						a.demand(largest)
					}
				}
				begin := w.now
				w.run(begin + 2_000_000)
				from := w.now
				w.run(from + 10_000_000)
				require.Empty(t, w.wrong)
				used, _ := w.usedIn(from)
				t.Logf("%.2f %% used, %d asks", 100*used, w.asks)
				require.GreaterOrEqual(t, used, 0.99)
				require.LessOrEqual(t, w.worstLevel(), max(1, float64(largest))+w.terms.Rate*0.11)
			})
		}
	}
}

// demand is a caller who asks again and again, and gives up three times in ten, at some time. While the callers of its process are away, it
// does not ask.
func (a *actor) demand(largest int64) {
	var begin func()
	begin = func() {
		if a.away > a.now {
			a.at(a.away+a.random.Int64N(100_000), begin)
			return
		}
		c := a.ask(1+a.random.Int64N(largest), -1, 0)
		again := func() { a.at(a.now+1, begin) }
		if !c.Waits() {
			again()
			return
		}
		c.then = again
		if a.random.IntN(10) < 3 {
			a.at(a.now+a.random.Int64N(1_000_000), func() {
				if c.then != nil {
					c.then = nil
					a.leave(c)
					begin()
				}
			})
		}
	}
	a.at(a.now+a.random.Int64N(100_000), begin)
}

// Large requests beside small ones: neither starves, warm-up with PayNow included.
func TestScheduleOfSizes(t *testing.T) {
	for name, c := range map[string]config{
		"bursty":  {Rate: 1000, Size: 10},
		"warm-up": {Rate: 1000, Kind: warmingUp, WarmupMicros: 2_000_000, ColdFactor: 3},
	} {
		t.Run(name, func(t *testing.T) {
			w := busy(4, c, []int64{100, 100}, 0, 1)
			for range 10 {
				w.at(w.now, func() { w.fleet[0].ask(100, -1, 1) })
			}
			for range 300 {
				w.at(w.now, func() { w.fleet[1].ask(1, -1, 1) })
			}
			w.run(w.now + 5_000_000)
			from := w.now
			w.run(from + 30_000_000)
			require.Empty(t, w.wrong)
			used, each := w.usedIn(from)
			t.Logf("%.1f %% used, shares of 100 and of 1: %.2f", 100*used, each)
			require.GreaterOrEqual(t, min(each[0], each[1]), 0.5)
		})
	}
}
