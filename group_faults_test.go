package tokenbucket_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// gatedStore is a store that fails, or replies late, while it is told to.
type gatedStore struct {
	*tb.MemoryStore
	fail atomic.Pointer[error]
	late atomic.Int64 // how long a reply takes, in nanoseconds; the states are written at once
}

func (s *gatedStore) Apply(ctx context.Context, b *tb.Batch) error {
	if err := s.fail.Load(); err != nil {
		return *err
	}
	err := s.MemoryStore.Apply(ctx, b)
	if d := s.late.Load(); d > 0 {
		time.Sleep(time.Duration(d))
	}
	return err
}

// A store that hangs holds nobody for longer than the store timeout, and what a late reply grants goes back.
func TestGroupLateReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &gatedStore{MemoryStore: tb.NewMemoryStore()}
		opts := []tb.Option{tb.WithStore(s), tb.WithStoreTimeout(time.Second), tb.WithMaxPermits(5), tb.WithInitialPermits(5)}
		a, b := limiter(t, "a", 0.001, opts...), limiter(t, "b", 0.001, opts...)
		g, err := tb.All(a, b)
		require.NoError(t, err)
		ok, err := g.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.True(t, ok)
		s.late.Store(int64(3 * time.Second))
		began := time.Now()
		_, err = g.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, tb.ErrStoreTimeout)
		require.ErrorIs(t, err, tb.ErrStoreUnavailable)
		var by *tb.MemberError
		require.True(t, errors.As(err, &by))
		require.Equal(t, time.Second, time.Since(began))
		s.late.Store(0)
		time.Sleep(10 * time.Second)
		for _, l := range []*tb.RateLimiter{a, b} {
			inStore, _ := stored(t, l)
			require.InDelta(t, 4, inStore, 0.1, "%s: the late permit is back", l.Name())
		}
	})
}

// A caller whose context ends is released at once, and the caller behind it takes its permits.
func TestGroupCallerLeaves(t *testing.T) {
	for _, which := range []string{"memory", "process"} {
		t.Run(which, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var s tb.Store = tb.NewMemoryStore()
				if which == "process" {
					s = &participantStore{tb.NewMemoryStore(), 0}
				}
				a, b := limiter(t, "a", 10, tb.WithStore(s), tb.WithMaxPermits(0)), limiter(t, "b", 5, tb.WithStore(s), tb.WithMaxPermits(0))
				g, err := tb.All(a, b)
				require.NoError(t, err)
				began := time.Now()
				due := make(chan time.Duration, 4)
				first, cancel := context.WithCancel(ctx)
				for i := range 4 {
					c := ctx
					if i == 1 {
						c = first
					}
					go func() {
						if _, err := g.Acquire(c, 1); err == nil {
							due <- time.Since(began).Round(time.Millisecond)
						}
					}()
					synctest.Wait()
				}
				time.Sleep(50 * time.Millisecond)
				cancel()
				for i := range 3 {
					require.Equal(t, time.Duration(i+1)*200*time.Millisecond, <-due)
				}
				synctest.Wait()
				time.Sleep(10 * time.Millisecond)
				_, err = a.Reserve(ctx, 1)
				require.NoError(t, err)
				require.Zero(t, g.Lost(), "the last grant went back at the tail")
				state, err := b.State(ctx)
				require.NoError(t, err)
				require.LessOrEqual(t, state.NextFreeTicketMicros-state.SeenMicros, int64(0))
			})
		})
	}
}

// Nothing of a group falls due before the end of a penalty of one member, in another process either.
func TestGroupPenalty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := tb.NewMemoryStore()
		one, other := &participantStore{memory, 1}, &participantStore{memory, 2}
		a, b := limiter(t, "a", 2, tb.WithStore(one), tb.WithMaxPermits(0)), limiter(t, "b", 1, tb.WithStore(one), tb.WithMaxPermits(0))
		g, err := tb.All(a, b)
		require.NoError(t, err)
		r, err := g.Reserve(ctx, 3)
		require.NoError(t, err)
		require.Equal(t, 3*time.Second, r.Delay())
		began := time.Now()
		require.NoError(t, limiter(t, "a", 2, tb.WithStore(other), tb.WithMaxPermits(0)).Penalize(ctx, 10*time.Second))
		<-r.Ready()
		require.GreaterOrEqual(t, time.Since(began), 10*time.Second)
		require.Less(t, time.Since(began), 13*time.Second)
	})
}

// A member whose switch is off, that is a shadow, or whose store is unavailable under FailOpen does not veto; under FailClosed the error names it.
func TestGroupMembersThatDoNotCount(t *testing.T) {
	quiet := tb.WithLogger(slog.New(slog.DiscardHandler))
	empty := []tb.Option{tb.WithMaxPermits(1), tb.WithInitialPermits(0), quiet}
	synctest.Test(t, func(t *testing.T) {
		var on atomic.Bool
		s := tb.WithStore(tb.NewMemoryStore())
		full := limiter(t, "full", 0.001, s, tb.WithMaxPermits(5), tb.WithInitialPermits(5))
		off := limiter(t, "off", 0.001, append(empty, s, tb.WithSwitch(on.Load))...)
		shadow := limiter(t, "shadow", 0.001, append(empty, s, tb.WithShadow())...)
		g, err := tb.All(full, off, shadow)
		require.NoError(t, err)
		ok, err := g.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.True(t, ok)
		on.Store(true)
		ok, err = g.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.False(t, ok)
		on.Store(false)
		g, err = tb.All(off)
		require.NoError(t, err)
		r, err := g.Reserve(ctx, 1)
		require.NoError(t, err)
		require.True(t, r.OK())
		<-r.Ready()
		require.NoError(t, r.Settle(ctx, 3))
	})
	for _, policy := range []tb.FailurePolicy{tb.FailClosed, tb.FailOpen, tb.LocalShare(2)} {
		t.Run(fmt.Sprint(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := tb.WithStore(tb.NewMemoryStore())
				away := &gatedStore{MemoryStore: tb.NewMemoryStore()}
				failure := fmt.Errorf("%w: gone", tb.ErrStoreUnavailable)
				away.fail.Store(&failure)
				full := limiter(t, "full", 1, s, tb.WithMaxPermits(50), tb.WithInitialPermits(50))
				gone := limiter(t, "gone", 2, tb.WithStore(away), tb.WithFailurePolicy(policy), quiet)
				g, err := tb.All(full, gone)
				require.NoError(t, err)
				ok, err := g.TryAcquire(ctx, 1, 0)
				switch policy {
				case tb.FailClosed:
					require.ErrorIs(t, err, tb.ErrStoreUnavailable)
					var by *tb.MemberError
					require.True(t, errors.As(err, &by))
					require.Equal(t, "gone", by.Bucket)
				case tb.FailOpen:
					require.NoError(t, err)
					require.True(t, ok)
				default:
					require.NoError(t, err)
					ok, err = g.TryAcquire(ctx, 1, 2*time.Second) // its share is 1/s, and begins empty
					require.NoError(t, err)
					require.True(t, ok)
					ok, err = g.TryAcquire(ctx, 1, 500*time.Millisecond)
					require.NoError(t, err)
					require.False(t, ok)
				}
				inStore, _ := stored(t, full)
				require.GreaterOrEqual(t, inStore, 48.0)
				away.fail.Store(nil)
				time.Sleep(time.Minute) // the probes end
			})
		})
	}
}

// A settlement of a group settles all members: a random number of them, and what remains is exact.
func TestGroupSettle(t *testing.T) {
	for name, open := range groupStores(t) {
		t.Run(name, func(t *testing.T) {
			s := tb.WithStore(open())
			slow := 1.0 / 3600
			a := limiter(t, "a", slow, s, tb.WithMaxPermits(1000), tb.WithInitialPermits(1000))
			b := limiter(t, "b", slow, s, tb.WithMaxPermits(1000), tb.WithInitialPermits(1000))
			g, err := tb.All(a, tb.Weighted(b, 2))
			require.NoError(t, err)
			used := 0
			for i := range 20 {
				r, err := g.Reserve(ctx, 10)
				require.NoError(t, err)
				require.True(t, r.OK())
				actual := (i * 7) % 20
				used += actual
				if i%2 == 0 {
					require.NoError(t, r.Settle(ctx, actual))
					require.NoError(t, r.Settle(ctx, 1000), "once")
				} else {
					r.SettleLater(actual)
				}
				require.NoError(t, r.Cancel(ctx))
			}
			require.NoError(t, g.Close(ctx))
			inA, _ := stored(t, a)
			inB, _ := stored(t, b)
			require.InDelta(t, 1000-used, inA, 0.1)
			require.InDelta(t, 1000-2*used, inB, 0.1)
		})
	}
}

// What each member decided is observed: under its own name, and by what decided for it. While a store is away, its member's policy does.
func TestGroupObserved(t *testing.T) {
	for _, policy := range []tb.FailurePolicy{tb.FailOpen, tb.LocalShare(2)} {
		t.Run(fmt.Sprint(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen []string
				var mu sync.Mutex
				trips := map[string]int{}
				observed := tb.WithObserver(tb.Observer{
					Decision: func(_ context.Context, d tb.Decision) {
						seen = append(seen, fmt.Sprintf("%s %d %v %v", d.Bucket, d.Permits, d.Granted, d.By))
					},
					Trip: func(t tb.Trip) {
						mu.Lock()
						defer mu.Unlock()
						trips[fmt.Sprint(t.Bucket, t.Requests, t.Err)]++
					},
				})
				decided := func(want ...string) {
					t.Helper()
					require.ElementsMatch(t, want, seen)
					seen = nil
				}
				away := &gatedStore{MemoryStore: tb.NewMemoryStore()}
				quiet := tb.WithLogger(slog.New(slog.DiscardHandler))
				opts := []tb.Option{observed, quiet, tb.WithMaxPermits(6), tb.WithInitialPermits(6)}
				stays := limiter(t, "stays", 0.001, append(opts, tb.WithStore(&participantStore{tb.NewMemoryStore(), 1}))...)
				goes := limiter(t, "goes", 2, append(opts, tb.WithStore(away), tb.WithFailurePolicy(policy))...)
				off := limiter(t, "off", 2, append(opts, tb.WithSwitch(func() bool { return false }))...)
				all, err := tb.All(stays, tb.Weighted(goes, 2), off)
				require.NoError(t, err)
				one, err := tb.Any(goes)
				require.NoError(t, err)

				ok, err := all.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
				decided("stays 1 true store", "goes 2 true store", "off 1 true switch")
				mu.Lock()
				require.Equal(t, map[string]int{"stays1 <nil>": 1, "goes1 <nil>": 1}, trips)
				mu.Unlock()
				ok, err = all.TryAcquire(ctx, 3, 0)
				require.NoError(t, err)
				require.False(t, ok)
				decided("goes 6 false store")

				failure := fmt.Errorf("%w: gone", tb.ErrStoreUnavailable)
				away.fail.Store(&failure)
				for range 2 { // a local share begins empty when the first call fails, and when the outage is known
					_, err = all.TryAcquire(ctx, 1, 0)
					require.NoError(t, err)
					time.Sleep(3 * time.Second)
				}
				seen = nil
				ok, err = all.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
				decided("stays 1 true store", "goes 2 true policy", "off 1 true switch")
				time.Sleep(2 * time.Second)
				by, err := one.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.Same(t, goes, by, "not the limiter of its local share")
				decided("goes 1 true policy")
				r, err := all.TryReserve(ctx, 3, 0)
				require.NoError(t, err)
				require.False(t, r.OK())
				if policy == tb.FailOpen {
					require.Same(t, stays, r.RefusedBy())
					decided("stays 3 false store")
				} else {
					require.Same(t, goes, r.RefusedBy())
					decided("goes 6 false policy")
				}
				away.fail.Store(nil)
				time.Sleep(time.Minute) // the probes end
			})
		})
	}
}

// A Redis that hangs does not reply to a group in time. That is told as it is to a caller of one limiter.
func TestGroupOfAHungRedis(t *testing.T) {
	server := redistest.Start(t)
	store := tb.NewRedisScriptStore(server.Client(t))
	var members []tb.Member
	for _, name := range []string{"a", "b"} {
		l, err := tb.NewSmoothBursty(name, 1e5, tb.WithStore(store))
		require.NoError(t, err)
		members = append(members, l)
	}
	g, err := tb.All(members...)
	require.NoError(t, err)
	_, err = g.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, server.Stop())
	defer func() { require.NoError(t, server.Continue()) }()
	soon, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	_, err = g.Acquire(soon, 1)
	if !errors.Is(err, context.DeadlineExceeded) { // the client returns a little earlier, with the cause
		require.ErrorIs(t, err, tb.ErrStoreTimeout)
		require.ErrorContains(t, err, `member "a"`)
	}
}
