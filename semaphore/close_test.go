package semaphore_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// gate is a hook that holds back the replies of scripts.
type gate struct {
	shut    atomic.Bool
	arrived chan struct{}
	open    chan struct{}
}

func (g *gate) DialHook(next redis.DialHook) redis.DialHook { return next }

func (g *gate) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (g *gate) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Name() == "evalsha" && g.shut.CompareAndSwap(true, false) {
			g.arrived <- struct{}{}
			<-g.open
		}
		return err
	}
}

// Close waits for the trips that callers make themselves, and releases the permits that these have just been granted. Then the client may be
// closed.
func TestCloseBesideACaller(t *testing.T) {
	server := redistest.Shared(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr, ContextTimeoutEnabled: true})
	g := &gate{arrived: make(chan struct{}), open: make(chan struct{})}
	client.AddHook(g)
	open := func(client semaphore.RedisClient) *semaphore.Semaphore {
		s, err := semaphore.NewRedis(client, t.Name(), 1, semaphore.WithStoreTimeout(10*time.Second))
		require.NoError(t, err)
		return s
	}
	s, other := open(client), open(server.Client(t))
	for range 5 { // until callers make trips themselves
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, p.Release(ctx))
		time.Sleep(time.Millisecond)
	}
	g.shut.Store(true)
	acquired := make(chan error, 1)
	go func() {
		_, err := s.Acquire(ctx, 1)
		acquired <- err
	}()
	<-g.arrived
	closed := make(chan error, 1)
	go func() { closed <- s.Close(ctx) }()
	select {
	case <-closed:
		t.Error("Close returned during a caller's trip")
	case <-time.After(50 * time.Millisecond):
		close(g.open)
		require.NoError(t, <-closed)
	}
	require.NoError(t, client.Close())
	if !t.Failed() {
		require.ErrorIs(t, <-acquired, semaphore.ErrClosed)
	}
	p, err := other.TryAcquire(ctx, 1, 0)
	require.NoError(t, err)
	require.NoError(t, p.Release(ctx))
}
