package registry_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// scene is a row /a whose changes a limiter must follow, beside a row /b that is never in the way of a group and never grants a choice in time.
type scene struct {
	t      *testing.T
	source *fake
	sw     *killswitch.Local
	limits *registry.Registry
	began  time.Time
	places bool                 // rows have places, too
	opts   []tokenbucket.Option // of limiters beside the rows'

	mu    sync.Mutex
	fates []fate
}

// fate is what a caller got, and when.
type fate struct {
	caller int
	passed bool
	err    error
	at     time.Duration
}

// aRow is the row /a.
func aRow(rate float64, change ...func(*registry.Limit)) registry.Limit {
	one := 1.0
	l := registry.Limit{Name: "/a", Row: "a", Rate: rate, Burst: &one, MaxWait: 5 * time.Second}
	for _, f := range change {
		f(&l)
	}
	return l
}

// set puts rows in force in place of /a.
func (s *scene) set(rows ...registry.Limit) {
	slow := row("/b", 1e-4, 1)
	for i := range rows {
		rows[i] = s.bounded(rows[i])
	}
	s.source.set(append(rows, slow)...)
	require.NoError(s.t, s.limits.Reload(ctx))
}

// verb makes one call of a limiter or a group and reports whether it passed.
type verb func(ctx context.Context) (bool, error)

// face returns the calls of a limiter: alone, or as a member of a group that is made once.
type face struct {
	name string
	of   func(t *testing.T, limits *registry.Registry) (acquire verb, try func(timeout time.Duration) verb)
}

var faces = []face{
	{"alone", func(t *testing.T, limits *registry.Registry) (verb, func(time.Duration) verb) {
		l, err := limits.Limiter("/a")
		require.NoError(t, err)
		return func(ctx context.Context) (bool, error) { _, err := l.Acquire(ctx, 1); return err == nil, err },
			func(d time.Duration) verb {
				return func(ctx context.Context) (bool, error) { return l.TryAcquire(ctx, 1, d) }
			}
	}},
	{"All", func(t *testing.T, limits *registry.Registry) (verb, func(time.Duration) verb) {
		l, err := limits.Limiter("/a")
		require.NoError(t, err)
		wide, err := tokenbucket.NewSmoothBursty("wide", 1e6, tokenbucket.WithInitialPermits(1e6))
		require.NoError(t, err)
		g, err := tokenbucket.All(l, wide)
		require.NoError(t, err)
		return func(ctx context.Context) (bool, error) { _, err := g.Acquire(ctx, 1); return err == nil, err },
			func(d time.Duration) verb {
				return func(ctx context.Context) (bool, error) { return g.TryAcquire(ctx, 1, d) }
			}
	}},
	{"Any", func(t *testing.T, limits *registry.Registry) (verb, func(time.Duration) verb) {
		l, err := limits.Limiter("/a")
		require.NoError(t, err)
		none, err := tokenbucket.NewSmoothBursty("none", 0.05, tokenbucket.WithInitialPermits(0))
		require.NoError(t, err)
		g, err := tokenbucket.Any(l, none)
		require.NoError(t, err)
		return func(ctx context.Context) (bool, error) { _, _, err := g.Acquire(ctx, 1); return err == nil, err },
			func(d time.Duration) verb {
				return func(ctx context.Context) (bool, error) {
					by, err := g.TryAcquire(ctx, 1, d)
					return by != nil, err
				}
			}
	}},
}

// eachFace runs a test of each face in a bubble, on a store that decides at once and on one that takes a millisecond.
func eachFace(t *testing.T, run func(t *testing.T, s *scene, f face)) {
	for i := range 2 * len(faces) {
		f, name := faces[i/2], [...]string{"", ", distant"}[i%2]
		t.Run(f.name+name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var store tokenbucket.Store = tokenbucket.NewMemoryStore()
				if name != "" {
					store = &distant{store}
				}
				s := &scene{t: t, source: &fake{}, sw: killswitch.NewLocal(true)}
				s.source.set(aRow(10), row("/b", 1e-4, 1))
				s.limits = open(t, s.source, store, registry.WithInterval(time.Hour), registry.WithSwitch(s.sw))
				run(t, s, f)
				s.limits.Close()
			})
		})
	}
}

// changes are what happens to the row of 10/s, and how many calls pass in two seconds under the changed row, of those that come one after the other and
// do not wait. refused is the error of a limiter alone.
var changes = []struct {
	name        string
	change      func(s *scene)
	least, most int
	refused     error
}{
	{"rate lowered", func(s *scene) { s.set(aRow(1)) }, 1, 3, nil},
	{"rate raised", func(s *scene) { s.set(aRow(50)) }, 95, 101, nil},
	{"rate 0", func(s *scene) { s.set(aRow(0)) }, 0, 0, tokenbucket.ErrNeverGranted},
	{"warm-up gained", func(s *scene) {
		s.set(aRow(10, func(l *registry.Limit) { l.Warmup, l.Burst = 4*time.Second, nil }))
	}, 5, 14, nil},
	{"quota gained", func(s *scene) {
		s.set(aRow(4, func(l *registry.Limit) { l.Quota, l.Burst = true, nil }))
	}, 7, 9, nil},
	{"priority lowered", func(s *scene) { s.set(aRow(2, func(l *registry.Limit) { l.Priority = tokenbucket.Low })) }, 3, 5, nil},
	{"disabled", func(s *scene) { s.set(aRow(10, func(l *registry.Limit) { l.Disabled = true })) }, 200, 200, nil},
	{"shadow on", func(s *scene) { s.set(aRow(10, inShadow)) }, 200, 200, nil},
	{"deleted", func(s *scene) { s.set() }, 200, 200, nil},
	{"bad", func(s *scene) { s.set(aRow(-1)) }, 19, 21, nil},
	{"switched off", func(s *scene) { s.sw.Set(false) }, 200, 200, nil},
	{"switched off and on again", func(s *scene) { s.sw.Set(false); time.Sleep(time.Second); s.sw.Set(true) }, 19, 22, nil},
	{"deleted, comes back", func(s *scene) { s.set(); time.Sleep(time.Second); s.set(aRow(4)) }, 7, 10, nil},
	{"rate 0, comes back", func(s *scene) { s.set(aRow(0)); time.Sleep(time.Second); s.set(aRow(4)) }, 7, 10, nil},
}

// New calls are decided by the row in force.
func TestLimiterFollowsItsRow(t *testing.T) {
	for _, c := range changes {
		t.Run(c.name, func(t *testing.T) {
			eachFace(t, func(t *testing.T, s *scene, f face) {
				_, try := f.of(t, s.limits)
				now := try(0)
				_, err := now(ctx)
				require.NoError(t, err)
				c.change(s)
				passed := 0
				for range 200 {
					ok, err := now(ctx)
					if f.name == "All" && c.name == "quota gained" { // as when the group is made
						require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
						return
					}
					if f.name == "Any" || c.refused == nil {
						require.NoError(t, err)
					} else {
						require.ErrorIs(t, err, c.refused)
						require.ErrorAs(t, err, new(*registry.RefusedError))
					}
					if ok {
						passed++
					}
					time.Sleep(10 * time.Millisecond)
				}
				if f.name == "Any" && c.most == 200 { // a member that passes does not count
					c.least, c.most = 0, 200
				}
				require.GreaterOrEqual(t, passed, c.least)
				require.LessOrEqual(t, passed, c.most)
			})
		})
	}
}

// waiters are what becomes of thirty callers that wait for 10/s, half a second after the first has come: at most how many pass in the two seconds from the
// change on, and whether all have ended 20 ms after the change.
var waiters = []struct {
	name        string
	change      func(s *scene)
	least, most int
	end         bool
	refused     error // of those that end
}{
	{"rate lowered", func(s *scene) { s.set(aRow(1)) }, 1, 2, false, nil},
	{"rate lowered much", func(s *scene) { s.set(aRow(0.01)) }, 0, 0, false, nil},
	{"rate raised", func(s *scene) { s.set(aRow(50)) }, 24, 24, false, nil},
	{"rate 0", func(s *scene) { s.set(aRow(0)) }, 0, 0, true, tokenbucket.ErrNeverGranted},
	{"warm-up gained", func(s *scene) {
		s.set(aRow(10, func(l *registry.Limit) { l.Warmup, l.Burst = 4*time.Second, nil }))
	}, 5, 9, false, nil},
	{"quota gained", func(s *scene) {
		s.set(aRow(4, func(l *registry.Limit) { l.Quota, l.Burst = true, nil }))
	}, 7, 8, false, nil},
	{"priority lowered", func(s *scene) { s.set(aRow(2, func(l *registry.Limit) { l.Priority = tokenbucket.Low })) }, 3, 4, false, nil},
	{"disabled", func(s *scene) { s.set(aRow(10, func(l *registry.Limit) { l.Disabled = true })) }, 24, 24, true, nil},
	{"shadow on", func(s *scene) { s.set(aRow(10, inShadow)) }, 24, 24, true, nil},
	{"deleted", func(s *scene) { s.set() }, 24, 24, true, nil},
	{"bad", func(s *scene) { s.set(aRow(-1)) }, 20, 20, false, nil},
	{"switched off", func(s *scene) { s.sw.Set(false) }, 24, 24, true, nil},
	{"changed twice", func(s *scene) { s.set(aRow(0.01)); s.set(aRow(4)) }, 7, 8, false, nil},
	{"version only", func(s *scene) { s.set(aRow(10, func(l *registry.Limit) { l.Version = 9 })) }, 20, 20, false, nil},
}

// wait lets a number of callers come one after the other, a millisecond apart.
func (s *scene) wait(calls *sync.WaitGroup, n int, call verb) {
	for i := range n {
		calls.Go(func() {
			ok, err := call(ctx)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.fates = append(s.fates, fate{i, ok, err, time.Since(s.began)})
		})
		time.Sleep(time.Millisecond)
	}
}

// ended returns how many callers have ended, and how many of them have passed.
func (s *scene) ended() (ended, passed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.fates {
		if ended++; o.passed {
			passed++
		}
	}
	return ended, passed
}

// A call that waits is admitted by the row that is in force when it passes, not when it came, and no caller is lost. Callers keep their order.
func TestWaitersFollowTheirRow(t *testing.T) {
	for _, c := range waiters {
		for _, how := range []string{"Acquire", "TryAcquire"} {
			t.Run(c.name+"/"+how, func(t *testing.T) {
				eachFace(t, func(t *testing.T, s *scene, f face) {
					acquire, try := f.of(t, s.limits)
					if how == "TryAcquire" {
						acquire = try(10 * time.Second)
					}
					s.began = time.Now()
					var calls sync.WaitGroup
					s.wait(&calls, 30, acquire)
					time.Sleep(time.Until(s.began.Add(550 * time.Millisecond)))
					ended, passed := s.ended()
					require.Equal(t, 6, ended)
					require.Equal(t, 6, passed)
					c.change(s)
					time.Sleep(60 * time.Millisecond)
					some, _ := s.ended()
					anyWithout := f.name == "Any" && c.end           // the other member decides
					if f.name == "All" && c.name == "quota gained" { // as when the group is made
						require.Equal(t, 30, some)
						require.ErrorIs(t, s.fates[29].err, tokenbucket.ErrInvalidConfig)
						return
					}
					if c.end && !anyWithout {
						require.Equal(t, 30, some)
					}
					time.Sleep(1940 * time.Millisecond)
					_, later := s.ended()
					if !anyWithout {
						switch {
						case c.name == "changed twice" && how == "TryAcquire": // the first change refuses most
						case c.end || f.name == "alone":
							require.GreaterOrEqual(t, later-passed, c.least)
						default: // a group may ask before the permits are back, and again up to 750 ms later
							require.GreaterOrEqual(t, later-passed, c.least/2)
						}
						require.LessOrEqual(t, later-passed, c.most)
					}
					s.set(aRow(1000, func(l *registry.Limit) { l.Version = 1000 }))
					s.sw.Set(true)
					calls.Wait()
					ended, _ = s.ended()
					require.Equal(t, 30, ended)
					for _, o := range s.fates {
						switch {
						case o.passed, anyWithout:
						case how == "TryAcquire" && c.refused == nil: // it cannot be in time
							require.NoError(t, o.err)
						default:
							require.ErrorIs(t, o.err, c.refused, "caller %d", o.caller)
							require.NotNil(t, c.refused)
						}
					}
					if f.name == "alone" && !c.end && c.name != "priority lowered" {
						passed := slices.DeleteFunc(s.fates, func(o fate) bool { return !o.passed })
						require.True(t, slices.IsSortedFunc(passed, func(a, b fate) int { return a.caller - b.caller }), "%v", passed)
					}
				})
			})
		}
	}
}

// The calls of Enter that wait are admitted by the row in force when they begin, those of a row with places, too.
func TestEnterFollowsItsRow(t *testing.T) {
	for _, c := range waiters {
		for _, places := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/places %v", c.name, places), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := &scene{t: t, source: &fake{}, sw: killswitch.NewLocal(true), places: places}
					s.source.set(s.bounded(aRow(10)), row("/b", 1e-4, 1))
					s.limits = open(t, s.source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithSwitch(s.sw),
						registry.WithLocalSemaphores())
					s.began = time.Now()
					var calls sync.WaitGroup
					s.wait(&calls, 30, func(ctx context.Context) (bool, error) { return allow(ctx, s.limits, "/a") })
					time.Sleep(time.Until(s.began.Add(550 * time.Millisecond)))
					_, passed := s.ended()
					require.Equal(t, 6, passed)
					c.change(s)
					time.Sleep(120 * time.Millisecond)
					if ended, _ := s.ended(); c.end {
						require.Equal(t, 30, ended)
					}
					time.Sleep(1880 * time.Millisecond)
					_, later := s.ended()
					switch c.name {
					case "changed twice": // the first change refuses them
					case "priority lowered": // a reservation is refused beyond the look-ahead of its priority
						require.GreaterOrEqual(t, later-passed, 1)
					default:
						require.GreaterOrEqual(t, later-passed, c.least)
					}
					require.LessOrEqual(t, later-passed, c.most)
					time.Sleep(10 * time.Second)
					calls.Wait()
					ended, _ := s.ended()
					require.Equal(t, 30, ended)
					for _, o := range s.fates {
						require.NoError(t, o.err)
					}
					if !c.end && !places {
						passed := slices.DeleteFunc(s.fates, func(o fate) bool { return !o.passed })
						require.True(t, slices.IsSortedFunc(passed, func(a, b fate) int { return a.caller - b.caller }), "%v", passed)
					}
					s.limits.Close()
				})
			})
		}
	}
}

// bounded gives a row places, if the scene has them.
func (s *scene) bounded(l registry.Limit) registry.Limit {
	if s.places {
		l.Concurrent = 100
	}
	return l
}

// A reservation stays due when its row changes. The permits that waiters beside it gave up are used by no waiter.
func TestReservationsOutliveARow(t *testing.T) {
	for _, store := range []tokenbucket.Store{tokenbucket.NewMemoryStore(), &distant{tokenbucket.NewMemoryStore()}} {
		synctest.Test(t, func(t *testing.T) {
			s := &scene{t: t, source: &fake{}, sw: killswitch.NewLocal(true)}
			s.source.set(aRow(10))
			s.limits = open(t, s.source, store, registry.WithInterval(time.Hour), registry.WithSwitch(s.sw))
			l, err := s.limits.Limiter("/a")
			require.NoError(t, err)
			s.began = time.Now()
			var calls sync.WaitGroup
			s.wait(&calls, 5, func(ctx context.Context) (bool, error) { return l.TryAcquire(ctx, 1, 30*time.Second) })
			r, err := l.Reserve(ctx, 1)
			require.NoError(t, err)
			s.set(aRow(0.01))
			select {
			case <-r.Ready():
			case <-time.After(time.Minute):
			}
			require.LessOrEqual(t, time.Since(s.began).Round(10*time.Millisecond), 500*time.Millisecond, "it may move up, as those ahead of it gave up")
			time.Sleep(2 * time.Second)
			_, passed := s.ended()
			require.Equal(t, 1, passed, "the first, before the change")
			require.NoError(t, r.Settle(ctx, 3))
			require.NoError(t, l.Close(ctx))
			s.set(aRow(0))
			calls.Wait()
			s.limits.Close()
		})
	}
}

// The calls of a group that wait for other members learn of a member that comes into force, or passes them no longer.
func TestGroupsLearnOfAMember(t *testing.T) {
	for name, c := range map[string]struct {
		before, after registry.Limit
		passed        int // two seconds later
	}{
		"All": {aRow(10, func(l *registry.Limit) { l.Disabled = true }), aRow(0.001), 0},
		"Any": {aRow(0), aRow(10), 6},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &scene{t: t, source: &fake{}, sw: killswitch.NewLocal(true)}
				s.source.set(c.before)
				s.limits = open(t, s.source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithSwitch(s.sw))
				l, err := s.limits.Limiter("/a")
				require.NoError(t, err)
				slow, err := tokenbucket.NewSmoothBursty("slow", 0.5, tokenbucket.WithInitialPermits(0))
				require.NoError(t, err)
				var call verb
				if name == "All" {
					g, err := tokenbucket.All(l, slow)
					require.NoError(t, err)
					call = func(ctx context.Context) (bool, error) { return g.TryAcquire(ctx, 1, time.Hour) }
				} else {
					g, err := tokenbucket.Any(l, slow)
					require.NoError(t, err)
					call = func(ctx context.Context) (bool, error) {
						by, err := g.TryAcquire(ctx, 1, time.Hour)
						return by != nil, err
					}
				}
				s.began = time.Now()
				var calls sync.WaitGroup
				s.wait(&calls, 6, call)
				s.set(c.after)
				time.Sleep(2 * time.Second)
				_, passed := s.ended()
				require.LessOrEqual(t, passed, max(1, c.passed), "the new bucket has one permit")
				require.GreaterOrEqual(t, passed, c.passed)
				s.set(aRow(1000, func(l *registry.Limit) { l.Version = 9 }))
				calls.Wait()
				s.limits.Close()
			})
		})
	}
}
