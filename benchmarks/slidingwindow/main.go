// Command slidingwindow measures the sliding window: the error of its counts, the cost of grants and refusals compared with
// go-redis/redis_rate, and memory. It also draws which calls of bursts pass, compared with a token bucket.
//
//	go run ./benchmarks/slidingwindow            two minutes; writes slidingwindow/RESULTS.md and docs/slidingwindow.svg
//	go run ./benchmarks/slidingwindow --quick    a small run that writes nothing
//	go run ./benchmarks/slidingwindow --draw     only the picture
//
// It starts its own redis-server.
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/pflag"

	"github.com/go-tokenbucket/tokenbucket/benchmarks/internal/machine"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

var ctx = context.Background()

func main() {
	quick := pflag.Bool("quick", false, "a small run that writes nothing")
	only := pflag.Bool("draw", false, "only the picture")
	pflag.Parse()
	do := func() error { return run(*quick) }
	if *only {
		do = writePicture
	}
	if err := do(); err != nil {
		fmt.Fprintln(os.Stderr, "slidingwindow:", err)
		os.Exit(1)
	}
}

func run(quick bool) error {
	rounds, length, steps := 5, 2*time.Second, 3000
	if quick {
		rounds, length, steps = 1, 300*time.Millisecond, 200
	}
	server, err := redistest.StartMain()
	if err != nil {
		return err
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr, PoolSize: 64, PoolTimeout: time.Minute})
	defer func() { _ = client.Close() }()

	errors, err := errorTable(client, steps)
	if err != nil {
		return err
	}
	fmt.Println(errors)
	allowed, err := allowedTable(client, rounds, length)
	if err != nil {
		return err
	}
	fmt.Println(allowed)
	refused, err := refusedTable(client, rounds)
	if err != nil {
		return err
	}
	fmt.Println(refused)
	memory, err := memoryTable(client)
	if err != nil {
		return err
	}
	fmt.Println(memory)
	if quick {
		_, err := draw()
		return err
	}
	info, err := client.Info(ctx, "server").Result()
	if err != nil {
		return err
	}
	facts := table.NewWriter()
	facts.AppendHeader(table.Row{"", ""})
	for _, pair := range machine.Read(info, "go run ./benchmarks/slidingwindow", "github.com/redis/go-redis/v9", "github.com/go-redis/redis_rate/v10") {
		facts.AppendRow(table.Row{pair[0], pair[1]})
	}
	text := fmt.Sprintf(report, facts.RenderMarkdown(), errors, allowed, refused, memory)
	if err := write(filepath.Join("benchmarks", "slidingwindow", "RESULTS.md"), []byte(text)); err != nil {
		return err
	}
	return writePicture()
}

func writePicture() error {
	picture, err := draw()
	if err != nil {
		return err
	}
	return write(filepath.Join("docs", "slidingwindow.svg"), picture)
}

// write writes a file of the repository, from its root or from benchmarks.
func write(path string, content []byte) error {
	if _, err := os.Stat("benchmarks"); err != nil {
		path = filepath.Join("..", path)
	}
	return os.WriteFile(path, content, 0o644)
}

const report = `# The sliding window, measured

Written by the command below. Medians of rounds in which the rivals took turns.

%s

## How far from the truth

100 calls in any 60 s, called eight at once by a random one of the processes, at five times the limit; a real redis-server, and
a clock that the program sets. After each step the calls that were allowed in the last 60 s are counted in the log of all.
*Mean error* is how far that is from the limit, above or below; *worst* is the most above it.

%s

## Allowed

64 callers of one limiter. Rivals are redis_rate, whose algorithm is another (GCRA, a bucket), and a PING.

%s

## Refused

64 goroutines of one limiter that is full.

%s

## Memory

A window of 60 sub-intervals, in all of which something was allowed.

%s
`

// allowedTable measures the throughput of 64 callers whose calls are granted.
func allowedTable(client *redis.Client, rounds int, length time.Duration) (string, error) {
	const callers, limit = 64, math.MaxInt32
	window := func(round int) (func() error, error) {
		l, err := slidingwindow.New(fmt.Sprint("window", round), limit, time.Minute, time.Second, slidingwindow.WithRedis(client))
		return func() error {
			ok, err := l.Allow(ctx)
			if err == nil && !ok {
				err = errors.New("window: refused")
			}
			return err
		}, err
	}
	rate := redis_rate.NewLimiter(client)
	rivals := []struct {
		name string
		open func(round int) (func() error, error)
	}{
		{"window", window},
		{"redis_rate", func(round int) (func() error, error) {
			return func() error {
				result, err := rate.Allow(ctx, fmt.Sprint("rate", round), redis_rate.Limit{Rate: 1_000_000, Burst: 1_000_000_000, Period: time.Second})
				if err == nil && result.Allowed == 0 {
					err = fmt.Errorf("redis_rate: refused")
				}
				return err
			}, nil
		}},
		{"PING", func(int) (func() error, error) { return func() error { return client.Ping(ctx).Err() }, nil }},
	}
	all := map[string][]float64{}
	for round := range rounds {
		for i := range rivals {
			r := rivals[(i+round)%len(rivals)]
			call, err := r.open(round)
			if err != nil {
				return "", err
			}
			perSecond, err := throughput(call, callers, length)
			if err != nil {
				return "", err
			}
			all[r.name] = append(all[r.name], perSecond)
		}
	}
	t := table.NewWriter()
	t.AppendHeader(table.Row{"limiter", "allowed/s", "µs each", "times redis_rate"})
	for _, r := range rivals {
		n := median(all[r.name])
		t.AppendRow(table.Row{r.name, fmt.Sprintf("%.0f", n), fmt.Sprintf("%.2f", 1e6/n), fmt.Sprintf("%.1f", n/median(all["redis_rate"]))})
	}
	return t.RenderMarkdown(), nil
}

func throughput(call func() error, callers int, length time.Duration) (float64, error) {
	var done atomic.Int64
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	began := time.Now()
	for range callers {
		wg.Go(func() {
			for time.Since(began) < length {
				if err := call(); err != nil {
					failed.Store(&err)
					return
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return float64(done.Load()) / took.Seconds(), nil
}

// refusedTable measures the cost of a refusal.
func refusedTable(client *redis.Client, rounds int) (string, error) {
	t := table.NewWriter()
	t.AppendHeader(table.Row{"counts in", "ns", "allocations"})
	for _, where := range []string{"process", "Redis"} {
		var opts []slidingwindow.Option
		if where == "Redis" {
			opts = append(opts, slidingwindow.WithRedis(client))
		}
		l, err := slidingwindow.New("refused", 1, 10*time.Minute, 10*time.Second, opts...)
		if err != nil {
			return "", err
		}
		if _, err := l.Allow(ctx); err != nil {
			return "", err
		}
		var ns []float64
		var allocations int64
		var wrong atomic.Int64
		for range rounds {
			r := testing.Benchmark(func(b *testing.B) {
				b.ReportAllocs()
				b.SetParallelism(64 / runtime.GOMAXPROCS(0))
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						if ok, err := l.Allow(ctx); ok || err != nil {
							wrong.Add(1)
						}
					}
				})
			})
			ns = append(ns, float64(r.T.Nanoseconds())/float64(r.N))
			allocations = max(allocations, r.AllocsPerOp())
		}
		if n := wrong.Load(); n > 0 {
			return "", fmt.Errorf("counts in %s: %d of those to be refused were not", where, n)
		}
		t.AppendRow(table.Row{where, fmt.Sprintf("%.0f", median(ns)), allocations})
	}
	return t.RenderMarkdown(), nil
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

// memoryTable measures the memory of a limiter after few requests and after many.
func memoryTable(client *redis.Client) (string, error) {
	const limiters = 1000
	t := table.NewWriter()
	t.AppendHeader(table.Row{"requests in the window", "bytes in the process", "bytes in the process, counts in Redis", "bytes in Redis"})
	for _, each := range []int{1, 100} { // requests in each sub-interval
		row := table.Row{60 * each}
		var inRedis int64
		for _, shared := range []bool{false, true} {
			clock := &hand{micros: begin}
			opts := []slidingwindow.Option{slidingwindow.WithClock(clock)}
			n := limiters
			if shared {
				opts = append(opts, slidingwindow.WithRedis(client), slidingwindow.WithLocalTime())
				n = 50
			}
			all := make([]*slidingwindow.Limiter, n)
			var before, after runtime.MemStats
			for i := range all { // connections and buffers are allocated before the measurement
				name := fmt.Sprint("memory", each, "-", i)
				if i == 1 || i == 0 {
					runtime.GC()
					runtime.ReadMemStats(&before)
				}
				var err error
				if all[i], err = slidingwindow.New(name, 1_000_000, time.Minute, time.Second, opts...); err != nil {
					return "", err
				}
				clock.micros = begin
				for range 60 {
					clock.micros += 1_000_000
					for range each {
						if _, err := all[i].Allow(ctx); err != nil {
							return "", err
						}
					}
				}
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			runtime.KeepAlive(all)
			row = append(row, (int64(after.HeapAlloc)-int64(before.HeapAlloc))/int64(n-1))
			if shared {
				var err error
				if inRedis, err = client.MemoryUsage(ctx, fmt.Sprintf("slidingwindow:{memory%d-0}:1m0s", each)).Result(); err != nil {
					return "", err
				}
			}
		}
		t.AppendRow(append(row, inRedis))
	}
	return t.RenderMarkdown(), nil
}
