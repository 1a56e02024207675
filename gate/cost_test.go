package gate_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// fill takes the permit that a new bucket has, and waits until one of a second's worth is full.
func fill(t *testing.T, l *tokenbucket.RateLimiter) {
	t.Helper()
	ok, err := l.TryAcquire(t.Context(), 1, 0)
	require.NoError(t, err)
	require.True(t, ok)
	time.Sleep(time.Second)
}

// A call that costs n permits takes n, and the next one waits for all of them.
func TestCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 10)
		g := gate.One(l, 2*time.Second)
		fill(t, l)
		start := time.Now()
		a, err := gate.AskN(t.Context(), g, "", 10)
		require.NoError(t, err)
		require.True(t, a.OK)
		require.Zero(t, a.Level.Remaining)
		require.Equal(t, start, time.Now(), "a full bucket")
		began := time.Now()
		a, err = gate.AskN(t.Context(), g, "", 15)
		require.NoError(t, err)
		require.True(t, a.OK)
		require.Equal(t, 1500*time.Millisecond, time.Since(began))
		a, err = gate.AskN(t.Context(), g, "", 30)
		require.NoError(t, err)
		require.False(t, a.OK)
		require.Equal(t, time.Second, a.RetryAfter, "30 permits take 3 s, and a call waits 2 s")
		a, err = gate.AskN(t.Context(), g, "", 0)
		require.NoError(t, err)
		require.True(t, a.OK)
		require.Nil(t, a.Level, "a call that costs nothing asks no bucket")
		a, err = gate.AskN(t.Context(), g, "", 1)
		require.NoError(t, err)
		require.True(t, a.OK)
		require.Equal(t, 1600*time.Millisecond, time.Since(began), "the refused 30 took nothing")
	})
}

// A cost that can never be granted is an error that names it, and takes nothing.
func TestNeverGranted(t *testing.T) {
	l := bursty(t, 10, tokenbucket.WithClock(clockwork.NewFakeClock()))
	quota, err := tokenbucket.NewQuota("quota", 10, time.Second, 0)
	require.NoError(t, err)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		ctx  context.Context
		g    gate.Gate
		cost int
		want error
		text string
	}{
		"negative":      {t.Context(), gate.One(l, time.Second), -1, tokenbucket.ErrInvalidPermits, `tokenbucket: invalid permits: key "k": cost -1: want 0 or more`},
		"too many":      {t.Context(), gate.One(l, time.Second), 31, tokenbucket.ErrNeverGranted, `key "k": cost 31: tokenbucket: can never be granted: bucket "bucket": permits 31: want a timeout of at least 2.1s`},
		"beyond time":   {t.Context(), gate.One(l, time.Second), math.MaxInt, tokenbucket.ErrInvalidPermits, `cost 9223372036854775807: tokenbucket: invalid permits`},
		"of a quota":    {t.Context(), gate.One(quota, time.Second), 2, tokenbucket.ErrInvalidPermits, `permits 2: want 1: those of a quota fall due one at a time`},
		"no cost gate":  {t.Context(), reply{}, 2, tokenbucket.ErrInvalidPermits, `cost 2: want 1: every call of this gate costs one permit`},
		"already ended": {ended, gate.One(l, time.Second), 0, context.Canceled, "context canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := gate.AskN(c.ctx, c.g, "k", c.cost)
			require.Nil(t, a)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.text)
			var wrong *gate.CostError
			require.Equal(t, c.want != context.Canceled, errors.As(err, &wrong))
			if wrong != nil {
				require.Equal(t, "k", wrong.Key)
				require.Equal(t, c.cost, wrong.Cost)
			}
		})
	}
	b, err := l.State(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1.0, b.StoredPermits, "what a new bucket has")
}

// A call is settled with what it has used, once, before or after it has left.
func TestAdmissionSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 10)
		g := gate.One(l, 0)
		stored := func() float64 {
			b, err := l.State(t.Context())
			require.NoError(t, err)
			return b.StoredPermits
		}
		fill(t, l)
		a, err := gate.AskN(t.Context(), g, "", 8)
		require.NoError(t, err)
		require.Equal(t, 2.0, stored())
		a.Leave()
		require.NoError(t, a.Settle(t.Context(), 3))
		require.Equal(t, 7.0, stored())
		require.NoError(t, a.Settle(t.Context(), 8))
		require.Equal(t, 7.0, stored(), "a call is settled once")

		a, err = gate.AskN(t.Context(), g, "", 1)
		require.NoError(t, err)
		a.SettleLater(5)
		require.NoError(t, l.Close(t.Context()))
		require.Equal(t, 2.0, stored())
		require.ErrorIs(t, a.Settle(t.Context(), -1), tokenbucket.ErrInvalidPermits)

		refused, err := gate.AskN(t.Context(), g, "", 9)
		require.NoError(t, err)
		require.False(t, refused.OK)
		free, err := gate.AskN(t.Context(), g, "", 0)
		require.NoError(t, err)
		for name, a := range map[string]*gate.Admission{"refused": refused, "free": free, "nil": nil, "of another gate": {OK: true}} {
			require.NoError(t, a.Settle(t.Context(), 2), name)
			a.SettleLater(2)
		}
		require.Equal(t, 2.0, stored())
	})
}

func TestContext(t *testing.T) {
	require.Nil(t, gate.FromContext(t.Context()))
	require.NoError(t, gate.FromContext(t.Context()).Settle(t.Context(), 1))
	a := &gate.Admission{OK: true}
	require.Same(t, a, gate.FromContext(gate.NewContext(t.Context(), a)))
}
