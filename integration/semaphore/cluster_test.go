package semaphore

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// On a real cluster, with names that try to leave their slot.
func TestCluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	clients := []semaphore.RedisClient{cluster.Client(t), cluster.Client(t)}
	names := []string{
		"plain", "{", "}", "{}", "}{", "a{b}c", "{a}{b}", "a}:held", "%7B", "\x00\r\n", " ", "日本語", "*", "\"quoted\"",
		strings.Repeat("}", 512), "seven", "eight", "nine",
	}
	var running sync.WaitGroup
	for _, name := range names {
		running.Go(func() {
			// A busy machine with seven servers answers late, and may stand still for two seconds.
			const permits, lease, timeout = 3, 5 * time.Second, 10 * time.Second
			what := fmt.Sprintf("%.20q", name)
			var processes []*semaphore.Semaphore
			for i, client := range clients {
				s, err := semaphore.NewRedis(client, name, permits, semaphore.WithLease(lease), semaphore.WithStoreTimeout(timeout), semaphore.WithLabel(fmt.Sprint(i)))
				if !assert.NoError(t, err, what) {
					return
				}
				processes = append(processes, s)
			}
			acquire := func(s *semaphore.Semaphore, n int) *semaphore.Permit {
				limited, cancel := context.WithTimeout(ctx, 20*time.Second)
				defer cancel()
				p, err := s.Acquire(limited, n)
				assert.NoError(t, err, what)
				return p
			}
			defer func() {
				for _, s := range processes {
					assert.NoError(t, s.Close(ctx), what)
				}
			}()
			p, q := acquire(processes[0], 2), acquire(processes[1], 1)
			if p == nil || q == nil {
				return
			}
			none, err := processes[1].TryAcquire(ctx, 1, 0)
			assert.ErrorIs(t, err, semaphore.ErrRefused, what)
			assert.Nil(t, none, what)
			held, err := processes[0].Holders(ctx)
			assert.NoError(t, err, what)
			if assert.Len(t, held, 2, what) {
				assert.Equal(t, []any{p.ID(), 2, p.Fence(), "0"}, []any{held[0].ID, held[0].Permits, held[0].Fence, held[0].Label}, what)
				assert.Equal(t, []any{q.ID(), 1, q.Fence(), "1"}, []any{held[1].ID, held[1].Permits, held[1].Fence, held[1].Label}, what)
			}
			last := q.Fence()
			for i := range 20 { // from one process to the other, by Pub/Sub
				from, to := processes[i%2], processes[(i+1)%2]
				if i == 0 {
					assert.NoError(t, q.Release(ctx), what)
					q = acquire(from, 1)
				}
				got := make(chan *semaphore.Permit)
				go func() { got <- acquire(to, 1) }()
				assert.Eventually(t, func() bool {
					stats, err := from.Stats(ctx)
					return err == nil && stats.Waiting == 1
				}, 20*time.Second, 5*time.Millisecond, what)
				assert.NoError(t, q.Release(ctx), what)
				if q = <-got; q == nil {
					return
				}
				assert.Greater(t, q.Fence(), last, what)
				last = q.Fence()
			}
			time.Sleep(lease)
			assert.NoError(t, p.Context().Err(), "%s: renewed for longer than a lease", what)
			assert.NoError(t, semaphore.NewGroup(processes[1]).Done(ctx, p.ID()), what)
			assert.ErrorIs(t, p.Release(ctx), semaphore.ErrLost, what)
			assert.NoError(t, q.Release(ctx), what)
			assert.NoError(t, semaphore.NewGroup(processes[0]).Wait(ctx), what)
		})
	}
	running.Wait()
	slots := map[int64]bool{}
	for _, node := range cluster.Nodes {
		client := node.Client(t)
		if role, err := client.Do(ctx, "ROLE").Slice(); err != nil || role[0] != "master" {
			continue
		}
		keys, err := client.Keys(ctx, "semaphore:*").Result()
		require.NoError(t, err)
		for _, key := range keys {
			slot, err := client.ClusterKeySlot(ctx, key).Result()
			require.NoError(t, err)
			slots[slot] = true
		}
		require.NotEmpty(t, keys, "every node has some")
	}
	require.Len(t, slots, len(names), "the keys of a name are in one slot")
}
