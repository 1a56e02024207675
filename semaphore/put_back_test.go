package semaphore_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Close may come when a batch was too late by the backend's clock, and what it asked for is about to be asked for again.
func TestCloseAfterLate(t *testing.T) {
	for range 1000 {
		late := make(chan struct{})
		var first atomic.Bool
		s, err := semaphore.New(&wayward{new(semaphoremodel.Backend), func(decide func() (*semaphore.Report, error)) (*semaphore.Report, error) {
			if first.CompareAndSwap(false, true) {
				close(late)
				return &semaphore.Report{Now: 1, Late: true}, nil
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
