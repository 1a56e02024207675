package semaphore_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// dice makes random numbers for many goroutines.
type dice struct {
	mu   sync.Mutex
	rand *rand.Rand
}

func (d *dice) below(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rand.IntN(n)
}

func (d *dice) upTo(most time.Duration) time.Duration { return time.Duration(d.below(int(most))) }

// unsteady is a store with every kind of fault: batches are slow, lost, or decided after their deadline; replies are lost; notifications of
// grants are lost or late.
type unsteady struct {
	store.Store
	*dice
	calm *bool     // guarded by dice.mu
	cut  time.Time // nothing arrives before; guarded by dice.mu
}

var errReset = errors.New("connection reset")

func (u *unsteady) one(in int) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return !*u.calm && u.rand.IntN(in) == 0
}

// isCut reports whether nothing arrives now. A cut begins at random, and ends when the store is calm.
func (u *unsteady) isCut() bool {
	begins := u.one(300)
	lasts := u.upTo(10 * time.Second)
	u.mu.Lock()
	defer u.mu.Unlock()
	if begins {
		u.cut = time.Now().Add(lasts)
	}
	return !*u.calm && time.Now().Before(u.cut)
}

func (u *unsteady) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	decide := func() (*store.Report, error) { return u.Store.Apply(context.WithoutCancel(ctx), b) }
	time.Sleep(u.upTo(2 * time.Millisecond))
	switch {
	case u.isCut(), u.one(30):
		return nil, errReset
	case u.one(30):
		go func() {
			time.Sleep(u.upTo(700 * time.Millisecond))
			_, _ = decide()
		}()
		time.Sleep(u.upTo(time.Millisecond))
		return nil, errReset
	case u.one(30):
		time.Sleep(u.upTo(2 * time.Second))
	}
	r, err := decide()
	switch {
	case u.one(30):
		return nil, errReset
	case u.one(30):
		time.Sleep(u.upTo(2 * time.Second))
	}
	time.Sleep(u.upTo(2 * time.Millisecond))
	return r, err
}

func (u *unsteady) Listen(ctx context.Context, process string, ready func(), wake func(store.Grant)) error {
	if u.one(10) {
		return errReset
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if u.one(5) {
		time.AfterFunc(u.upTo(5*time.Second), cancel)
	}
	return u.Store.Listen(ctx, process, ready, func(g store.Grant) {
		switch {
		case u.one(10):
			return
		case u.one(10):
			time.Sleep(u.upTo(300 * time.Millisecond))
		}
		wake(g)
	})
}

// Under every kind of fault, never more permits are held than there are, every call ends, and in the end all permits are free.
func TestAnythingGoesWrong(t *testing.T) {
	for seed := range uint64(3) {
		inBubble(t, func(t *testing.T, place *semaphoremodel.Store) { anythingGoesWrong(t, place, seed) })
		if t.Failed() {
			t.Log("seed", seed)
			return
		}
	}
}

// bounded calls a function that may fail but must return.
func bounded(call func(ctx context.Context) error) error {
	c, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	if err := call(c); errors.Is(err, context.DeadlineExceeded) && c.Err() != nil {
		return err
	}
	return nil
}

func anythingGoesWrong(t *testing.T, place *semaphoremodel.Store, seed uint64) {
	const permits, lease, heartbeat = 3, 2 * time.Second, 2 * time.Second / 3
	calm := false
	d := &dice{rand: rand.New(rand.NewPCG(seed, 2))}
	var mu sync.Mutex
	held := map[*semaphore.Permit]bool{}
	grants := 0
	granted := func(p *semaphore.Permit) {
		mu.Lock()
		defer mu.Unlock()
		held[p] = true
		grants++
		used := 0
		for p := range held {
			if p.Err() == nil {
				used += p.Permits()
			}
		}
		assert.LessOrEqual(t, used, permits)
	}
	released := func(p *semaphore.Permit) {
		mu.Lock()
		defer mu.Unlock()
		delete(held, p)
	}
	load, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	ever, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var callers sync.WaitGroup
	var all []*semaphore.Semaphore
	for range 3 {
		s, err := semaphore.New(&unsteady{Store: place, dice: d, calm: &calm}, "x", permits, semaphore.WithLease(lease), semaphore.WithStoreTimeout(500*time.Millisecond))
		require.NoError(t, err)
		all = append(all, s)
		for range 4 {
			callers.Go(func() {
				for load.Err() == nil {
					var p *semaphore.Permit
					var err error
					c, cancel := context.WithCancel(ctx)
					switch n := 1 + d.below(permits); d.below(4) {
					case 0:
						p, err = s.TryAcquire(ctx, n, 0)
					case 1:
						p, err = s.TryAcquire(ctx, n, d.upTo(time.Second))
					case 2:
						time.AfterFunc(d.upTo(time.Second), cancel)
						p, err = s.Acquire(c, n)
					case 3:
						p, err = s.Acquire(ever, n)
					}
					cancel()
					if err != nil {
						time.Sleep(d.upTo(50 * time.Millisecond))
						continue
					}
					granted(p)
					most := 100 * time.Millisecond
					if d.below(20) == 0 {
						most = 2 * lease
					}
					time.Sleep(d.upTo(most))
					released(p)
					_ = p.Release(ctx)
				}
			})
		}
	}
	for _, s := range all {
		callers.Go(func() {
			for load.Err() == nil {
				assert.NoError(t, bounded(semaphore.NewGroup(s).Wait))
				time.Sleep(d.upTo(time.Second))
			}
		})
		callers.Go(func() {
			for load.Err() == nil {
				switch d.below(3) {
				case 0:
					_ = s.SetPermits(ctx, permits-d.below(2))
				case 1:
					_ = s.AddPermits(ctx, -1)
				case 2:
					_ = s.ResetPermits(ctx)
				}
				time.Sleep(d.upTo(20 * time.Second))
			}
		})
	}
	<-load.Done()
	d.mu.Lock()
	calm = true
	d.mu.Unlock()
	over := make(chan struct{})
	go func() { callers.Wait(); close(over) }()
	select {
	case <-over:
	case <-time.After(time.Hour):
		t.Error("a call has not returned")
		giveUp()
		<-over
	}
	assert.NoError(t, all[0].ResetPermits(ctx))
	time.Sleep(lease + 4*heartbeat)
	for _, s := range all {
		began := time.Now()
		p, err := s.Acquire(ctx, permits)
		assert.NoError(t, err)
		assert.Less(t, time.Since(began), 50*time.Millisecond)
		assert.NoError(t, p.Release(ctx))
		live, sent, held := semaphore.LeftOf(s)
		assert.Zero(t, live+sent+held+semaphore.LeavesOf(s))
	}
	stats, err := all[0].Stats(ctx)
	assert.NoError(t, err)
	assert.Zero(t, stats.Used+stats.Waiting)
	for _, s := range all {
		assert.NoError(t, s.Close(ctx))
	}
	assert.Greater(t, grants, 20)
}
