package registry_test

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// ways are how a call may wait for a name.
var ways = map[string]func(s *scene, name string) verb{
	"Enter": func(s *scene, name string) verb {
		return func(ctx context.Context) (bool, error) { return allow(ctx, s.limits, name) }
	},
	"Limiter": func(s *scene, name string) verb {
		l, err := s.limits.Limiter(name)
		require.NoError(s.t, err)
		return func(ctx context.Context) (bool, error) { return l.TryAcquire(ctx, 1, time.Minute) }
	},
	"All": func(s *scene, name string) verb { return inAll(s, name, 1e6) },
}

// inAll returns the calls of a group of a name's limiter and another one, whose bucket is empty at first.
func inAll(s *scene, name string, other float64) verb {
	l, err := s.limits.Limiter(name)
	require.NoError(s.t, err)
	slow, err := tokenbucket.NewSmoothBursty("other", other, append(s.opts, tokenbucket.WithInitialPermits(0))...)
	require.NoError(s.t, err)
	g, err := tokenbucket.All(l, slow)
	require.NoError(s.t, err)
	return func(ctx context.Context) (bool, error) { return g.TryAcquire(ctx, 1, time.Minute) }
}

// eachWay runs a test of each way in a bubble. It opens a registry with some rows.
func eachWay(t *testing.T, run func(t *testing.T, s *scene, of func(name string) verb), opts []tokenbucket.Option, more []registry.Option, rows ...registry.Limit) {
	for name, of := range ways {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &scene{t: t, source: &fake{}, began: time.Now(), opts: opts}
				s.source.set(rows...)
				s.limits = open(t, s.source, tokenbucket.NewMemoryStore(), append(more, registry.WithInterval(time.Hour), registry.WithLimiterOptions(opts...))...)
				run(t, s, func(name string) verb { return of(s, name) })
				s.limits.Close()
			})
		})
	}
}

// The calls that wait by a row that matches many names follow the row that their name gets, also if the other one changes in the same load.
func TestHostileRowOfAWideOnesName(t *testing.T) {
	for name, change := range map[string]func(*registry.Limit){
		"one bucket": func(*registry.Limit) {},
		"per key":    perKey,
	} {
		for _, rate := range []float64{1, 0.5} {
			t.Run(fmt.Sprintf("%s, %v", name, rate), func(t *testing.T) {
				eachWay(t, func(t *testing.T, s *scene, of func(string) verb) {
					var calls sync.WaitGroup
					s.wait(&calls, 5, of("/a/x"))
					s.set(hostileRow("/a/*", rate, change), hostileRow("/a/x", 1000))
					time.Sleep(100 * time.Millisecond)
					_, passed := s.ended()
					calls.Wait()
					require.Equal(t, 5, passed)
				}, nil, nil, hostileRow("/a/*", 1, change))
			})
		}
	}
}

// The calls of a group that wait for another member are decided by the row of a name that had none of its own, and by rows whose switch is on again.
func TestHostileGroupsLearnOfNewRules(t *testing.T) {
	off := func(l *registry.Limit) { l.Disabled = true }
	for name, change := range map[string]func(s *scene){
		"new row": func(s *scene) { s.set(hostileRow("/a/*", 1, off), hostileRow("/a/x", 1e-3)) },
		"new row, two loads": func(s *scene) {
			s.set(hostileRow("/a/*", 2, off))
			s.set(hostileRow("/a/*", 2, off), hostileRow("/a/x", 1e-3))
		},
		"switch": func(s *scene) { s.set(hostileRow("/a/*", 1e-3)); s.sw.Set(true) },
		"switch, twice": func(s *scene) {
			for range 2 {
				s.sw.Set(true)
				time.Sleep(60 * time.Millisecond)
				s.sw.Set(false)
				time.Sleep(60 * time.Millisecond)
			}
			s.set(hostileRow("/a/*", 1e-3))
			s.sw.Set(true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &scene{t: t, source: &fake{}, began: time.Now(), sw: killswitch.NewLocal(name[0] == 'n')}
				s.source.set(hostileRow("/a/*", 1, off))
				s.limits = open(t, s.source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour), registry.WithSwitch(s.sw))
				call := inAll(s, "/a/x", 1)
				within, cancel := context.WithTimeout(ctx, 20*time.Second)
				defer cancel()
				var calls sync.WaitGroup
				s.wait(&calls, 6, func(context.Context) (bool, error) { return call(within) })
				change(s)
				calls.Wait()
				_, passed := s.ended()
				require.Equal(t, 1, passed, "the new bucket has one permit")
				s.limits.Close()
			})
		})
	}
}

// Calls of names that others have pushed out of the registry's caches follow their row, too.
func TestHostileDroppedNames(t *testing.T) {
	few := []registry.Option{registry.WithMaxUnknown(4), registry.WithMaxKeyLimiters(4)}
	for name, c := range map[string]struct {
		opts []registry.Option
		row  registry.Limit
		now  registry.Limit
	}{
		"keys": {few, hostileRow("/a/*", 1, perKey), hostileRow("/a/*", 1000, perKey)},
		"names without a row": {append(few, registry.WithUnknown(registry.Default(hostileRow("", 1)))), hostileRow("/b", 1),
			hostileRow("/a/x", 1000)},
	} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, s *scene, of func(string) verb) {
				var calls sync.WaitGroup
				s.wait(&calls, 4, of("/a/x"))
				for i := range 10 {
					_, err := allow(ctx, s.limits, fmt.Sprint("/a/", i))
					require.NoError(t, err)
				}
				time.Sleep(50 * time.Millisecond)
				s.set(c.now)
				time.Sleep(100 * time.Millisecond)
				_, passed := s.ended()
				calls.Wait()
				require.Equal(t, 4, passed)
			}, nil, c.opts, c.row)
		})
	}
}

// instant runs a function once, when it is armed: as a limiter is made, or when the clock is read.
type instant struct {
	clockwork.Clock
	armed atomic.Pointer[func()]
}

func (i *instant) strike() {
	if f := i.armed.Swap(nil); f != nil {
		(*f)()
	}
}

func (i *instant) Since(t time.Time) time.Duration {
	i.strike()
	return i.Clock.Since(t)
}

// option returns an option that strikes.
func (i *instant) option() tokenbucket.Option {
	opt := tokenbucket.WithInitialPermits(0)
	strikes := reflect.MakeFunc(reflect.TypeOf(opt), func(args []reflect.Value) []reflect.Value {
		i.strike()
		return reflect.ValueOf(opt).Call(args)
	})
	return strikes.Interface().(tokenbucket.Option)
}

// A call follows its row if that changes in the very instant in which the call finds its limiter.
func TestHostileChangeInTheInstantOfACall(t *testing.T) {
	for name, c := range map[string]struct{ before, after []registry.Limit }{
		"row":       {[]registry.Limit{hostileRow("/a/x", 0.5)}, []registry.Limit{hostileRow("/a/x", 1000)}},
		"key":       {[]registry.Limit{hostileRow("/a/*", 0.5, perKey)}, []registry.Limit{hostileRow("/a/*", 1000, perKey)}},
		"new row":   {[]registry.Limit{hostileRow("/a/*", 0.5)}, []registry.Limit{hostileRow("/a/*", 0.5), hostileRow("/a/x", 1000)}},
		"key's row": {[]registry.Limit{hostileRow("/a/*", 0.5, perKey)}, []registry.Limit{hostileRow("/a/*", 0.5, perKey), hostileRow("/a/x", 1000)}},
	} {
		for _, when := range []string{"made", "asked"} {
			t.Run(name+", "+when, func(t *testing.T) {
				at := &instant{Clock: clockwork.NewRealClock()}
				opt := tokenbucket.WithClock(at)
				if when == "made" {
					opt = at.option()
				}
				eachWay(t, func(t *testing.T, s *scene, of func(string) verb) {
					change := func() { s.set(c.after...) }
					if when == "made" {
						at.armed.Store(&change)
					}
					call := of("/a/x")
					if when == "asked" {
						at.armed.Store(&change)
					}
					var calls sync.WaitGroup
					s.wait(&calls, 1, call)
					time.Sleep(100 * time.Millisecond)
					_, passed := s.ended()
					calls.Wait()
					require.Equal(t, 1, passed)
				}, []tokenbucket.Option{opt, tokenbucket.WithInitialPermits(0)}, nil, c.before...)
			})
		}
	}
}
