package gate_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/gate/gatetest"
)

func bursty(t *testing.T, rate float64, opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
	t.Helper()
	l, err := tokenbucket.NewSmoothBursty("bucket", rate, opts...)
	require.NoError(t, err)
	return l
}

// A call of a single limiter waits until its permit is due, and is refused if that takes longer than the timeout.
func TestOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := gate.One(bursty(t, 1, tokenbucket.WithMaxPermits(2)), 1500*time.Millisecond)
		began := time.Now()
		for i := range 2 {
			a, err := g.Enter(t.Context(), "any")
			require.NoError(t, err)
			require.True(t, a.OK)
			require.Equal(t, gate.ByLimit, a.By)
			require.Equal(t, time.Duration(i)*time.Second, time.Since(began))
			require.Equal(t, tokenbucket.Level{MaxPermits: 2, Rate: 1, Full: 2 * time.Second}, *a.Level, "as the call begins")
			require.False(t, a.Holds())
			a.Leave()
		}
		require.NoError(t, g.Penalize(t.Context(), "any", 10*time.Second))
		a, err := g.Enter(t.Context(), "any")
		require.NoError(t, err)
		require.False(t, a.OK)
		require.Equal(t, 9500*time.Millisecond, a.RetryAfter, "a permit is due in 11 s, and a call waits 1.5 s")
		require.NotNil(t, a.Level)
	})
	require.Nil(t, gate.One((*tokenbucket.RateLimiter)(nil), 0))
}

// A wait that is given up gives its permit back: the next wait is as long as if it had never been.
func TestWaitIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 1)
		g := gate.One(l, time.Minute)
		_, err := g.Enter(t.Context(), "")
		require.NoError(t, err)
		ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Second, errors.New("enough"))
		defer cancel()
		require.NoError(t, l.Penalize(t.Context(), 4*time.Second))
		ended := make(chan error)
		go func() {
			_, err := g.Enter(ctx, "")
			ended <- err
		}()
		synctest.Wait()
		require.NoError(t, l.Penalize(t.Context(), 10*time.Second))
		require.ErrorIs(t, <-ended, context.DeadlineExceeded)
		r, err := l.Reserve(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, 6*time.Second, r.Delay(), "the rest of the penalty, and one interval")
	})
}

// A call that passes without a bucket has no level.
func TestAdmitWithoutBucket(t *testing.T) {
	a := gate.Admit(&tokenbucket.Reservation{})
	require.True(t, a.OK)
	require.Nil(t, a.Level)
	require.Zero(t, a.RetryAfter)
}

// reply is a gate that replies as a test wants.
type reply struct {
	a   *gate.Admission
	err error
	gate.Gate
}

func (g reply) Enter(context.Context, string) (*gate.Admission, error) { return g.a, g.err }

// A call that does not begin holds nothing, whatever its gate returns. One that begins gives its place back once.
func TestAsk(t *testing.T) {
	left := 0
	holds := func(ok bool) *gate.Admission { return &gate.Admission{OK: ok, Release: func() { left++ }} }
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	away := errors.New("away")
	for name, c := range map[string]struct {
		ctx  context.Context
		g    reply
		want error // nil: refused
	}{
		"failed":               {t.Context(), reply{a: holds(true), err: away}, away},
		"refused":              {t.Context(), reply{a: holds(false)}, nil},
		"refused, ended":       {gone, reply{a: holds(false)}, nil},
		"ended":                {gone, reply{a: holds(true)}, context.Canceled},
		"failed, ended":        {gone, reply{a: holds(true), err: away}, context.Canceled},
		"only ctx is too long": {t.Context(), reply{a: holds(true), err: &tokenbucket.WaitError{Reason: context.DeadlineExceeded}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			left = 0
			a, err := gate.Ask(c.ctx, c.g, "")
			require.ErrorIs(t, err, c.want)
			require.Equal(t, c.want == nil, a != nil && !a.OK)
			require.Equal(t, 1, left)
		})
	}
	left = 0
	a, err := gate.Ask(t.Context(), reply{a: holds(true)}, "")
	require.NoError(t, err)
	require.True(t, a.OK)
	require.True(t, a.Holds())
	require.Zero(t, left)
	a.Leave()
	a.Leave()
	require.Equal(t, 1, left)

	_, err = gate.Ask(t.Context(), reply{}, "")
	require.ErrorContains(t, err, "neither an admission nor an error")
	_, err = gate.Ask(t.Context(), reply{err: &tokenbucket.WaitError{Reason: tokenbucket.ErrNeverGranted}}, "")
	require.ErrorIs(t, err, tokenbucket.ErrNeverGranted, "longer than the gate's own timeout")
	var none *gate.Admission
	none.Leave()
}

// ending is a context that ends after it was looked at so many times.
type ending struct {
	context.Context
	looks int
}

func (c *ending) Err() error {
	if c.looks--; c.looks < 0 {
		return context.Canceled
	}
	return nil
}

// A call holds something if it begins, and nothing otherwise, whenever its context ends.
func TestEndsMeanwhile(t *testing.T) {
	for looks := range 5 {
		for _, cost := range []int{1, 2} {
			h := &gatetest.Holder{}
			a, err := gate.AskN(&ending{t.Context(), looks}, costly{h}, "", cost)
			require.Equal(t, err == nil, a != nil, "%d looks", looks)
			require.Equal(t, err != nil, h.Released() == 1, "%d looks: %v", looks, err)
		}
	}
}

// costly is a gate whose calls may cost several permits.
type costly struct{ *gatetest.Holder }

func (g costly) EnterN(ctx context.Context, key string, _ int) (*gate.Admission, error) {
	return g.Enter(ctx, key)
}

// RetryAfter of a call whose context is too short is never more than the wait, even if its deadline has passed meanwhile.
func TestDeadlineTooShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := reply{err: &tokenbucket.WaitError{Wait: 3 * time.Second, Reason: context.DeadlineExceeded}}
		for _, c := range []struct{ left, want time.Duration }{
			{time.Second, 2 * time.Second},
			{3 * time.Second, 3 * time.Second}, // the gate has a deadline of its own
			{time.Hour, 3 * time.Second},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), c.left)
			a, err := gate.Ask(ctx, g, "")
			require.NoError(t, err)
			require.Equal(t, c.want, a.RetryAfter, "%v left", c.left)
			cancel()
		}
		a, err := gate.Ask(context.Background(), g, "")
		require.NoError(t, err)
		require.Equal(t, 3*time.Second, a.RetryAfter)
	})
}

// Different parts never make one key.
func TestKey(t *testing.T) {
	keys := map[string][]string{}
	for _, parts := range [][]string{{}, {"", ""}, {"a"}, {"a", "b"}, {"a|b"}, {`a\`, "b"}, {`a\|b`}, {`a\\`, "b"}, {"a", "", "b"}} {
		key := gate.Key(parts...)
		require.NotContains(t, keys, key, "%q and %q", parts, keys[key])
		keys[key] = parts
	}
	require.Equal(t, `/a\|b|x`, gate.Key("/a|b", "x"))
	require.Equal(t, "", gate.Key(""))
}

func TestDecider(t *testing.T) {
	require.Equal(t, "limit", gate.ByLimit.String())
	require.Equal(t, "penalty", gate.ByPenalty.String())
	require.Equal(t, "none", (gate.ByPenalty + 1).String())
}
