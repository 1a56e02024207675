package registry_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Fifty calls wait for 10/s, and the row changes: none passes by the old row, those that pass are counted in the new window, and calls that come then find
// nothing of the old row either.
func TestHostileFiftyWaiters(t *testing.T) {
	for name, c := range map[string]struct {
		rows        []registry.Limit
		least, most int // of the waiters that pass within ten seconds
		by          gate.Decider
	}{
		"window": {[]registry.Limit{hostileRow("/a", 10, func(l *registry.Limit) { l.Window, l.WindowLimit = 10*time.Second, 5 })}, 5, 5, gate.ByWindow},
		"window alone": {[]registry.Limit{hostileRow("/a", 0, func(l *registry.Limit) {
			l.NoRate, l.Burst, l.MaxWait, l.Window, l.WindowLimit = true, nil, 0, 10*time.Second, 5
		})}, 5, 5, gate.ByWindow},
		"0":         {[]registry.Limit{hostileRow("/a", 0)}, 0, 0, gate.ByZero},
		"deleted":   {nil, 0, 0, gate.ByUnknown},
		"0.1/s":     {[]registry.Limit{hostileRow("/a", 0.1)}, 0, 1, gate.ByLimit},
		"no wait":   {[]registry.Limit{hostileRow("/a", 10, func(l *registry.Limit) { l.MaxWait = 0 })}, 0, 1, gate.ByLimit},
		"no change": {[]registry.Limit{hostileRow("/a", 10)}, 44, 44, gate.ByLimit},
	} {
		for _, far := range []time.Duration{0, time.Millisecond} {
			t.Run(name+" "+far.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var store tokenbucket.Store = tokenbucket.NewMemoryStore()
					if far != 0 {
						store = &hostileFar{store, far}
					}
					s := &scene{t: t, source: &fake{}, began: time.Now()}
					s.source.set(hostileRow("/a", 10), row("/b", 1e-4, 1))
					s.limits = open(t, s.source, store, registry.WithInterval(time.Hour), registry.WithUnknown(registry.Refuse()), registry.WithLocalWindows())
					var calls sync.WaitGroup
					s.wait(&calls, 50, func(ctx context.Context) (bool, error) { return allow(ctx, s.limits, "/a") })
					time.Sleep(time.Until(s.began.Add(550 * time.Millisecond)))
					_, before := s.ended()
					s.set(c.rows...)
					calls.Wait()
					_, passed := s.ended()
					t.Logf("%d before, %d after", before, passed-before)
					require.GreaterOrEqual(t, passed-before, c.least)
					require.LessOrEqual(t, passed-before, c.most)
					for _, o := range s.fates {
						require.NoError(t, o.err)
					}
					if c.by == gate.ByWindow {
						a, err := s.limits.Enter(ctx, "/a")
						require.NoError(t, err)
						require.False(t, a.OK, "the waiters are counted in the window")
						require.Equal(t, c.by, a.By)
					}
					s.limits.Close()
					time.Sleep(time.Second) // refunds end
				})
			})
		}
	}
}

// running are the calls of a row with places that run.
type running struct {
	mu        sync.Mutex
	now, most int
	order     []int
}

func (r *running) begin(i int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now++
	r.most = max(r.most, r.now)
	r.order = append(r.order, i)
}

func (r *running) running() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

func (r *running) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now--
}

// placed is a row of a number of places, and what else a test gives it.
func placed(places int, wait time.Duration, change ...func(*registry.Limit)) registry.Limit {
	l := hostileRow("/a", 1000, change...)
	l.Concurrent, l.ConcurrentWait = places, wait
	return l
}

func noRate(l *registry.Limit) { l.NoRate, l.Rate, l.Burst, l.MaxWait = true, 0, nil, 0 }

// eachPlaces runs a test of rows with places, with a rate and without.
func eachPlaces(t *testing.T, run func(t *testing.T, s *scene, r *running, row func(places int, wait time.Duration) registry.Limit)) {
	for name, change := range map[string]func(*registry.Limit){"rate": func(*registry.Limit) {}, "no rate": noRate} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &scene{t: t, source: &fake{}, began: time.Now()}
				s.source.set(registry.Limit{Name: "/none", Disabled: true})
				s.limits = open(t, s.source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithLocalSemaphores())
				run(t, s, new(running), func(places int, wait time.Duration) registry.Limit { return placed(places, wait, change) })
				s.limits.Close()
			})
		})
	}
}

// occupy makes calls that run for a time, a millisecond apart.
func (s *scene) occupy(calls *sync.WaitGroup, r *running, from, n int, runs time.Duration) {
	for i := range n {
		s.wait(calls, 1, func(ctx context.Context) (bool, error) {
			a, err := s.limits.Enter(ctx, "/a")
			if err != nil || !a.OK {
				return false, err
			}
			r.begin(from + i)
			time.Sleep(runs)
			r.end()
			a.Leave()
			return true, nil
		})
	}
}

// A concurrency that is lowered admits no call while as many run as it allows, or more. Calls that run are not ended.
func TestHostilePlacesLowered(t *testing.T) {
	eachPlaces(t, func(t *testing.T, s *scene, r *running, row func(int, time.Duration) registry.Limit) {
		s.set(row(5, time.Minute))
		var calls sync.WaitGroup
		s.occupy(&calls, r, 0, 15, time.Second)
		require.Equal(t, 5, r.running())
		s.set(row(1, time.Minute))
		s.occupy(&calls, r, 15, 3, time.Second)
		time.Sleep(2 * time.Second)
		r.mu.Lock()
		r.most = r.now
		r.mu.Unlock()
		calls.Wait()
		_, passed := s.ended()
		require.Equal(t, 1, r.most, "once those of before have ended")
		require.Equal(t, 18, passed)
	})
}

// The calls that wait get the places of a concurrency that is raised before those that come later, in their order.
func TestHostilePlacesRaised(t *testing.T) {
	eachPlaces(t, func(t *testing.T, s *scene, r *running, row func(int, time.Duration) registry.Limit) {
		s.set(row(1, time.Minute))
		var calls sync.WaitGroup
		s.occupy(&calls, r, 0, 4, time.Second)
		s.source.set(row(10, time.Minute), hostileRow("/b", 1))
		calls.Go(func() { require.NoError(t, s.limits.Reload(ctx)) })
		s.occupy(&calls, r, 4, 50, time.Second)
		r.mu.Lock()
		require.Equal(t, 10, r.most)
		require.Subset(t, r.order[:10], []int{0, 1, 2, 3})
		r.mu.Unlock()
		calls.Wait()
		_, passed := s.ended()
		require.Equal(t, 54, passed)
		require.Equal(t, 10, r.most)
		for i, call := range r.order {
			require.InDelta(t, i, call, 5, "in order, but for calls that begin in one instant: %v", r.order)
		}
	})
}

// A call that waits for a place waits as long as its row says now.
func TestHostilePlaceWaitChanges(t *testing.T) {
	for name, c := range map[string]struct{ before, after, ends time.Duration }{
		"shortened":  {10 * time.Second, 2 * time.Second, 2 * time.Second},
		"lengthened": {2 * time.Second, 5 * time.Second, 5 * time.Second},
		"0":          {10 * time.Second, 0, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			eachPlaces(t, func(t *testing.T, s *scene, r *running, row func(int, time.Duration) registry.Limit) {
				s.set(row(1, c.before))
				var calls sync.WaitGroup
				s.occupy(&calls, r, 0, 1, time.Hour)
				began := time.Now()
				s.occupy(&calls, r, 1, 3, time.Second)
				time.Sleep(time.Until(began.Add(time.Second)))
				s.set(row(1, c.after))
				time.Sleep(time.Minute)
				s.mu.Lock()
				fates := slices.Clone(s.fates)
				s.mu.Unlock()
				require.Len(t, fates, 3)
				for _, o := range fates {
					require.InDelta(t, c.ends, o.at-began.Sub(s.began), float64(50*time.Millisecond))
				}
				calls.Wait()
			})
		})
	}
}

// A rate that is raised refuses no call for the time of the old one, and one that gains or loses its warm-up passes no more than its rate.
func TestHostileRateChanges(t *testing.T) {
	warm := func(l *registry.Limit) { l.Warmup, l.Burst = 4*time.Second, nil }
	plain := func(*registry.Limit) {}
	patient := func(l *registry.Limit) { l.MaxWait = 30 * time.Second }
	for name, c := range map[string]struct {
		before, after registry.Limit
		least, most   int // of those that pass in the four seconds after the change
	}{
		"raised":      {hostileRow("/a", 0.1, patient), hostileRow("/a", 1000, patient), 3900, 4004},
		"warms up":    {hostileRow("/a", 10, plain), hostileRow("/a", 10, warm), 15, 41},
		"no warm-up":  {hostileRow("/a", 10, warm), hostileRow("/a", 10, plain), 39, 42},
		"both, twice": {hostileRow("/a", 10, warm), hostileRow("/a", 10, plain), 35, 44},
	} {
		for _, places := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := &scene{t: t, source: &fake{}, began: time.Now(), places: places}
					s.source.set(s.bounded(c.before))
					s.limits = open(t, s.source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithLocalSemaphores())
					enter := func(ctx context.Context) (bool, error) { return allow(ctx, s.limits, "/a") }
					var calls sync.WaitGroup
					s.wait(&calls, 40, enter)
					time.Sleep(500 * time.Millisecond)
					_, before := s.ended()
					s.set(c.after)
					if name == "both, twice" {
						s.set(c.before)
						s.set(c.after)
					}
					for range 4000 { // callers that come later
						s.wait(&calls, 1, enter)
					}
					_, after := s.ended()
					t.Logf("%d before, %d after", before, after-before)
					require.GreaterOrEqual(t, after-before, c.least)
					require.LessOrEqual(t, after-before, c.most)
					calls.Wait()
					s.limits.Close()
				})
			})
		}
	}
}
