package matrix

import (
	"cmp"
	"flag"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

var soak = flag.Duration("soak", 0, "how long random triples are tried; 0: not at all, with TOKENBUCKET_LONG=1 3m")

// Three features at once, drawn by lot for as long as the soak lasts: in the first half in memory, then on a server.
func TestSoakTriples(t *testing.T) {
	total := cmp.Or(*soak, faultlab.Lasting(0, 3*time.Minute))
	if total == 0 {
		t.Skip("they are for the soak: -soak 3m, or TOKENBUCKET_LONG=1")
	}
	quiet()
	random := redistest.Seed(t)
	began := time.Now()
	draws := make(chan []string)
	stop := make(chan struct{})
	go func() {
		defer close(draws)
		all := triples()
		random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for i := 0; ; i++ {
			select {
			case draws <- all[i%len(all)]:
			case <-stop:
				return
			}
		}
	}()
	defer close(stop)
	results := new(collected)
	var running sync.WaitGroup
	t.Run("in memory", func(t *testing.T) {
		for i := range 2 {
			running.Go(func() {
				for time.Since(began) < total/2 {
					names := <-draws
					t.Run(strings.Join(names, " + "), func(t *testing.T) { results.add(t, inMemory(t, worlds[i], names)) })
				}
			})
		}
		running.Wait()
	})
	server := redistest.Start(t)
	for time.Since(began) < total {
		var orders []order
		for range 2 * sizes[0] {
			orders = append(orders, named(<-draws, kinds[len(orders)%len(kinds)]))
		}
		results.add(t, onServer(t, server, orders)...)
	}
	results.table(t)
}

// triples are all of three different features.
func triples() (all [][]string) {
	for i, a := range features {
		for j, b := range features[:i] {
			for _, c := range features[:j] {
				all = append(all, []string{c.name, b.name, a.name})
			}
		}
	}
	return all
}
