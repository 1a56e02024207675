package tokenbucket

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// endings are the ends of a reservation of 10 permits. Of two settlements, the first is of 7, the second of 13.
var endings = []string{"cancel", "return", "settle", "settle later", "due", "close"}

// counted10 returns how many permits count if endings happen in order. atOnce: the permits are due at first, and have never waited.
func counted10(atOnce bool, ends [2]string, order [2]int) float64 {
	due, count, open := atOnce, 10.0, true
	for _, i := range order {
		switch ends[i] {
		case "cancel":
			if open && !due {
				count, open = 0, false
			}
		case "return":
			if open && (!due || atOnce) {
				count, open = 0, false
			}
		case "settle", "settle later":
			if open {
				count, open = 7+6*float64(i), false
			}
		case "due":
			due = true
		}
	}
	return count
}

// endLab ends reservations in two ways at once. The second of its members has twice the rate, and twice the weight in a group.
type endLab struct {
	clock   *clockwork.FakeClock
	members []*RateLimiter
	reserve func(n int) (ending, error)
	close   func(context.Context) error
}

type ending interface {
	held
	Cancel(ctx context.Context) error
	Return(ctx context.Context) error
}

func newEndLab(t *testing.T, store Store, members int) *endLab {
	lab := &endLab{clock: clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))}
	for m := range members {
		l, err := NewSmoothBursty(fmt.Sprint(t.Name(), m), float64(m+1), WithStore(store), WithClock(lab.clock), WithMaxPermits(2000), WithInitialPermits(0), patient)
		require.NoError(t, err)
		lab.members = append(lab.members, l)
	}
	first := lab.members[0]
	lab.reserve = func(n int) (ending, error) { return first.Reserve(background, n) }
	lab.close = first.Close
	if members == 2 {
		g, err := All(first, Weighted(lab.members[1], 2))
		require.NoError(t, err)
		lab.reserve = func(n int) (ending, error) { return g.Reserve(background, n) }
		lab.close = g.Close
	}
	_, err := lab.reserve(1) // makes the buckets
	require.NoError(t, err)
	return lab
}

// owed returns what the first member owes, less what it has stored. The second owes twice as much.
func (lab *endLab) owed(t *testing.T) float64 {
	owed := settles(t, lab.members[0])
	if len(lab.members) == 2 {
		require.InDelta(t, 2*owed, settles(t, lab.members[1]), 1e-4)
	}
	return owed
}

// end ends a reservation in two ways at once, and returns how many of its permits count.
func (lab *endLab) end(t *testing.T, atOnce bool, ends [2]string) float64 {
	owed := lab.owed(t)
	switch {
	case atOnce && owed > -50:
		lab.clock.Advance(time.Duration((owed + 200) * float64(time.Second)).Truncate(time.Microsecond))
	case !atOnce:
		ahead, err := lab.reserve(int(100 - owed))
		require.NoError(t, err)
		require.True(t, ahead.OK())
	}
	before := lab.owed(t)
	r, err := lab.reserve(10)
	require.NoError(t, err)
	require.Equal(t, atOnce, r.Delay() == 0)
	var start atomic.Int32
	var both sync.WaitGroup
	began := lab.clock.Now()
	for i, how := range ends {
		both.Go(func() {
			for start.Add(1); start.Load() < 2; {
				runtime.Gosched()
			}
			var err error
			switch how {
			case "cancel":
				err = r.Cancel(background)
			case "return":
				err = r.Return(background)
			case "settle":
				err = r.Settle(background, 7+6*i)
			case "settle later":
				r.SettleLater(7 + 6*i)
			case "due":
				lab.clock.Advance(r.Delay())
			case "close":
				err = lab.close(background)
			}
			assert.NoError(t, err)
		})
	}
	both.Wait()
	require.NoError(t, lab.close(background))
	counted := lab.owed(t) - before + lab.clock.Since(began).Seconds()
	if !atOnce {
		lab.clock.Advance(200 * time.Second)
	}
	return counted
}

// However two ends of a reservation fall together, each of its permits counts once: as it would if one end came after the other.
func TestTwoEndsAtOnce(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	redis := redisStores(client, WithKeyPrefix(prefixOf(t)), WithLocalTime())
	for _, c := range []struct {
		name  string
		store Store
		times int
	}{
		{"memory", NewMemoryStore(), sized(20_000, 200)},
		{"script", redis["script"], sized(300, 5)},
		{"lock", redis["lock"], sized(150, 3)},
	} {
		for members, what := range map[int]string{1: "limiter", 2: "group"} {
			t.Run(c.name+"/"+what, func(t *testing.T) {
				wrong := map[string]int{}
				lab := newEndLab(t, c.store, members)
				for _, atOnce := range []bool{true, false} {
					for a, one := range endings {
						for _, other := range endings[a:] {
							ends := [2]string{one, other}
							for range c.times {
								got := lab.end(t, atOnce, ends)
								first, second := counted10(atOnce, ends, [2]int{0, 1}), counted10(atOnce, ends, [2]int{1, 0})
								if max(got-first, first-got) > 1e-4 && max(got-second, second-got) > 1e-4 {
									wrong[fmt.Sprintf("%s, %s, due at once %v: %.0f", one, other, atOnce, got)]++
								}
							}
						}
					}
				}
				require.Empty(t, wrong)
			})
		}
	}
}

// The zero GroupReservation is a refusal.
func TestZeroGroupReservation(t *testing.T) {
	var r GroupReservation
	require.False(t, r.OK())
	require.Nil(t, r.RefusedBy())
	require.Empty(t, r.Members())
	require.Zero(t, r.Delay())
	require.Nil(t, r.Ready())
	require.NoError(t, r.Cancel(background))
	require.NoError(t, r.Return(background))
	require.NoError(t, r.Settle(background, 1))
	r.SettleLater(1)
	require.Equal(t, "given back", permit.GivenBack.String())
}
