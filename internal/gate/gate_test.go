package gate

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
)

// What a caller is told to wait is never more than the wait, also when its deadline has passed meanwhile.
func TestSooner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct{ left, want time.Duration }{
			{-time.Hour, 3 * time.Second},
			{0, 3 * time.Second},
			{time.Second, 2 * time.Second},
			{3 * time.Second, 3 * time.Second}, // the gate has a deadline of its own
			{time.Hour, 3 * time.Second},
		} {
			ctx, cancel := context.WithTimeout(context.Background(), c.left)
			require.Equal(t, c.want, Sooner(ctx, 3*time.Second), "%v left", c.left)
			cancel()
		}
		require.Equal(t, 3*time.Second, Sooner(context.Background(), 3*time.Second))
	})
}

// answer is a gate that says what it is told to.
type answer struct {
	permit *tokenbucket.Reservation
	left   int
	err    error
}

func (a *answer) Reserve(context.Context, string) (*tokenbucket.Reservation, error) {
	return nil, errors.New("Admit is not asked")
}

func (a *answer) Admit(context.Context, string) (*tokenbucket.Reservation, func(), error) {
	return a.permit, func() { a.left++ }, a.err
}

// A call that does not begin holds nothing, whatever its gate returns. One that begins gives its place back once.
func TestAsk(t *testing.T) {
	for name, a := range map[string]*answer{"an error": {permit: new(tokenbucket.Reservation), err: context.Canceled}, "nothing": {}} {
		_, p, _ := Ask(context.Background(), a, "")
		require.Nil(t, p, name)
		require.Equal(t, 1, a.left, name)
		p.Leave()
	}
	a := &answer{permit: new(tokenbucket.Reservation)}
	_, p, err := Ask(context.Background(), a, "")
	require.NoError(t, err)
	require.Zero(t, a.left)
	p.Leave()
	p.Leave()
	require.Equal(t, 1, a.left)
}
