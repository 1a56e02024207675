package tokenbucket

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// returns is a store that records the refunds it gets: under which max permits, and whether they were accepted.
type returns struct {
	Store
	mu    sync.Mutex
	asked int
	back  []string
}

func (s *returns) Apply(ctx context.Context, b *Batch) error {
	err := s.Store.Apply(ctx, b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	for i := range b.asked.Requests {
		if r := &b.asked.Requests[i]; r.Op == permit.GiveBack {
			s.back = append(s.back, fmt.Sprintf("%v %v", settingOf(b.asked.Terms).Size, r.Grant.OK))
		}
	}
	return err
}

// noted returns the number of batches and the refunds since the last call of noted.
func (s *returns) noted() (asked int, back []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked, back = s.asked, s.back
	s.asked, s.back = 0, nil
	return asked, back
}

// holds is how many permits are held in blocks that were leased for a limiter.
func holds(l *RateLimiter) (left int64) {
	l.limiter.Coordinator.Inspect(func(s engine.State) { left = s.LeasedFor(&l.limiter) })
	return left
}

// Two limiters of one bucket disagree in their configuration, in one process or in two. Each holds a block, and they are closed one after
// the other. Each gives back its own block, under its own configuration. The store accepts it if no other configuration was in force
// since the grant, and a refund that it refuses changes nothing.
func TestCloseOfTwoThatDisagree(t *testing.T) {
	for _, processes := range []int{1, 2} {
		for _, first := range []string{"older", "newer"} {
			t.Run(fmt.Sprintf("processes=%d, closed first: %s", processes, first), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					memory := NewMemoryStore()
					store := &returns{Store: memory}
					open := func(size float64) *RateLimiter {
						l, err := NewSmoothBursty("x", 100, WithMaxPermits(size), WithInitialPermits(size), WithPrefetch(time.Second), WithStore(store))
						require.NoError(t, err)
						for taken := 0; holds(l) == 0; taken++ {
							require.Less(t, taken, 100)
							ok, err := l.TryAcquire(background, 1, 0)
							require.NoError(t, err)
							require.True(t, ok)
							synctest.Wait()
						}
						return l
					}
					older := open(1000)
					of := map[*RateLimiter]*returns{older: store}
					if processes > 1 {
						store = &returns{Store: memory}
					}
					newer := open(500)
					of[newer] = store
					stored := func() float64 { // under the newer one's configuration, by a limiter that is in no queue
						out, err := apply(background, memory, &permit.Batch{Name: "x", Terms: &newer.own.terms, LocalMicros: newer.limiter.Coordinator.Micros})
						require.NoError(t, err)
						return out.Bucket.StoredPermits
					}
					for _, s := range of {
						_, back := s.noted()
						require.Empty(t, back)
					}
					shut := func(l, other *RateLimiter, back string) {
						kept := holds(other)
						require.NoError(t, l.Close(background))
						require.Zero(t, holds(l))
						require.Equal(t, kept, holds(other), "what the other holds stays with it")
						_, got := of[l].noted()
						require.Equal(t, []string{back}, got)
					}
					left, own := stored(), float64(holds(newer))
					if first == "older" {
						shut(older, newer, "1000 false")
						require.Equal(t, left, stored())
						shut(newer, older, "500 true")
					} else {
						shut(newer, older, "500 true")
						require.Equal(t, left+own, stored())
						shut(older, newer, "1000 false")
					}
					require.Equal(t, left+own, stored())
				})
			})
		}
	}
}

// A limiter that has leased nothing has nothing to close, whatever others of its bucket hold, or wait for.
func TestCloseLeavesOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &tardy{Store: NewMemoryStore()}
		store := &returns{Store: slow}
		open := func(opts ...Option) *RateLimiter {
			l, err := NewSmoothBursty("x", 100, append(opts, WithMaxPermits(1000), WithInitialPermits(1000), WithStore(store))...)
			require.NoError(t, err)
			return l
		}
		l, other := open(WithPrefetch(10*time.Second)), open()
		for holds(l) == 0 {
			_, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			synctest.Wait()
		}
		held := holds(l)
		store.noted()
		require.NoError(t, other.Close(background))
		asked, _ := store.noted()
		require.Zero(t, asked)
		require.Equal(t, held, holds(l))

		slow.drained(t, l, 300*time.Millisecond)
		began := time.Now()
		require.NoError(t, other.Close(background))
		require.Zero(t, time.Since(began), "it waits for no block")
		time.Sleep(time.Second)
		require.NotZero(t, holds(l))
		require.NoError(t, l.Close(background))
	})
}

// Close waits for refunds that are in flight, and for those that wait for the next batch.
func TestCloseWaitsForEarlierRefunds(t *testing.T) {
	for what, pause := range map[string]time.Duration{"waits its turn": 150 * time.Millisecond, "on its way": 250 * time.Millisecond} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &returns{Store: NewMemoryStore()}
				takes := time.Duration(0)
				l, err := NewSmoothBursty("x", 1000, WithMaxPermits(9000), WithInitialPermits(500), WithPrefetch(100*time.Millisecond),
					WithStore(&delayed{store, func() (there, back time.Duration) { return takes, 0 }}))
				require.NoError(t, err)
				for holds(l) == 0 {
					_, err := l.TryAcquire(background, 1, 0)
					require.NoError(t, err)
					synctest.Wait()
				}
				takes = 200 * time.Millisecond
				go func() { _, _ = l.State(background) }()
				time.Sleep(pause)
				require.Zero(t, holds(l), "the block has had its time")
				_, back := store.noted()
				require.Empty(t, back)
				require.NoError(t, l.Close(background))
				_, back = store.noted()
				require.NotEmpty(t, back)
				require.NotContains(t, back, "9000 false")
				time.Sleep(time.Second)
				_, back = store.noted()
				require.Empty(t, back)
			})
		})
	}
}
