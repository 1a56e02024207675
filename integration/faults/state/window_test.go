package state

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// deafened loses replies.
type deafened struct{ on atomic.Bool }

func (d *deafened) DialHook(next redis.DialHook) redis.DialHook { return next }
func (d *deafened) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (d *deafened) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if d.on.Load() {
			<-ctx.Done()
			err = ctx.Err()
			cmd.SetErr(err)
		}
		return err
	}
}

// A window with a report to repeat serves while its slot moves, although the report's key does not exist. The report is counted afterwards.
func TestD10ReportOfAWindow(t *testing.T) {
	t.Parallel()
	const limit, share, calls = 1000, 10, 50
	cluster := redistest.StartCluster(t)
	m := newMovingSlot(t, cluster, t.Name())
	client, replies := cluster.Client(t), new(deafened)
	client.AddHook(replies)
	open := func(c *redis.ClusterClient) *slidingwindow.Limiter {
		w, err := slidingwindow.New(m.named("window"), limit, 10*time.Minute, time.Second, slidingwindow.WithRedis(c), slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(share)))
		require.NoError(t, err)
		return w
	}
	w := open(client)
	passed := 0
	allow := func() {
		ok, err := w.Allow(background)
		require.NoError(t, err)
		if ok {
			passed++
		}
	}
	until := time.Now().Add(30 * time.Second)
	allow()
	replies.on.Store(true)
	for range share {
		allow()
	}
	m.mark(t)
	replies.on.Store(false)
	for passed < calls {
		require.WithinRange(t, time.Now(), time.Time{}, until, "%d calls of %d: more than a share", passed, calls)
		allow()
		time.Sleep(10 * time.Millisecond)
	}
	m.empty(t)
	m.assign(t)
	counted := func() int {
		left, err := open(cluster.Client(t)).Remaining(background)
		require.NoError(t, err)
		return limit - left
	}
	for counted() < passed {
		require.WithinRange(t, time.Now(), time.Time{}, until, "counted")
		time.Sleep(100 * time.Millisecond)
		allow()
	}
	require.LessOrEqual(t, counted(), passed+1, "counted once; one whose reply was lost may count as well")
}
