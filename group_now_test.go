package tokenbucket

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// pair is a group in memory, and another one with the same members in another store, which decides by its queue alone.
type pair struct {
	short, long *several
	clock       *clockwork.FakeClock
}

func drawPair(t *rapid.T) pair {
	p := pair{clock: clockwork.NewFakeClock()}
	choice := permit.Choice(rapid.IntRange(int(permit.All), int(permit.Any)).Draw(t, "choice"))
	stores := [2]*MemoryStore{NewMemoryStore(), NewMemoryStore()}
	var members [2][]Member
	for i := range rapid.IntRange(1, 4).Draw(t, "members") {
		c, weight := drawPlain(t), rapid.IntRange(1, 3).Draw(t, "weight")
		initial := WithInitialPermitsUpTo(rapid.Float64Range(0, 2000).Draw(t, "initial"))
		for k := range stores {
			l, err := newLimiter(fmt.Sprint("member", i), c, []Option{WithStore(stores[k]), WithClock(p.clock), initial})
			require.NoError(t, err)
			_, err = l.State(context.Background()) // no bucket is new later, so none is swept
			require.NoError(t, err)
			members[k] = append(members[k], Weighted(l, weight))
		}
	}
	p.short, p.long = new(several), new(several)
	require.NoError(t, p.short.init(choice, members[0]))
	require.NoError(t, p.long.init(choice, members[1]))
	p.long.participant(1<<len(p.long.members) - 1).locks = nil
	return p
}

// states returns what the buckets of both groups have in common: all but names that are drawn at random.
func (p pair) states(t *rapid.T) (states [2][]PermitBucket) {
	for k, g := range []*several{p.short, p.long} {
		for _, l := range g.limiters() {
			b, err := l.State(context.Background())
			require.NoError(t, err)
			b.Epoch, b.Tail, b.setting = 0, 0, nil
			states[k] = append(states[k], b)
		}
	}
	return states
}

// The short way of a group in memory decides as its queue does, to the last bit.
func TestGroupTakeNow(t *testing.T) {
	var granted, refused, left int
	rapid.Check(t, func(t *rapid.T) {
		p := drawPair(t)
		ctx, cancel := context.WithCancel(context.Background())
		defer time.AfterFunc(2*time.Second, cancel).Stop()
		for range 30 {
			slowest := p.short.members[0].limiter.own.interval
			p.clock.Advance(time.Duration(rapid.Float64Range(0, 4).Draw(t, "gap")*slowest) * time.Microsecond)
			n, maxWait := rapid.Int64Range(1, 3).Draw(t, "permits"), int64(rapid.Float64Range(0, 2).Draw(t, "timeout")*slowest)
			if rapid.IntRange(0, 3).Draw(t, "single") == 0 { // a call of one member, which does not wait, so it owns nothing later
				i := rapid.IntRange(0, len(p.short.members)-1).Draw(t, "member")
				for _, g := range []*several{p.short, p.long} {
					_, err := g.members[i].limiter.TryAcquire(ctx, int(n), 0)
					_ = err // a request that can never be granted
				}
			}
			set, err := p.short.check(n, maxWait)
			if err != nil {
				continue
			}
			a := answer{asked: p.short, refused: -1}
			if !p.short.takeNow(p.short.participant(set), n, maxWait, &a) {
				left++
				continue
			}
			b, err := p.long.askStores(ctx, acquire, int(n), time.Duration(maxWait)*time.Microsecond)
			require.NotErrorIs(t, err, context.Canceled, "it waits, and the short way returns %+v", a)
			require.Equal(t, []any{b.granted, b.wait, b.refused}, []any{a.granted, a.wait, a.refused})
			if a.granted && p.short.choice == permit.Any {
				require.Equal(t, b.member, a.member)
			}
			states := p.states(t)
			require.Equal(t, states[1], states[0])
			if a.granted {
				granted++
			} else {
				refused++
			}
		}
	})
	t.Logf("%d granted, %d refused, %d left to the queue", granted, refused, left)
	require.Greater(t, granted, 100)
	require.Greater(t, refused, 100)
}

// A newcomer does not take the permits that a waiting call of its group needs, though they are due at once.
func TestGroupTakeNowOvertakesNobody(t *testing.T) {
	ctx, clock, store := context.Background(), clockwork.NewFakeClock(), WithStore(NewMemoryStore())
	var members []Member
	for i := range 2 {
		l, err := NewSmoothBursty(fmt.Sprint(i), 1, store, WithClock(clock))
		require.NoError(t, err)
		members = append(members, l)
	}
	g, err := All(members...)
	require.NoError(t, err)
	_, err = members[0].(*RateLimiter).Reserve(ctx, 20) // more than the look-ahead
	require.NoError(t, err)
	served := make(chan error)
	go func() {
		_, err := g.Acquire(ctx, 1)
		served <- err
	}()
	require.Eventually(t, func() bool { return !g.participant(1<<2 - 1).Idle() }, time.Minute, time.Millisecond)
	clock.Advance(20500 * time.Millisecond)
	ok, err := g.TryAcquire(ctx, 1, 0)
	require.NoError(t, err)
	require.False(t, ok)
	require.NoError(t, <-served)
}
