package semaphore_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// partial is a store that, while it moves, decides only releases and renewals.
type partial struct {
	store.Store
	moves    atomic.Bool
	released atomic.Int64
	renewed  atomic.Int64
}

var errMoves = errors.New("it moves")

func (p *partial) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	if !p.moves.Load() {
		return p.Store.Apply(ctx, b)
	}
	some := *b
	some.Enter = nil
	r, err := p.Store.Apply(ctx, &some)
	if err != nil {
		return nil, err
	}
	for _, was := range r.Left {
		if was == store.Holding {
			p.released.Add(1)
		}
	}
	p.renewed.Add(int64(len(r.Renewed)))
	time.Sleep(time.Millisecond)
	return nil, &store.Partial{Left: r.Left, Renewed: r.Renewed, Err: errMoves}
}

// Callers wait for a store that decides only a part of their batches, as long as they would wait for a permit. Permits that are held stay held, and
// are released at once. The first to come is the first to be served.
func TestPartial(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := t.Name() + time.Now().String()[20:29]
	vehicle, err := semaphore.NewRedis(client, name, 2)
	require.NoError(t, err)
	st := &partial{Store: semaphore.StoreOf(vehicle)}
	const timeout = 200 * time.Millisecond
	s, err := semaphore.New(st, name, 2, semaphore.WithLease(600*time.Millisecond), semaphore.WithStoreTimeout(timeout))
	require.NoError(t, err)
	defer func() { _ = s.Close(ctx) }()
	held, err := s.Acquire(ctx, 1)
	require.NoError(t, err)
	other, err := s.Acquire(ctx, 1)
	require.NoError(t, err)
	st.moves.Store(true)

	var order []int
	turns := make(chan int)
	for i := range 3 {
		go func() {
			p, err := s.Acquire(ctx, 1)
			assert.NoError(t, err)
			turns <- i
			assert.NoError(t, p.Release(ctx))
		}()
		require.NoError(t, redistest.Poll(10*time.Second, func() error {
			if live, _, _ := semaphore.LeftOf(s); live != i+1 {
				return errors.New("it has not come")
			}
			return nil
		}))
	}
	began := time.Now()
	p, err := s.TryAcquire(ctx, 1, 50*time.Millisecond)
	require.ErrorIs(t, err, semaphore.ErrRefused)
	require.Nil(t, p)
	require.NoError(t, other.Release(ctx))
	require.EqualValues(t, 1, st.released.Load())
	_, err = s.TryAcquire(ctx, 1, 0)
	require.ErrorIs(t, err, semaphore.ErrStoreTimeout, "it is unknown whether a permit is free")
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		if st.renewed.Load() < 5 || time.Since(began) < 4*timeout {
			return errors.New("too few renewals")
		}
		return nil
	}))
	require.NoError(t, held.Err())
	st.moves.Store(false)
	for range 3 {
		order = append(order, <-turns)
	}
	require.Equal(t, []int{0, 1, 2}, order)
	require.NoError(t, held.Release(ctx))
}
