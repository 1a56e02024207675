package semaphore_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// faulty is a store with hooks.
type faulty struct {
	store.Store
	apply func(ctx context.Context, b *store.Batch) error // called before a batch is decided
	asked func() error                                    // called before Stats and Holders
	told  func(g *store.Grant)                            // called before a grant is delivered
}

func (f *faulty) Stats(ctx context.Context) (store.Stats, error) {
	if f.asked != nil {
		if err := f.asked(); err != nil {
			return store.Stats{}, err
		}
	}
	return f.Store.Stats(ctx)
}

func (f *faulty) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	if f.apply != nil {
		if err := f.apply(ctx, b); err != nil {
			return nil, err
		}
	}
	return f.Store.Apply(ctx, b)
}

func (f *faulty) Listen(ctx context.Context, process string, ready func(), wake func(store.Grant)) error {
	return f.Store.Listen(ctx, process, ready, func(g store.Grant) {
		if f.told != nil {
			f.told(&g)
		}
		wake(g)
	})
}

// inBubble runs a test in a bubble of synctest, where time is exact. The bubble's clock begins in the year 2000, before this process was
// started, so it is moved on first. Permits are kept in the process.
func inBubble(t *testing.T, test func(t *testing.T, b *semaphoremodel.Store)) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(50 * 365 * 24 * time.Hour)
		test(t, new(semaphoremodel.Store))
	})
}

// process returns the semaphore of another process on the same state, with a faulty store.
func (f *faulty) process(t *testing.T, at store.Store, permits int, opts ...semaphore.Option) *semaphore.Semaphore {
	f.Store = at
	s, err := semaphore.New(f, "x", permits, opts...)
	require.NoError(t, err)
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_ = s.Close(c)
	})
	return s
}

// A permit survives renewals that fail, as long as one succeeds within its lease.
func TestRenewalsThatFail(t *testing.T) {
	const lease = 600 * time.Millisecond
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		other := new(faulty).process(t, b, 1)
		var failed atomic.Int64
		f := &faulty{apply: func(_ context.Context, b *store.Batch) error {
			if len(b.Renew) > 0 && failed.Add(1)%2 == 1 {
				return errors.New("connection reset")
			}
			return nil
		}}
		s := f.process(t, b, 1, semaphore.WithLease(lease))
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		select {
		case <-p.Context().Done():
			t.Fatal(context.Cause(p.Context()))
		case <-time.After(40 * lease):
		}
		require.Greater(t, failed.Load(), int64(80))
		none, err := other.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, semaphore.ErrRefused)
		require.Nil(t, none)
		require.NoError(t, p.Release(ctx))
	})
}

// In memory, more permits than the semaphore has are an error however many are held.
func TestMemoryOverflow(t *testing.T) {
	s, err := semaphore.NewMemory(2)
	require.NoError(t, err)
	_, err = s.Acquire(ctx, 1)
	require.NoError(t, err)
	_, err = s.Acquire(ctx, math.MaxInt)
	require.ErrorIs(t, err, semaphore.ErrTooMany)
	_, err = s.TryAcquire(ctx, 2, 0)
	require.ErrorIs(t, err, semaphore.ErrRefused)
}

// With ints of 32 bits, the sum of held and requested permits may overflow (GOARCH=386 go test).
func TestMemoryOverflowOfWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := semaphore.NewMemory(math.MaxInt32)
		require.NoError(t, err)
		most, err := s.Acquire(ctx, math.MaxInt32-1)
		require.NoError(t, err)
		one, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		got := make(chan error, 1)
		go func() {
			_, err := s.Acquire(ctx, math.MaxInt32)
			got <- err
		}()
		synctest.Wait()
		require.NoError(t, one.Release(ctx))
		synctest.Wait()
		require.Empty(t, got)
		require.NoError(t, most.Release(ctx))
		require.NoError(t, <-got)
	})
}

func keyOf(t *testing.T, client *redis.Client, part string) string {
	keys, err := client.Keys(ctx, "*"+strings.ReplaceAll(t.Name(), " ", "?")+"*:"+part).Result()
	require.NoError(t, err)
	require.Len(t, keys, 1)
	return keys[0]
}

// If Redis evicts one of the keys, the permits held are counted again: the semaphore admits no more than its permits, and does not stay
// blocked.
func TestEvictedKeys(t *testing.T) {
	t.Parallel()
	client := redistest.Shared(t).Client(t)
	for what, label := range map[string]string{"quiet": "", "state": spread, "held": spread, "info": spread} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()                  // each waits for leases to end
			const lease = 2 * time.Second // long enough to be renewed in time on a slow machine
			process := openRedis(t, client, 3, semaphore.WithLease(lease))
			a, b := process().Labelled(label), process()
			part := what
			if what == "quiet" {
				part = "state"
			}
			p, err := a.Acquire(ctx, 1)
			require.NoError(t, err)
			require.NoError(t, p.Release(ctx))
			for range 2 {
				_, err := a.Acquire(ctx, 1)
				require.NoError(t, err)
			}
			require.NoError(t, client.Del(ctx, keyOf(t, client, part)).Err())
			_, err = a.Acquire(ctx, 1)
			require.NoError(t, err)
			two, err := b.TryAcquire(ctx, 2, 0)
			require.Equal(t, what == "held" || what == "quiet", err == nil)
			if err != nil {
				require.ErrorIs(t, err, semaphore.ErrRefused)
			} else {
				require.NoError(t, two.Release(ctx))
			}
			c, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			require.NoError(t, a.Close(c))
			all, err := b.Acquire(c, 3)
			require.NoError(t, err)
			require.NoError(t, all.Release(ctx))
		})
	}
}

// Without the right to publish, calls fail, but permits that are held stay counted.
func TestNoRightToPublish(t *testing.T) {
	server := redistest.Shared(t)
	admin := server.Client(t)
	require.NoError(t, admin.Do(ctx, "ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "resetchannels").Err())
	t.Cleanup(func() { require.NoError(t, server.Client(t).Do(ctx, "ACL", "DELUSER", "mute").Err()) })
	mute := server.Client(t, func(o *redis.Options) { o.Username, o.Password = "mute", "secret" })
	name := t.Name()
	open := func(client semaphore.RedisClient) *semaphore.Semaphore {
		s, err := semaphore.NewRedis(client, name, 2, semaphore.WithLease(3*time.Second), patient)
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.Close(ctx) })
		return s
	}
	a, b := open(mute), open(admin)
	p, err := a.Acquire(ctx, 1)
	require.NoError(t, err)
	waits := make(chan *semaphore.Permit)
	go func() {
		p, err := b.Acquire(ctx, 2)
		if err != nil {
			t.Error(err)
		}
		waits <- p
	}()
	queue := strings.TrimSuffix(keyOf(t, admin, "state"), "state") + "queue"
	require.Eventually(t, func() bool { return admin.ZCard(ctx, queue).Val() == 1 }, 20*time.Second, time.Millisecond)
	err = p.Release(ctx)
	require.Error(t, err)
	require.Regexp(t, "NOPERM|ACL failure|publish|access a channel", err.Error(), "the wording depends on the server's version")
	q := <-waits // without a notification
	stats, err := b.Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, semaphore.Stats{Permits: 2, Used: 2}, stats)
	none, err := b.TryAcquire(ctx, 1, 0)
	require.ErrorIs(t, err, semaphore.ErrRefused)
	require.Nil(t, none)
	require.NoError(t, q.Release(ctx))
}

// The number of queued releases is bounded during an outage.
func TestLeavesAreBounded(t *testing.T) {
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		f := &faulty{apply: func(context.Context, *store.Batch) error { return errors.New("connection refused") }}
		s := f.process(t, b, 1, semaphore.WithLease(time.Hour))
		var calls sync.WaitGroup
		for range 64 {
			calls.Go(func() {
				for range semaphore.MaxLeaves * 5 / 4 / 64 {
					_, err := s.TryAcquire(ctx, 1, 0)
					assert.Error(t, err)
				}
			})
		}
		calls.Wait()
		require.LessOrEqual(t, semaphore.LeavesOf(s), semaphore.MaxLeaves)
		require.Greater(t, semaphore.LeavesOf(s), semaphore.MaxLeaves/2)
	})
}

// When the store hangs, a call behind many others fails as soon as they do.
func TestHungStore(t *testing.T) {
	const timeout, callers = 200 * time.Millisecond, 20_000
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		f := &faulty{apply: func(ctx context.Context, _ *store.Batch) error { <-ctx.Done(); return ctx.Err() }}
		s := f.process(t, b, 1, semaphore.WithStoreTimeout(timeout))
		var calls sync.WaitGroup
		began := time.Now()
		for range callers {
			calls.Go(func() {
				_, err := s.TryAcquire(ctx, 1, 0)
				assert.ErrorIs(t, err, semaphore.ErrStoreTimeout)
			})
		}
		calls.Wait()
		require.LessOrEqual(t, time.Since(began), timeout, "one batch after another would take 40 timeouts")
	})
}

// Callers that have given up do not count as waiters.
func TestWaitersThatHaveGone(t *testing.T) {
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		release := make(chan struct{})
		f := &faulty{apply: func(ctx context.Context, _ *store.Batch) error {
			select {
			case <-release:
			case <-ctx.Done():
			}
			return nil
		}}
		s := f.process(t, b, 1, semaphore.WithStoreTimeout(time.Minute), semaphore.WithMaxWaiters(5))
		for range 20 {
			short, cancel := context.WithTimeout(ctx, time.Millisecond)
			_, err := s.Acquire(short, 1)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		time.AfterFunc(20*time.Millisecond, func() { close(release) })
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, p.Release(ctx))
	})
}

// If the store's clock has leapt since the last report, a grant that it sends is requested again at once, because the end of the lease is
// unknown.
func TestGrantAfterALeap(t *testing.T) {
	const lease = 500 * time.Millisecond
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		a, b := new(faulty).process(t, place, 1, semaphore.WithLease(lease)), new(faulty).process(t, place, 1, semaphore.WithLease(lease))
		var leapt atomic.Bool
		f := &faulty{told: func(g *store.Grant) {
			g.Expires += time.Hour.Microseconds()
			leapt.Store(true)
		}}
		c := f.process(t, place, 1, semaphore.WithLease(lease))
		p, err := a.Acquire(ctx, 1)
		require.NoError(t, err)
		waits := make(chan *semaphore.Permit)
		go func() {
			p, err := c.Acquire(ctx, 1)
			assert.NoError(t, err)
			waits <- p
		}()
		synctest.Wait() // until it is queued and listens
		require.NoError(t, p.Release(ctx))
		q := <-waits
		require.NotNil(t, q)
		require.True(t, leapt.Load())
		none, err := b.TryAcquire(ctx, 1, 3*lease)
		require.ErrorIs(t, err, semaphore.ErrRefused)
		require.Nil(t, none, "renewed")
		require.NoError(t, q.Release(ctx))
	})
}

// Permits may be released during Close.
func TestCloseBesideReleases(t *testing.T) {
	b := new(semaphoremodel.Store)
	for range 200 {
		s := new(faulty).process(t, b, 100)
		var calls sync.WaitGroup
		for range 4 {
			p, err := s.Acquire(ctx, 1)
			require.NoError(t, err)
			calls.Go(func() {
				<-p.Context().Done()
				_ = p.Release(ctx)
				_ = s.SetPermits(ctx, 100)
			})
		}
		require.NoError(t, s.Close(ctx))
		calls.Wait()
	}
}

// A permit is renewed while it is held, and not longer: the permits of a process that has ended expire.
func TestLease(t *testing.T) {
	const lease = 300 * time.Millisecond
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		gone := &faulty{}
		a, b := gone.process(t, place, 1, semaphore.WithLease(lease)), new(faulty).process(t, place, 1, semaphore.WithLease(lease))
		p, err := a.Acquire(ctx, 1)
		require.NoError(t, err)
		none, err := b.TryAcquire(ctx, 1, 30*lease)
		require.ErrorIs(t, err, semaphore.ErrRefused)
		require.Nil(t, none, "renewed")
		require.NoError(t, p.Context().Err())
		require.NoError(t, p.Release(ctx))
		q, err := b.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.NotNil(t, q)

		place.Do(func(m *semaphoremodel.Model) { m.Drop() })
		<-q.Context().Done()
		require.ErrorIs(t, context.Cause(q.Context()), semaphore.ErrLost)
		err = q.Release(ctx)
		require.ErrorIs(t, err, semaphore.ErrLost)
		require.ErrorContains(t, err, q.ID())
		require.ErrorIs(t, q.Release(ctx), semaphore.ErrLost, "a second Release returns the same")

		// The lease of a silent process ends, and not before its time.
		began := time.Now()
		_, err = place.Apply(ctx, &store.Batch{Process: "dead", Permits: 1, LeaseMicros: lease.Microseconds(), Enter: []store.Entry{{ID: "x", Permits: 1}}})
		require.NoError(t, err)
		q, err = b.Acquire(ctx, 1)
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(began), lease)
		require.Less(t, time.Since(began), lease+50*time.Millisecond)
		require.NoError(t, q.Release(ctx))
	})
}

// During an outage, a permit's context ends before its lease does; calls fail by their deadline.
func TestStoreUnavailable(t *testing.T) {
	const lease, timeout = 500 * time.Millisecond, 200 * time.Millisecond
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		var mu sync.Mutex
		var stopped chan struct{} // if not nil, no call returns until it is closed; contexts are ignored
		hang := &faulty{apply: func(context.Context, *store.Batch) error {
			mu.Lock()
			open := stopped
			mu.Unlock()
			if open != nil {
				<-open
			}
			return nil
		}}
		a := hang.process(t, place, 1, semaphore.WithLease(lease), semaphore.WithStoreTimeout(timeout))
		b := hang.process(t, place, 1, semaphore.WithLease(lease), semaphore.WithStoreTimeout(timeout))
		p, err := a.Acquire(ctx, 1)
		require.NoError(t, err)
		mu.Lock()
		stopped = make(chan struct{})
		mu.Unlock()
		began := time.Now()
		<-p.Context().Done()
		require.ErrorIs(t, context.Cause(p.Context()), semaphore.ErrExpired)
		require.Less(t, time.Since(began), lease)
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		began = time.Now()
		_, err = b.Acquire(short, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 100*time.Millisecond, time.Since(began))
		_, err = b.Acquire(ctx, 1)
		require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
		require.LessOrEqual(t, time.Since(began), 100*time.Millisecond+timeout)
		require.ErrorIs(t, p.Release(ctx), semaphore.ErrExpired)
		mu.Lock()
		close(stopped)
		stopped = nil
		mu.Unlock()
		q, err := b.TryAcquire(ctx, 1, 20*time.Second)
		require.NoError(t, err)
		require.NotNil(t, q)
		require.NoError(t, q.Release(ctx))
	})
}

// wayward is a store whose calls pass through a function, and which ignores contexts.
type wayward struct {
	store.Store
	way func(decide func() (*store.Report, error)) (*store.Report, error)
}

func (w *wayward) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	return w.way(func() (*store.Report, error) { return w.Store.Apply(context.WithoutCancel(ctx), b) })
}

// The permits of a batch that is decided after its callers have failed are released.
func TestAnswerAfterTheTimeout(t *testing.T) {
	const timeout = 200 * time.Millisecond
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		var first atomic.Bool
		s, err := semaphore.New(&wayward{place, func(decide func() (*store.Report, error)) (*store.Report, error) {
			if first.CompareAndSwap(false, true) {
				time.Sleep(3 * timeout) // the batch has no Deadline yet, because the store's clock is unknown
			}
			return decide()
		}}, "x", 1, semaphore.WithStoreTimeout(timeout), semaphore.WithLease(time.Hour))
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close(ctx)) }()
		began := time.Now()
		_, err = s.Acquire(ctx, 1)
		require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
		require.Equal(t, timeout, time.Since(began))
		time.Sleep(3 * timeout)
		p, err := new(faulty).process(t, place, 1).TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.NotNil(t, p)
		require.NoError(t, p.Release(ctx))
	})
}

// A waiter whose grant was in a lost report gets its permit.
func TestGrantInALostAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		var lose atomic.Bool
		s, err := semaphore.New(&wayward{place, func(decide func() (*store.Report, error)) (*store.Report, error) {
			r, err := decide()
			if lose.CompareAndSwap(true, false) {
				return nil, errors.New("connection reset")
			}
			return r, err
		}}, "x", 1)
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close(ctx)) }()
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		waits, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		got := make(chan *semaphore.Permit)
		go func() {
			q, err := s.Acquire(waits, 1)
			assert.NoError(t, err)
			got <- q
		}()
		synctest.Wait() // until it is queued
		lose.Store(true)
		require.Error(t, p.Release(ctx))
		began := time.Now()
		q := <-got
		require.NotNil(t, q)
		require.Less(t, time.Since(began), time.Second)
		require.NoError(t, q.Release(ctx))
	})
}

// In memory, a release by id does not make the ids of all other permits under the lock.
func TestMemoryReleasedByItsIDAmongMany(t *testing.T) {
	s, err := semaphore.NewMemory(2000)
	require.NoError(t, err)
	g := semaphore.NewGroup(s)
	var ids []string
	for range 2000 {
		p, err := g.Add(ctx)
		require.NoError(t, err)
		ids = append(ids, p.ID())
	}
	require.Less(t, testing.AllocsPerRun(len(ids)/2, func() {
		require.NoError(t, g.Done(ctx, ids[0]))
		ids = ids[1:]
	}), 20.0)
	for _, wrong := range []string{ids[0] + "0", "-" + ids[0], ids[0][:len(ids[0])-1], strings.ToUpper(ids[0]), "x", "0"} {
		require.ErrorIs(t, g.Done(ctx, wrong), semaphore.ErrNotHeld, wrong)
	}
}
