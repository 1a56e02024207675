package gate_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// The lower of the priorities of a call and of its limit counts.
func TestPriorityOfACall(t *testing.T) {
	require.Equal(t, tokenbucket.Normal, gate.PriorityOf(t.Context()))
	var decided tokenbucket.Priority
	for _, limit := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Low, tokenbucket.Lowest} {
		l, err := tokenbucket.NewSmoothBursty(t.Name()+limit.String(), 1000, tokenbucket.WithPriority(limit),
			tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(_ context.Context, d tokenbucket.Decision) { decided = d.Priority }}))
		require.NoError(t, err)
		for _, call := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Low, tokenbucket.Lowest} {
			ctx := gate.WithPriority(t.Context(), call)
			require.Equal(t, call, gate.PriorityOf(ctx))
			_, err := gate.One(l, time.Second).Enter(ctx, "any")
			require.NoError(t, err)
			require.Equal(t, max(call, limit), decided)
		}
	}
}

// demand is calls of a gate, so many every 10 ms, with a priority.
func demand(ctx context.Context, g gate.Gate, p tokenbucket.Priority, each int, passed *atomic.Int64) {
	ctx = gate.WithPriority(ctx, p)
	for ctx.Err() == nil {
		for range each {
			go func() {
				if a, err := g.Enter(ctx, ""); err == nil && a.OK {
					passed.Add(1)
				}
			}()
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// While calls of Normal want more than the rate, those of lower priorities get their floor; afterwards they get the whole rate.
func TestPrioritiesOfAGate(t *testing.T) {
	for _, low := range []tokenbucket.Priority{tokenbucket.Low, tokenbucket.Lowest} {
		synctest.Test(t, func(t *testing.T) {
			l, err := tokenbucket.NewSmoothBursty("x", 100, tokenbucket.WithMaxPermits(0))
			require.NoError(t, err)
			g := gate.One(l, 500*time.Millisecond)
			var normal, lower atomic.Int64
			first, end := context.WithTimeout(t.Context(), 20*time.Second)
			defer end()
			second, endAll := context.WithTimeout(t.Context(), 40*time.Second)
			defer endAll()
			go demand(first, g, tokenbucket.Normal, 2, &normal)
			go demand(second, g, low, 2, &lower)
			<-first.Done()
			synctest.Wait()
			during := lower.Load()
			t.Logf("%v: %d beside %d", low, during, normal.Load())
			require.InDelta(t, 2000, normal.Load()+during, 60)
			require.Less(t, during, int64(100), "of about 2,000")
			<-second.Done()
			time.Sleep(time.Second)
			synctest.Wait()
			require.InDelta(t, 2000, lower.Load()-during, 100)
		})
	}
}

// A bucket that saves nothing up serves calls of each priority, because the time of their own permits does not count.
func TestLowPriorityOfASlowLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := tokenbucket.NewSmoothBursty("x", 2, tokenbucket.WithMaxPermits(0))
		require.NoError(t, err)
		for _, p := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Low, tokenbucket.Lowest} {
			a, err := gate.One(l, 500*time.Millisecond).Enter(gate.WithPriority(t.Context(), p), "")
			require.NoError(t, err)
			require.True(t, a.OK, p)
		}
	})
}

type tenantKey struct{}

// Calls through a gate take turns if its limiter serves tenants in turns: one of a quiet tenant passes although a hundred others wait.
func TestTurnsOfAGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := tokenbucket.NewSmoothBursty("x", 10, tokenbucket.WithMaxPermits(0),
			tokenbucket.WithFairness(func(ctx context.Context) string { return ctx.Value(tenantKey{}).(string) }))
		require.NoError(t, err)
		require.True(t, l.ServesInTurns())
		g := gate.One(l, time.Hour)
		all, end := context.WithCancel(t.Context())
		for range 100 {
			go func() { _, _ = g.Enter(context.WithValue(all, tenantKey{}, "busy"), "") }()
		}
		time.Sleep(time.Second)
		begun := time.Now()
		a, err := g.Enter(context.WithValue(all, tenantKey{}, "quiet"), "")
		require.NoError(t, err)
		require.True(t, a.OK)
		require.LessOrEqual(t, time.Since(begun), 200*time.Millisecond)
		a, err = gate.One(l, 150*time.Millisecond).Enter(context.WithValue(all, tenantKey{}, "busy"), "")
		require.NoError(t, err)
		require.False(t, a.OK)
		require.InDelta(t, 9, a.RetryAfter.Seconds(), 1, "about 90 calls of its own tenant are ahead")
		end()
	})
}

// The lower of the priorities of a call and of each member counts in the gate of a group or a choice, too.
func TestPriorityOfACallOfSeveral(t *testing.T) {
	var decided tokenbucket.Priority
	l, err := tokenbucket.NewSmoothBursty("several", 1000, tokenbucket.WithPriority(tokenbucket.Low),
		tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(_ context.Context, d tokenbucket.Decision) { decided = d.Priority }}))
	require.NoError(t, err)
	all, err := tokenbucket.All(l)
	require.NoError(t, err)
	choice, err := tokenbucket.Any(l)
	require.NoError(t, err)
	for _, g := range []gate.Gate{gate.One(all, time.Second), gate.One(choice, time.Second)} {
		for _, call := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Low, tokenbucket.Lowest} {
			a, err := g.Enter(gate.WithPriority(t.Context(), call), "any")
			require.NoError(t, err)
			require.True(t, a.OK)
			require.Equal(t, max(call, tokenbucket.Low), decided)
		}
	}
	require.Same(t, all.ForPriority(tokenbucket.Lowest), all.ForPriority(tokenbucket.Lowest))
}
