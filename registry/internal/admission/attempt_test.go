package admission

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// A call whose count is older than the window in the store allows for is counted again, once.
func TestRecount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		env := &Env{Windows: slidingwindow.New}
		b, err := env.bounds(Row{Name: "/a", Window: time.Second, WindowLimit: 10}, nil)
		require.NoError(t, err)
		a := &attempt{env: env, bounds: b, Call: Call{Cost: 1, Asked: func() {}}}
		refused, err := a.count(ctx)
		require.NoError(t, err)
		require.Nil(t, refused)
		first := a.countedAt

		time.Sleep(latest(b.lead))
		refused, err = a.recount(ctx)
		require.NoError(t, err)
		require.Nil(t, refused)
		require.Equal(t, first, a.countedAt, "the window is longer by that time")

		time.Sleep(time.Millisecond)
		refused, err = a.recount(ctx)
		require.NoError(t, err)
		require.Nil(t, refused)
		require.Equal(t, time.Now(), a.countedAt)
		left, err := b.window.Remaining(ctx)
		require.NoError(t, err)
		require.Equal(t, 9, left)
	})
}

// During an outage of the semaphores' backend a process admits its share of the concurrency by itself.
func TestLocalShare(t *testing.T) {
	for policy, want := range map[tokenbucket.FailurePolicy]int{tokenbucket.FailClosed: 0, tokenbucket.FailOpen: 6, tokenbucket.LocalShare(3): 2, tokenbucket.LocalShare(100): 1} {
		synctest.Test(t, func(t *testing.T) {
			ctx := context.Background()
			env := &Env{Policy: policy}
			b, s := &bounds{most: 6}, new(Slot)
			s.outage.began(semaphore.ErrStoreTimeout)
			var places []*place
			for range b.most + 1 {
				p, err := s.enter(ctx, b, env.localShare(b.most))
				if want == 0 {
					require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
				} else {
					require.NoError(t, err)
				}
				if p != nil {
					places = append(places, p)
				}
			}
			require.Len(t, places, want, policy)
			require.Equal(t, int64(want), s.Inside())
			for _, p := range places {
				p.leave()
				p.leave()
			}
			require.Zero(t, s.Inside())
		})
	}
}

// A call that must queue again, since a penalty has postponed it, waits only for what is left of its patience.
func TestPatienceIsSpent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		places, err := semaphore.NewMemory(1)
		require.NoError(t, err)
		env := &Env{}
		a := &attempt{env: env, slot: new(Slot), bounds: &bounds{places: places, most: 1}, patience: time.Second, Call: Call{Asked: func() {}}}
		elsewhere, err := places.Acquire(ctx, 1)
		require.NoError(t, err)
		time.AfterFunc(600*time.Millisecond, func() { _ = elsewhere.Release(ctx) })
		refused, err := a.queue(ctx)
		require.NoError(t, err)
		require.Nil(t, refused)
		require.Equal(t, int64(1), a.slot.Inside())
		require.Zero(t, a.slot.queueing.Load())

		a.untake()
		elsewhere, err = places.Acquire(ctx, 1)
		require.NoError(t, err)
		began := time.Now()
		refused, err = a.queue(ctx)
		require.NoError(t, err)
		require.NotNil(t, refused)
		require.Equal(t, 400*time.Millisecond, time.Since(began))
		require.Zero(t, a.slot.Inside())
		require.NoError(t, elsewhere.Release(ctx))
	})
}
