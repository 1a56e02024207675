package tokenbucket_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/seam"
)

// recording is a store that looks into the batches that it hands on, and notes the states before and after.
type recording struct {
	tb.Store
	decided       []seam.Decided
	before, after []string
}

// Apply implements Store.
func (s *recording) Apply(ctx context.Context, b *tb.Batch) error {
	noted := tb.Batch{Names: b.Names, Decide: func(now int64, states [][]byte) ([][]byte, time.Duration, error) {
		next, ttl, err := b.Decide(now, states)
		if err == nil && next[0] != nil {
			s.before, s.after = append(s.before, string(states[0])), append(s.after, string(next[0]))
		}
		return next, ttl, err
	}}
	err := s.Store.Apply(ctx, &noted)
	if d := seam.DecidedIn(b); len(d.Takes)+d.Refunds > 0 {
		s.decided = append(s.decided, d)
	}
	return err
}

// What the tools of this repository see in a batch is what was decided, and the arithmetic that they ask comes to the same state.
func TestHooks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s := &recording{Store: tb.NewMemoryStore()}
		l := bursty(t, 10, tb.WithStore(s), tb.WithMaxPermits(3), tb.WithInitialPermits(3))
		for i, n := range []int{1, 2, 3, 1} {
			ok, err := l.TryAcquire(ctx, n, 100*time.Millisecond)
			require.NoError(t, err)
			require.Equal(t, n != 3, ok, i)
			time.Sleep(20 * time.Millisecond) // so that each is a batch
		}
		require.NotEmpty(t, s.decided)
		written := 0
		for _, d := range s.decided {
			require.Zero(t, d.Refunds)
			if !d.Takes[0].Granted {
				continue
			}
			takes := []seam.Take{{Permits: d.Takes[0].Permits, MaxWaitMicros: d.Takes[0].MaxWaitMicros}}
			q := seam.Question{State: s.before[written], Config: configIn(s.after[written]), Initial: 3, Epoch: epochIn(t, s.after[written])}
			state, err := seam.Answer(q, d.NowMicros, takes)
			require.NoError(t, err)
			require.Equal(t, s.after[written], state)
			require.Equal(t, d.Takes[0], takes[0])
			written++
		}
		require.Equal(t, len(s.after), written)
		require.GreaterOrEqual(t, written, 3)

		_, err := seam.Answer(seam.Question{Config: "nonsense"}, 1, nil)
		require.Error(t, err)
		_, err = seam.Answer(seam.Question{State: "nonsense", Config: configIn(s.after[0])}, 1, nil)
		require.Error(t, err)
	})
}

// configIn is the configuration at the end of a state.
func configIn(state string) string {
	fields := strings.Fields(state)
	return strings.Join(fields[len(fields)-6:], " ")
}

// epochIn is the epoch of a state.
func epochIn(t *testing.T, state string) int64 {
	t.Helper()
	var b tb.PermitBucket
	require.NoError(t, seam.Read(&b, state))
	return b.Epoch
}
