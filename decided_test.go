package tokenbucket_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// recording is a store that looks into the batches that it hands on, and records the states before and after each change.
type recording struct {
	tb.Store
	times         []int64
	decided       []tb.Decision
	refunds       int
	before, after []tb.PermitBucket
}

// Apply implements Store.
func (s *recording) Apply(ctx context.Context, b *tb.Batch) error {
	recorded := tb.Batch{Names: b.Names, Decide: func(now int64, states [][]byte) ([][]byte, time.Duration, error) {
		next, ttl, err := b.Decide(now, states)
		if err == nil && next[0] != nil {
			var before, after tb.PermitBucket
			if err := before.UnmarshalText(states[0]); err != nil {
				return nil, 0, err
			}
			if err := after.UnmarshalText(next[0]); err != nil {
				return nil, 0, err
			}
			s.before, s.after = append(s.before, before), append(s.after, after)
		}
		return next, ttl, err
	}}
	err := s.Store.Apply(ctx, &recorded)
	now, decisions, refunds := b.Decided()
	s.refunds += refunds
	for _, d := range decisions {
		s.times, s.decided = append(s.times, now), append(s.decided, d)
	}
	return err
}

// Batch.Decided returns the grants of a batch. Applied to a copy of the earlier bucket, they result in the new bucket.
func TestDecided(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s := &recording{Store: tb.NewMemoryStore()}
		l := bursty(t, 10, tb.WithStore(s), tb.WithMaxPermits(3), tb.WithInitialPermits(3))
		for i, n := range []int{1, 2, 3, 1} {
			ok, err := l.TryAcquire(ctx, n, 100*time.Millisecond)
			require.NoError(t, err)
			require.Equal(t, n != 3, ok, i)
			time.Sleep(20 * time.Millisecond) // so that each is a batch
		}
		r, err := l.Reserve(ctx, 2)
		require.NoError(t, err)
		require.NoError(t, r.Cancel(ctx))
		require.Equal(t, 1, s.refunds)

		written := 0
		for i, d := range s.decided {
			require.Equal(t, l.Name(), d.Bucket)
			if !d.Granted {
				require.Greater(t, d.Wait, 100*time.Millisecond)
				continue
			}
			if b := s.before[written]; written == 0 {
				wait, ok := b.Take(s.times[i], 1, time.Hour)
				require.Zero(t, wait)
				require.False(t, ok, "there is no bucket yet")
			} else {
				wait, ok := b.Take(s.times[i], d.Permits, time.Hour)
				require.True(t, ok)
				require.Equal(t, d.Wait, wait)
				b.Tail = s.after[written].Tail // which has a nonce
				require.Equal(t, s.after[written], b)
			}
			written++
		}
		require.Equal(t, 4, written)

		now, decisions, refunds := new(tb.Batch).Decided()
		require.Zero(t, now)
		require.Empty(t, decisions)
		require.Zero(t, refunds)
		require.ErrorIs(t, new(tb.PermitBucket).UnmarshalText([]byte("nonsense")), tb.ErrCorruptState)
	})
}

// Take changes a copy alone, and takes nothing that falls due too late.
func TestTake(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		l := bursty(t, 10, tb.WithMaxPermits(3), tb.WithInitialPermits(3))
		b, err := l.State(ctx)
		require.NoError(t, err)
		wait, ok := b.Take(b.SeenMicros, 5, 200*time.Millisecond)
		require.True(t, ok)
		require.Equal(t, 200*time.Millisecond, wait)
		after := b
		wait, ok = b.Take(b.SeenMicros, 1, 299*time.Millisecond)
		require.False(t, ok)
		require.Equal(t, 300*time.Millisecond, wait)
		require.Equal(t, after, b)
		for _, n := range []int{0, -1} {
			_, ok = b.Take(b.SeenMicros, n, time.Hour)
			require.False(t, ok)
		}
		b, err = l.State(ctx)
		require.NoError(t, err)
		require.Equal(t, 3.0, b.StoredPermits)
	})
}
