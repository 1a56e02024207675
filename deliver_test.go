package tokenbucket

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// lagging is a store that decides every other batch by a time which has passed, as a prediction does.
type lagging struct {
	Store
	lag     time.Duration
	batches atomic.Int64
}

func (s *lagging) Apply(ctx context.Context, b *Batch) error {
	if s.batches.Add(1)%2 == 0 {
		time.Sleep(s.lag)
		return s.Store.Apply(ctx, b)
	}
	now := b.asked.LocalMicros()
	before := *b.asked
	before.LocalMicros = func() int64 { return now - s.lag.Microseconds() }
	out, err := before.ask(ctx, s.Store)
	out.local = clock.FromMicros(now)
	time.Sleep(s.lag)
	b.asked.out = *out
	return b.asked.answered(err)
}

// Every permit that was granted is used, though the store's time lies before the callers came.
func TestLaggingDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := NewSmoothBursty("x", 100, WithMaxPermits(1), WithStore(&lagging{Store: NewMemoryStore(), lag: 3 * time.Millisecond}))
		require.NoError(t, err)
		before, err := l.State(background)
		require.NoError(t, err)
		const calls = 300
		for range calls {
			ok, err := l.TryAcquire(background, 1, time.Second)
			require.NoError(t, err)
			require.True(t, ok)
			time.Sleep(rand.N(20 * time.Millisecond))
		}
		after, err := l.State(background)
		require.NoError(t, err)
		require.EqualValues(t, calls, after.Seq-max(1, before.Seq), "taken")
	})
}
