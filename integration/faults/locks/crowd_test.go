package locks

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Two hundred clients contend for one lock, each like a process of its own, and none starves: all are served long before they would give
// up.
func TestC7LockStarvation(t *testing.T) {
	const contenders, ttl = 200, 500 * time.Millisecond
	calls := 3
	if faultlab.Long() {
		calls = 30
	}
	server := redistest.Start(t)
	p := newPlace(t, server)
	many := server.Client(t, func(o *redis.Options) { o.PoolSize = contenders })
	var mu sync.Mutex
	var waits []time.Duration
	begin := make(chan struct{})
	var running sync.WaitGroup
	for range contenders {
		store := tokenbucket.NewRedisStore(many, tokenbucket.WithKeyPrefix(p.Prefix), tokenbucket.WithLockTTL(ttl))
		l := open(t, p.Name, store, tokenbucket.WithStoreTimeout(time.Minute))
		running.Go(func() {
			<-begin
			for range calls {
				began := time.Now()
				ok, err := l.TryAcquire(background, 1, 0)
				took := time.Since(began)
				mu.Lock()
				waits = append(waits, took)
				mu.Unlock()
				if err != nil || !ok && calls*contenders <= permits { // later there are none left
					t.Errorf("granted %v, %v after %v", ok, err, took)
				}
			}
		})
	}
	began := time.Now()
	close(begin)
	running.Wait()
	took := time.Since(began)
	slices.Sort(waits)
	t.Logf("%d calls waited %v in the median, p99 %v", len(waits), waits[len(waits)/2].Round(time.Millisecond),
		waits[len(waits)*99/100].Round(time.Millisecond))
	faultlab.Figure(t, fmt.Sprintf("%d calls took", len(waits)), took)
	faultlab.Figure(t, "longest wait", waits[len(waits)-1])
	require.Len(t, waits, contenders*calls)
	p.taken(min(contenders*calls, permits))
	faultlab.CleanUp(t, p.Client, p.Prefix)
}

// joining is a context that signals when its caller has joined the queue: a call asks for Done when it begins to wait.
type joining struct {
	context.Context
	once   sync.Once
	joined chan struct{}
}

func (c *joining) Done() <-chan struct{} {
	c.once.Do(func() { close(c.joined) })
	return c.Context.Done()
}

// While others keep the lock, two hundred callers of one process queue up for it. When they get it, it is in the order in
// which they came.
func TestC7FirstComeFirstServedBehindALock(t *testing.T) {
	const callers = 200
	p := newPlace(t, redistest.Start(t))
	store := tokenbucket.NewRedisStore(p.Client, tokenbucket.WithKeyPrefix(p.Prefix), tokenbucket.WithLockTTL(time.Minute))
	l, err := tokenbucket.NewSmoothBursty(p.Name, 1000, tokenbucket.WithMaxPermits(1), tokenbucket.WithInitialPermits(0),
		tokenbucket.WithStore(store), tokenbucket.WithStoreTimeout(time.Minute))
	require.NoError(t, err)
	require.NoError(t, p.Set(background, p.lock(), "somebody else", time.Minute).Err())
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	var running sync.WaitGroup
	waited := make([]time.Duration, callers)
	for i := range callers {
		c := &joining{Context: ctx, joined: make(chan struct{})}
		running.Go(func() {
			var err error
			if waited[i], err = l.Acquire(c, 1+i%3); err != nil {
				t.Error(err)
			}
		})
		<-c.joined
	}
	require.Empty(t, p.text(), "nobody was served while somebody else had the lock")
	require.NoError(t, p.Del(background, p.lock()).Err())
	running.Wait()
	// The first came alone to the store. The others' waits are counted from one answer.
	require.True(t, slices.IsSorted(waited[1:]), "%v", waited)
	require.Greater(t, waited[callers-1], waited[1])
	t.Logf("the second waited %v", waited[1])
	faultlab.Figure(t, fmt.Sprintf("the last of %d in one queue waited", callers), waited[callers-1])
	faultlab.CleanUp(t, p.Client, p.Prefix)
}
