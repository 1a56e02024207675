package matrix

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

const jobEnv = "TOKENBUCKET_MATRIX"

// job is what a process does: its part of each cell of a batch, all at once.
type job struct {
	Addr      string
	Process   int
	Processes int
	Begins    time.Time
	Lasts     time.Duration
	Cells     []order
}

// order is a cell on a server.
type order struct {
	Name, Store string
	Features    []string
}

// named returns the order of a cell with features.
func named(features []string, store string) order {
	return order{Name: strings.Join(features, " + "), Store: store, Features: features}
}

// report is what a process writes of a cell, or, at its end, the goroutines that it has left.
type report struct {
	Cell  int
	Part  part
	Leaks string `json:",omitempty"`
}

// work does the job in a process of its own.
func work(_ context.Context, j *job, tell func(report)) error {
	slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil))) // the registry's and the outages' log
	client := redis.NewClient(&redis.Options{Addr: j.Addr, PoolSize: 2 * len(j.Cells)})
	lateness := faultlab.StartLateness()
	var running sync.WaitGroup
	cells := make([]*cell, len(j.Cells))
	for i, o := range j.Cells {
		c := newCell(o.Name, j.Lasts, o.Features...)
		c.began = j.Begins
		cells[i] = c
		store := faultlab.Stores[o.Store](client, tb.WithKeyPrefix(o.Store+": "+o.Name+":"))
		running.Go(func() { c.run(background, j.Processes, map[int]tb.Store{j.Process: store}) })
	}
	running.Wait()
	worst := lateness.Since(j.Begins)
	lateness.Stop()
	for i, c := range cells {
		c.Late = worst
		tell(report{Cell: i, Part: c.part})
	}
	if err := client.Close(); err != nil {
		return err
	}
	if err := redistest.Poll(20*time.Second, func() error { return goleak.Find(redistest.Dialing) }); err != nil {
		tell(report{Cell: -1, Leaks: err.Error()})
	}
	return nil
}

// batch runs cells at once, each in a number of processes, and returns them with all of their parts. The first cells should be plain.
func batch(t *testing.T, server *redistest.Server, processes int, orders []order) []*cell {
	t.Helper()
	j := job{Addr: server.Addr, Processes: processes, Begins: time.Now().Add(setup), Lasts: lasts, Cells: orders}
	var workers []*worker.Worker[report]
	for j.Process = range processes {
		workers = append(workers, worker.Start[report](t, jobEnv, j))
	}
	cells := make([]*cell, len(orders))
	for i, o := range orders {
		cells[i] = newCell(o.Name, lasts, o.Features...)
	}
	time.Sleep(time.Until(j.Begins.Add(lasts + drain)))
	var ending sync.WaitGroup
	for _, w := range workers { // at once: each waits for the end of its input
		ending.Go(func() { w.End() })
	}
	ending.Wait()
	for p, w := range workers {
		seen := 0
		for _, r := range w.End() {
			switch {
			case r.Cell < 0:
				t.Errorf("process %d of the batch has left goroutines: %s", p, r.Leaks)
				continue
			case p == 0:
				cells[r.Cell].part = r.Part
			default:
				cells[r.Cell].join(r.Part)
			}
			seen++
		}
		if seen < len(orders) {
			t.Errorf("process %d has written of %d cells out of %d", p, seen, len(orders))
		}
	}
	return cells
}

// plain are the orders of the first cells of a batch: one on each store that has only callers of Acquire.
func plain(batch string) (all []order) {
	for _, store := range kinds {
		all = append(all, order{Name: batch + ": plain", Store: store, Features: []string{"Acquire"}})
	}
	return all
}

// control returns the share of the rate that a plain cell has used: what it has not is the machine's part.
func control(c *cell) float64 {
	return min(1, max(0.1, float64(c.used(start, c.EndedAt))/max(1, c.possible(start, c.EndedAt)-1)))
}
