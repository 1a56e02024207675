package semaphore_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// slowly is a store that delays each grant by the duration that its function returns, or drops it.
type slowly struct {
	store.Store
	tell    func(g store.Grant, wake func(store.Grant))
	listens atomic.Int64
}

func (s *slowly) Listen(ctx context.Context, process string, ready func(), wake func(store.Grant)) error {
	s.listens.Add(1)
	return s.Store.Listen(ctx, process, ready, func(g store.Grant) { s.tell(g, wake) })
}

// A lost grant is detected within two heartbeats, even if an earlier grant was late.
func TestLostBehindALateOne(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		grants := 0
		slow := &slowly{Store: place, tell: func(g store.Grant, wake func(store.Grant)) {
			if grants++; grants == 1 {
				time.Sleep(10 * time.Millisecond)
				wake(g)
			}
		}}
		s, err := semaphore.New(slow, "x", 2)
		require.NoError(t, err)
		other := new(faulty).process(t, place, 2)
		one, err := other.Acquire(ctx, 1)
		require.NoError(t, err)
		two, err := other.Acquire(ctx, 1)
		require.NoError(t, err)
		got := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := s.Acquire(ctx, 1)
				got <- err
			}()
		}
		synctest.Wait()
		require.NoError(t, one.Release(ctx))
		_, err = s.TryAcquire(ctx, 1, 0) // its report counts the grant
		require.ErrorIs(t, err, semaphore.ErrRefused)
		require.NoError(t, <-got)
		require.NoError(t, two.Release(ctx))
		began := time.Now()
		require.NoError(t, <-got)
		require.LessOrEqual(t, time.Since(began), 2*time.Second)
		require.NoError(t, s.Close(ctx))
	})
}

// A grant that takes longer than a batch does not count as lost.
func TestLateIsNotLost(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		slow := &slowly{Store: place, tell: func(g store.Grant, wake func(store.Grant)) {
			time.Sleep(10 * time.Millisecond)
			wake(g)
		}}
		s, err := semaphore.New(slow, "x", 1)
		require.NoError(t, err)
		other := new(faulty).process(t, place, 1)
		p, err := other.Acquire(ctx, 1)
		require.NoError(t, err)
		got := make(chan error, 1)
		go func() {
			_, err := s.Acquire(ctx, 1)
			got <- err
		}()
		synctest.Wait()
		require.NoError(t, p.Release(ctx))
		for range 3 {
			_, err = s.TryAcquire(ctx, 1, 0)
			require.ErrorIs(t, err, semaphore.ErrRefused)
		}
		require.NoError(t, <-got)
		require.EqualValues(t, 1, slow.listens.Load(), "it does not subscribe again")
		require.NoError(t, s.Close(ctx))
	})
}

// listening is a store that counts subscriptions.
type listening struct {
	store.Store
	begun, current atomic.Int64
}

func (l *listening) Listen(ctx context.Context, process string, ready func(), grant func(store.Grant)) error {
	l.begun.Add(1)
	l.current.Add(1)
	defer l.current.Add(-1)
	return l.Store.Listen(ctx, process, ready, grant)
}

// A process stays subscribed for 5 s after its last waiter, so that waits in quick succession share a subscription.
func TestSubscriptionOutlastsWaits(t *testing.T) {
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		counted := &listening{Store: b}
		s, err := semaphore.New(counted, "x", 1)
		require.NoError(t, err)
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		wait := func() {
			_, err := s.TryAcquire(ctx, 1, 100*time.Millisecond)
			require.ErrorIs(t, err, semaphore.ErrRefused)
		}
		wait()
		for range 3 {
			time.Sleep(4 * time.Second)
			require.EqualValues(t, 1, counted.current.Load())
			wait()
		}
		require.EqualValues(t, 1, counted.begun.Load())
		time.Sleep(7 * time.Second)
		require.Zero(t, counted.current.Load(), "no request has waited for 5 s")
		wait()
		require.EqualValues(t, 2, counted.begun.Load())
		require.NoError(t, p.Release(ctx))
		require.NoError(t, s.Close(ctx))
		synctest.Wait()
		require.Zero(t, counted.current.Load(), "closed")
	})
}
