// Package matrix crosses every feature of a limiter with every other one, on each store and in two processes. See docs/testing.md.
package matrix

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

const (
	rate, burst = 100.0, 50.0
	faster      = 125 // the rate of a bucket whose rate is changed
	callers     = 16
	patience    = 500 * time.Millisecond
	penalty     = 200 * time.Millisecond
	away        = 300 * time.Millisecond
	warmup      = 200 * time.Millisecond
	// coldStart is how many permits a bucket makes less while it warms up: at the start, and after an idle time or a penalty of its warm-up's length.
	coldStart = rate * float64(warmup/2) / float64(time.Second)
	// pause is how long a caller waits that was refused at once. Four callers in this time use the rate.
	pause = 40 * time.Millisecond
	// least is the share of what is possible that a cell must use.
	least = 0.97
	// late bounds how late a permit is used: one that is overdue by more lapses.
	late = 100 * time.Millisecond
	// slack is the time for which a cell on a server may use nothing, since a busy machine wakes its processes late.
	slack = 50 * time.Millisecond
	// lowest bounds the share of a lower priority beside callers who want the whole rate.
	lowest = 0.15
	// unequal bounds the part of the tenant that has least, as a share of the one that has most.
	unequal = 0.9
)

const (
	// lasts is how long a cell on a server takes; one in virtual time takes longer.
	lasts, virtual = 3 * time.Second, 6 * time.Second
	// start is the time in which the processes of a cell begin. Their share of the rate does not count.
	start = 500 * time.Millisecond
	// drain is the time in which the processes of a cell close their limiters.
	drain = 200 * time.Millisecond
	// setup is the time in which the processes of a batch start.
	setup = 700 * time.Millisecond
)

// sizes are how many cells are in a batch, of which two run at once: of the first try, and of those of cells that have failed. A cell that
// fails only in a crowd fails for want of processor time.
var sizes = []int{40, 10, 5, 3, 3}

var background = context.Background()

var only = flag.String("matrix", "", "run only cells with these `features`, separated by +")

func TestMain(m *testing.M) {
	worker.Main(jobEnv, work)
	redistest.Main(m)
}

// kinds are the stores on a server.
var kinds = []string{"script", "lock"}

// world is a store and a number of limiters that share nothing but it: in memory those of one process, on a server each in a process of its own.
type world struct {
	store     string
	processes int
}

var worlds = []world{{"memory", 1}, {"memory", 2}, {"script", 2}, {"lock", 2}}

func (w world) real() bool { return w.store != "memory" }

func (w world) String() string {
	if w.real() {
		return fmt.Sprintf("%s in %d processes", w.store, w.processes)
	}
	return fmt.Sprintf("memory x %d", w.processes)
}

// pairs are all pairs of features, those of each with itself included.
func pairs() (all [][]string) {
	for i, a := range features {
		for _, b := range features[i:] {
			names := slices.Compact([]string{a.name, b.name})
			if !slices.ContainsFunc(chosen(), func(name string) bool { return !slices.Contains(names, name) }) {
				all = append(all, names)
			}
		}
	}
	return all
}

// chosen are the features that every cell must have.
func chosen() (all []string) {
	for name := range strings.SplitSeq(*only, "+") {
		if name = strings.TrimSpace(name); name != "" {
			all = append(all, name)
		}
	}
	return all
}

// Every feature beside every other one, and beside itself, uses the rate, keeps the bound and the order, and leaves nothing. What is refused
// is in refusals, with its reason.
func TestMatrix(t *testing.T) {
	quiet()
	random := redistest.Seed(t)
	results := new(collected)
	t.Run("in memory", func(t *testing.T) {
		bubbles := make(chan struct{}, 2) // they use the processor all the time
		for _, names := range pairs() {
			for _, w := range some(random, worlds[:2]) {
				t.Run(fmt.Sprintf("%v/%s", w, strings.Join(names, " + ")), func(t *testing.T) {
					t.Parallel()
					bubbles <- struct{}{}
					defer func() { <-bubbles }()
					results.add(t, inMemory(t, w, names))
				})
			}
		}
	})
	server := redistest.Start(t)
	var orders []order
	for _, names := range pairs() {
		for _, store := range some(random, kinds) {
			orders = append(orders, named(names, store))
		}
	}
	random.Shuffle(len(orders), func(i, j int) { orders[i], orders[j] = orders[j], orders[i] })
	results.add(t, onServer(t, server, orders)...)
	require.Empty(t, server.Client(t).Keys(background, "*}:lock").Val(), "locks that are left")
	results.table(t)
}

// some returns all, or under the race detector one of them, drawn by lot: it takes several times the processor time. So each pair then runs in one of
// the two ways in memory and on one of the two stores on a server.
func some[T any](random *rand.Rand, all []T) []T {
	if redistest.Raced {
		return all[random.IntN(len(all)):][:1]
	}
	return all
}

// quiet drops the registry's and the outages' log.
func quiet() { slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil))) }

// inMemory runs a cell in virtual time.
func inMemory(t *testing.T, w world, names []string) result {
	c := newCell(t.Name(), virtual, names...)
	synctest.Test(t, func(*testing.T) {
		c.began = time.Now()
		store, stores := tb.NewMemoryStore(), map[int]tb.Store{}
		for p := range w.processes {
			stores[p] = store
		}
		c.run(background, w.processes, stores)
	})
	return judgement{c, w, 1}.result()
}

// onServer runs cells in two processes each. What does not hold is tried again, with fewer others.
func onServer(t *testing.T, server *redistest.Server, orders []order) (all []result) {
	for try, size := range sizes {
		failed := []order{}
		for _, r := range inBatches(t, fmt.Sprintf("on a server, try %d", try+1), server, orders, size) {
			if try == len(sizes)-1 || r.holds() {
				all = append(all, r)
				continue
			}
			t.Logf("again: %v: %s: %s", r.world, r.cell.key(), r.wrong)
			failed = append(failed, order{Name: fmt.Sprintf("%s, try %d", r.cell.key(), try+2), Store: r.world.store, Features: r.cell.names()})
		}
		orders = failed
	}
	return all
}

// inBatches runs cells in two processes each, a number of them at once.
func inBatches(t *testing.T, name string, server *redistest.Server, orders []order, size int) (all []result) {
	var mu sync.Mutex
	lanes := make(chan struct{}, 2)
	t.Run(name, func(t *testing.T) {
		for part := range slices.Chunk(orders, size) {
			name := part[0].Store + ", " + part[0].Name
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				lanes <- struct{}{}
				defer func() { <-lanes }()
				cells := batch(t, server, 2, append(plain(name), part...))
				shares := map[string]float64{}
				for i, store := range kinds {
					shares[store] = control(cells[i])
				}
				mu.Lock()
				defer mu.Unlock()
				for i, o := range part {
					all = append(all, judgement{cells[len(kinds)+i], world{o.Store, 2}, shares[o.Store]}.result())
				}
			})
		}
	})
	return all
}

// collected are the results of all cells. They are safe for concurrent use.
type collected struct {
	mu  sync.Mutex
	all []result
}

// add adds results, and fails the test if one does not hold and is not known.
func (s *collected) add(t *testing.T, all ...result) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, all...)
	for _, r := range all {
		if !r.holds() {
			t.Errorf("%v: %s: %s", r.world, r.cell.key(), r.wrong)
		}
	}
}

// table logs a line for each world, and the cells that do not hold.
func (s *collected) table(t *testing.T) {
	for _, w := range worlds {
		cells, refused, known, low, worst := 0, 0, 0, 0.0, result{share: 1, cell: &cell{}}
		for _, r := range s.all {
			if r.world != w {
				continue
			}
			cells++
			switch {
			case r.wrong != "":
				known++
			case r.refused:
				refused++
			default:
				low = max(low, r.low)
				if r.share < worst.share && !r.free {
					worst = r
				}
			}
		}
		t.Logf("%-22v %4d cells: %d hold, %d are refused with a reason, %d do not hold; worst share of those that hold %.3f (%s), most of lower priorities %.3f",
			w, cells, cells-refused-known, refused, known, worst.share, worst.cell.key(), low)
	}
	slices.SortFunc(s.all, func(a, b result) int { return cmp.Compare(a.cell.key(), b.cell.key()) })
	for _, r := range s.all {
		if r.wrong != "" && testing.Verbose() {
			t.Logf("%v: %s: %s (known: %s)", r.world, r.cell.key(), r.wrong, isKnown(r.cell))
		}
	}
}
