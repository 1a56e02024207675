package semaphore

import (
	"bufio"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// serverUse is what the server has used and done so far.
type serverUse struct {
	cpu               time.Duration
	scripts, commands int64 // commands: those in scripts too, but those of this test
}

func usage(t *testing.T, client *redis.Client) (u serverUse) {
	t.Helper()
	text, err := client.Info(ctx, "cpu", "commandstats").Result()
	require.NoError(t, err)
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), ":")
		switch {
		case key == "used_cpu_sys" || key == "used_cpu_user":
			s, err := strconv.ParseFloat(value, 64)
			require.NoError(t, err)
			u.cpu += time.Duration(s * float64(time.Second))
		case strings.HasPrefix(key, "cmdstat_"):
			var calls int64
			_, err := fmt.Sscanf(value, "calls=%d", &calls)
			require.NoError(t, err)
			switch strings.TrimPrefix(key, "cmdstat_") {
			case "evalsha", "eval":
				u.scripts += calls
				u.commands += calls
			case "info", "ping", "zcard":
			default:
				u.commands += calls
			}
		}
	}
	return u
}

// pings returns the median time of a PING, now.
func pings(t *testing.T, client *redis.Client) time.Duration {
	t.Helper()
	var all []time.Duration
	for range 2000 {
		began := time.Now()
		require.NoError(t, client.Ping(ctx).Err())
		all = append(all, time.Since(began))
	}
	return quantile(all, 0.5)
}

// crowdTest is a semaphore of one permit, which the test keeps, and processes that wait for it.
type crowdTest struct {
	*testing.T
	client    *redis.Client
	spec      spec
	processes []*process
	holder    *semaphore.Semaphore
	permit    *semaphore.Permit
	reached   chan *process
}

func newCrowd(t *testing.T, processes int) *crowdTest {
	_, client := server(t)
	addr := client.Options().Addr
	c := &crowdTest{T: t, client: client, spec: spec{Name: "crowd", Permits: 1, Lease: 10 * time.Second, Timeout: 20 * time.Second}, reached: make(chan *process, 1000)}
	c.holder = open(t, addr, c.spec.Name, 1)
	for i := range processes {
		c.processes = append(c.processes, start(t, job{
			Do: "crowd", Redis: addr, Label: fmt.Sprint("process ", i), Semaphores: []spec{c.spec},
		}, func(p *process, e event) {
			switch e.What {
			case "reached":
				c.reached <- p
			case "failed":
				t.Errorf("process %s: %s", p.Label, e.Text)
			default:
				p.events <- e
			}
		}))
	}
	c.keep()
	return c
}

// keep takes the permit.
func (c *crowdTest) keep() {
	var err error
	c.permit, err = c.holder.Acquire(ctx, 1)
	require.NoError(c, err)
}

func (c *crowdTest) all(command, answer string) (events []event) {
	for _, p := range c.processes {
		p.command(command)
	}
	for _, p := range c.processes {
		if answer != "" {
			events = append(events, p.expect(c.T, answer))
		}
	}
	return events
}

// gather starts waiters up to n in all, spread over the given time, and returns the bytes in use for each.
func (c *crowdTest) gather(n int, within time.Duration) float64 {
	bytes := func() (sum int) {
		for _, e := range c.all("usage", "usage") {
			sum += e.N
		}
		return sum
	}
	before := bytes()
	c.all(fmt.Sprintf("wait %d %d", n/len(c.processes), within.Milliseconds()), "")
	require.Eventually(c, func() bool { return c.client.ZCard(ctx, base(c.spec.Name)+"queue").Val() == int64(n) },
		60*time.Second, 10*time.Millisecond)
	return float64(bytes()-before) / float64(n)
}

// idle returns the share of a processor that each process, and Redis, used in the given time while all wait.
func (c *crowdTest) idle(long time.Duration) (processes []float64, server float64) {
	before, mine, began := usage(c.T, c.client), c.all("cpu", "cpu"), time.Now()
	time.Sleep(long)
	took := float64(time.Since(began))
	server = float64(usage(c.T, c.client).cpu-before.cpu) / took
	for i, e := range c.all("cpu", "cpu") {
		processes = append(processes, float64(micros(e.Call-mine[i].Call))/took)
	}
	return processes, server
}

// turns returns who has had the permit since they were asked for last, in order.
func (c *crowdTest) turns() (all []event) {
	for _, p := range c.processes {
		p.command("series")
		for e := p.next(c.T); e.What != "end"; e = p.next(c.T) {
			require.Equal(c.T, "turn", e.What, "%+v", e)
			e.Text = p.Label
			all = append(all, e)
		}
	}
	slices.SortFunc(all, func(a, b event) int { return int(a.Fence - b.Fence) })
	return all
}

// hand hands the permit over until one process has had it so often, and keeps it. It returns what the server did per turn, and
// the turns.
func (c *crowdTest) hand(quota int, how string) (scripts, commands float64, turns []event) {
	c.turns()
	before := usage(c.T, c.client)
	c.all(fmt.Sprintf("quota %d %s", quota, how), "set")
	if c.permit != nil {
		require.NoError(c, c.permit.Release(ctx))
		c.permit = nil
	}
	select {
	case <-c.reached:
	case <-time.After(2 * time.Minute):
		held, err := c.holder.Holders(ctx)
		require.Fail(c, "nobody has had the permit so often", "%d: held %+v, %v; %d wait; %d turns",
			quota, held, err, c.client.ZCard(ctx, base(c.spec.Name)+"queue").Val(), len(c.turns()))
	}
	after := usage(c.T, c.client)
	turns = c.turns()
	n := float64(len(turns))
	return float64(after.scripts-before.scripts) / n, float64(after.commands-before.commands) / n, turns
}

// disperse ends all waits.
func (c *crowdTest) disperse() {
	c.all("stop", "stopped")
	c.keep()
	require.Zero(c, c.client.ZCard(ctx, base(c.spec.Name)+"queue").Val(), "nobody waits")
	for len(c.reached) > 0 {
		<-c.reached
	}
}

// wakes returns the times from each call of Release to the next return of Acquire; those to another process also by themselves.
func wakes(turns []event) (all, crossed []time.Duration) {
	for i, e := range turns[1:] {
		d := micros(e.At - turns[i].Call)
		if all = append(all, d); e.Text != turns[i].Text {
			crossed = append(crossed, d)
		}
	}
	return all, crossed
}

// Ten thousand wait, in one process and in four: that costs next to nothing, waking them does not take longer, nor does
// Redis do more for each than for one of ten.
func TestTenThousandWaiters(t *testing.T) {
	const most = 10_000
	for _, processes := range []int{1, 4} {
		t.Run(fmt.Sprintf("in %d processes", processes), func(t *testing.T) {
			c := newCrowd(t, processes)
			each := map[int]float64{}
			bound := func() float64 {
				if processes > 1 { // the messages between several processes differ
					return 1.2 * each[12]
				}
				return 1.2 * min(each[12], each[100], each[1000])
			}
			for _, n := range []int{12, 100, 1000, most} {
				if n == 100 && processes > 1 {
					continue
				}
				bytes := c.gather(n, time.Duration(n/10)*time.Millisecond)
				if n == most {
					idle, redis := c.idle(3 * time.Second)
					for range 3 { // all who wait ask again every ten heartbeats: not each time
						if max(slices.Max(idle), redis) >= 0.03 {
							idle, redis = c.idle(3 * time.Second)
						}
					}
					t.Logf("%d wait: %.0f bytes each; processors used: %.2f %% by each process, %.2f %% by Redis",
						n, bytes, 100*slices.Max(idle), 100*redis)
					require.Less(t, slices.Max(idle), 0.03)
					require.Less(t, redis, 0.03)
				}
				scripts, commands, turns := c.hand(1000/processes, "again")
				for range 4 {
					if n == most && commands > bound() { // likewise, if it does not take long
						_, more, _ := c.hand(200/processes, "again")
						commands = min(commands, more)
					}
				}
				all, crossed := wakes(turns)
				each[n] = commands
				t.Logf("%d wait, again and again: per turn %.2f scripts, %.1f commands in all; from Release to the next Acquire p50 %v, p99 %v; %d of %d turns from another process",
					n, scripts, commands, quantile(all, 0.5), quantile(all, 0.99), len(crossed), len(turns))
				if n < most {
					c.disperse()
				}
			}
			require.LessOrEqual(t, each[most], bound())

			ping := pings(t, c.client)
			_, _, turns := c.hand(3000/processes, "once")
			all, crossed := wakes(turns)
			c.disperse()
			p50, p99 := quantile(all, 0.5), quantile(all, 0.99)
			t.Logf("%d wait, once each: from Release to the next Acquire p50 %v, p99 %v, at most %v; PING p50 %v: p50 is %.1f of it, p99 %.1f",
				most, p50, p99, quantile(all, 1), ping, float64(p50)/float64(ping), float64(p99)/float64(ping))
			if processes > 1 {
				t.Logf("%d of %d turns from another process: p50 %v, p99 %v", len(crossed), len(turns), quantile(crossed, 0.5), quantile(crossed, 0.99))
				require.NotEmpty(t, crossed)
			}
			require.NoError(t, c.permit.Release(ctx))
			require.Less(t, p50, 250*time.Millisecond, "nobody finds out by asking now and then, each second; how fast it is, a benchmark says")
		})
	}
}
