// Command quota counts the calls that reach an upstream in its busiest second, behind limiters of 5 calls a second:
//
//	go run ./benchmarks/quota    a quarter of a minute, then a table
//
// Each limiter has three callers with connections of their own, like three processes. They call as often as the limiter allows for ten seconds,
// pause for two, in which a limiter may store permits, and call again. All limiters run at the same time, on one redis-server that the program
// starts. On a busy machine callers wake late, some by more than the jitter of NewQuota. The line below the table shows how late timers were.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

const (
	rate    = 5 // calls a second
	callers = 3
	demand  = 10 * time.Second
	pause   = 2 * time.Second
	again   = 3 * time.Second
	jitter  = 2 * time.Millisecond // what NewQuota leaves room for
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "quota:", err)
		os.Exit(1)
	}
}

// wait blocks until a call may pass. It returns an error if the context ends before.
type wait func(context.Context) error

// rival is a limiter. Each of its callers opens it.
type rival struct {
	name string
	open func(*redis.Client) (wait, error)
}

var rivals = []rival{
	{"redis_rate, PerSecond(5)", openRedisRate},
	{"NewSmoothBursty(5)", func(c *redis.Client) (wait, error) { return openBursty(c, "default", rate) }},
	{"NewSmoothBursty(5), WithMaxPermits(1)", func(c *redis.Client) (wait, error) {
		return openBursty(c, "one", rate, tokenbucket.WithMaxPermits(1))
	}},
	{"NewQuota(…, 5, 1s, 2ms)", func(c *redis.Client) (wait, error) {
		return waits(tokenbucket.NewQuota("quota", rate, time.Second, jitter, tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(c))))
	}},
}

// openRedisRate returns a wait that retries after redis_rate's RetryAfter, since redis_rate has no blocking call.
func openRedisRate(client *redis.Client) (wait, error) {
	l := redis_rate.NewLimiter(client)
	return func(ctx context.Context) error {
		for {
			r, err := l.Allow(ctx, "redis_rate", redis_rate.PerSecond(rate))
			if err != nil || r.Allowed > 0 {
				return err
			}
			select {
			case <-time.After(r.RetryAfter):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}, nil
}

func openBursty(client *redis.Client, name string, rate float64, opts ...tokenbucket.Option) (wait, error) {
	return waits(tokenbucket.NewSmoothBursty(name, rate, append(opts, tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(client)))...))
}

func waits(l *tokenbucket.RateLimiter, err error) (wait, error) {
	return func(ctx context.Context) error {
		_, err := l.Acquire(ctx, 1)
		return err
	}, err
}

func run(ctx context.Context) error {
	server, err := redistest.StartMain()
	if err != nil {
		return err
	}
	defer server.Close()
	var (
		all    sync.WaitGroup
		rows   = make([]table.Row, len(rivals))
		failed = make([]error, len(rivals))
		late   = latest()
	)
	for i, r := range rivals {
		all.Go(func() { rows[i], failed[i] = r.measure(ctx, server.Addr) })
	}
	all.Wait()
	if err := errors.Join(failed...); err != nil {
		return err
	}
	t := table.NewWriter()
	t.AppendHeader(table.Row{"limiter", "calls passed a second", "busiest sliding second", "busiest, a pause included"})
	t.AppendRows(rows)
	fmt.Println(t.RenderMarkdown())
	fmt.Printf("\nTimers were up to %v late.\n", late().Round(10*time.Microsecond))
	return nil
}

// latest measures how late timers fire. stop ends the measurement and returns the maximum.
func latest() (stop func() time.Duration) {
	done, worst := make(chan struct{}), make(chan time.Duration)
	go func() {
		var most time.Duration
		for {
			began := time.Now()
			select {
			case <-time.After(time.Millisecond):
				most = max(most, time.Since(began)-time.Millisecond)
			case <-done:
				worst <- most
				return
			}
		}
	}()
	return func() time.Duration {
		close(done)
		return <-worst
	}
}

func (r *rival) measure(ctx context.Context, addr string) (table.Row, error) {
	var waits []wait
	for range callers {
		client := redis.NewClient(&redis.Options{Addr: addr})
		defer func() { _ = client.Close() }()
		w, err := r.open(client)
		if err != nil {
			return nil, err
		}
		waits = append(waits, w)
	}
	first, err := call(ctx, waits, demand)
	if err != nil {
		return nil, err
	}
	time.Sleep(pause)
	second, err := call(ctx, waits, again)
	if err != nil {
		return nil, err
	}
	passed := fmt.Sprintf("%.2f", float64(len(first))/demand.Seconds())
	return table.Row{r.name, passed, busiest(first), busiest(append(first, second...))}, nil
}

// call runs all callers as fast as the limiter allows, and returns the times at which their calls passed.
func call(ctx context.Context, waits []wait, d time.Duration) ([]time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var (
		mu     sync.Mutex
		times  []time.Time
		failed error
		all    sync.WaitGroup
	)
	for _, w := range waits {
		all.Go(func() {
			for {
				err := w(ctx)
				at := time.Now()
				mu.Lock()
				switch {
				case err == nil:
					times = append(times, at)
				case !errors.Is(err, context.DeadlineExceeded):
					failed = err
				}
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	all.Wait()
	slices.SortFunc(times, time.Time.Compare)
	return times, failed
}

// busiest returns the largest number of calls within less than a second, as an upstream counts them.
func busiest(times []time.Time) int {
	most, first := 0, 0
	for i, t := range times {
		for t.Sub(times[first]) >= time.Second {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}
