package semaphore_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// A waiter whose place the store has lost is sent again, even if the store still has its process.
func TestPlaceIsLost(t *testing.T) {
	const heartbeat = time.Second
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		var mu sync.Mutex
		var ids []string
		f := &faulty{apply: func(_ context.Context, b *store.Batch) error {
			mu.Lock()
			defer mu.Unlock()
			for _, e := range b.Enter {
				ids = append(ids, e.ID)
			}
			return nil
		}}
		a, s := new(faulty).process(t, place, 1), f.process(t, place, 1)
		held, err := a.Acquire(ctx, 1)
		require.NoError(t, err)
		got := make(chan error, 3)
		for range 3 {
			go func() {
				p, err := s.Acquire(ctx, 1)
				if err == nil {
					err = p.Release(ctx)
				}
				got <- err
			}()
		}
		synctest.Wait()
		mu.Lock()
		lost := &store.Batch{Process: "b", Permits: 1, LeaseMicros: 1, Leave: ids}
		mu.Unlock()
		_, err = place.Apply(ctx, lost)
		require.NoError(t, err)
		require.NoError(t, held.Release(ctx))
		began := time.Now()
		for range 3 {
			select {
			case err := <-got:
				require.NoError(t, err)
			case <-time.After(time.Hour):
				t.Fatal("the waiter was not granted")
			}
		}
		require.LessOrEqual(t, time.Since(began), 11*heartbeat)
	})
}

// Sending many waiters again does not load the store, however short the lease.
func TestManyAskAgain(t *testing.T) {
	const many, each = 20_000, 5
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		asked := 0
		f := &faulty{apply: func(_ context.Context, b *store.Batch) error {
			asked += len(b.Enter)
			return nil
		}}
		s := f.process(t, forgetful{place}, 1, semaphore.WithLease(100*time.Millisecond))
		waiting, giveUp := context.WithCancel(ctx)
		for range many {
			go func() { _, _ = s.Acquire(waiting, 1) }()
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Greater(t, asked, 3*many)
		require.Less(t, asked, (1+each+1)*many)
		giveUp()
	})
}

// forgetful is a store that queues every request and loses its place.
type forgetful struct{ store.Store }

func (f forgetful) Apply(_ context.Context, b *store.Batch) (*store.Report, error) {
	now := time.Now().UnixMicro()
	r := &store.Report{Now: now, Permits: 1, Left: make([]store.Standing, len(b.Leave)), Renewed: make([]bool, len(b.Renew))}
	for i := range b.Enter {
		r.Entered = append(r.Entered, store.Result{Outcome: store.Queued, Ticket: now + int64(i)})
	}
	return r, nil
}

// Whichever key Redis evicts, waiters are granted.
func TestEvictedKeysOfWaiters(t *testing.T) {
	t.Parallel()
	client := redistest.Shared(t).Client(t)
	for _, part := range []string{"state", "held", "info", "queue", "procs", "idle"} {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			process := openRedis(t, client, 1, semaphore.WithLease(3*time.Second)) // long enough to be renewed in time on a slow machine
			a, b := process(), process()
			p, err := a.Acquire(ctx, 1)
			require.NoError(t, err)
			one := waits(t, b, 1)
			idle := make(chan error, 1)
			go func() { idle <- semaphore.NewGroup(b).Wait(ctx) }()
			key := func(part string) string { return strings.TrimSuffix(keyOf(t, client, "state"), "state") + part }
			require.Eventually(t, func() bool { return client.HLen(ctx, key("idle")).Val() == 1 }, 20*time.Second, time.Millisecond)
			require.NoError(t, client.Del(ctx, key(part)).Err())
			_ = p.Release(ctx)
			for what, c := range map[string]<-chan error{"permit": one, "idle": idle} {
				select {
				case err := <-c:
					require.NoError(t, err)
				case <-time.After(30 * time.Second):
					t.Error(what, "was not granted")
				}
			}
		})
	}
}

// When Redis has evicted the key of the holders, their permits are free after their leases, even if other permits are held throughout.
func TestEvictedInfo(t *testing.T) {
	const lease = 300 * time.Millisecond
	client := redistest.Shared(t).Client(t)
	process := openRedis(t, client, 3, semaphore.WithLease(lease))
	a, b := process().Labelled(spread), process().Labelled(spread)
	for range 2 {
		_, err := a.Acquire(ctx, 1)
		require.NoError(t, err)
	}
	require.NoError(t, client.Del(ctx, keyOf(t, client, "info")).Err())
	p, err := b.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, a.Close(ctx))
	two, err := b.TryAcquire(ctx, 2, 20*time.Second)
	require.NoError(t, err)
	_, _ = two.Release(ctx), p.Release(ctx) // on a slow machine they may be lost
}

// After Redis has evicted info, a release of a permit that is no longer in it frees only that permit.
func TestEvictedInfoOfSeveral(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	s, err := semaphore.NewRedis(client, fmt.Sprint(t.Name(), time.Now().UnixNano()), 10, patient)
	require.NoError(t, err)
	b := semaphore.StoreOf(s)
	apply := func(lease time.Duration, entries ...store.Entry) *store.Report {
		r, err := b.Apply(ctx, &store.Batch{Process: "a", Label: spread, LeaseMicros: lease.Microseconds(), Permits: 10, Enter: entries})
		require.NoError(t, err)
		return r
	}
	apply(time.Minute, store.Entry{ID: "five", Permits: 5})
	apply(50*time.Millisecond, store.Entry{ID: "two", Permits: 2})
	require.NoError(t, client.Del(ctx, keyOf(t, client, "info")).Err())
	time.Sleep(60 * time.Millisecond)
	got := apply(time.Minute, store.Entry{ID: "eight", Permits: 8}).Entered[0]
	require.Equal(t, store.Refused, got.Outcome)
}

// A request that is queued by a batch after its deadline is withdrawn: it must not block others.
func TestPlaceInALateAnswer(t *testing.T) {
	const timeout = 200 * time.Millisecond
	inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
		var first atomic.Bool
		s, err := semaphore.New(&wayward{place, func(decide func() (*store.Report, error)) (*store.Report, error) {
			if first.CompareAndSwap(false, true) {
				time.Sleep(3 * timeout) // it has no Deadline, for what time it is there is not known yet
			}
			return decide()
		}}, "x", 2, semaphore.WithStoreTimeout(timeout))
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close(ctx)) }()
		other := new(faulty).process(t, place, 2)
		held, err := other.Acquire(ctx, 1)
		require.NoError(t, err)
		_, err = s.Acquire(ctx, 2)
		require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
		time.Sleep(3 * timeout)
		idle := make(chan error, 1)
		go func() { idle <- semaphore.NewGroup(s).Wait(ctx) }() // so that the process has a waiter
		synctest.Wait()
		p, err := other.TryAcquire(ctx, 1, 0)
		require.NoError(t, err, "no request for permits is queued")
		require.NoError(t, p.Release(ctx))
		require.NoError(t, held.Release(ctx))
		assert.NoError(t, <-idle)
	})
}

// A leap of the server's clock ends no permit if it is less than two thirds of the lease, or a tenth of a fixed lease.
func TestLeapOfTheClock(t *testing.T) {
	const lease, jitter = 9 * time.Second, 20 * time.Millisecond
	for _, c := range []struct {
		held   semaphore.Option
		leap   time.Duration
		admits bool // a second permit is granted, in the worst case
	}{
		{semaphore.WithLease(lease), lease*2/3 - jitter, false},
		{semaphore.WithLease(lease), lease*2/3 + jitter, true},
		{semaphore.WithFixedLease(lease), lease/10 - jitter, false},
		{semaphore.WithFixedLease(lease), lease/10 + jitter, true},
	} {
		worst := false
		for _, after := range []time.Duration{0, lease/3 - jitter/2, lease/3 + jitter/2, lease / 2, lease*2/3 - jitter/2, lease*9/10 - jitter/2} {
			inBubble(t, func(t *testing.T, place *semaphoremodel.Store) {
				a, b := new(faulty).process(t, place, 1, c.held), new(faulty).process(t, place, 1)
				p, err := a.Acquire(ctx, 1)
				require.NoError(t, err)
				time.Sleep(after)
				place.Do(func(m *semaphoremodel.Model) { m.Shift(-c.leap.Microseconds()) })
				q, err := b.TryAcquire(ctx, 1, 0)
				worst = worst || err == nil && p.Err() == nil
				_, _ = q.Release(ctx), p.Release(ctx)
			})
		}
		require.Equal(t, c.admits, worst, "%+v", c)
	}
}
