package gate_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// named returns a bursty limiter with a full bucket.
func named(t *testing.T, name string, rate, size float64, opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
	t.Helper()
	l, err := tokenbucket.NewSmoothBursty(name, rate, append(opts, tokenbucket.WithMaxPermits(size), tokenbucket.WithInitialPermits(size))...)
	require.NoError(t, err)
	return l
}

func storedIn(t *testing.T, l *tokenbucket.RateLimiter) float64 {
	t.Helper()
	b, err := l.State(t.Context())
	require.NoError(t, err)
	return b.StoredPermits
}

// A gate of several limits names the member that decided, with its level, takes costs times weights, and settles all members.
func TestOneOfSeveral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		second, day := named(t, "second", 5, 5), named(t, "day", 0.1, 60)
		all, err := tokenbucket.All(second, tokenbucket.Weighted(day, 10))
		require.NoError(t, err)
		g := gate.One(all, 500*time.Millisecond)
		a, err := g.Enter(t.Context(), "")
		require.NoError(t, err)
		require.True(t, a.OK)
		require.Equal(t, "second", a.Member, "4 are left, and of the day 50, which is 5 of them")
		require.Equal(t, 4.0, a.Level.Remaining)
		a, err = gate.AskN(t.Context(), g, "", 4)
		require.NoError(t, err)
		require.Equal(t, "second", a.Member)
		require.Zero(t, a.Level.Remaining)
		require.NoError(t, a.Settle(t.Context(), 1))
		require.Equal(t, []float64{3, 40}, []float64{storedIn(t, second), storedIn(t, day)})
		time.Sleep(time.Second)
		a, err = gate.AskN(t.Context(), g, "", 3)
		require.NoError(t, err)
		require.Equal(t, "day", a.Member, "of a weight of 10: 10 are left, which is one")
		require.InDelta(t, 1, a.Level.Remaining, 0.02)
		require.InDelta(t, 6, a.Level.MaxPermits, 1e-9)
		require.InDelta(t, 0.01, a.Level.Rate, 1e-9)
		a, err = gate.AskN(t.Context(), g, "", 2)
		require.NoError(t, err)
		require.False(t, a.OK)
		require.Equal(t, "day", a.Member)
		require.InDelta(t, 98500*time.Millisecond, a.RetryAfter, float64(time.Second), "9.9 permits at 0.1/s, less what a call waits")
		require.Equal(t, 2.0, storedIn(t, second), "the refusal took nothing")
	})
}

// A pause that an upstream asks for holds back the buckets whose permits the call has taken, and no others.
func TestPenalizeSeveral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held := func(l *tokenbucket.RateLimiter) bool {
			b, err := l.State(t.Context())
			require.NoError(t, err)
			return b.HeldUntilMicros != 0
		}
		one, two, three := named(t, "one", 1, 1), named(t, "two", 1, 1), named(t, "three", 1, 1)
		all, err := tokenbucket.All(one, two)
		require.NoError(t, err)
		a, err := gate.One(all, 0).Enter(t.Context(), "")
		require.NoError(t, err)
		require.NoError(t, gate.Penalize(t.Context(), gate.One(all, 0), a, "", time.Minute))
		require.Equal(t, []bool{true, true, false}, []bool{held(one), held(two), held(three)})

		first, second := named(t, "first", 1, 1), named(t, "second", 1, 1)
		choice, err := tokenbucket.Any(first, second)
		require.NoError(t, err)
		g := gate.One(choice, 0)
		a, err = g.Enter(t.Context(), "")
		require.NoError(t, err)
		require.NoError(t, gate.Penalize(t.Context(), g, a, "", time.Minute))
		require.Equal(t, []bool{true, false}, []bool{held(first), held(second)})
		a, err = g.Enter(t.Context(), "")
		require.NoError(t, err)
		require.True(t, a.OK, "the other key is used meanwhile")
		require.Equal(t, "second", a.Member)

		require.ErrorIs(t, g.Penalize(t.Context(), "", time.Second), tokenbucket.ErrInvalidConfig)
		require.NoError(t, gate.Penalize(t.Context(), gate.One(three, 0), nil, "", time.Minute))
		require.True(t, held(three))
	})
}

// A wait for several limits that is given up takes nothing of any.
func TestWaitForSeveralIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, two := named(t, "one", 1, 1), named(t, "two", 1, 2)
		all, err := tokenbucket.All(one, two)
		require.NoError(t, err)
		g := gate.One(all, time.Minute)
		_, err = g.Enter(t.Context(), "")
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		time.AfterFunc(500*time.Millisecond, cancel)
		_, err = g.Enter(ctx, "")
		require.ErrorIs(t, err, context.Canceled)
		time.Sleep(2 * time.Second)
		require.Equal(t, []float64{1, 2}, []float64{storedIn(t, one), storedIn(t, two)})
	})
	require.Nil(t, gate.One[*tokenbucket.Reservation](nil, 0))
	require.Nil(t, gate.One((*tokenbucket.Group)(nil), 0))
}

// The member that an admission names is the one whose wait is the RetryAfter: of a refused choice the one that would have been due first.
func TestMemberOfARefusedChoice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow, quick := named(t, "slow", 0.1, 1), named(t, "quick", 1, 2)
		choice, err := tokenbucket.Any(slow, quick)
		require.NoError(t, err)
		for _, l := range []*tokenbucket.RateLimiter{slow, quick} {
			_, err := l.Reserve(t.Context(), int(storedIn(t, l))+1)
			require.NoError(t, err)
		}
		a, err := gate.One(choice, 0).Enter(t.Context(), "")
		require.NoError(t, err)
		require.False(t, a.OK)
		require.Equal(t, "quick", a.Member)
		require.Equal(t, 2*time.Second, a.RetryAfter, "for the debt of one permit, and its own")
		require.Equal(t, 2.0, a.Level.MaxPermits)
	})
}
