package tokenbucket_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	. "github.com/go-tokenbucket/tokenbucket"
)

// Close of a limiter waits for the settlements of calls that ForPriority gave another priority.
func TestCloseWaitsForSettlementsOfPriorities(t *testing.T) {
	store := &lateStore{MemoryStore: NewMemoryStore(), hold: make(chan struct{})}
	l, err := NewSmoothBursty("x", 5, WithStore(store), WithInitialPermits(5), WithStoreTimeout(10*time.Second))
	require.NoError(t, err)
	r, err := l.ForPriority(Low).TryReserve(t.Context(), 1, 0)
	require.NoError(t, err)
	require.True(t, r.OK())
	store.on.Store(true)
	r.SettleLater(3)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, l.Close(ctx), context.DeadlineExceeded, "the settlement is on its way")
	close(store.hold)
}

type lateStore struct {
	*MemoryStore
	on   atomic.Bool
	hold chan struct{}
}

func (s *lateStore) Apply(ctx context.Context, b *Batch) error {
	if s.on.Load() {
		<-s.hold
	}
	return s.MemoryStore.Apply(ctx, b)
}
