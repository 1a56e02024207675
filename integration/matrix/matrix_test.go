// Package matrix crosses every feature of a limiter with every other one, on each store and in two processes. See docs/testing.md.
package matrix

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

const (
	rate, burst = 200.0, 50.0
	faster      = 250 // the rate of a bucket whose rate is changed
	callers     = 16
	// owned bounds the permits that the callers own ahead.
	owned    = 4*callers + 1
	patience = 500 * time.Millisecond
	penalty  = 200 * time.Millisecond
	away     = 300 * time.Millisecond
	warmup   = 200 * time.Millisecond
	// least is the share of what is possible that a cell must use.
	least = 0.97
	// late bounds how late a permit is used: one that is overdue by more lapses.
	late = 100 * time.Millisecond
)

var background = context.Background()

func TestMain(m *testing.M) { redistest.Main(m) }

// world is a store and a number of processes that share nothing but it.
type world struct {
	kind      string
	processes int
}

func (w world) String() string { return fmt.Sprintf("%s x %d", w.kind, w.processes) }

var worlds = []world{{"memory", 1}, {"memory", 2}}

// atOnce is how many cells on a server run at once: most of a cell's time is waiting.
const atOnce = 64

// Every feature beside every other one, and beside itself, uses the rate, keeps the bound and the order, and leaves nothing. What is refused
// is in refusals, with its reason.
func TestMatrix(t *testing.T) {
	slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil))) // the registry's and the outages' log
	server := redistest.Start(t)
	stalls := watch(t)
	var clients [2]*redis.Client
	for i := range clients {
		clients[i] = server.Client(t, func(o *redis.Options) { o.PoolSize = 2 * atOnce })
	}
	var mu sync.Mutex
	var results []result
	t.Run("cells", func(t *testing.T) {
		slots := make(chan struct{}, atOnce)
		bubbles := make(chan struct{}, 2) // they use the processor all the time
		for _, w := range worlds {
			for i, a := range features {
				for _, b := range features[i:] {
					t.Run(fmt.Sprintf("%v/%s + %s", w, a.name, b.name), func(t *testing.T) {
						t.Parallel()
						c := &cell{name: t.Name(), world: w, pair: [2]feature{a, b}}
						if w.kind == "memory" {
							bubbles <- struct{}{}
							defer func() { <-bubbles }()
							c.lasts = 3 * time.Second
							synctest.Test(t, func(*testing.T) { c.run(background, nil) })
						} else {
							slots <- struct{}{}
							defer func() { <-slots }()
							c.lasts = 2 * time.Second
							c.run(background, clients[:])
							c.stalled = stalls(c.began, c.ended)
						}
						r := c.result()
						mu.Lock()
						results = append(results, r)
						mu.Unlock()
						item := isKnown(r.pair[0], r.pair[1], r.wrong)
						switch {
						case r.wrong != "" && item != "":
							t.Skipf("known, %s: %s", item, r.wrong)
						case r.wrong != "":
							t.Error(r.wrong)
						}
					})
				}
			}
		}
	})
	for _, client := range clients {
		require.Empty(t, client.Keys(background, "*}:lock").Val(), "locks that are left")
	}
	table(t, results)
}

// table logs the results.
func table(t *testing.T, results []result) {
	for _, w := range worlds {
		cells, holds, refused, worst := 0, 0, 0, result{share: 9}
		for _, r := range results {
			switch {
			case r.world != w:
				continue
			case r.refused:
				refused++
			case r.share < worst.share && !r.free:
				worst = r
			}
			cells++
			if r.wrong == "" {
				holds++
			}
		}
		t.Logf("%-10v %4d cells, %4d hold (%d of them refused with a reason); worst share %.3f: %s", w, cells, holds, refused, worst.share, worst.key())
	}
	slices.SortFunc(results, func(a, b result) int { return strings.Compare(a.key(), b.key()) })
	for _, r := range results {
		if r.wrong != "" && testing.Verbose() {
			t.Logf("%v: %s: %s", r.world, r.key(), r.wrong)
		}
	}
}

// result is what a cell has shown.
type result struct {
	world         world
	pair          [2]string
	share         float64
	free, refused bool
	wrong         string
}

func (r *result) key() string { return r.pair[0] + " + " + r.pair[1] }

// cell is two features on a bucket of its own.
type cell struct {
	name     string
	world    world
	pair     [2]feature
	lasts    time.Duration
	stores   []*tokenbuckettest.Store
	limiters []*tb.RateLimiter
	rows     *rows
	off      atomic.Bool // the switch
	away     atomic.Bool // the store was away, so that errors may say so
	free     atomic.Bool // calls may pass without a limit, so there is no bound
	second   atomic.Bool // a choice has a second bucket
	began    time.Time
	ended    time.Time
	stalled  time.Duration

	mu       sync.Mutex
	lost     float64   // permits that need not be used
	more     float64   // permits that may be used on top of the bound
	raised   time.Time // when the rate was raised, until a reset unless it is that of a row
	stays    bool
	reset    time.Time
	uses     []use
	refusal  error
	failures []string
}

// use is permits that a caller has used.
type use struct {
	asked, at time.Time
	permits   int
	ordered   bool // first come, first served
}

// less takes permits out of what is possible, and allows others beyond it.
func (c *cell) less(lost, more float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost += lost
	c.more += more
}

// faster notes a change to the rate faster, which stays after a reset or not. What is owned already keeps its due time.
func (c *cell) faster(change func() error, stays bool) error {
	before := time.Now()
	err := change()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stays = c.stays || stays
	if c.raised.IsZero() && err == nil {
		c.raised = before
		c.lost += owned/2*(1-rate/faster) + (faster-rate)*time.Since(before).Seconds()
	}
	return err
}

func (c *cell) fail(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.failures) < 4 {
		c.failures = append(c.failures, fmt.Sprintf(format, args...))
	}
}

// note keeps an error: a refusal of the combination, what an outage explains, or a failure.
func (c *cell) note(ctx context.Context, what string, err error) {
	switch {
	case err == nil, ctx.Err() != nil && errors.Is(err, context.Canceled):
	case c.away.Load() && errors.Is(err, tb.ErrStoreUnavailable):
	case refused(err):
		c.mu.Lock()
		c.refusal = err
		c.mu.Unlock()
	default:
		c.fail("%s: %v", what, err)
	}
}

// refused reports whether an error is the typed error of a combination that cannot be.
func refused(err error) bool {
	return errors.Is(err, tb.ErrInvalidConfig) || errors.Is(err, tb.ErrInvalidPermits) || errors.Is(err, errNoSuchVerb)
}

// run makes the limiters, lets the callers and the disturbances run, and closes everything.
func (c *cell) run(ctx context.Context, clients []*redis.Client) {
	s := &spec{cell: c}
	for _, f := range c.pair {
		if f.limit != nil {
			f.limit(c, s)
		}
		if c.pair[0].name == c.pair[1].name {
			break
		}
	}
	c.rows = &rows{spec: s}
	defer c.rows.close()
	targets := make([][]target, c.world.processes) // of each process: by target and face
	memory := tb.NewMemoryStore()
	var closing []func(context.Context) error
	for p := range targets {
		var inner tb.Store = memory
		if c.world.kind != "memory" {
			inner = faultlab.Stores[c.world.kind](clients[p%len(clients)], tb.WithKeyPrefix(c.name+":"))
		}
		store := tokenbuckettest.Wrap(inner)
		c.stores = append(c.stores, store)
		l, err := s.build(c.name, rate, store)
		if err != nil {
			c.note(ctx, "making the limiter", err)
			return
		}
		c.limiters = append(c.limiters, l)
		closing = append(closing, l.Close)
		for _, face := range c.faces() {
			of, err := face(l)
			if err != nil {
				c.note(ctx, "the priority", err)
				return
			}
			for _, make := range c.targets() {
				to, err := make(c, s, store, of)
				if err != nil {
					c.note(ctx, "making the target", err)
					return
				}
				targets[p] = append(targets[p], to)
				closing = append(closing, to.Close)
			}
		}
	}
	within, end := context.WithCancel(ctx)
	defer end()
	var running sync.WaitGroup
	c.began = time.Now()
	calls, queues := c.calls()
	inOrder := c.ordered()
	for i := range callers {
		by := targets[i/2%len(targets)]
		to := by[i/4%len(by)]
		call := calls[i%len(calls)]
		mine := context.WithValue(within, callerKey{}, i)
		running.Go(func() {
			for within.Err() == nil {
				asked := time.Now()
				n, err := call(c, mine, to)
				if n > 0 && err == nil {
					c.mu.Lock()
					c.uses = append(c.uses, use{asked: asked, at: time.Now(), permits: n, ordered: inOrder && queues[i%len(calls)]})
					c.mu.Unlock()
				}
				c.note(within, "call", err)
				if n == 0 && time.Since(asked) < time.Millisecond || c.free.Load() || err != nil {
					sleep(within, 5*time.Millisecond)
				}
			}
		})
	}
	for i, f := range c.pair {
		if f.disturb != nil && (i == 0 || c.pair[0].name != f.name) {
			running.Go(func() { c.note(within, f.name, f.disturb(c, within)) })
		}
	}
	sleep(within, c.lasts)
	c.ended = time.Now()
	end()
	running.Wait()
	for _, close := range closing {
		bounded, cancel := context.WithTimeout(background, 5*time.Second)
		if err := close(bounded); err != nil && !c.away.Load() {
			c.fail("Close: %v", err)
		}
		cancel()
	}
	for _, l := range c.limiters {
		if n, _ := l.Waiting(); n != 0 {
			c.fail("%d waiters are left", n)
		}
	}
}

// faces returns the priorities of the callers.
func (c *cell) faces() (all []func(*tb.RateLimiter) (*tb.RateLimiter, error)) {
	for _, f := range c.pair {
		if f.face != nil {
			all = append(all, func(l *tb.RateLimiter) (of *tb.RateLimiter, err error) { return f.face(l), nil })
		}
	}
	if len(all) < 2 {
		all = append(all, func(l *tb.RateLimiter) (*tb.RateLimiter, error) { return l, nil })
	}
	return all
}

// targets returns what makes the targets of the callers.
func (c *cell) targets() (all []func(*cell, *spec, tb.Store, *tb.RateLimiter) (target, error)) {
	for _, f := range c.pair {
		if f.target != nil {
			all = append(all, f.target)
		}
	}
	if len(all) == 0 {
		all = append(all, func(c *cell, _ *spec, _ tb.Store, l *tb.RateLimiter) (target, error) {
			one := one{RateLimiter: l}
			if s := c.rows.registries; len(s) > 0 {
				one.rows = s[len(s)-1]
			}
			return one, nil
		})
	}
	return all
}

// calls returns the ways of calling: those of the features, and Acquire beside a single one or those that give up. queues tells which wait
// in the queue of their process until they are served.
func (c *cell) calls() (all []func(*cell, context.Context, target) (int, error), queues []bool) {
	for _, f := range c.pair {
		if f.call != nil {
			all = append(all, f.call)
			queues = append(queues, slices.Contains([]string{"Acquire", "TryAcquire", "Try", "TryAwait"}, f.name))
		}
	}
	if len(all) < 2 || c.pair[0].leaves && c.pair[1].leaves {
		all, queues = append(all, features[0].call), append(queues, true)
	}
	return all, queues
}

// possible returns the permits that fall due in the cell's time.
func (c *cell) possible() float64 {
	n := rate * c.ended.Sub(c.began).Seconds()
	if c.second.Load() {
		n *= 2
	}
	if !c.raised.IsZero() {
		until := c.ended
		if !c.reset.IsZero() && !c.stays {
			until = c.reset
		}
		n += (faster - rate) * until.Sub(c.raised).Seconds()
	}
	return n
}

// window returns by how many permits the fullest window, of any length, exceeds the rate.
func (c *cell) window() (most float64) {
	per := rate
	if c.second.Load() {
		per += rate
	}
	if !c.raised.IsZero() {
		per += faster - rate
	}
	slices.SortFunc(c.uses, func(a, b use) int { return a.at.Compare(b.at) })
	sum, last := 0.0, c.began
	for _, u := range c.uses {
		sum = max(0, sum-per*u.at.Sub(last).Seconds()) + float64(u.permits)
		last, most = u.at, max(most, sum)
	}
	return most
}

// result judges the cell.
func (c *cell) result() result {
	r := result{world: c.world, pair: [2]string{c.pair[0].name, c.pair[1].name}, free: c.free.Load()}
	reason, expected := refusals[r.key()]
	if !expected {
		reason, expected = refusals[r.pair[1]+" + "+r.pair[0]]
	}
	if r.refused = c.refusal != nil; r.refused {
		if !expected {
			r.wrong = fmt.Sprintf("refused, and refusals has no reason: %v", c.refusal)
		}
		return r
	}
	if expected {
		c.fail("refusals has a reason, %q, and it is not refused", reason)
	}
	used := 0
	for _, u := range c.uses {
		if !u.at.After(c.ended) {
			used += u.permits
		}
	}
	possible := c.possible()
	r.share = float64(used) / max(1, possible-c.lost-rate*c.stalled.Seconds()-1)
	if r.share < least {
		c.fail("%.3f of the rate is used: %d of %.0f permits (%.0f need not be, stalled for %v)", r.share, used, possible, c.lost, c.stalled)
	}
	most := possible + c.more + 2 // the bucket begins empty, or with the one permit of a quota; a choice has two
	full := burst + c.more + 1
	if c.second.Load() {
		full += burst + 1
	}
	if c.world.kind != "memory" {
		most += rate * late.Seconds() / 2 // how well the server's clock is known
		full += 2 * rate * late.Seconds() // those of all processes are used late
	}
	if !r.free && float64(used) > most {
		c.fail("%d permits are used, and at most %.0f are due", used, most)
	}
	if n := c.window(); !r.free && n > full {
		c.fail("a window has %.0f permits beyond the rate, and at most %.0f may be", n, full)
	}
	if n := c.overtaken(); n > 0 {
		c.fail("%d calls were overtaken", n)
	}
	r.wrong = strings.Join(c.failures, "; ")
	return r
}

// overtaken counts the calls of one queue that were made before another one and served after it.
func (c *cell) overtaken() (n int) {
	if c.world.kind != "memory" || c.world.processes > 1 {
		return 0 // the instant at which a call enters a queue is not known exactly
	}
	var before, latest time.Time // the latest call that was served at an earlier instant, and until now
	var at time.Time
	for _, u := range c.uses { // by the time of their use
		if !u.ordered {
			continue
		}
		if u.at.After(at) {
			at, before = u.at, latest
		}
		if u.asked.Before(before) {
			n++
		}
		if u.asked.After(latest) {
			latest = u.asked
		}
	}
	return n
}

// ordered reports whether a feature's calls are served first come, first served: those of the verbs that wait in the queue.
func (c *cell) ordered() bool {
	for _, f := range c.pair {
		switch f.name {
		case "WithFairness", "Low", "Lowest", "All", "Any", "Reset", "FailClosed", "FailOpen", "LocalShare", "WithPrefetch", "WithShadow", "WithSwitch":
			return false
		}
	}
	return true
}

// watch returns a function that tells for how long the process got no processor time, in pauses that let permits lapse.
func watch(t *testing.T) func(from, to time.Time) time.Duration {
	type span struct {
		at time.Time
		d  time.Duration
	}
	var mu sync.Mutex
	var spans []span
	ctx, end := context.WithCancel(background)
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			before := time.Now()
			sleep(ctx, 5*time.Millisecond)
			if d := time.Since(before) - 5*time.Millisecond; d > 25*time.Millisecond {
				mu.Lock()
				spans = append(spans, span{before, d})
				mu.Unlock()
			}
		}
	})
	t.Cleanup(func() { end(); running.Wait() })
	return func(from, to time.Time) (sum time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range spans {
			if s.at.After(from) && s.at.Before(to) {
				sum += s.d
			}
		}
		return sum
	}
}
