package semaphore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// The process of a holder can no longer reach Redis while its work goes on: the context of the work ends before another holder is admitted.
// All times are of one monotonic clock.
func TestWorkIsToldBeforeTheNextHolder(t *testing.T) {
	t.Parallel()
	_, client := server(t)
	addr := client.Options().Addr
	type outcome struct {
		streams             []stream
		lease, told, margin time.Duration
		late                time.Duration // how late a goroutine was woken then
	}
	const repetitions = 25
	outcomes := make([]outcome, repetitions)
	late := faultlab.MeasureLateness(t)
	random := faultlab.Seed(t)
	var running sync.WaitGroup
	for i := range repetitions {
		lease := time.Duration(3000+150*i) * time.Millisecond // renewed in time, however slow the machine
		streams := []stream{requests, replies}
		if i%5 == 4 { // Redis receives the renewals, and their replies are lost
			streams = streams[1:]
		}
		g := startGate(t, addr)
		name := fmt.Sprint("told", i)
		cut := open(t, g.addr, name, 1, semaphore.WithLease(lease), semaphore.WithStoreTimeout(lease/3))
		other := open(t, addr, name, 1, semaphore.WithLease(lease))
		p, err := cut.Acquire(ctx, 1)
		for ; errors.Is(err, semaphore.ErrStoreTimeout); p, err = cut.Acquire(ctx, 1) { // a second is little for a busy machine
		}
		require.NoError(t, err)
		pause := time.Duration(random.Int64N(int64(lease))) // it is renewed meanwhile, or not yet
		running.Go(func() {
			admitted := make(chan time.Time, 1)
			running.Go(func() {
				q, err := other.Acquire(ctx, 1)
				if assert.NoError(t, err) {
					admitted <- time.Now()
					assert.Greater(t, q.Fence(), p.Fence())
					assert.NoError(t, q.Release(ctx))
				}
			})
			time.Sleep(pause)
			assert.NoError(t, p.Context().Err())
			stopped := time.Now()
			g.stop(true, streams...)
			<-p.Context().Done()
			told := time.Now()
			assert.ErrorIs(t, context.Cause(p.Context()), semaphore.ErrExpired)
			margin := (<-admitted).Sub(told)
			outcomes[i] = outcome{streams, lease, told.Sub(stopped), margin, late.Since(told.Add(-lease / 10))}
			assert.ErrorIs(t, p.Release(ctx), semaphore.ErrExpired)
			g.stop(false, streams...)
			p, err := cut.Acquire(ctx, 1)
			for ; errors.Is(err, semaphore.ErrStoreTimeout); p, err = cut.Acquire(ctx, 1) { // it takes a moment
			}
			if assert.NoError(t, err) {
				assert.NoError(t, p.Release(ctx))
			}
		})
	}
	running.Wait()
	least := slices.MinFunc(outcomes, func(a, b outcome) int { return int(a.margin - b.margin) })
	counted := 0
	for _, o := range outcomes {
		t.Logf("lease %v: told %v after %v was cut off, %v before the next (%.2f leases)", o.lease, o.told.Round(time.Millisecond),
			map[int]string{1: "replies", 2: "all"}[len(o.streams)], o.margin.Round(time.Millisecond), float64(o.margin)/float64(o.lease))
		// The work ends when another goroutine is woken by a timer and then wakes it: each may be late.
		require.LessOrEqual(t, o.told, o.lease-o.lease/10+3*o.late+200*time.Millisecond)
		require.GreaterOrEqual(t, o.margin, o.lease/10-3*o.late)
		if 3*o.late < o.lease/10 { // else this machine cannot keep any such promise
			counted++
			require.Positive(t, o.margin)
		}
	}
	t.Logf("the least margin was %v of a lease of %v, when somebody was woken %v late; %d counted", least.margin, least.lease, least.late, counted)
	require.GreaterOrEqual(t, counted, 5)
}
