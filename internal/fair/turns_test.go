package fair

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// add adds a waiter of a tenant.
func add(t *Turns[int], tenant string, weight, permits int64) *Place[int] {
	p := &Place[int]{Tenant: tenant, Weight: weight, Permits: permits}
	t.Add(p)
	return p
}

// serve serves n waiters in turns and returns their tenants.
func serve(t *Turns[int], n int) (tenants []string) {
	for range n {
		p := t.Next()
		tenants = append(tenants, p.Tenant)
		t.Served(p)
	}
	return tenants
}

// Tenants take turns, whatever the number of their waiters. One that comes later has its first turn after all others.
func TestTurns(t *testing.T) {
	var turns Turns[int]
	require.Nil(t, turns.Next())
	for range 3 {
		add(&turns, "a", 1, 1)
	}
	add(&turns, "b", 1, 1)
	require.Equal(t, []string{"a"}, serve(&turns, 1))
	add(&turns, "c", 1, 1)
	require.Equal(t, 3, turns.Tenants())
	require.Equal(t, 2, turns.Waiters("a"))
	require.Equal(t, []string{"b", "c", "a", "a"}, serve(&turns, 4), "b has its first turn before the next of a, and so has c")
	require.Zero(t, turns.Tenants())
	require.Nil(t, turns.Next())
}

// In a turn a tenant is served as many permits as its weight, and keeps what is too little for its first waiter.
func TestWeightsAndSizes(t *testing.T) {
	var turns Turns[int]
	for range 6 {
		add(&turns, "three", 3, 1)
		add(&turns, "big", 1, 2)
	}
	require.Equal(t, []string{"three", "three", "three", "three", "three", "three", "big"}, serve(&turns, 7), "big has credit for 2 in its second turn")
}

// The waiter whose turn it is stays the same until it leaves, whoever comes and goes.
func TestNextIsStable(t *testing.T) {
	var turns Turns[int]
	a := add(&turns, "a", 1, 5)
	require.Same(t, a, turns.Next())
	b := add(&turns, "b", 1, 1)
	require.Same(t, a, turns.Next())
	turns.Remove(b)
	require.Same(t, a, turns.Next())
	b = add(&turns, "b", 1, 1)
	turns.Remove(a)
	require.Same(t, b, turns.Next())
	turns.Remove(a) // it does nothing
	require.Same(t, b, turns.Next())
}

// Rounds without a service are skipped: even requests of 2^50 permits are found at once.
func TestRoundsAreSkipped(t *testing.T) {
	var turns Turns[int]
	for range 20 {
		add(&turns, "a", 1, 1<<50)
		add(&turns, "b", 1, 1<<49)
	}
	require.Equal(t, []string{"b", "a", "b", "b", "a", "b"}, serve(&turns, 6))
}

// A waiter that is served out of turn is charged to its tenant, which then waits for longer.
func TestOutOfTurn(t *testing.T) {
	var turns Turns[int]
	var a []*Place[int]
	for range 4 {
		a = append(a, add(&turns, "a", 1, 1))
	}
	for range 8 {
		add(&turns, "b", 1, 1)
	}
	turns.Served(a[0])
	turns.Served(a[1])
	turns.Served(a[2])
	require.Equal(t, []string{"b", "b", "b", "a"}, serve(&turns, 4))
}

// Nothing remains of tenants without waiters.
func TestTenantsAreForgotten(t *testing.T) {
	var turns Turns[int]
	var places []*Place[int]
	for i := range 10_000 {
		places = append(places, add(&turns, fmt.Sprint(i), 1, 1))
	}
	for _, p := range places {
		turns.Remove(p)
	}
	require.Equal(t, Turns[int]{}, turns)
}

// check requires the invariants of a Turns.
func check(t *testing.T, turns *Turns[int]) {
	t.Helper()
	ring, largest := 0, turns.largest
	for of := turns.front; of != nil && (ring == 0 || of != turns.front); of = of.next {
		ring++
		waiters, backlog := 0, int64(0)
		for p := of.head; p != nil && p.of == of; p = p.next {
			waiters++
			backlog += p.Permits
		}
		if of.next.prev != of || turns.tenants[of.name] != of || of.credit >= largest+of.weight || waiters == 0 || of.waiters != waiters || of.backlog != backlog {
			t.Fatalf("%+v has %d waiters, who need %d", of, waiters, backlog)
		}
	}
	require.Len(t, turns.tenants, ring)
}

// Random histories: the invariants hold, each tenant is served in the order of arrival, and a newcomer's estimate is never too high.
func TestRandomTurns(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		var turns Turns[int]
		waiting := map[string][]*Place[int]{}
		largest, served, estimates := 1+r.Int64N(10), int64(0), map[*Place[int]]int64{}
		for range 300 {
			tenant := fmt.Sprint(r.IntN(8))
			switch all := waiting[tenant]; {
			case r.IntN(3) < 2:
				p := &Place[int]{Tenant: tenant, Weight: 1 + r.Int64N(3), Permits: 1 + r.Int64N(largest)}
				if of := turns.tenants[tenant]; of != nil {
					p.Weight = of.weight
				}
				if r.IntN(4) == 0 {
					estimates[p] = served + turns.Ahead(p)
				}
				turns.Add(p)
				waiting[tenant] = append(all, p)
			case len(all) > 0 && r.IntN(4) == 0: // waiters that leave let others move up
				i := r.IntN(len(all))
				turns.Remove(all[i])
				waiting[tenant] = slices.Delete(all, i, i+1)
				clear(estimates)
			default:
				if p := turns.Next(); p != nil {
					require.Same(t, waiting[p.Tenant][0], p, "seed %d", seed)
					waiting[p.Tenant] = waiting[p.Tenant][1:]
					if least, ok := estimates[p]; ok {
						require.GreaterOrEqual(t, served, least, "seed %d: %d permits were served before", seed, served)
					}
					served += p.Permits
					turns.Served(p)
				}
			}
			check(t, &turns)
		}
	}
}

// Whatever the sizes and weights, tenants that always wait get parts in proportion to their weights, and none is ever behind its part by
// more than a turn and its largest request.
func TestParts(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 2))
		var turns Turns[int]
		n := 2 + r.IntN(6)
		weights, largest, got := make([]int64, n), 1+r.Int64N(30), make([]int64, n)
		total, each := int64(0), make([]int64, n)
		for i := range n {
			weights[i], each[i] = 1+r.Int64N(5), 1+r.Int64N(largest)
			total += weights[i]
		}
		come := func(i int) {
			turns.Add(&Place[int]{Value: i, Tenant: fmt.Sprint(i), Weight: weights[i], Permits: 1 + r.Int64N(each[i])})
		}
		for i := range n {
			come(i)
			come(i)
		}
		sum := int64(0)
		for range 5000 {
			p := turns.Next()
			turns.Served(p)
			got[p.Value] += p.Permits
			sum += p.Permits
			come(p.Value)
			for i := range n {
				part := float64(sum) * float64(weights[i]) / float64(total)
				if off, most := math.Abs(part-float64(got[i])), float64(2*(largest+weights[i])+total+int64(n)*largest); off > most {
					t.Fatalf("seed %d: tenant %d is %v permits from its part, at most %v", seed, i, off, most)
				}
			}
		}
	}
}

func BenchmarkTurns(b *testing.B) {
	for _, tenants := range []int{1, 10, 10_000} {
		for _, largest := range []int64{1, 1000} {
			b.Run(fmt.Sprint("tenants=", tenants, "/largest=", largest), func(b *testing.B) {
				var turns Turns[int]
				r := rand.New(rand.NewPCG(1, 1))
				places := make([]Place[int], 2*tenants)
				for i := range places {
					places[i] = Place[int]{Tenant: fmt.Sprint(i / 2), Weight: 1, Permits: 1 + r.Int64N(largest)}
					turns.Add(&places[i])
				}
				b.ReportAllocs()
				for b.Loop() {
					p := turns.Next()
					turns.Served(p)
					turns.Add(p)
				}
			})
		}
	}
}
