package semaphore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// limit is a process whose workers acquire as many permits as there are by its configuration, or fewer, and hold them for some
// milliseconds. Its events: "held"; "too many", if N permits are more than there are; "expired", if they were not renewed in time, as
// on a machine that stands still; "failed", which must not be.
func limit(c *child) error {
	var running sync.WaitGroup
	for i := range c.Workers {
		r := rand.New(rand.NewPCG(c.Seed, uint64(i)))
		running.Go(func() {
			for c.ctx.Err() == nil {
				n := 1 + r.IntN(c.Semaphores[0].Permits)
				p, err := c.semaphores[0].Acquire(c.ctx, n)
				switch {
				case errors.Is(err, context.Canceled):
				case errors.Is(err, semaphore.ErrTooMany):
					c.tell(event{What: "too many", N: n})
					time.Sleep(10 * time.Millisecond)
				case err != nil:
					c.tell(event{What: "failed", N: n, Text: err.Error()})
				default:
					c.tell(event{What: "held", N: n, Fence: p.Fence()})
					time.Sleep(time.Duration(r.ExpFloat64() * 3 * float64(time.Millisecond)))
					switch err := p.Release(ctx); {
					case errors.Is(err, semaphore.ErrExpired), errors.Is(err, semaphore.ErrLost):
						c.tell(event{What: "expired", N: n})
					case err != nil:
						c.tell(event{What: "failed", N: n, Text: err.Error()})
					}
				}
			}
		})
	}
	for range c.commands {
	}
	running.Wait()
	return nil
}

// Processes that are configured with 5 and with 2 permits, under load, and killed: no request is granted above the number in force, and
// none for at most that number fails. Without versions each process's own number is in force. With versions it is the 2, once the first
// process with it has started.
func TestTwoNumbers(t *testing.T) {
	long := 3 * time.Second
	if os.Getenv("TOKENBUCKET_LONG") != "" {
		long = 10 * time.Second
	}
	for name, versions := range map[string][2]int64{"own": {}, "versions": {1, 2}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, client := server(t)
			random := faultlab.Seed(t)
			specs := [2]spec{
				{Name: "x", Permits: 5, Lease: 500 * time.Millisecond, Version: versions[0]},
				{Name: "x", Permits: 2, Lease: 500 * time.Millisecond, Version: versions[1]},
			}
			m := monitor(t, client.Options().Addr, spec{Name: "x", Permits: 5})["x"]
			if versions[1] == 0 {
				m.mu.Lock()
				m.own = map[string]int{"2": 2, "5": 5}
				m.mu.Unlock()
			}
			var mu sync.Mutex
			held, tooMany, expired, failed := map[string]int{}, 0, 0, []string{}
			hear := func(p *process, e event) {
				mu.Lock()
				defer mu.Unlock()
				switch {
				case e.What == "held":
					held[p.Label]++
				case e.What == "expired":
					expired++
				case e.What == "too many" && versions[1] != 0 && e.N > 2:
					tooMany++
				default:
					failed = append(failed, fmt.Sprintf("%s: %+v", p.Label, e))
				}
			}
			begin := func(i int) *process {
				return start(t, job{
					Do: "limit", Redis: client.Options().Addr, Label: fmt.Sprint(specs[i].Permits), Semaphores: []spec{specs[i]},
					Workers: 8, Seed: random.Uint64(),
				}, hear)
			}
			running := []*process{begin(0), begin(0)}
			time.Sleep(long / 6)
			running = append(running, begin(1), begin(1))
			kills := 0
			enough := func() bool {
				mu.Lock()
				defer mu.Unlock()
				return held["5"] > 20 && held["2"] > 20 && (tooMany > 0 || versions[1] == 0)
			}
			for began := time.Now(); time.Since(began) < long || !enough() && time.Since(began) < time.Minute; kills++ {
				time.Sleep(time.Duration(200+random.IntN(300)) * time.Millisecond)
				i := random.IntN(len(running))
				running[i].kill()
				running[i] = begin(i / 2)
			}
			for _, p := range running {
				p.end(t)
			}
			m.end(t)
			mu.Lock()
			defer mu.Unlock()
			require.Empty(t, failed)
			require.Empty(t, m.wrong)
			require.Greater(t, held["5"], 20)
			require.Greater(t, held["2"], 20)
			require.Equal(t, versions[1] != 0, tooMany > 0)
			require.LessOrEqual(t, expired, (held["5"]+held["2"])/10)
			t.Logf("%d processes killed, %d grants, at most %d held, %d expired, %d too many; to whom: %v", kills, len(m.grants), m.most, expired, tooMany, held)
		})
	}
}

// watch is a process that holds a permit and checks it as often as it can: "held", then the command "look". After each gap of more than a
// lease between two checks it sends an event with the result of the next check: Text is the number of permit, context and cause by which
// the permit was over.
func watch(c *child) error {
	lease := c.Semaphores[0].Lease
	p, err := c.semaphores[0].Acquire(c.ctx, 1)
	if err != nil {
		return err
	}
	held := p.Context()
	last := time.Now() // before the event is sent: the process may be stopped at once
	c.tell(event{What: "held"})
	for {
		looked := time.Now()
		over := []bool{p.Err() != nil, held.Err() != nil, context.Cause(held) != nil}
		if gap := looked.Sub(last); gap > lease {
			c.tell(event{What: "gap", N: int(gap.Microseconds()), Text: fmt.Sprint(over)})
			break
		}
		last = looked
	}
	for range c.commands {
	}
	return nil
}

// A holder that was stopped for longer than its lease finds it over at its first check, in all rounds.
func TestFirstLook(t *testing.T) {
	t.Parallel()
	rounds := 12
	if os.Getenv("TOKENBUCKET_LONG") != "" {
		rounds = 48
	}
	_, client := server(t)
	const lease = 500 * time.Millisecond // another thread may renew it while the one that looks has no processor
	seen := map[string]int{}
	for i := range rounds {
		p := start(t, job{
			Do: "watch", Redis: client.Options().Addr, Label: "w", Semaphores: []spec{{Name: fmt.Sprint("w", i), Permits: 1, Lease: lease}},
		}, nil)
		p.expect(t, "held")
		time.Sleep(time.Duration(i%7) * 27 * time.Millisecond) // before or after a renewal
		p.signal(t, syscall.SIGSTOP)
		time.Sleep(lease * 3 / 2)
		p.signal(t, syscall.SIGCONT)
		e := p.expect(t, "gap")
		seen[strings.Trim(e.Text, "[]")]++
		p.end(t)
	}
	require.Equal(t, map[string]int{"true true true": rounds}, seen)
}

// While Redis is stopped, no call waits longer for a reply than the timeout, even if another call is in flight.
func TestTimeoutWhileRedisHangs(t *testing.T) {
	s, client := server(t)
	const timeout = 2 * time.Second
	sem := open(t, client.Options().Addr, "x", 5, semaphore.WithStoreTimeout(timeout))
	p, err := sem.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, s.Stop())
	var calls sync.WaitGroup
	var mu sync.Mutex
	worst := time.Duration(0)
	late := faultlab.MeasureLateness(t)
	for i := range 12 {
		calls.Go(func() {
			time.Sleep(time.Duration(i) * timeout / 14)
			began := time.Now()
			_, err := sem.Acquire(ctx, 1)
			mu.Lock()
			defer mu.Unlock()
			worst = max(worst, time.Since(began))
			if !errors.Is(err, semaphore.ErrStoreTimeout) {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	slack := timeout/4 + 5*late.Most() // to wait for the one under way, and then as long again, is nearly twice the timeout
	require.NoError(t, s.Continue())
	require.Less(t, worst, timeout+slack)
	faultlab.Figure(t, "longest wait for an answer with a timeout of 2 s", worst)
	require.Eventually(t, func() bool { return p.Release(ctx) == nil || p.Err() != nil }, 10*time.Second, 10*time.Millisecond)
}
