//go:build !race

package tokenbucket

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// crowd is one process of a class, at a distance, with so many callers that ask again at once. A process with callers of two classes is two
// of these, since its coordinators share nothing.
func (w *world) crowd(class engine.Class, distance int64, callers int) *actor {
	a := w.actor(func() int64 { return distance + w.random.Int64N(1+distance/10) })
	a.line.Strict, a.class = true, class
	for range callers {
		w.at(w.now+w.random.Int64N(500_000), func() { a.ask(1, -1, 1) })
	}
	return a
}

// crowds is a fleet at full demand: n processes of each class.
func crowds(seed uint64, rate float64, n, callers int, floor float64, classes ...engine.Class) *world {
	w := newWorld(seed, config{Rate: rate, Size: 1})
	lossRate = 0
	for _, class := range classes {
		for i := range n {
			w.crowd(class, []int64{100, 1000, 5000}[i%3], callers).share = floor
		}
	}
	return w
}

// of is the share of each class in what was used from a time on, and the share of the rate that was used.
func (w *world) of(from int64) (each [engine.Classes]float64, used float64) {
	used, shares := w.usedIn(from)
	for i, a := range w.fleet {
		each[a.class] += shares[i] / float64(len(w.fleet))
	}
	return each, used
}

// bounded requires that nothing was wrong, and that no window has more than the bucket and the rate allow.
func (w *world) bounded(t *testing.T) {
	t.Helper()
	require.Empty(t, w.wrong)
	require.LessOrEqual(t, w.worstLevel(), w.terms.max+w.terms.Rate*(schedule.Tolerated+1)/1e6)
}

// seeds is how often a cell of a table is played, once for each seed: in full 500 times, and 20 times where that would take half an hour.
func seeds(rate float64) uint64 {
	switch {
	case os.Getenv("TOKENBUCKET_LONG") == "":
		return 1
	case rate < 100:
		return 500
	}
	return 20
}

// Two processes keep a bucket busy with callers of a class. A caller of the highest class, which comes every 0.3 s, waits for what they own:
// a horizon less the share that their class yields. The whole rate is used.
func TestLoneCallerOfTheHighestClass(t *testing.T) {
	for _, cell := range []struct {
		rate   float64
		class  engine.Class
		median [2]int64 // of the wait in ms, from and to
		most   int64    // 99 % of the waits
	}{
		{1000, engine.Normal, [2]int64{700, 900}, 850}, {1000, engine.Low, [2]int64{200, 260}, 280}, {1000, engine.Lowest, [2]int64{50, 90}, 110},
		{100, engine.Normal, [2]int64{700, 900}, 870}, {100, engine.Low, [2]int64{200, 270}, 290}, {100, engine.Lowest, [2]int64{50, 100}, 120},
		{20, engine.Normal, [2]int64{750, 950}, 950}, {20, engine.Low, [2]int64{220, 320}, 350}, {20, engine.Lowest, [2]int64{80, 150}, 170},
		{5, engine.Low, [2]int64{300, 500}, 720}, {5, engine.Lowest, [2]int64{200, 400}, 620}, // the floor is a permit, which takes 0.2 s
	} {
		t.Run(fmt.Sprintf("%v/s beside %v", cell.rate, cell.class), func(t *testing.T) {
			for seed := range seeds(cell.rate) {
				w := crowds(seed, cell.rate, 2, 1200, 0.05, cell.class)
				lone, waits := w.crowd(engine.Normal, 100, 0), []int64(nil)
				var come func()
				come = func() {
					came := w.now
					served := func() { waits = append(waits, (w.now-came)/1000) }
					if c := lone.ask(1, -1, 0); c.Waits() {
						c.then = served
					} else {
						served()
					}
					w.at(w.now+300_000, come)
				}
				begin := w.now + 2_000_000
				w.at(begin, come)
				w.run(begin + 30_000_000)
				slices.Sort(waits)
				median, most := waits[len(waits)/2], waits[len(waits)*99/100]
				used, _ := w.usedIn(begin)
				t.Logf("seed %d: half of the waits within %d ms, 99 %% within %d ms, %.1f %% of the rate used", seed, median, most, 100*used)
				w.bounded(t)
				require.GreaterOrEqual(t, median, cell.median[0])
				require.LessOrEqual(t, median, cell.median[1])
				require.LessOrEqual(t, most, cell.most)
				require.GreaterOrEqual(t, used, 0.99)
			}
		})
	}
}

// A process with callers of one class, far from the bucket: it uses the rate, whatever the class and the distance, which is one way.
func TestClassesFarFromTheStore(t *testing.T) {
	for _, rate := range []float64{20, 200, 1000} {
		for class := range engine.Classes {
			for _, distance := range []int64{50, 5000, 20_000, 50_000} {
				w := newWorld(1, config{Rate: rate, Size: 1})
				lossRate = 0
				w.crowd(class, distance, int(2*rate))
				from := w.now + 1_500_000
				w.run(from)
				asks := w.asks
				w.run(from + 3_000_000)
				used, _ := w.usedIn(from)
				t.Logf("%v/s, %v, %d µs away: %.1f %% used, %d asks/s", rate, class, distance, 100*used, (w.asks-asks)/3)
				w.bounded(t)
				require.GreaterOrEqual(t, used, 0.97, "%v/s, %v, %d µs away", rate, class, distance)
			}
		}
	}
}

// Processes of a lower class at different distances share the rate. In a class with a short look-ahead a farther one had 0.43 of an equal
// part from 50 ms away.
func TestFarProcessesOfAClassShare(t *testing.T) {
	for _, rate := range []float64{20, 1000} {
		for _, class := range []engine.Class{engine.Low, engine.Lowest} {
			w := newWorld(1, config{Rate: rate, Size: 1})
			lossRate = 0
			for _, distance := range []int64{100, 50_000} {
				w.crowd(class, distance, int(3*rate))
			}
			from := w.now + 3_000_000
			w.run(from)
			w.run(from + 20_000_000)
			used, each := w.usedIn(from)
			t.Logf("%v/s, %v: %.1f %% used, shares %.2f", rate, class, 100*used, each)
			w.bounded(t)
			require.GreaterOrEqual(t, used, 0.99)
			require.GreaterOrEqual(t, slices.Min(each), 0.55)
		}
	}
}

// Processes of three classes at full demand, without floors: the highest class has the whole rate. When it has gone, the next one has, and
// then the lowest. When the highest comes back, it has all of it again.
func TestClassesComeAndGo(t *testing.T) {
	for _, rate := range []float64{1000, 100, 20, 5} {
		for _, n := range []int{1, 3} {
			t.Run(fmt.Sprintf("%v/s, %d of each", rate, n), func(t *testing.T) {
				for seed := range seeds(rate) {
					w := crowds(seed, rate, n, 1000, 0, engine.Normal, engine.Low, engine.Lowest)
					has := func(class engine.Class) {
						t.Helper()
						w.run(w.now + 2_000_000) // two horizons
						from := w.now
						w.run(from + 10_000_000)
						each, used := w.of(from)
						t.Logf("seed %d: %.3f, %.1f %% used", seed, each, 100*used)
						require.GreaterOrEqual(t, each[class], 0.97)
						require.GreaterOrEqual(t, used, 0.98)
					}
					asleep := func(class engine.Class, until int64) {
						for _, a := range w.fleet {
							if a.class == class {
								a.asleep = until
							}
						}
					}
					begin := w.now
					has(engine.Normal)
					asleep(engine.Normal, begin+36_000_000)
					has(engine.Low)
					asleep(engine.Low, begin+60_000_000)
					has(engine.Lowest)
					has(engine.Normal)
					w.bounded(t)
				}
			})
		}
	}
}

// With the floor, a lower class gets a twentieth of what a process of the higher one gets, whatever the rate and however many processes
// there are, and at 5/s a little at least.
func TestFloorOfALowerClass(t *testing.T) {
	for _, rate := range []float64{20, 5, 100, 1000}[:sized(4, 2)] {
		for _, n := range []int{1, 10} {
			for _, class := range []engine.Class{engine.Low, engine.Lowest} {
				t.Run(fmt.Sprintf("%v/s, %d of each, %v", rate, n, class), func(t *testing.T) {
					for seed := range min(seeds(rate), 50) {
						w := crowds(seed, rate, n, 1000, 0.05, engine.Normal, class)
						starts, lasts := int64(3_000_000), int64(10_000_000)
						if rate < 100 { // each process has a permit in 20 s
							starts, lasts = 20_000_000, 60_000_000
						}
						w.run(w.now + starts)
						from := w.now
						w.run(from + lasts)
						each, used := w.of(from)
						t.Logf("seed %d: %.3f, %.1f %% used", seed, each, 100*used)
						w.bounded(t)
						require.GreaterOrEqual(t, used, 0.99)
						least, most := 0.03, 0.07
						if rate < 100 { // a permit is a large part of the horizon
							least, most = 0.01, 0.13
						}
						require.GreaterOrEqual(t, each[class], least)
						require.LessOrEqual(t, each[class], most)
					}
				})
			}
		}
	}
}

// Callers of all classes want 1 to 20 permits, give up three times in ten, and their processes are stopped now and then: the highest class
// has nearly all of the rate that it wants, the bound holds, and what is cancelled is used.
func TestClassesOfSizesAndCancels(t *testing.T) {
	for seed := range 3 * seeds(1000) {
		w := newWorld(seed, config{Rate: 1000, Size: 20})
		lossRate = 0
		for i, class := range []engine.Class{engine.Normal, engine.Low, engine.Lowest, engine.Normal, engine.Low, engine.Lowest} {
			a := w.crowd(class, []int64{100, 5000}[i/3], 0)
			a.share = 0.05
			for range 300 {
				a.demand(20)
			}
		}
		w.run(w.now + 2_000_000)
		from := w.now
		for range 10 {
			a := w.fleet[w.random.IntN(len(w.fleet))]
			a.asleep = w.now + 50_000 + w.random.Int64N(100_000)
			w.run(w.now + 1_000_000)
		}
		each, used := w.of(from)
		t.Logf("seed %d: %.3f, %.1f %% used", seed, each, 100*used)
		w.bounded(t)
		require.GreaterOrEqual(t, used, 0.95)
		require.GreaterOrEqual(t, each[engine.Normal], 0.85)
		require.Positive(t, each[engine.Low])
		require.Positive(t, each[engine.Lowest])
	}
}

// Random fleets of two to five processes, each of a class and at a distance of its own. Their callers want up to 1, 5 or 20 permits, and
// three in ten give up. Processes are stopped for a moment, and callers of all processes but one stay away for some seconds. In each of 500
// fleets at each rate, the bound holds, and 98 % of the rate is used.
func TestClassesInRandomFleets(t *testing.T) {
	for _, cell := range []struct{ rate, seconds float64 }{{5, 200}, {20, 50}, {100, 12}, {1000, 3}} {
		t.Run(fmt.Sprintf("%v/s", cell.rate), func(t *testing.T) {
			least, stopped, away, served := 1.0, 0, 0, 0
			for seed := range uint64(sized(500, 5)) {
				w := randomFleet(seed, cell.rate)
				w.run(w.now + 3_000_000)
				from := w.now
				stops, leaves := w.comeAndGo(from + int64(cell.seconds*1e6))
				_, used := w.of(from)
				least, stopped, away, served = min(least, used), stopped+stops, away+leaves, served+w.served
				w.bounded(t)
				require.GreaterOrEqual(t, used, 0.98, "seed %d", seed)
			}
			t.Logf("%.1f %% of the rate used at least; %d calls served, %d times a process was stopped, %d times its callers went away",
				100*least, served, stopped, away)
		})
	}
}

// randomFleet returns processes with at least twice as many callers as the rate serves in a horizon. The bucket has room for the largest request.
func randomFleet(seed uint64, rate float64) *world {
	r := rand.New(rand.NewPCG(seed, 4))
	largest := []int64{1, 5, 20}[r.IntN(3)]
	w := newWorld(seed, config{Rate: rate, Size: float64(largest)})
	lossRate = 0
	for range 2 + r.IntN(4) {
		a := w.crowd(engine.Class(r.IntN(int(engine.Classes))), []int64{100, 1000, 5000}[r.IntN(3)], 0)
		a.share = 0.05
		for range max(10, 4*int64(rate)/(1+largest)) {
			a.demand(largest)
		}
	}
	return w
}

// comeAndGo runs the world until a time, and returns how often a process was stopped and how often its callers went away. Those of the first
// process stay.
func (w *world) comeAndGo(until int64) (stopped, away int) {
	for w.now < until {
		a := w.fleet[w.random.IntN(len(w.fleet))]
		switch w.random.IntN(4) {
		case 0:
			a.asleep = w.now + 20_000 + w.random.Int64N(50_000)
			stopped++
		case 1, 2:
			if a != w.fleet[0] {
				a.away = w.now + w.random.Int64N(6_000_000)
				away++
			}
		}
		w.run(min(until, w.now+w.random.Int64N(4_000_000)))
	}
	return stopped, away
}
