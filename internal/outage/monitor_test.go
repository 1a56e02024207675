package outage

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var background = context.Background()

// backend is a backend that is away or slow on demand.
type backend struct {
	*Monitor
	timeout time.Duration // of calls
	away    atomic.Bool
	unused  atomic.Bool
	trip    atomic.Int64
	stuck   chan struct{} // if not nil, no call returns until it is closed
	sent    atomic.Int64

	mu      sync.Mutex
	changes []Change
}

func newBackend(group *Group) *backend {
	b := &backend{timeout: time.Second}
	b.Monitor = New(group, Backend{
		Next:    func() (Probe, bool) { return b.probe(), !b.unused.Load() },
		Away:    func(err error) bool { return errors.Is(err, errAway) },
		Timeout: errAway,
		Changed: func(c Change) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.changes = append(b.changes, c)
		},
	})
	return b
}

func (b *backend) probe() Probe { return Probe{b.ask, b.timeout} }

func (b *backend) ask(ctx context.Context) error {
	b.sent.Add(1)
	if b.stuck != nil {
		<-b.stuck
	}
	select {
	case <-time.After(time.Duration(b.trip.Load())):
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errAway, ctx.Err())
	}
	if b.away.Load() {
		return fmt.Errorf("%w: it says", errAway)
	}
	return nil
}

// newChanges returns the changes since its last call.
func (b *backend) newChanges() []Change {
	b.mu.Lock()
	defer b.mu.Unlock()
	changes := b.changes
	b.changes = nil
	return changes
}

// until waits until the monitor has detected that the backend is away, or back.
func (b *backend) until(t *testing.T, down bool) time.Duration {
	t.Helper()
	began := time.Now()
	for (b.Down() != nil) != down {
		require.Less(t, time.Since(began), time.Minute, "waiting for: down %v", down)
		time.Sleep(time.Millisecond)
	}
	synctest.Wait() // for the watchers
	return time.Since(began)
}

// A failed call causes one probe. If the probe is answered, no call is refused and no watcher is notified.
func TestSuspicion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(new(Group))
		b.trip.Store(int64(20 * time.Millisecond))
		for range 3 {
			for range 10 {
				b.Failed()
				require.Nil(t, b.Down())
				time.Sleep(time.Millisecond)
			}
			time.Sleep(time.Hour)
		}
		require.Empty(t, b.newChanges())
		require.EqualValues(t, 3, b.sent.Load())
	})
}

// An outage begins with a probe that fails and ends with one that is answered. In between there are about ten a second.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		group := new(Group)
		b := newBackend(group)
		b.away.Store(true)
		b.Failed()
		synctest.Wait()
		o := b.Down()
		require.ErrorIs(t, o.Err, errAway)
		require.Equal(t, time.Now(), o.Since)
		require.Equal(t, []Change{{Down: true, Err: o.Err}}, b.newChanges())
		require.EqualValues(t, 1, group.Outages())
		time.Sleep(10 * time.Second)
		require.InDelta(t, 100, b.sent.Load(), 25)
		require.Same(t, o, b.Down())
		b.Failed()
		b.away.Store(false)
		require.LessOrEqual(t, b.until(t, false), 3*ProbePause/2)
		changes := b.newChanges()
		require.Len(t, changes, 1)
		require.InDelta(t, time.Since(o.Since), changes[0].After, float64(time.Millisecond))
		require.Equal(t, Change{After: changes[0].After}, changes[0])
		require.Zero(t, group.Outages())
		before := b.sent.Load()
		time.Sleep(time.Hour)
		require.Equal(t, before, b.sent.Load())
	})
}

// A probe without a reply fails after the time that replies take, and not before.
func TestPatience(t *testing.T) {
	for name, c := range map[string]struct {
		answers []time.Duration
		timeout time.Duration
		want    time.Duration
	}{
		"nothing was ever answered":   {nil, time.Minute, time.Second},
		"nor had calls that long":     {nil, 300 * time.Millisecond, 300 * time.Millisecond},
		"fast answers":                {[]time.Duration{time.Millisecond}, time.Minute, 250 * time.Millisecond},
		"slow answers":                {[]time.Duration{200 * time.Millisecond, time.Millisecond}, time.Minute, 562500 * time.Microsecond},
		"no slower than a call":       {[]time.Duration{200 * time.Millisecond}, 400 * time.Millisecond, 400 * time.Millisecond},
		"calls shorter than a probe":  {[]time.Duration{time.Millisecond}, 50 * time.Millisecond, 50 * time.Millisecond},
		"an answer after an outage":   {[]time.Duration{time.Hour}, time.Minute, 3 * time.Second},
		"what was slow is fast again": {append([]time.Duration{time.Second}, make([]time.Duration, 100)...), time.Minute, 250 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBackend(new(Group))
				b.timeout = c.timeout
				b.trip.Store(int64(time.Hour))
				for _, took := range c.answers {
					b.Answered(took)
				}
				began := time.Now()
				b.Failed()
				b.until(t, true)
				require.InDelta(t, c.want, b.Down().Since.Sub(began), 1)
				b.trip.Store(0)
				b.until(t, false)
				time.Sleep(keepFor)
			})
		})
	}
}

// A backend that has become slow is down for at most the duration of a reply, and is not down again when a call fails.
func TestLateAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(new(Group))
		b.timeout = time.Minute
		b.Answered(time.Millisecond)
		const trip = 700 * time.Millisecond
		b.trip.Store(int64(trip))
		began := time.Now()
		b.Failed()
		b.until(t, true)
		b.until(t, false)
		require.InDelta(t, trip, time.Since(began), float64(3*ProbePause/2), "the reply to the first probe counts as soon as the next probe is in flight")
		require.Len(t, b.newChanges(), 2)
		time.Sleep(keepFor)
		b.Failed()
		time.Sleep(time.Minute)
		require.Empty(t, b.newChanges())
	})
}

// A reply that arrived before an outage does not end it.
func TestLateAnswerOfAnEarlierOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(new(Group))
		b.timeout = time.Minute
		b.Answered(time.Millisecond)
		b.trip.Store(int64(2 * time.Second))
		b.Failed()
		b.until(t, true)
		time.Sleep(time.Second) // for several late replies
		b.trip.Store(0)
		b.until(t, false)
		time.Sleep(keepFor)
		require.Len(t, b.newChanges(), 2)
		require.Len(t, b.probes.late, 1, "one late reply is kept")
		b.away.Store(true)
		b.Failed()
		b.until(t, true)
		time.Sleep(10 * time.Second)
		require.Len(t, b.newChanges(), 1)
		b.away.Store(false)
		b.until(t, false)
	})
}

// Any reply ends an outage, even an error, and likewise a suspicion.
func TestAnswersThatAreErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var says atomic.Pointer[error]
		say := func(err error) { says.Store(&err) }
		probe := Probe{func(context.Context) error { return *says.Load() }, time.Second}
		m := New(new(Group), Backend{
			Next:    func() (Probe, bool) { return probe, true },
			Away:    func(err error) bool { return errors.Is(err, errAway) },
			Changed: func(Change) {},
		})
		wrong := errors.New("a wrong password, say")
		say(wrong)
		m.Failed()
		synctest.Wait()
		require.Nil(t, m.Down())
		require.ErrorIs(t, m.Ask(background, probe), wrong)
		say(errAway)
		m.Failed()
		synctest.Wait()
		require.NotNil(t, m.Down())
		say(errors.New("missing rights"))
		time.Sleep(3 * ProbePause / 2)
		synctest.Wait()
		require.Nil(t, m.Down())
	})
}

// A probe that was given up may take as long as a call, but not longer: it occupies a connection.
func TestProbesEnd(t *testing.T) {
	for timeout, want := range map[time.Duration]time.Duration{100 * time.Millisecond: 100 * time.Millisecond, 2 * time.Second: 2 * time.Second, time.Minute: keepFor} {
		synctest.Test(t, func(t *testing.T) {
			b := newBackend(new(Group))
			b.Answered(time.Millisecond)
			began := time.Now()
			var took atomic.Int64
			err := b.Ask(background, Probe{func(ctx context.Context) error {
				<-ctx.Done()
				took.Store(int64(time.Since(began)))
				return errAway
			}, timeout})
			require.Error(t, err)
			require.Equal(t, min(timeout, ProbeTimeout), time.Since(began))
			time.Sleep(time.Minute)
			require.EqualValues(t, want, took.Load())
			require.Zero(t, b.probes.pending.Load())
		})
	}
}

// The number of unfinished probes is bounded. When they return, the backend is probed again.
func TestStuckProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(new(Group))
		b.stuck = make(chan struct{})
		b.away.Store(true)
		b.Failed()
		b.until(t, true)
		time.Sleep(time.Minute)
		require.EqualValues(t, maxPending, b.sent.Load())
		require.EqualValues(t, maxPending, b.probes.pending.Load())
		require.ErrorContains(t, b.Ask(background, b.probe()), "16 probes have no reply yet")
		close(b.stuck)
		time.Sleep(time.Second)
		require.NotNil(t, b.Down(), "the bound is an outage")
		require.Greater(t, b.sent.Load(), int64(maxPending))
		b.away.Store(false)
		b.until(t, false)
		require.Len(t, b.newChanges(), 2)
	})
}

// manyAway returns the given number of backends of one client, all of them away.
func manyAway(t *testing.T, many int) (*Group, []*backend) {
	group := new(Group)
	all := make([]*backend, many)
	for i := range all {
		all[i] = newBackend(group)
		all[i].away.Store(true)
		all[i].Failed()
		all[i].until(t, true)
		changes := all[i].newChanges()
		require.Len(t, changes, 1)
		require.EqualValues(t, i, changes[0].Others)
	}
	require.EqualValues(t, many, group.Outages())
	return group, all
}

// With many outages each backend is probed less often, at least once a second.
func TestPaceOfMany(t *testing.T) {
	for many, want := range map[int]int{1: 100, manyOutages - 1: 100, 3 * manyOutages: 25, 12 * manyOutages: 10} {
		t.Run(fmt.Sprint(many), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, all := manyAway(t, many)
				time.Sleep(2 * time.Second) // until all outages have begun
				before := int64(0)
				for _, b := range all {
					before -= b.sent.Load()
				}
				time.Sleep(10 * time.Second)
				sent := before
				for _, b := range all {
					sent += b.sent.Load()
					b.away.Store(false)
				}
				require.InEpsilon(t, want*many, sent, 0.2)
				time.Sleep(2 * time.Second)
			})
		})
	}
}

// Among many outages, one that no call notices for a minute is abandoned; among few it is not.
func TestForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many = manyOutages + 5
		group, all := manyAway(t, many)
		for range 70 {
			all[0].Failed()
			time.Sleep(time.Second)
		}
		require.EqualValues(t, manyOutages, group.Outages(), "the others were abandoned")
		require.NotNil(t, all[0].Down(), "calls need it")
		for _, b := range all {
			switch changes := b.newChanges(); {
			case b.Down() != nil:
				require.Empty(t, changes)
			default:
				require.Len(t, changes, 1)
				require.True(t, changes[0].Forgotten)
				require.InDelta(t, interest, changes[0].After, float64(time.Second))
			}
			b.Failed() // the next call detects it again
		}
		synctest.Wait()
		require.EqualValues(t, many, group.Outages())
		for _, b := range all {
			b.away.Store(false)
		}
		time.Sleep(2 * time.Second)
		require.Zero(t, group.Outages())
		for _, b := range all {
			changes := b.newChanges()
			require.False(t, changes[len(changes)-1].Forgotten)
		}
	})
}

// The outage of a backend without users is abandoned.
func TestNobodyLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(new(Group))
		b.away.Store(true)
		b.Failed()
		b.until(t, true)
		b.unused.Store(true)
		b.until(t, false)
		changes := b.newChanges()
		require.Len(t, changes, 2)
		require.True(t, changes[1].Forgotten)
		b.Failed()
		time.Sleep(time.Minute)
		require.Empty(t, b.newChanges(), "a suspicion notifies no watcher")
	})
}

// user is the user of a watcher.
type user struct{ heard *atomic.Int64 } // 1 for a beginning, 1000 for an end

func (b *backend) watch(u *user) {
	Watch(b.Monitor, u, func(u *user) func(Change) {
		heard := u.heard
		return func(c Change) {
			if c.Down {
				heard.Add(1)
			} else {
				heard.Add(1000)
			}
		}
	})
}

// collect runs the garbage collector until a condition holds. It does not use a bubble's clock.
func collect(t *testing.T, collected func() bool) {
	t.Helper()
	for i := 0; !collected(); i++ {
		require.Less(t, i, 2000, "not collected")
		runtime.GC()
		runtime.Gosched() // cleanups run in a goroutine of the runtime
	}
}

// Exactly the watchers that were notified of the beginning are notified of the end, reachable or not.
func TestWhoIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(new(Group))
		var used, before, meanwhile, late, longGone atomic.Int64
		stays, comes := &user{&used}, &user{&late}
		b.watch(stays)
		collected := func(heard *atomic.Int64, until func(gone *user)) {
			var gone atomic.Bool
			func() {
				u := &user{heard}
				runtime.AddCleanup(u, func(gone *atomic.Bool) { gone.Store(true) }, &gone)
				b.watch(u)
				until(u)
			}()
			collect(t, gone.Load)
		}
		outage := func(begins bool) {
			b.away.Store(begins)
			if begins {
				b.Failed()
			}
			b.until(t, begins)
		}
		collected(&longGone, func(*user) {})
		collected(&before, func(*user) { outage(true) })
		b.watch(comes)
		collected(&meanwhile, func(*user) {})
		outage(false)
		require.EqualValues(t, 1001, used.Load())
		require.EqualValues(t, 1001, before.Load(), "the user is unreachable")
		require.Zero(t, longGone.Load())
		require.Zero(t, late.Load(), "registered during the outage")
		outage(true)
		outage(false)
		require.EqualValues(t, 2002, used.Load())
		require.EqualValues(t, 1001, late.Load())
		require.EqualValues(t, 1001, before.Load())
		require.Zero(t, meanwhile.Load())
		collect(t, func() bool { // their watchers, too
			b.Monitor.mu.Lock()
			defer b.Monitor.mu.Unlock()
			return len(b.watchers) == 2
		})
		require.Empty(t, b.receivers)
		runtime.KeepAlive(stays)
		runtime.KeepAlive(comes)
	})
}

// A call that fails while watchers are being notified of the end of an outage is a suspicion. The next beginning is reported after the end.
func TestFailsWhileTheEndIsTold(t *testing.T) {
	for _, away := range []bool{true, false} {
		t.Run(fmt.Sprint(away), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBackend(new(Group))
				open := make(chan struct{})
				var order []bool
				tell := func(c Change) {
					if !c.Down {
						<-open
					}
					order = append(order, c.Down)
				}
				u := new(user)
				Watch(b.Monitor, u, func(*user) func(Change) { return tell })
				b.away.Store(true)
				b.Failed()
				b.until(t, true)
				b.away.Store(false)
				b.until(t, false)
				b.away.Store(away)
				sent := b.sent.Load()
				b.Failed()
				time.Sleep(time.Minute)
				require.Nil(t, b.Down())
				require.Equal(t, sent, b.sent.Load(), "one after the other")
				close(open)
				synctest.Wait()
				require.Equal(t, away, b.Down() != nil)
				require.Greater(t, b.sent.Load(), sent)
				b.away.Store(false)
				b.until(t, false)
				if away {
					require.Equal(t, []bool{true, false, true, false}, order)
				} else {
					require.Equal(t, []bool{true, false}, order)
				}
				runtime.KeepAlive(u)
			})
		})
	}
}

// Ask waits for the probe in flight, but no longer than for a probe of its own and until its context ends.
func TestAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(new(Group))
		b.trip.Store(int64(600 * time.Millisecond))
		began := time.Now()
		b.Failed()
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, b.Ask(background, b.probe()))
		require.Equal(t, 600*time.Millisecond, time.Since(began))
		require.EqualValues(t, 1, b.sent.Load())
		require.NoError(t, b.Ask(background, b.probe()))
		require.EqualValues(t, 2, b.sent.Load())

		began = time.Now()
		b.Failed()
		synctest.Wait()
		require.ErrorIs(t, b.Ask(background, Probe{b.ask, 50 * time.Millisecond}), context.DeadlineExceeded)
		require.Equal(t, 50*time.Millisecond, time.Since(began))
		short, cancel := context.WithTimeout(background, 50*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, b.Ask(short, b.probe()), context.DeadlineExceeded)
		require.Equal(t, 100*time.Millisecond, time.Since(began))
		b.away.Store(true)
		require.ErrorIs(t, b.Ask(background, b.probe()), errAway)
		b.until(t, true)
		b.away.Store(false)
		b.until(t, false)
	})
}

// Callbacks run without a lock of the monitor, so they may use it.
func TestNoCallUnderALock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m *Monitor
		var away atomic.Bool
		called := map[string]bool{}
		free := func(who string) {
			for _, mu := range []*sync.Mutex{&m.mu, &m.probes.mu} {
				require.True(t, mu.TryLock(), who) // no other goroutine uses the monitor now
				mu.Unlock()
			}
			called[who] = true
			m.Answered(0)
			m.Down()
			m.Failed()
		}
		m = New(new(Group), Backend{
			Next: func() (Probe, bool) {
				free("next")
				return Probe{func(context.Context) error {
					free("probe")
					if away.Load() {
						return errAway
					}
					return nil
				}, time.Second}, true
			},
			Away:    func(err error) bool { free("away"); return err != nil },
			Timeout: errAway,
			Changed: func(Change) { free("changed"); away.Store(false) },
		})
		u := new(user)
		Watch(m, u, func(*user) func(Change) {
			free("watcher")
			return func(Change) { free("told") }
		})
		away.Store(true)
		m.Failed()
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, called, 6)
		runtime.KeepAlive(u)
	})
}

// With concurrent events there is one prober, and each end is reported once, after its beginning.
func TestAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(new(Group))
		b.trip.Store(int64(3 * time.Millisecond))
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				for k := range 200 {
					switch (i + k) % 4 {
					case 0:
						b.away.Store(k%3 == 0)
					case 1:
						_ = b.Ask(background, b.probe())
					case 2:
						u := &user{new(atomic.Int64)}
						b.watch(u)
					}
					if b.Down() == nil || k%2 == 0 {
						b.Failed()
					}
					time.Sleep(time.Duration(1+(i*k)%17) * time.Millisecond)
				}
			})
		}
		wg.Wait()
		b.away.Store(false)
		b.Failed()
		time.Sleep(time.Minute)
		require.Nil(t, b.Down())
		changes := b.newChanges()
		require.NotEmpty(t, changes)
		for i, c := range changes {
			require.Equal(t, i%2 == 0, c.Down)
		}
		require.Zero(t, len(changes)%2)
		require.Zero(t, b.group.Outages())
	})
}
