package registry_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// began is a call that was let pass.
type began struct{ at, until time.Time }

// arrivals has calls come at random, and returns those that passed, and when which one was refused by what.
func arrivals(t *testing.T, r *registry.Registry, random *rand.Rand, gaveUp bool) (passed []began, refused map[gate.Decider][]time.Time) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	refused = map[gate.Decider][]time.Time{}
	for range 300 {
		comes := time.Duration(random.Float64() * float64(6*time.Second))
		lasts := time.Duration(random.ExpFloat64() * float64(150*time.Millisecond))
		ctx, cancel := context.WithCancel(ctx)
		var stays time.Duration
		if gaveUp && random.IntN(3) == 0 {
			stays = time.Duration(random.ExpFloat64() * float64(50*time.Millisecond))
		}
		wg.Go(func() {
			defer cancel()
			time.Sleep(comes)
			if stays > 0 {
				time.AfterFunc(stays, cancel)
			}
			a, err := r.Enter(ctx, "/a")
			at := time.Now()
			if err != nil {
				require.ErrorIs(t, err, context.Canceled)
				return
			}
			if a.OK {
				time.Sleep(lasts)
				a.Leave()
			}
			mu.Lock()
			defer mu.Unlock()
			if a.OK {
				passed = append(passed, began{at, time.Now()})
			} else {
				refused[a.By] = append(refused[a.By], at)
			}
		})
	}
	wg.Wait()
	slices.SortFunc(passed, func(a, b began) int { return a.at.Compare(b.at) })
	return passed, refused
}

// Whatever comes when, none of the three bounds is exceeded; and none refuses that is not reached, since what a call has taken goes back
// if it is refused by another.
func TestBoundsHold(t *testing.T) {
	all := map[gate.Decider]int{}
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			size := float64(1 + random.IntN(6))
			row := registry.Limit{
				Name: "/a", Rate: float64(5 + random.IntN(60)), Burst: &size, MaxWait: time.Duration(random.IntN(4)) * 100 * time.Millisecond, Version: 1,
				Window: time.Duration(200+random.IntN(2000)) * time.Millisecond, WindowLimit: 3 + random.IntN(30), Concurrent: 1 + random.IntN(6),
			}
			if seed%3 == 2 {
				row.ConcurrentWait = time.Duration(1+random.IntN(500)) * time.Millisecond
			}
			gaveUp := seed%2 == 1
			r := openLocal(t, registry.Static{row})
			passed, refused := arrivals(t, r, random, gaveUp)
			for by, at := range refused {
				all[by] += len(at)
			}
			note := fmt.Sprintf("seed %d: %s", seed, row.String())
			checkBounds(t, &row, passed, note)
			if !gaveUp {
				checkRefusals(t, &row, passed, refused, note)
			}
			time.Sleep(2*row.Window + 2*time.Second)
			least := min(int(size), row.WindowLimit, row.Concurrent)
			for range least {
				require.True(t, enter(t, r, "/a").OK, "nothing is left behind: %s", note)
			}
			r.Close()
		})
	}
	for _, by := range []gate.Decider{gate.ByLimit, gate.ByWindow, gate.ByConcurrency} {
		require.Greater(t, all[by], 500, "each of them was put to the test: %s", by)
	}
}

func checkBounds(t *testing.T, row *registry.Limit, passed []began, note string) {
	t.Helper()
	for i, p := range passed {
		inside := 0
		for j := range i + 1 {
			q := passed[i-j]
			n, ago := float64(j+1), p.at.Sub(q.at)
			require.LessOrEqual(t, n, max(1, *row.Burst)+row.Rate*(ago+2*time.Microsecond).Seconds(), "%d in %v: %s", j+1, ago, note)
			if ago < row.Window {
				require.LessOrEqual(t, j+1, row.WindowLimit, "in %v: %s", ago, note)
			}
			if q.until.After(p.at) {
				inside++
			}
		}
		require.LessOrEqual(t, inside, row.Concurrent, note)
	}
}

// checkRefusals checks that windows and places refused only when they were full. A call may have been counted 20 ms before it began, and
// counts for up to a hundredth of the window longer than it must.
func checkRefusals(t *testing.T, row *registry.Limit, passed []began, refused map[gate.Decider][]time.Time, note string) {
	t.Helper()
	const lead = 20 * time.Millisecond
	for _, at := range refused[gate.ByWindow] {
		n := 0
		for _, p := range passed {
			if ago := at.Sub(p.at); ago >= -lead && ago <= row.Window*102/100+2*lead {
				n++
			}
		}
		require.GreaterOrEqual(t, n, row.WindowLimit, "refused by the window: %s", note)
	}
	for _, at := range refused[gate.ByConcurrency] {
		if row.ConcurrentWait > 0 { // places may be held by calls that wait for the rate, and that it refuses
			break
		}
		n := 0
		for _, p := range passed {
			if at.Sub(p.at) >= -lead && !p.until.Before(at) {
				n++
			}
		}
		require.GreaterOrEqual(t, n, row.Concurrent, "refused by the concurrency: %s", note)
	}
}
