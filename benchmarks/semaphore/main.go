// Command semaphore compares the concurrency limiter with two common hand-written solutions, on its own redis-server, and in memory with
// golang.org/x/sync/semaphore:
//
//	go run ./benchmarks/semaphore            three minutes; writes SEMAPHORE.md
//	go run ./benchmarks/semaphore --quick    a small run that writes nothing
//
// The rivals take turns, and medians are shown. Callers release each permit at once, so that only the limiter is measured. Each run checks that
// no more permits were held than exist.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/pflag"
	xsync "golang.org/x/sync/semaphore"

	"github.com/go-tokenbucket/tokenbucket/benchmarks/internal/machine"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

const permits = 4

func main() {
	quick := pflag.Bool("quick", false, "a small run that writes nothing")
	pflag.Parse()
	rounds, length := 5, 3*time.Second
	if *quick {
		rounds, length = 1, 300*time.Millisecond
	}
	if err := run(rounds, length, *quick); err != nil {
		fmt.Fprintln(os.Stderr, "semaphore:", err)
		os.Exit(1)
	}
}

// result is one run of one rival.
type result struct {
	done     int64
	took     time.Duration
	sent     int64 // number of commands sent by the client
	waits    []time.Duration
	exceeded bool
}

func run(rounds int, length time.Duration, quick bool) error {
	server, err := redistest.StartMain()
	if err != nil {
		return err
	}
	defer server.Close()
	var counter counting
	client := redis.NewClient(&redis.Options{Addr: server.Addr, PoolSize: 1100, ContextTimeoutEnabled: true})
	client.AddHook(&counter)
	defer func() { _ = client.Close() }()
	usual := redis.NewClient(&redis.Options{Addr: server.Addr, PoolSize: 1100})
	defer func() { _ = usual.Close() }()
	rivals := []struct {
		name string
		open func(name string) (limiter, error)
	}{
		{"this", func(name string) (limiter, error) { return openOurs(client, name) }},
		{"this, with a client's default options", func(name string) (limiter, error) { return openOurs(usual, name) }},
		{"lock and busy wait", func(name string) (limiter, error) { return &waitGroup{client: client, name: name}, nil }},
		{"list", func(name string) (limiter, error) { return openList(client, name) }},
	}
	workers := []int{1, 10, 1000}
	all := map[string][]result{}
	for round := range rounds {
		for i := range rivals {
			r := rivals[(i+round)%len(rivals)]
			for _, n := range workers {
				key := fmt.Sprint(r.name, n)
				fmt.Fprintf(os.Stderr, "\rround %d of %d: %-20s %4d workers ", round+1, rounds, r.name, n)
				l, err := r.open(fmt.Sprint(r.name, n, round))
				if err != nil {
					return err
				}
				one, err := measure(l, n, length, &counter)
				if err != nil {
					return fmt.Errorf("%s, %d workers: %w", r.name, n, err)
				}
				if one.exceeded {
					return fmt.Errorf("%s, %d workers: more than %d held", r.name, n, permits)
				}
				all[key] = append(all[key], one)
			}
		}
	}
	fmt.Fprintln(os.Stderr)
	t := table.NewWriter()
	t.AppendHeader(table.Row{"workers", "limiter", "acquired and released/s", "commands sent for each", "waited p50", "waited p99"})
	for _, n := range workers {
		for _, r := range rivals {
			rs := all[fmt.Sprint(r.name, n)]
			t.AppendRow(table.Row{
				n, r.name,
				fmt.Sprintf("%.0f", median(rs, func(r result) float64 { return float64(r.done) / r.took.Seconds() })),
				perRound(median(rs, func(r result) float64 { return float64(r.sent) / float64(max(1, r.done)) })),
				time.Duration(median(rs, func(r result) float64 { return float64(quantile(r.waits, 0.5)) })).Round(10 * time.Microsecond),
				time.Duration(median(rs, func(r result) float64 { return float64(quantile(r.waits, 0.99)) })).Round(10 * time.Microsecond),
			})
		}
	}
	fmt.Println(t.RenderMarkdown())
	memory := inMemory(rounds)
	fmt.Println("\n" + memory)
	if quick {
		return nil
	}
	info, err := client.Info(context.Background(), "server").Result()
	if err != nil {
		return err
	}
	facts := table.NewWriter()
	facts.AppendHeader(table.Row{"", ""})
	for _, pair := range machine.Read(info, "go run ./benchmarks/semaphore", "github.com/redis/go-redis/v9", "golang.org/x/sync") {
		facts.AppendRow(table.Row{pair[0], pair[1]})
	}
	text := fmt.Sprintf(report, facts.RenderMarkdown(), permits, t.RenderMarkdown(), memory)
	path := filepath.Join("benchmarks", "SEMAPHORE.md")
	if _, err := os.Stat("benchmarks"); err != nil {
		path = "SEMAPHORE.md"
	}
	return os.WriteFile(path, []byte(text), 0o644)
}

// perRound formats the number of commands sent for each permit. With default options a client's commands are not counted, because a hook would
// not see all of them.
func perRound(sent float64) string {
	if sent == 0 {
		return "not counted"
	}
	return fmt.Sprintf("%.2f", sent)
}

const report = `# The concurrency limiter, beside others

Written by the command below. Medians of rounds in which the rivals took turns.

%s

## A fleet's, in Redis: %d permits

Workers acquire and release one after another, and hold for no time at all. *Lock and busy wait* takes a lock with SETNX, and
under it waits until the set of workers is small enough, asking for the key of each to find the dead; *list* takes an item
with BLPOP and gives it back with RPUSH, and loses the permits of who dies. A worker of the list occupies a connection while
it waits; of this limiter, all workers of a process together two.

%s

## In memory

An acquire and its release, nanoseconds. golang.org/x/sync/semaphore counts permits; this one also knows who holds them since
when, and a permit released twice is released once: a permit is an object, and the clock is read.

%s
`

type limiter interface {
	add(ctx context.Context) (id string, err error)
	done(ctx context.Context, id string) error
	close()
}

func measure(l limiter, workers int, length time.Duration, counter *counting) (r result, err error) {
	defer l.close()
	ctx, cancel := context.WithTimeout(context.Background(), length)
	defer cancel()
	var done, held atomic.Int64
	var exceeded atomic.Bool
	var mu sync.Mutex
	var wg sync.WaitGroup
	counter.n.Store(0)
	began := time.Now()
	for range workers {
		wg.Go(func() {
			var waits []time.Duration
			for ctx.Err() == nil {
				asked := time.Now()
				id, e := l.add(ctx)
				if e != nil {
					break
				}
				waits = append(waits, time.Since(asked))
				if held.Add(1) > permits {
					exceeded.Store(true)
				}
				held.Add(-1)
				done.Add(1)
				if e := l.done(context.WithoutCancel(ctx), id); e != nil {
					mu.Lock()
					err = errors.Join(err, e)
					mu.Unlock()
					break
				}
			}
			mu.Lock()
			r.waits = append(r.waits, waits...)
			mu.Unlock()
		})
	}
	wg.Wait()
	r.done, r.took, r.sent, r.exceeded = done.Load(), time.Since(began), counter.n.Load(), exceeded.Load()
	slices.Sort(r.waits)
	return r, err
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1))]
}

func median(rs []result, of func(result) float64) float64 {
	var all []float64
	for _, r := range rs {
		all = append(all, of(r))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// counting counts the commands that a client sends.
type counting struct{ n atomic.Int64 }

func (c *counting) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c *counting) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.n.Add(1)
		return next(ctx, cmd)
	}
}
func (c *counting) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.n.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

func inMemory(rounds int) string {
	ctx := context.Background()
	t := table.NewWriter()
	t.AppendHeader(table.Row{"permits", "goroutines", "this", "x/sync/semaphore", "ratio"})
	for _, c := range []struct{ permits, goroutines int }{{1, 1}, {1, 64}, {32, 64}, {1000, 64}} {
		s, err := semaphore.NewMemory(c.permits)
		if err != nil {
			panic(err)
		}
		x := xsync.NewWeighted(int64(c.permits))
		time := func(call func()) float64 {
			return float64(testing.Benchmark(func(b *testing.B) {
				if c.goroutines == 1 {
					for b.Loop() {
						call()
					}
					return
				}
				b.SetParallelism(c.goroutines / runtime.GOMAXPROCS(0))
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						call()
					}
				})
			}).NsPerOp())
		}
		var ours, theirs []float64
		for range rounds {
			ours = append(ours, time(func() {
				p, _ := s.Acquire(ctx, 1)
				_ = p.Release(ctx)
			}))
			theirs = append(theirs, time(func() {
				_ = x.Acquire(ctx, 1)
				x.Release(1)
			}))
		}
		slices.Sort(ours)
		slices.Sort(theirs)
		a, b := ours[len(ours)/2], theirs[len(theirs)/2]
		t.AppendRow(table.Row{c.permits, c.goroutines, fmt.Sprintf("%.0f", a), fmt.Sprintf("%.0f", b), strings.TrimRight(fmt.Sprintf("%.2f", a/b), "0")})
	}
	return t.RenderMarkdown()
}
