package tokenbucket

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

// settleLab settles random reservations of random buckets, as many at a time as there are callers, and keeps the account of each bucket.
type settleLab struct {
	t               *testing.T
	random          *rand.Rand
	clock           *clockwork.FakeClock
	settled, rounds int
	forgone         int // permits did not come back to a bucket, because it was full since they were taken
	clipped         int // permits came back to a bucket that was full, or nearly
	pending         []pending
}

// pending is a reservation that is not due yet.
type pending struct {
	due   time.Time
	ready <-chan struct{}
}

// advance moves the clock on, and stops where a reservation is due: a process that sleeps longer would lose its permits.
func (s *settleLab) advance(d time.Duration) {
	until := s.clock.Now().Add(d.Truncate(time.Microsecond))
	slices.SortFunc(s.pending, func(a, b pending) int { return a.due.Compare(b.due) })
	for len(s.pending) > 0 && !s.pending[0].due.After(until) {
		s.clock.Advance(max(0, s.pending[0].due.Sub(s.clock.Now())))
		select {
		case <-s.pending[0].ready:
		case <-time.After(time.Minute):
			s.t.Fatalf("a reservation is due at %v, and not ready", s.pending[0].due)
		}
		s.pending = s.pending[1:]
	}
	s.clock.Advance(until.Sub(s.clock.Now()))
}

// round settles about n reservations of new buckets.
func (s *settleLab) round(store Store, members, n int) {
	t, random := s.t, s.random
	s.rounds++
	roomy := random.IntN(2) == 0 // no bucket is ever full
	sizes, rates, initial := make([]float64, members), make([]float64, members), make([]float64, members)
	p := newPayer(t, random, members, func(m int) (float64, []Option) {
		if rates[m] = []float64{0.3, 5, 7.7, 1000}[random.IntN(4)]; roomy {
			rates[m] = rates[0] // a faster one would become full
		}
		if sizes[m] = []float64{1, 20, 1000}[random.IntN(3)]; roomy {
			sizes[m] = 1e7
		}
		initial[m] = sizes[m] / 2
		return rates[m], []Option{WithStore(store), WithClock(s.clock), WithMaxPermits(sizes[m]), WithInitialPermits(initial[m]),
			WithStoreTimeout(time.Minute), Logged(t)}
	})
	type open struct {
		held
		n     int
		since int
	}
	var (
		held    []open
		began   = s.clock.Now()
		events  = make([][]event, members)
		full    = make([]int, members) // the last step in which the bucket was full
		step    int
		largest = make([]float64, members)
		charged int // permits of settled reservations, by what they used
		most    = 1 + random.IntN(64)
		slowest = slices.Min(rates)
	)
	for done := 0; done < n; {
		s.advance(time.Duration(random.Float64() * 30 * float64(most) / slowest * 1e9))
		now := s.clock.Now().UnixMicro()
		if len(held) == 0 && done == 0 {
			began = s.clock.Now() // the first call makes the buckets
		}
		if step++; !roomy {
			for m, owed := range p.owed(t) {
				if -owed > sizes[m]-1e-6 {
					full[m] = step
				}
			}
		}
		taken := make([]open, 1+random.IntN(most))
		var callers sync.WaitGroup
		for i := range taken {
			taken[i].n, taken[i].since = 1+random.IntN(50), step
			callers.Go(func() {
				h, err := p.reserve(taken[i].n)
				require.NoError(t, err)
				taken[i].held = h
			})
		}
		callers.Wait()
		for _, o := range taken {
			require.True(t, o.OK())
			for m, wait := range p.waits(o.held) {
				used := float64(o.n * p.weights[m])
				events[m], largest[m] = append(events[m], event{now + wait.Microseconds(), used}), max(largest[m], used)
			}
		}
		for m := range events { // a bucket has granted them in this order
			fresh := events[m][len(events[m])-len(taken):]
			slices.SortStableFunc(fresh, func(a, b event) int { return int(a.at - b.at) })
		}
		for _, o := range taken {
			s.pending = append(s.pending, pending{s.clock.Now().Add(o.Delay()), o.Ready()})
		}
		held = append(held, taken...)
		random.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
		ending := held[:min(len(held), random.IntN(2*most))]
		held = slices.Clone(held[len(ending):])

		before := p.owed(t)
		more, less, lost := 0, 0, make([]int, members)
		for _, o := range ending {
			actual, later := random.IntN(2*o.n+1), random.IntN(2) == 0
			charged += actual
			if actual == 0 { // as if it was cancelled: unless it is due, it never will be
				s.pending = slices.DeleteFunc(s.pending, func(p pending) bool { return p.ready == o.Ready() })
			}
			more, less = more+max(0, actual-o.n), less+max(0, o.n-actual)
			for m := range lost {
				if o.since < full[m] { // it would be as full without the reservation
					lost[m] += max(0, o.n-actual)
				}
			}
			callers.Go(func() {
				if later {
					o.SettleLater(actual)
					o.SettleLater(1e6)
				} else {
					require.NoError(t, o.Settle(background, actual))
				}
				require.NoError(t, o.Settle(background, 1e6), "once")
			})
		}
		callers.Wait()
		require.NoError(t, p.close(background))
		done += len(ending)
		after := p.owed(t)
		for m, w := range p.weights {
			if more > 0 { // in any order of them the bucket ends here, and so a window that begins among them has no more than in this order
				charge := float64(more * w)
				due := now + int64(max(0, before[m]+charge)/rates[m]*1e6)
				events[m], largest[m] = append(events[m], event{due, charge}), max(largest[m], charge)
			}
			events[m] = append(events[m], event{now, -float64(less * w)})
			want := float64((more - less + lost[m]) * w)
			if lost[m] > 0 {
				s.forgone++
			}
			if float64((less-lost[m])*w)-before[m] >= sizes[m]-1e-6 { // it may have been full meanwhile
				s.clipped, full[m] = s.clipped+1, step+1
				require.GreaterOrEqual(t, after[m]-before[m], want-1e-5)
				require.LessOrEqual(t, after[m]-before[m], float64(more*w)+1e-5)
			} else {
				require.InDelta(t, want, after[m]-before[m], 1e-5, "member %d of %v", m, p.weights)
			}
		}
		s.settled += len(ending)
	}
	after := p.owed(t)
	for _, o := range held {
		charged += o.n // never settled: the estimate
	}
	for m, w := range p.weights {
		if roomy {
			want := float64(charged*w) - initial[m] - rates[m]*s.clock.Since(began).Seconds()
			require.InDelta(t, want, after[m], 1e-4+math.Abs(want)*1e-10, "what was used, and what the rate has made")
		}
		c := config{Kind: bursty, Rate: rates[m]}
		require.LessOrEqual(t, worstNet(events[m], rates[m]), bound(c, sizes[m], largest[m])+1e-5*float64(len(events[m])), "%v/s, size %v", rates[m], sizes[m])
	}
}

// Limiters and groups on every store are settled by many callers at a time, in the foreground and behind: a hundred thousand settlements in full size, a
// million with TOKENBUCKET_LONG=1. Each bucket is charged exactly what its reservations have used, each by its estimate if it is never settled. No window
// has more than the bound, plus the permits given back since its first grant.
func TestSettlementsOnStores(t *testing.T) {
	client := patientClient(t)
	prefix := func(store string) RedisOption { return WithKeyPrefix(fmt.Sprint(t.Name(), store, rand.Uint64(), ":")) } // their buckets have the same names
	total, times, seed := 0, 1, rand.Uint64()
	t.Logf("seed %d", seed)
	if os.Getenv("TOKENBUCKET_LONG") == "1" {
		times = 10
	}
	for _, c := range []struct {
		name       string
		store      Store
		full, part int
	}{
		{"memory", NewMemoryStore(), 40_000, 10_000},
		{"script", NewRedisScriptStore(client, prefix("script"), WithLocalTime()), 8_000, 2_000},
		{"lock", NewRedisStore(client, prefix("lock"), WithLocalTime()), 3_000, 1_000},
	} {
		for members, what := range map[int]string{1: "limiter", 3: "group"} {
			t.Run(c.name+"/"+what, func(t *testing.T) {
				lab := &settleLab{t: t, random: rand.New(rand.NewPCG(seed, uint64(members))), clock: clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))}
				for lab.settled < times*sized(c.full, c.part) {
					lab.round(c.store, members, sized(2000, 400))
				}
				total += lab.settled
				t.Logf("%d settlements of %d sets of buckets; %d times permits came back to a full one, %d times not to one that was full since",
					lab.settled, lab.rounds, lab.clipped, lab.forgone)
			})
		}
	}
	t.Logf("%d settlements in all", total)
	require.GreaterOrEqual(t, total, times*sized(100_000, 25_000))
}
