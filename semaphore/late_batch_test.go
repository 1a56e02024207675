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

// tardy is a store that finds one batch past its deadline, while late is set, and decides nothing in it.
type tardy struct {
	store.Store
	late atomic.Bool
}

func (s *tardy) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	if s.late.Swap(false) {
		return &store.Report{Late: true, Now: time.Now().UnixMicro()}, nil
	}
	return s.Store.Apply(ctx, b)
}

// A batch that the store found past its deadline is sent again, whatever is in it: a request, a renewal, a change of the limit, a release.
func TestLateBatchIsSentAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		late := &tardy{Store: place}
		const lease = 9 * time.Second
		s, err := semaphore.New(late, "x", 1, semaphore.WithLease(lease))
		require.NoError(t, err)
		limited, cancel := context.WithTimeout(ctx, 20*lease)
		defer cancel()

		late.late.Store(true)
		p, err := s.Acquire(limited, 1)
		require.NoError(t, err)
		require.False(t, late.late.Load())

		time.Sleep(lease/3 - time.Millisecond)
		late.late.Store(true)
		time.Sleep(2 * lease)
		require.False(t, late.late.Load())
		require.NoError(t, p.Context().Err(), "it is renewed")

		late.late.Store(true)
		require.NoError(t, s.SetPermits(limited, 2))
		require.False(t, late.late.Load())

		late.late.Store(true)
		require.NoError(t, p.Release(limited))
		require.False(t, late.late.Load())
		require.NoError(t, s.Close(ctx))
	})
}

// belated is a store whose Listen begins late. It counts the calls.
type belated struct {
	store.Store
	by      time.Duration
	listens atomic.Int64
}

func (s *belated) Listen(ctx context.Context, process string, ready func(), grant func(store.Grant)) error {
	s.listens.Add(1)
	time.Sleep(s.by)
	return s.Store.Listen(ctx, process, ready, grant)
}

// A process that begins to listen sends its waiters again, because their grants may have been missed.
func TestGrantBeforeListening(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		s, err := semaphore.New(&belated{Store: place, by: 100 * time.Millisecond}, "x", 1)
		require.NoError(t, err)
		other := new(faulty).process(t, place, 1)
		p, err := other.Acquire(ctx, 1)
		require.NoError(t, err)
		got := make(chan error, 1)
		began := time.Now()
		go func() {
			_, err := s.Acquire(ctx, 1)
			got <- err
		}()
		synctest.Wait()
		require.NoError(t, p.Release(ctx))
		require.NoError(t, <-got)
		require.Less(t, time.Since(began), 110*time.Millisecond)
		require.NoError(t, s.Close(ctx))
	})
}

// A process whose grants arrive goes on listening on its connection.
func TestGrantsAreCounted(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		counted := &belated{Store: place}
		s, err := semaphore.New(counted, "x", 1)
		require.NoError(t, err)
		other := new(faulty).process(t, place, 1)
		for range 5 {
			p, err := other.Acquire(ctx, 1)
			require.NoError(t, err)
			got := make(chan *semaphore.Permit, 1)
			go func() {
				p, err := s.Acquire(ctx, 1)
				if err != nil {
					t.Error(err)
				}
				got <- p
			}()
			time.Sleep(time.Second)
			require.NoError(t, p.Release(ctx))
			granted := <-got
			waits := make(chan error, 1)
			go func() {
				_, err := s.TryAcquire(ctx, 1, 2*time.Second)
				waits <- err
			}()
			require.ErrorIs(t, <-waits, semaphore.ErrRefused)
			require.NoError(t, granted.Release(ctx))
		}
		require.EqualValues(t, 1, counted.listens.Load())
		require.NoError(t, s.Close(ctx))
	})
}

// failing is a store that returns an error for one batch, which it has not decided, while fail is set, and delays one reply by delay.
type failing struct {
	store.Store
	fail  atomic.Bool
	delay atomic.Int64
}

func (s *failing) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	if s.fail.Swap(false) {
		return nil, semaphore.ErrStoreUnusable
	}
	report, err := s.Store.Apply(ctx, b)
	time.Sleep(time.Duration(s.delay.Swap(0)))
	return report, err
}

// A release that failed is sent again, although its caller has the error: others need not wait for the end of the lease.
func TestFailedReleaseIsSentAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		f := &failing{Store: place}
		s, err := semaphore.New(f, "x", 1)
		require.NoError(t, err)
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		f.fail.Store(true)
		require.ErrorIs(t, p.Release(ctx), semaphore.ErrStoreUnusable)
		other := new(faulty).process(t, place, 1)
		_, err = other.TryAcquire(ctx, 1, time.Second)
		require.NoError(t, err)
		require.NoError(t, s.Close(ctx))
	})
}

// A grant whose reply took nearly as long as the lease is not handed out. The request is sent again, and the permit has a new lease.
func TestGrantOfAnOldLease(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		const lease = 2 * time.Second
		f := &failing{Store: place}
		s, err := semaphore.New(f, "x", 1, semaphore.WithLease(lease), semaphore.WithStoreTimeout(10*time.Second))
		require.NoError(t, err)
		f.delay.Store(int64(lease - lease/20))
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, p.Err())
		require.NoError(t, p.Release(ctx))
		require.NoError(t, s.Close(ctx))
	})
}

// emptied is a store that can lose its state.
type emptied struct {
	store.Store
	state atomic.Pointer[semaphoremodel.Store]
}

func (s *emptied) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	return s.state.Load().Apply(ctx, b)
}

func (s *emptied) Listen(ctx context.Context, process string, ready func(), grant func(store.Grant)) error {
	return s.state.Load().Listen(ctx, process, ready, grant)
}

// A process whose next report shows that the store has lost its state sends its waiters again at once.
func TestWaitersOfALostState(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		f := &emptied{Store: place}
		f.state.Store(place)
		s, err := semaphore.New(f, "x", 1)
		require.NoError(t, err)
		other := new(faulty).process(t, place, 1)
		_, err = other.Acquire(ctx, 1)
		require.NoError(t, err)
		got := make(chan error, 1)
		go func() {
			_, err := s.Acquire(ctx, 1)
			got <- err
		}()
		synctest.Wait()
		f.state.Store(new(semaphoremodel.Store))
		began := time.Now()
		require.NoError(t, <-got)
		require.Less(t, time.Since(began), 2*time.Second, "two heartbeats")
		require.NoError(t, s.Close(ctx))
	})
}
