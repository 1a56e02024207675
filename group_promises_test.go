package tokenbucket_test

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

var quiet = tb.WithLogger(slog.New(slog.DiscardHandler))

// awayStore returns a store that fails until fail is nil.
func awayStore() *gatedStore {
	s := &gatedStore{MemoryStore: tb.NewMemoryStore()}
	err := fmt.Errorf("%w: away", tb.ErrStoreUnavailable)
	s.fail.Store(&err)
	return s
}

// recovers ends the outages of stores, and waits until their monitors have noticed.
func recovers(stores ...*gatedStore) {
	for _, s := range stores {
		s.fail.Store(nil)
		s.late.Store(0)
	}
	time.Sleep(2 * time.Hour)
}

func all(t *testing.T, members ...tb.Member) *tb.Group {
	t.Helper()
	g, err := tb.All(members...)
	require.NoError(t, err)
	return g
}

func anyOf(t *testing.T, members ...tb.Member) *tb.Choice {
	t.Helper()
	c, err := tb.Any(members...)
	require.NoError(t, err)
	return c
}

// Of several members that are due at once a choice takes the first of the list, on one store and on two.
func TestChoiceTakesTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := tb.NewMemoryStore()
		for _, other := range []tb.Store{one, tb.NewMemoryStore()} {
			primary := limiter(t, "primary", 100, tb.WithStore(one), tb.WithMaxPermits(50), tb.WithInitialPermits(50))
			c := anyOf(t, primary, limiter(t, "secondary", 1, tb.WithStore(other), tb.WithMaxPermits(50), tb.WithInitialPermits(50)))
			for range 50 {
				by, err := c.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.Same(t, primary, by)
			}
			require.NoError(t, primary.Reset(ctx))
		}
	})
}

// While the store of one member is known to hang, a choice asks the others at once.
func TestChoiceGoesOnInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := &gatedStore{MemoryStore: tb.NewMemoryStore()}
		hangs.late.Store(int64(time.Hour))
		first, second := limiter(t, "first", 1000, quiet, tb.WithStore(hangs)), limiter(t, "second", 1000)
		c := anyOf(t, first, second)
		_, err := c.TryAcquire(ctx, 1, 0) // the outage begins
		require.NoError(t, err)
		time.Sleep(5 * time.Second)
		for range 5 {
			within, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
			began := time.Now()
			by, err := c.TryAcquire(within, 1, 0)
			cancel()
			require.NoError(t, err)
			require.Same(t, second, by)
			require.Zero(t, time.Since(began))
			time.Sleep(10 * time.Millisecond)
		}
		recovers(hangs)
	})
}

// The failure policy of a member that is away decides for a choice if the others refuse, wherever it stands in the list.
func TestChoiceHeedsFailurePolicies(t *testing.T) {
	for _, policy := range []tb.FailurePolicy{tb.LocalShare(1), tb.FailOpen, tb.FailClosed} {
		for _, first := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				s := awayStore()
				gone := limiter(t, "gone", 1000, quiet, tb.WithStore(s), tb.WithFailurePolicy(policy))
				members := []tb.Member{gone, limiter(t, "empty", 0.001, tb.WithMaxPermits(1), tb.WithInitialPermits(0))}
				if !first {
					members[0], members[1] = members[1], members[0]
				}
				c := anyOf(t, members...)
				if policy == tb.FailClosed { // the other one has an initial permit to grant
					_, err := c.TryAcquire(ctx, 1, time.Second)
					require.NoError(t, err)
				}
				for range 3 {
					by, err := c.TryAcquire(ctx, 1, time.Second)
					require.NoError(t, err)
					if policy == tb.FailClosed {
						require.Nil(t, by)
					} else {
						require.Same(t, gone, by)
					}
					time.Sleep(time.Second)
				}
				recovers(s)
			})
		}
	}
}

// A member that does not count has no say in an outage either, whatever its failure policy.
func TestOutageOfMembersThatDoNotCount(t *testing.T) {
	off := tb.WithSwitch(func() bool { return false })
	for name, opts := range map[string][]tb.Option{
		"shadow": {tb.WithShadow()}, "off": {off}, "off with a local share": {off, tb.WithFailurePolicy(tb.LocalShare(1))},
		"off and open": {off, tb.WithFailurePolicy(tb.FailOpen)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := awayStore()
				at := []tb.Option{quiet, tb.WithStore(s)}
				open := limiter(t, "open", 100, append(at, tb.WithFailurePolicy(tb.FailOpen))...)
				closed := limiter(t, "closed", 100, at...)
				other := limiter(t, "other", 0.001, append(at, opts...)...)
				g, c := all(t, open, other), anyOf(t, closed, other)
				for range 3 {
					for range 2 {
						ok, err := g.TryAcquire(ctx, 1, 0)
						require.NoError(t, err)
						require.True(t, ok)
					}
					_, err := c.TryAcquire(ctx, 1, 0)
					require.ErrorIs(t, err, tb.ErrStoreUnavailable)
					time.Sleep(3 * time.Second)
				}
				recovers(s)
			})
		})
	}
}

// A choice refuses nobody whom the members together serve in time.
func TestChoiceServesInTime(t *testing.T) {
	for _, count := range []int{2, 4} {
		synctest.Test(t, func(t *testing.T) {
			s := tb.WithStore(tb.NewMemoryStore())
			var members []tb.Member
			for i := range count {
				members = append(members, limiter(t, fmt.Sprint(i), 10, s, tb.WithMaxPermits(0)))
			}
			c := anyOf(t, members...)
			var callers sync.WaitGroup
			for range 30 * count { // for three seconds
				callers.Go(func() {
					_, _, err := c.Acquire(ctx, 1)
					require.NoError(t, err)
				})
				synctest.Wait()
			}
			by, err := c.TryAcquire(ctx, 1, 4*time.Second)
			require.NoError(t, err)
			require.NotNil(t, by)
			callers.Wait()
		})
	}
}

// A slow member does not hold back a choice whose batches take time.
func TestChoiceOfASlowMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &gatedStore{MemoryStore: tb.NewMemoryStore()}
		store.late.Store(int64(20 * time.Millisecond))
		s, none := tb.WithStore(store), tb.WithMaxPermits(0)
		c := anyOf(t, limiter(t, "fast", 2000, s, none), limiter(t, "slow", 0.01, s, none))
		end, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		var granted atomic.Int64
		var callers sync.WaitGroup
		for range 1000 {
			callers.Go(func() {
				for {
					if _, _, err := c.Acquire(end, 1); err != nil {
						return
					}
					granted.Add(1)
				}
			})
		}
		callers.Wait()
		time.Sleep(time.Minute)
		require.Greater(t, granted.Load(), int64(9500))
	})
}

// A settlement gives nothing of a quota back, alone or as a member: more of its calls would fall into a window.
func TestSettledQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := tb.NewQuota("q", 5, time.Second, 0)
		require.NoError(t, err)
		first, err := q.Reserve(ctx, 1)
		require.NoError(t, err)
		second, err := all(t, q).Reserve(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, first.Settle(ctx, 0))
		require.NoError(t, second.Settle(ctx, 0))
		for i := range 6 {
			r, err := q.Reserve(ctx, 1)
			require.NoError(t, err)
			require.Equal(t, time.Duration(i+2)*200*time.Millisecond, r.Delay().Round(time.Millisecond))
		}
	})
}

// A refusal by an earlier reply tells of the member with the longest wait, as one by the store does.
func TestGroupRefusedByAnEarlierReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := tb.WithStore(plainStore{tb.NewMemoryStore()})
		g := all(t, limiter(t, "short", 1, s, tb.WithMaxPermits(1)), limiter(t, "long", 0.01, s, tb.WithMaxPermits(1)))
		_, err := g.TryReserve(ctx, 1, 2*time.Minute)
		require.NoError(t, err)
		for range 2 {
			r, err := g.TryReserve(ctx, 1, 0)
			require.NoError(t, err)
			require.Equal(t, "long", r.RefusedBy().Name())
			require.Greater(t, r.RetryAfter(), 90*time.Second)
		}
	})
}

// Errors name the member that has caused them.
func TestGroupErrorsNameTheMember(t *testing.T) {
	named := func(t *testing.T, err error) string {
		var of *tb.MemberError
		require.ErrorAs(t, err, &of)
		return of.Bucket
	}
	synctest.Test(t, func(t *testing.T) {
		s := tb.WithStore(tb.NewMemoryStore())
		a, b := limiter(t, "a", 10, s, tb.WithMaxPermits(0)), limiter(t, "b", 1e-6, s)
		g := all(t, a, b)
		_, err := g.Acquire(ctx, 8700)
		require.ErrorIs(t, err, tb.ErrInvalidPermits)
		require.Equal(t, "b", named(t, err))
		r, err := g.Reserve(ctx, 1)
		require.NoError(t, err)
		err = r.Settle(ctx, 9100)
		require.ErrorIs(t, err, tb.ErrInvalidPermits)
		require.Equal(t, "b", named(t, err))

		c := limiter(t, "c", 1, s, tb.WithMaxPermits(0)) // a penalty moves its permits beyond the caller's deadline
		within, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		require.NoError(t, a.Reset(ctx))
		time.AfterFunc(100*time.Millisecond, func() { require.NoError(t, c.Penalize(ctx, time.Minute)) })
		_, err = all(t, a, c).Acquire(within, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, "c", named(t, err))

		choice := anyOf(t, limiter(t, "d", 100, s), tb.Weighted(limiter(t, "e", 1e6, s), 1<<30))
		r, err = choice.Reserve(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, r.Settle(ctx, 10_000_000), "the other member, which cannot be charged that, was not taken from")

		none, err := tb.All(a, nil)
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
		require.Nil(t, none)
		nothing, err := tb.Any()
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
		require.Nil(t, nothing)
	})
}

// TryAwait tells when to try again as TryReserve does, also by a local share and for a timeout below 0.
func TestAwaitRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := awayStore()
		for _, l := range []*tb.RateLimiter{
			limiter(t, "a", 0.1, tb.WithMaxPermits(1)),
			limiter(t, "b", 0.1, quiet, tb.WithMaxPermits(1), tb.WithStore(s), tb.WithFailurePolicy(tb.LocalShare(1))),
		} {
			_, err := l.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			for _, timeout := range []time.Duration{0, -time.Hour, math.MinInt64} {
				want, err := l.TryReserve(ctx, 1, timeout)
				require.NoError(t, err)
				got, err := l.TryAwait(ctx, 1, timeout)
				require.NoError(t, err)
				require.False(t, got.OK())
				require.NotZero(t, got.RetryAfter())
				require.Equal(t, want.RetryAfter(), got.RetryAfter())
			}
		}
		recovers(s)
	})
}

// A batch has no more settlements than a store accepts, of whichever member they are.
func TestSettlementsOfAChoiceInBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &gatedStore{MemoryStore: tb.NewMemoryStore()}
		store.late.Store(int64(10 * time.Millisecond))
		var largest atomic.Int64
		opts := []tb.Option{tb.WithStore(store), tb.WithObserver(tb.Observer{Trip: func(trip tb.Trip) {
			largest.Store(max(largest.Load(), int64(trip.Requests)))
		}})}
		c := anyOf(t, limiter(t, "a", 1e-3, append(opts, tb.WithMaxPermits(1), tb.WithInitialPermits(0))...),
			limiter(t, "b", 1e6, append(opts, tb.WithMaxPermits(1e5), tb.WithInitialPermits(1e5))...))
		var reservations []*tb.GroupReservation
		for range 3000 {
			r, err := c.Reserve(ctx, 5)
			require.NoError(t, err)
			reservations = append(reservations, r)
		}
		for _, r := range reservations {
			r.SettleLater(3)
		}
		require.NoError(t, c.Close(ctx))
		require.Greater(t, largest.Load(), int64(100))
		require.LessOrEqual(t, largest.Load(), int64(1024))
	})
}

// Close waits for settlements of calls that a local share stood in for, and Lost does not forget what was lost in an earlier outage.
func TestGroupAfterAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, slow := awayStore(), &gatedStore{MemoryStore: tb.NewMemoryStore()}
		gone := limiter(t, "gone", 1000, quiet, tb.WithStore(s), tb.WithFailurePolicy(tb.LocalShare(1)))
		g := all(t, gone, limiter(t, "up", 0.001, tb.WithStore(slow), tb.WithMaxPermits(10), tb.WithInitialPermits(10)))
		r, err := g.TryReserve(ctx, 5, time.Second)
		require.NoError(t, err)
		require.True(t, r.OK())
		slow.late.Store(int64(500 * time.Millisecond))
		r.SettleLater(1)
		began := time.Now()
		require.NoError(t, g.Close(ctx))
		require.Equal(t, 500*time.Millisecond, time.Since(began))
		recovers(s, slow)
	})
	synctest.Test(t, func(t *testing.T) {
		s, other := awayStore(), awayStore()
		away := other.fail.Swap(nil)
		open := tb.WithFailurePolicy(tb.FailOpen)
		up := limiter(t, "up", 1e-6, tb.WithMaxPermits(100), tb.WithInitialPermits(100))
		g := all(t, limiter(t, "x", 100, quiet, open, tb.WithStore(s)), limiter(t, "y", 100, quiet, open, tb.WithStore(other)), up)
		r, err := g.Reserve(ctx, 5) // without x
		require.NoError(t, err)
		require.NoError(t, up.Reset(ctx)) // its permits cannot go back
		require.NoError(t, r.Return(ctx))
		time.Sleep(time.Second)
		lost := g.Lost()
		require.Positive(t, lost)
		recovers(s)
		other.fail.Store(away)
		_, err = g.Reserve(ctx, 1) // without y
		require.NoError(t, err)
		require.GreaterOrEqual(t, g.Lost(), lost)
		recovers(other)
	})
}
