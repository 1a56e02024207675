package faultlab

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// A node that is started again answers at the same address, and knows nothing.
func TestNode(t *testing.T) {
	ctx := context.Background()
	n := StartNode(t)
	client := n.Client(t)
	require.NoError(t, client.Set(ctx, "key", "value", time.Minute).Err())
	n.Kill()
	quick := n.Client(t, func(o *redis.Options) { o.DialerRetries, o.MaxRetries = 1, -1 })
	require.ErrorContains(t, quick.Ping(ctx).Err(), "refused")
	n.Restart(t)
	require.Eventually(t, func() bool { return client.Get(ctx, "key").Err() == redis.Nil }, 10*time.Second, time.Millisecond)
	require.NoError(t, n.Stop())
	n.Kill()
	n.Kill()
}

// A master that is silent for a second and a half stays the master, until a test wants it replaced; a killed one is replaced then, the
// client follows, and the replicated keys are there.
func TestSentinel(t *testing.T) {
	ctx := context.Background()
	s := StartSentinel(t, 2)
	require.Same(t, s.Master, s.Current())
	client := s.Client(t)
	require.NoError(t, client.Set(ctx, "key", "value", time.Minute).Err())
	for _, r := range s.Replicas {
		r.InStep(t, s.Master)
	}
	require.NoError(t, s.Master.Stop())
	time.Sleep(1500 * time.Millisecond)
	require.NoError(t, s.Master.Continue())
	for _, n := range s.Sentinels {
		sentinel := redis.NewSentinelClient(&redis.Options{Addr: n.Addr})
		require.NoError(t, s.knows(sentinel), "as it did at first")
		require.NoError(t, sentinel.Close())
	}
	require.Same(t, s.Master, s.Current())
	s.ReplaceSoon(t)
	s.Master.Kill()
	now := s.AwaitFailover(t, s.Master)
	require.Contains(t, s.Replicas, now)
	require.NoError(t, redistest.Poll(20*time.Second, func() error { return client.Set(ctx, "other", "value", time.Minute).Err() }))
	require.Equal(t, "value", client.Get(ctx, "key").Val())
	require.Equal(t, "value", now.Client(t).Get(ctx, "other").Val())
}
