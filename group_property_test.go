package tokenbucket_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// participantStore is a store as one process has it: limiters of two of them share nothing but the states.
type participantStore struct {
	store *tb.MemoryStore
	id    int
}

func (p *participantStore) Apply(ctx context.Context, b *tb.Batch) error {
	return p.store.Apply(ctx, b)
}

// use is permits that a caller has used.
type use struct {
	at      time.Duration
	permits int
}

// ledger has the uses of one bucket.
type ledger struct {
	mu      sync.Mutex
	uses    []use
	largest int
}

func (l *ledger) used(at time.Duration, permits int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.uses = append(l.uses, use{at, permits})
	l.largest = max(l.largest, permits)
}

// excess returns by how many permits the uses of any window exceed burst + rate × (window + late). The fullest window that ends with a use begins
// with it, or is the fullest one that ends with the use before, continued.
func (l *ledger) excess(rate, burst float64, late time.Duration) (most float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.SortFunc(l.uses, func(a, b use) int { return int(a.at - b.at) })
	most = -burst
	bound := max(burst, float64(l.largest)) + rate*(late+time.Microsecond).Seconds()
	beyond := 0.0 // the permits of that window, less those of its length at the rate
	for i, u := range l.uses {
		if i > 0 {
			beyond = max(0, beyond-rate*(u.at-l.uses[i-1].at).Seconds())
		}
		beyond += float64(u.permits)
		most = max(most, beyond-bound)
	}
	return most
}

// Random groups over random buckets, in one to four processes, beside single limiters of the same buckets, with callers that give up: no window of any
// bucket has more permits than its bound. A member of a group may be used later than due, by the look-ahead of the other members at most.
func TestGroupWindowBound(t *testing.T) {
	var calls, given, groupUses atomic.Int64
	var tightest float64 = -1e9
	for seed := range tb.Sized(200, 20) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(uint64(seed), 7))
			memory := tb.NewMemoryStore()
			buckets := 2 + random.IntN(3)
			rates, sizes := make([]float64, buckets), make([]float64, buckets)
			for i := range rates {
				rates[i] = []float64{0.5, 2, 5, 20, 50}[random.IntN(5)]
				sizes[i] = float64([]int{0, 1, 1, 5}[random.IntN(4)])
			}
			ledgers := make([]ledger, buckets)
			grouped := make([]time.Duration, buckets) // the longest look-ahead of another member
			began := time.Now()
			var wg sync.WaitGroup
			stop, cancel := context.WithTimeout(ctx, 30*time.Second)
			defer cancel()
			for id := range 1 + random.IntN(4) {
				store := &participantStore{memory, id}
				limiters := make([]*tb.RateLimiter, buckets)
				for i := range limiters {
					limiters[i] = limiter(t, fmt.Sprint(i), rates[i], tb.WithStore(store), tb.WithMaxPermits(sizes[i]))
				}
				for range 1 + random.IntN(2) {
					order := random.Perm(buckets)[:1+random.IntN(buckets)]
					weights := make([]int, len(order))
					var members []tb.Member
					for at, i := range order {
						weights[at] = 1 + random.IntN(2)
						members = append(members, tb.Weighted(limiters[i], weights[at]))
						for _, o := range order {
							if o != i {
								look := max(1, 4/rates[o]) - 1/rates[o] + 4/rates[o]
								grouped[i] = max(grouped[i], time.Duration(look*1e9))
							}
						}
					}
					g, err := tb.All(members...)
					require.NoError(t, err)
					for range 1 + random.IntN(20) {
						mine := rand.New(rand.NewPCG(random.Uint64(), 1))
						wg.Go(func() {
							for stop.Err() == nil {
								n := 1 + mine.IntN(2)
								calls.Add(1)
								c, give := context.WithCancel(stop)
								if mine.IntN(4) == 0 {
									c, give = context.WithTimeout(stop, time.Duration(mine.IntN(3000))*time.Millisecond)
									given.Add(1)
								}
								ok := false
								if mine.IntN(2) == 0 {
									_, err := g.Acquire(c, n)
									ok = err == nil
								} else {
									ok, _ = g.TryAcquire(c, n, time.Duration(mine.IntN(3000))*time.Millisecond)
								}
								give()
								if ok {
									for at, i := range order {
										ledgers[i].used(time.Since(began), n*weights[at])
										groupUses.Add(1)
									}
								}
								time.Sleep(time.Duration(1+mine.IntN(100)) * time.Millisecond)
							}
						})
					}
				}
				for i := range limiters {
					if random.IntN(2) == 0 {
						continue
					}
					wg.Go(func() {
						for stop.Err() == nil {
							if _, err := limiters[i].Acquire(stop, 1); err == nil {
								ledgers[i].used(time.Since(began), 1)
							} else {
								time.Sleep(10 * time.Millisecond) // nothing is due before the end
							}
						}
					})
				}
			}
			wg.Wait()
			for i := range ledgers {
				over := ledgers[i].excess(rates[i], sizes[i], grouped[i])
				tightest = max(tightest, over)
				require.LessOrEqual(t, over, 1e-6, "seed %d, bucket %d of rate %v", seed, i, rates[i])
			}
			time.Sleep(time.Minute) // timers of the engine end
		})
	}
	t.Logf("%d calls, %d with a deadline, %d uses by groups; the tightest window had %.2f permits less than the bound", calls.Load(), given.Load(), groupUses.Load(), -tightest)
}

// Two groups that list the same members in opposite order, and single callers of one member: nobody is blocked, nobody starves, and the whole rate is used.
func TestGroupsShare(t *testing.T) {
	for name, open := range groupStores(t) {
		t.Run(name, func(t *testing.T) {
			const rate = 400.0
			shares := make([]atomic.Int64, 3)
			patient := tb.WithStoreTimeout(time.Minute)
			members := func(s tb.Store) (a, b *tb.RateLimiter) {
				return limiter(t, "a", rate, tb.WithStore(s), tb.WithMaxPermits(1), patient), limiter(t, "b", rate, tb.WithStore(s), tb.WithMaxPermits(1), patient)
			}
			var verbs []func(context.Context) error
			for i := range 2 {
				a, b := members(open())
				first, second := tb.Member(a), tb.Member(b)
				if i == 1 {
					first, second = b, a
				}
				g, err := tb.All(first, second)
				require.NoError(t, err)
				verbs = append(verbs, func(c context.Context) error { _, err := g.Acquire(c, 1); return err })
			}
			a, _ := members(open())
			verbs = append(verbs, func(c context.Context) error { _, err := a.Acquire(c, 1); return err })
			c, cancel := context.WithTimeout(ctx, time.Duration(max(2, tb.Sized(6, 2)))*time.Second)
			defer cancel()
			var wg sync.WaitGroup
			began := time.Now()
			for i := range 1000 {
				wg.Go(func() {
					for verbs[i%3](c) == nil {
						shares[i%3].Add(1)
					}
				})
			}
			wg.Wait()
			elapsed := time.Since(began).Seconds()
			total := shares[0].Load() + shares[1].Load() + shares[2].Load()
			t.Logf("in %.1f s: group a, b %d; group b, a %d; single callers of a %d; %.0f %% of the rate", elapsed, shares[0].Load(), shares[1].Load(), shares[2].Load(),
				100*float64(total)/(rate*elapsed))
			for i := range shares {
				require.Greater(t, shares[i].Load(), total/10, "share %d", i)
			}
		})
	}
}
