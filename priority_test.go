package tokenbucket_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	. "github.com/go-tokenbucket/tokenbucket"
)

func TestParsePriority(t *testing.T) {
	for name, want := range map[string]Priority{"": Normal, "normal": Normal, "Low": Low, "LOWEST": Lowest} {
		got, err := ParsePriority(name)
		require.NoError(t, err)
		require.Equal(t, want, got, name)
	}
	_, err := ParsePriority("high")
	require.ErrorIs(t, err, ErrInvalidConfig)
	require.ErrorContains(t, err, `priority "high": want normal, low or lowest`)

	for _, p := range []Priority{Normal, Low, Lowest} {
		text, err := p.MarshalText()
		require.NoError(t, err)
		var back Priority
		require.NoError(t, back.UnmarshalText(text))
		require.Equal(t, p, back)
	}
	_, err = Priority(3).MarshalText()
	require.ErrorIs(t, err, ErrInvalidConfig)
}

func TestWithPriority(t *testing.T) {
	l, err := NewSmoothBursty("x", 5)
	require.NoError(t, err)
	require.Equal(t, Normal, l.Priority())
	l, err = NewSmoothBursty("x", 5, WithPriority(Lowest))
	require.NoError(t, err)
	require.Equal(t, Lowest, l.Priority())

	_, err = NewSmoothBursty("x", 5, WithPriority(3))
	require.ErrorIs(t, err, ErrInvalidConfig)
	require.ErrorContains(t, err, "priority 3: want Normal, Low or Lowest")
	_, err = NewSmoothBursty("x", 5, WithPriority(Low), WithPrefetch(time.Second))
	require.ErrorIs(t, err, ErrInvalidConfig)
	require.ErrorContains(t, err, "none with priority low")
}

// The limiters of ForPriority share the bucket, and each is made once.
func TestForPriority(t *testing.T) {
	l, err := NewSmoothBursty("x", 0.1, WithMaxPermits(3), WithInitialPermits(3), WithLabel("y"))
	require.NoError(t, err)
	low := l.ForPriority(Low)
	require.Equal(t, Low, low.Priority())
	require.Same(t, low, l.ForPriority(Low))
	require.Same(t, l, l.ForPriority(Normal))
	require.Same(t, l, low.ForPriority(Normal))
	require.Same(t, low.ForPriority(Lowest), l.ForPriority(200))
	for i, each := range []*RateLimiter{l, low, l.ForPriority(Lowest), low, l} {
		granted, err := each.TryAcquire(context.Background(), 1, 0)
		require.NoError(t, err)
		require.Equal(t, i < 3, granted, "call %d", i)
	}
}
