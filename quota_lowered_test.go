package tokenbucket_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// upstream counts the calls of several processes by a fake clock, when their permits are due.
type upstream struct {
	t         *testing.T
	clock     *clockwork.FakeClock
	processes []*tb.RateLimiter
	ctx       context.Context                   // ends with the test
	given     map[*tb.Reservation]chan struct{} // closed when the reservation is cancelled

	ended sync.WaitGroup // of all calls

	mu    sync.Mutex
	open  int // calls that have not ended
	calls []time.Time
}

// newUpstream returns the upstream of processes with a quota.
func newUpstream(t *testing.T, clock *clockwork.FakeClock, processes, n int, window time.Duration, open func() tb.Store) *upstream {
	u := &upstream{t: t, clock: clock, given: map[*tb.Reservation]chan struct{}{}}
	var cancel func()
	u.ctx, cancel = context.WithCancel(ctx)
	t.Cleanup(func() {
		cancel()
		u.ended.Wait()
	})
	for range processes {
		l, err := tb.NewQuota(t.Name(), n, window, 0, tb.WithStore(open()), patient, tb.WithClock(clock))
		require.NoError(t, err)
		u.processes = append(u.processes, l)
	}
	return u
}

// acquire begins n calls of Acquire in a process, one behind the other.
func (u *upstream) acquire(process, n int) {
	for range n {
		u.begin(func() bool {
			_, err := u.processes[process].Acquire(u.ctx, 1)
			return err == nil
		})
		u.rest()
	}
}

// begin begins a call, which reports whether it reaches the upstream.
func (u *upstream) begin(call func() bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.open++
	u.ended.Go(func() {
		reaches := call()
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.open--; reaches {
			u.calls = append(u.calls, u.clock.Now())
		}
	})
}

// reserve makes n reservations in a process. They reach the upstream when they are due, unless they were cancelled before.
func (u *upstream) reserve(process, n int) (all []*tb.Reservation) {
	for range n {
		r, err := u.processes[process].Reserve(ctx, 1)
		require.NoError(u.t, err)
		u.await(r)
		all = append(all, r)
	}
	return all
}

func (u *upstream) await(r *tb.Reservation) {
	given := make(chan struct{})
	u.given[r] = given
	u.begin(func() bool {
		select {
		case <-r.Ready():
			return true
		case <-given:
		case <-u.ctx.Done():
		}
		return ready(r)
	})
}

// cancel cancels a reservation, unless it is due.
func (u *upstream) cancel(r *tb.Reservation) {
	require.NoError(u.t, r.Cancel(ctx))
	close(u.given[r])
	u.rest()
}

// rest waits until all processes wait for the clock, and returns when the first alarm rings.
func (u *upstream) rest() (alarm int64) {
	require.Eventually(u.t, func() bool {
		open, seen := 0, map[any]bool{}
		alarm = 0
		for _, l := range u.processes {
			calm, at := tb.Calm(l)
			if !calm {
				return false
			}
			if calls, process := tb.InProgress(l); !seen[process] { // processes that share a MemoryStore are one
				seen[process] = true
				open += calls
			}
			if at != 0 && (alarm == 0 || at < alarm) {
				alarm = at
			}
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		return u.open == open
	}, time.Minute, 50*time.Microsecond)
	return alarm
}

// advance moves the clock on, and stops at each alarm.
func (u *upstream) advance(d time.Duration) {
	for {
		alarm := time.Duration(u.rest()) * time.Microsecond
		if alarm == 0 || alarm > d {
			break
		}
		u.clock.Advance(alarm)
		d -= alarm
	}
	u.clock.Advance(d)
	u.rest()
}

// since returns the calls from a time on.
func (u *upstream) since(from time.Time) []time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	slices.SortFunc(u.calls, time.Time.Compare)
	i, _ := slices.BinarySearchFunc(u.calls, from, time.Time.Compare)
	return slices.Clone(u.calls[i:])
}

// within returns the most calls of one window, of those from a time on.
func (u *upstream) within(from time.Time, window time.Duration) (most int) {
	calls := u.since(from)
	for i := range calls {
		n, _ := slices.BinarySearchFunc(calls[i:], calls[i].Add(window), time.Time.Compare)
		most = max(most, n)
	}
	return most
}

// A quota that is lowered holds in every window that begins after SetQuota has returned, however many callers wait, and its whole rate is used.
func TestLoweredQuotaOfWaiters(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		u := newUpstream(t, clock, 1, 100, time.Second, open)
		u.acquire(0, 100)
		u.advance(50 * time.Millisecond)
		require.Len(t, u.since(time.Time{}), 6)
		require.NoError(t, u.processes[0].SetQuota(ctx, 1, time.Second, 0))
		u.rest()
		lowered := clock.Now().Add(1)
		u.advance(10 * time.Second)
		require.Equal(t, 1, u.within(lowered, time.Second))
		require.Len(t, u.since(lowered), 10, "the whole rate is used")
		require.NoError(t, u.processes[0].SetQuota(ctx, 100, time.Second, 0))
		raised := len(u.since(time.Time{}))
		u.advance(4 * time.Second) // the permits that it owns are due within three
		require.Len(t, u.since(time.Time{}), raised+84)
		require.LessOrEqual(t, u.within(lowered, time.Second), 100)
	})
}

// So it does for reservations that were not due, which keep their order.
func TestLoweredQuotaOfReservations(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		u := newUpstream(t, clock, 1, 100, time.Second, open)
		all := u.reserve(0, 200)
		u.advance(50 * time.Millisecond)
		require.NoError(t, u.processes[0].SetQuota(ctx, 1, time.Second, 0))
		u.rest()
		lowered := clock.Now().Add(1)
		u.advance(10 * time.Second)
		require.Equal(t, 1, u.within(lowered, time.Second))
		require.Len(t, u.since(lowered), 10, "the whole rate is used")
		for i, r := range all {
			require.Equal(t, i < 16, ready(r), "reservation %d", i)
		}
		require.Equal(t, 194050*time.Millisecond, all[199].Delay())
		newcomer := u.reserve(0, 1)[0]
		require.Equal(t, 185*time.Second, newcomer.Delay(), "it passes none of those before it")
	})
}

// Reset of a quota forgets no call of the window: it puts the limiter's own quota in force, and ends a penalty.
func TestResetOfAQuota(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		u := newUpstream(t, clock, 1, 1, time.Hour, open)
		l := u.processes[0]
		for i := range 5 {
			granted, err := l.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			require.Equal(t, i == 0, granted, "call %d", i)
			require.NoError(t, l.Reset(ctx))
		}
		clock.Advance(10 * time.Minute)
		require.NoError(t, l.Penalize(ctx, 30*time.Minute))
		require.NoError(t, l.SetQuota(ctx, 2, time.Hour, 0))
		clock.Advance(10 * time.Minute)
		require.NoError(t, l.Reset(ctx))
		b, err := l.State(ctx)
		require.NoError(t, err)
		require.Zero(t, b.Version)
		require.Zero(t, b.HeldUntilMicros)
		require.Equal(t, 1.0/3600, l.Rate())
		wait, granted := b.Take(b.SeenMicros, 1, time.Hour)
		require.True(t, granted)
		require.Equal(t, time.Hour, wait, "a penalty drops what was stored before it, and nothing is earned in it")
	})
}

// Reset of a quota that was raised lowers it, for what was granted before, too.
func TestResetLowersAQuota(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		u := newUpstream(t, clock, 1, 1, time.Second, open)
		require.NoError(t, u.processes[0].SetQuota(ctx, 100, time.Second, 0))
		u.reserve(0, 50)
		u.acquire(0, 50)
		u.advance(50 * time.Millisecond)
		require.NoError(t, u.processes[0].Reset(ctx))
		u.rest()
		lowered := clock.Now().Add(1)
		u.advance(10 * time.Second)
		require.Equal(t, 1, u.within(lowered, time.Second))
		require.GreaterOrEqual(t, len(u.since(lowered)), 9, "what cannot go back to the new bucket takes its second")
	})
}

// Several processes at full demand hear of a lowered quota within half a second and a round trip. It holds in every window that begins after that.
func TestLoweredQuotaOfAFleet(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		u := newUpstream(t, clock, 3, 100, time.Second, open)
		for p := range u.processes {
			u.acquire(p, 20)
		}
		for range 20 {
			for p := range u.processes {
				u.reserve(p, 1)
				u.acquire(p, 1)
			}
		}
		u.advance(100 * time.Millisecond)
		require.NoError(t, u.processes[0].SetQuota(ctx, 2, time.Second, 0))
		u.advance(510 * time.Millisecond)
		heard := clock.Now().Add(1)
		u.advance(20 * time.Second)
		require.Equal(t, 2, u.within(heard, time.Second))
		require.GreaterOrEqual(t, len(u.since(heard)), 35, "at most the time up to which was granted is lost")
	})
}

// A group asks anew for what it was granted under a quota that was lowered, and for its reservations first.
func TestLoweredQuotaOfAGroup(t *testing.T) {
	for name, open := range map[string]func() tb.Store{
		"memory":  func() tb.Store { return tb.NewMemoryStore() },
		"distant": func() tb.Store { return &tb.Distant{Store: tb.NewMemoryStore(), Takes: 2 * time.Millisecond} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, err := tb.NewQuota("x", 100, time.Second, 0, tb.WithStore(open()))
				require.NoError(t, err)
				g, err := tb.All(l)
				require.NoError(t, err)
				until, cancel := context.WithCancel(ctx)
				defer func() {
					cancel()
					time.Sleep(time.Minute) // refunds are on their way
				}()
				var mu sync.Mutex
				var calls []time.Time
				reaches := func() {
					mu.Lock()
					defer mu.Unlock()
					calls = append(calls, time.Now())
				}
				var reservations []*tb.GroupReservation
				for range 50 {
					for range 10 {
						go func() {
							if _, err := g.Acquire(until, 1); err == nil {
								reaches()
							}
						}()
					}
					r, err := g.Reserve(ctx, 1)
					require.NoError(t, err)
					reservations = append(reservations, r)
					go func() {
						select {
						case <-r.Ready():
							reaches()
						case <-until.Done():
						}
					}()
				}
				time.Sleep(105 * time.Millisecond)
				require.NoError(t, l.SetQuota(ctx, 2, time.Second, 0))
				time.Sleep(510 * time.Millisecond)
				synctest.Wait()
				mu.Lock()
				heard := len(calls)
				mu.Unlock()
				time.Sleep(30 * time.Second)
				synctest.Wait()
				mu.Lock()
				defer mu.Unlock()
				for i := heard + 2; i < len(calls); i++ {
					require.GreaterOrEqual(t, calls[i].Sub(calls[i-2]), time.Second)
				}
				require.GreaterOrEqual(t, len(calls)-heard, 54, "at most the time up to which was granted is lost")
				left := 0
				for _, r := range reservations {
					if !isClosed(r.Ready()) {
						left++
					}
				}
				newcomer, err := g.Reserve(ctx, 1)
				require.NoError(t, err)
				require.GreaterOrEqual(t, newcomer.Delay(), time.Duration(left-1)*time.Second/2, "it passes none of those before it")
				require.NoError(t, newcomer.Cancel(ctx))
			})
		})
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// In random sequences of all calls of one process, every window that begins after a SetQuota has returned, and ends before the next, has at most the
// new quota.
func TestRandomQuotas(t *testing.T) {
	onEveryStore(t, func(t *testing.T, clock *clockwork.FakeClock, open func() tb.Store) {
		random := redistest.Seed(t)
		for round := range tb.Sized(40, 8) {
			if !t.Run(fmt.Sprint(round), func(t *testing.T) { randomQuotas(t, random, clock, open) }) {
				return
			}
		}
	})
}

// setQuota is a quota from a time on.
type setQuota struct {
	from   time.Time
	n      int
	window time.Duration
}

func randomQuotas(t *testing.T, random *rand.Rand, clock *clockwork.FakeClock, open func() tb.Store) {
	draw := func() (int, time.Duration) {
		return []int{1, 2, 5, 20, 100}[random.IntN(5)], []time.Duration{time.Second, 3 * time.Second, 20 * time.Second}[random.IntN(3)]
	}
	n, window := draw()
	u := newUpstream(t, clock, 1, n, window, open)
	l := u.processes[0]
	set := []setQuota{{clock.Now(), n, window}}
	var held []*tb.Reservation
	for range 60 {
		switch random.IntN(6) {
		case 0:
			n, window := draw()
			require.NoError(t, l.SetQuota(ctx, n, window, 0))
			u.rest()
			set = append(set, setQuota{clock.Now().Add(1), n, window})
		case 1:
			held = append(held, u.reserve(0, random.IntN(30))...)
		case 2:
			u.acquire(0, random.IntN(30))
		case 3:
			for range random.IntN(10) {
				timeout := time.Duration(random.Int64N(5e6)) * time.Microsecond
				u.begin(func() bool {
					granted, err := l.TryAcquire(u.ctx, 1, timeout)
					return err == nil && granted
				})
				u.rest()
			}
		case 4:
			for range min(len(held), random.IntN(40)) {
				i := random.IntN(len(held))
				u.cancel(held[i])
				held = slices.Delete(held, i, i+1)
			}
		default:
			u.advance(time.Duration(random.Int64N(4e6)) * time.Microsecond)
		}
	}
	u.advance(time.Minute)
	for i, q := range set {
		calls := u.since(q.from)
		if i+1 < len(set) {
			after := slices.IndexFunc(calls, func(at time.Time) bool { return !at.Before(set[i+1].from) })
			if after >= 0 {
				calls = calls[:after]
			}
		}
		for j := q.n; j < len(calls); j++ {
			require.GreaterOrEqual(t, calls[j].Sub(calls[j-q.n]), q.window-time.Duration(q.n)*time.Microsecond, "quota %d of %v", i, set)
		}
	}
}
