package engine

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Each permit of a lease is used by exactly one caller, also while the lease is given up.
func TestLeaseTakeOnce(t *testing.T) {
	for range 200 {
		e := &lease{limiter: new(Limiter), permits: 1000, until: 1 << 60, half: 500, left: Seen{Terms: terms(time.Second, 1000)},
			place: permit.Place{Before: permit.Balance{Stored: 1000}}}
		var given, lows atomic.Int64
		var callers sync.WaitGroup
		for range 8 {
			callers.Go(func() {
				for n := int64(1); ; n = n%3 + 1 {
					ok, low := e.take(n, 0)
					if !ok {
						return
					}
					given.Add(n)
					if low {
						lows.Add(1)
					}
				}
			})
		}
		var unused int64
		callers.Go(func() {
			if rand.IntN(2) == 0 {
				s := leases{outbox: new(outbox)}
				if s.giveUp(e); len(s.outbox.refunds) > 0 {
					unused = int64(s.outbox.refunds[0].give.Spent)
				}
			}
		})
		callers.Wait()
		require.LessOrEqual(t, given.Load()+unused, int64(1000))
		require.LessOrEqual(t, lows.Load(), int64(1))
		if unused > 0 {
			require.Equal(t, int64(1000), given.Load()+unused)
		}
	}
}

// No permit is used after the end of the lease, or after the lease was given up. A permit that is put back can be used once more.
func TestLeaseEnds(t *testing.T) {
	e := &lease{limiter: new(Limiter), permits: 2, until: 1000, half: 1, left: Seen{Terms: terms(time.Second, 2)}}
	ok, _ := e.take(1, 1000)
	require.False(t, ok)
	ok, low := e.take(1, 999)
	require.True(t, ok && low)
	e.putBack(1)
	ok, _ = e.take(2, 999)
	require.True(t, ok)
	ok, _ = e.take(1, 999)
	require.False(t, ok)
	s := leases{outbox: new(outbox)}
	s.giveUp(e)
	e.putBack(1)
	ok, _ = e.take(1, 999)
	require.False(t, ok)
	require.Zero(t, e.unused(999))
}
