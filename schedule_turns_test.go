//go:build !race

package tokenbucket

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/fair"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// choice is how a process of the model chooses the head of its queue. It returns nil if the head may stay.
type choice func(*actor) *schedule.Waiter[*caller]

// modelTurns are the tenants of a process of the model.
type modelTurns struct {
	fair.Turns[*caller]
	choose choice
	chosen *caller // by anyOne, until it has left
}

// trips is how many round trips the first decision about a caller may take: by arrival it is about that caller's own request, in turns about
// any.
func (t *modelTurns) trips() int64 {
	if t.choose == nil {
		return 1
	}
	return 2
}

// byTurns chooses by deficit round robin.
func byTurns(a *actor) *schedule.Waiter[*caller] {
	if next := a.turns.Next(); next != nil {
		return &next.Value.Waiter
	}
	return nil
}

// anyOne chooses any of the first waiters, more wildly than any rule, and the same one until that has left.
func anyOne(a *actor) *schedule.Waiter[*caller] {
	if c := a.turns.chosen; c != nil && c.Waits() {
		return &c.Waiter
	}
	w := a.line.Head()
	for range a.random.IntN(20) {
		if w.Following() != nil && !w.Following().Value.reserved {
			w = w.Following()
		}
	}
	a.turns.chosen = w.Value
	return w
}

// join gives a caller its place among those of its tenant.
func (a *actor) join(c *caller) {
	c.turn = fair.Place[*caller]{Value: c, Tenant: fmt.Sprint(c.order % 4), Weight: 1 + c.order%4, Permits: c.Permits}
	a.turns.Add(&c.turn)
}

// next lets the next waiter go. Before, it makes the one that was chosen the head.
func (a *actor) next() (w *schedule.Waiter[*caller], at int64) {
	if head := a.line.Head(); a.turns.choose != nil && head != nil && !head.Value.reserved {
		if chosen := a.turns.choose(a); chosen != nil && !a.line.Lead(chosen, a.now) {
			if first := a.turns.First(&head.Value.turn); first != nil {
				a.line.Lead(&first.Value.Waiter, a.now)
			}
		}
	}
	if w, at = a.line.Next(a.now); w != nil {
		a.turns.Served(&w.Value.turn)
	}
	return w, at
}

// Whichever waiter a process makes the head of its queue, by turns or at random, the bound holds, nobody goes before due or after its
// timeout, and everybody is served.
func TestScheduleModelInTurns(t *testing.T) {
	for name, turns := range map[string]choice{"turns": byTurns, "any": anyOne} {
		for _, faults := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", faults ", faults), func(t *testing.T) {
				uses := 0
				for seed := range uint64(500) {
					wrong, n := history(seed, faults, turns)
					require.Empty(t, wrong, "seed %d", seed)
					uses += n
				}
				require.Greater(t, uses, 500)
			})
		}
	}
}
