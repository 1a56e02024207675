package semaphore_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// Close may run while the requests of a batch that was too late by the store's clock are queued again.
func TestCloseAfterLate(t *testing.T) {
	for range 1000 {
		late := make(chan struct{})
		var first atomic.Bool
		s, err := semaphore.New(&wayward{new(semaphoremodel.Store), func(decide func() (*store.Report, error)) (*store.Report, error) {
			if first.CompareAndSwap(false, true) {
				close(late)
				return &store.Report{Now: 1, Late: true}, nil
			}
			return decide()
		}}, "x", 1)
		require.NoError(t, err)
		var callers sync.WaitGroup
		callers.Go(func() {
			if _, err := s.Acquire(ctx, 1); err != nil {
				assert.ErrorIs(t, err, semaphore.ErrClosed)
			}
		})
		<-late
		require.NoError(t, s.Close(ctx))
		callers.Wait()
	}
}

// A batch has at most 512 releases, even if more callers release right after a failure.
func TestManyReleasesAfterAnError(t *testing.T) {
	const many = 2000
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		most, fail := 0, false
		f := &faulty{apply: func(_ context.Context, b *store.Batch) error {
			most = max(most, len(b.Leave))
			if fail {
				fail = false
				return errReset
			}
			time.Sleep(time.Millisecond)
			return nil
		}}
		s := f.process(t, place, many)
		var all []*semaphore.Permit
		for range many {
			p, err := s.Acquire(ctx, 1)
			require.NoError(t, err)
			all = append(all, p)
		}
		fail = true
		_, err := s.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, errReset)
		began := time.Now()
		var callers sync.WaitGroup
		for _, p := range all {
			callers.Go(func() { assert.NoError(t, p.Release(ctx)) })
		}
		callers.Wait()
		synctest.Wait()
		require.LessOrEqual(t, most, 512)
		require.Less(t, time.Since(began), 100*time.Millisecond)
	})
}
