// Command groups compares a call that counts against two limits, decided by All, with what can be built from redis_rate:
//
//	go run ./benchmarks/groups    half a minute, then two tables
//
// An upstream allows 100 calls a second. Four tenants may have 30 of them each, so all four can have 100 together. One of them has forty
// callers, the others have four each, and all call as often as they may. A rival that asks the upstream's limit first, and then the tenant's,
// cannot give back what it took if the second refuses. One that looks first, and then takes, is overtaken in between.
//
// The second table is the time of a call by one caller, with limits that always grant, for two and for three of them. All limiters run in
// turns, each on an empty Redis that the program starts.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

const (
	upstream = 100 // calls a second, of all tenants
	tenant   = 30  // calls a second, of each
	tenants  = 4
	many     = 40              // callers of the first tenant
	few      = 4               // callers of each other tenant
	warm     = 3 * time.Second // in which buckets are used up
	demand   = 5 * time.Second
	rounds   = 5 // of the second table
	length   = 500 * time.Millisecond
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "groups:", err)
		os.Exit(1)
	}
}

// limit is a name and a rate, of which a second's permits may pass at once.
type limit struct {
	name string
	rate int
}

// call waits until it may pass all limits, or until the context ends. It counts the permits that it takes from the first one.
type call func(ctx context.Context, first *atomic.Int64) error

// rival makes the calls of a process that count against some limits.
type rival struct {
	name string
	open func(*redis.Client, ...limit) (call, error)
}

var rivals = []rival{
	{"All, script store", openAll(func(c *redis.Client) tokenbucket.Store { return tokenbucket.NewRedisScriptStore(c) })},
	{"All, lock store", openAll(func(c *redis.Client) tokenbucket.Store { return tokenbucket.NewRedisStore(c) })},
	{"redis_rate, one after the other", openRedisRate(false)},
	{"redis_rate, looking first", openRedisRate(true)},
}

func openAll(store func(*redis.Client) tokenbucket.Store) func(*redis.Client, ...limit) (call, error) {
	return func(client *redis.Client, limits ...limit) (call, error) {
		shared := store(client)
		var members []tokenbucket.Member
		for _, l := range limits {
			m, err := tokenbucket.NewSmoothBursty(l.name, float64(l.rate), tokenbucket.WithStore(shared))
			if err != nil {
				return nil, err
			}
			members = append(members, m)
		}
		all, err := tokenbucket.All(members...)
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context, first *atomic.Int64) error {
			_, err := all.Acquire(ctx, 1)
			if err == nil {
				first.Add(1)
			}
			return err
		}, nil
	}
}

// openRedisRate asks one limit after the other. If one refuses, it begins again after that one's RetryAfter, and what it took before is lost.
// Looking first, it takes nothing until all of them have a permit.
func openRedisRate(looks bool) func(*redis.Client, ...limit) (call, error) {
	return func(client *redis.Client, limits ...limit) (call, error) {
		l := redis_rate.NewLimiter(client)
		pass := func(ctx context.Context, n int, first *atomic.Int64) (retryAfter time.Duration, err error) {
			for i, limit := range limits {
				r, err := l.AllowN(ctx, limit.name, redis_rate.PerSecond(limit.rate), n)
				switch {
				case err != nil:
					return 0, err
				case n == 0 && r.Remaining == 0:
					return max(r.ResetAfter-time.Second, time.Millisecond), nil
				case n > 0 && r.Allowed == 0:
					return r.RetryAfter, nil
				case i == 0:
					first.Add(int64(n))
				}
			}
			return 0, nil
		}
		return func(ctx context.Context, first *atomic.Int64) error {
			for {
				var retryAfter time.Duration
				var err error
				if looks {
					retryAfter, err = pass(ctx, 0, first)
				}
				if err == nil && retryAfter == 0 {
					retryAfter, err = pass(ctx, 1, first)
				}
				if err != nil || retryAfter == 0 {
					return err
				}
				select {
				case <-time.After(retryAfter):
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}, nil
	}
}

func run(ctx context.Context) error {
	server, err := redistest.StartMain()
	if err != nil {
		return err
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr, PoolSize: 100})
	defer func() { _ = client.Close() }()

	shares := table.NewWriter()
	shares.AppendHeader(table.Row{"limiter", "calls passed a second, of 100", "of the tenant with many callers, of 30", "of each other one", "upstream's permits a call", "busiest second, of 200", "commands a call"})
	for _, r := range rivals {
		row, err := r.shares(ctx, client)
		if err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		shares.AppendRow(row)
	}
	fmt.Println(shares.RenderMarkdown())

	took := make([][2][]float64, len(rivals))
	for range rounds {
		for i, r := range rivals {
			for j, limits := range [][]limit{{{"a", 1e6}, {"b", 1e6}}, {{"a", 1e6}, {"b", 1e6}, {"c", 1e6}}} {
				µs, err := r.time(ctx, client, limits)
				if err != nil {
					return fmt.Errorf("%s: %w", r.name, err)
				}
				took[i][j] = append(took[i][j], µs)
			}
		}
	}
	times := table.NewWriter()
	times.AppendHeader(table.Row{"limiter", "µs a call, two limits", "three"})
	for i, r := range rivals {
		times.AppendRow(table.Row{r.name, fmt.Sprintf("%.0f", median(took[i][0])), fmt.Sprintf("%.0f", median(took[i][1]))})
	}
	fmt.Println()
	fmt.Println(times.RenderMarkdown())
	return nil
}

// shares lets all tenants call at full demand, and counts what passes once the buckets are used up.
func (r *rival) shares(ctx context.Context, client *redis.Client) (table.Row, error) {
	if err := client.FlushAll(ctx).Err(); err != nil {
		return nil, err
	}
	var calls [tenants]call
	for i := range calls {
		var err error
		if calls[i], err = r.open(client, limit{"upstream", upstream}, limit{fmt.Sprint("tenant", i), tenant}); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, warm+demand)
	defer cancel()
	var (
		mu     sync.Mutex
		passed [tenants][]time.Time
		failed error
		all    sync.WaitGroup
		first  atomic.Int64
	)
	for i := range calls {
		callers := few
		if i == 0 {
			callers = many
		}
		for range callers {
			all.Go(func() {
				for {
					err := calls[i](ctx, &first)
					mu.Lock()
					if err == nil {
						passed[i] = append(passed[i], time.Now())
					} else if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, tokenbucket.ErrStoreTimeout) { // it has ended, or ends before a reply
						failed = err
					}
					mu.Unlock()
					if err != nil {
						return
					}
				}
			})
		}
	}
	time.Sleep(warm)
	from, took, commands := time.Now(), first.Load(), processed(ctx, client)
	all.Wait()
	took, commands = first.Load()-took, processed(context.Background(), client)-commands
	if failed != nil {
		return nil, failed
	}
	var sums [tenants]float64
	var times []time.Time
	sum := 0.0
	for i := range passed {
		times = append(times, passed[i]...)
		for _, at := range passed[i] {
			if at.After(from) {
				sums[i]++
			}
		}
		sum += sums[i]
	}
	seconds := demand.Seconds()
	return table.Row{r.name, fmt.Sprintf("%.1f", sum/seconds), fmt.Sprintf("%.1f", sums[0]/seconds), fmt.Sprintf("%.1f", (sum-sums[0])/seconds/(tenants-1)),
		fmt.Sprintf("%.2f", float64(took)/sum), busiest(times), fmt.Sprintf("%.1f", float64(commands)/sum)}, nil
}

// processed is how many commands a server has executed.
func processed(ctx context.Context, client *redis.Client) (n int64) {
	stats := client.InfoMap(ctx, "stats").Val()
	_, _ = fmt.Sscan(stats["Stats"]["total_commands_processed"], &n)
	return n
}

// time returns the microseconds of a call that always passes.
func (r *rival) time(ctx context.Context, client *redis.Client, limits []limit) (float64, error) {
	if err := client.FlushAll(ctx).Err(); err != nil {
		return 0, err
	}
	do, err := r.open(client, limits...)
	if err != nil {
		return 0, err
	}
	var first atomic.Int64
	n, began := 0, time.Now()
	for ; time.Since(began) < length; n++ {
		if err := do(ctx, &first); err != nil {
			return 0, err
		}
	}
	if n == 0 {
		return 0, errors.New("no call has passed")
	}
	return float64(time.Since(began).Microseconds()) / float64(n), nil
}

// busiest returns the largest number of calls within less than a second.
func busiest(times []time.Time) int {
	slices.SortFunc(times, time.Time.Compare)
	most, first := 0, 0
	for i, t := range times {
		for t.Sub(times[first]) >= time.Second {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}

func median(figures []float64) float64 {
	slices.Sort(figures)
	return figures[len(figures)/2]
}
