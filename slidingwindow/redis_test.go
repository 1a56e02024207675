package slidingwindow

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// redistestNone is a client that must not be used.
type redistestNone struct{}

func (redistestNone) Process(context.Context, redis.Cmder) error { return errors.New("used") }

// patient is a timeout that is long enough for a real server's reply on a slow machine.
var patient = WithStoreTimeout(30 * time.Second)

// unique returns a name that no other test uses.
func unique(t testing.TB) string { return fmt.Sprintf("%s:%d", t.Name(), rand.Uint64()) }

// serverClock returns an option that makes scripts decide by a clock of the test, while the process uses another.
func serverClock(now func() int64) Option {
	return func(o *options) { o.server = func(int64) int64 { return now() } }
}

// scripted returns a machine with the fields that the arguments of scripts need.
func scripted(key string, r rule, server func() int64) *machine {
	return &machine{config: config{key: key, rule: r, server: func(int64) int64 { return server() }}}
}

// lua/apply.lua and counts compute the same, to the last character of the state: with clocks that go on, stand still and step back, states of
// other resolutions, and permits that are requested and refunded.
func TestDifferential(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	key := unique(t)
	executed, granted, refunded := 0, 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		require.NoError(rt, client.Del(ctx, key).Err())
		window, resolution := drawRule(rt)
		rules := []rule{
			{window.Microseconds(), resolution.Microseconds(), int64(window / resolution)},
			{window.Microseconds(), window.Microseconds(), 1}, // another resolution, as of another release
		}
		clock := begin + rapid.Int64Range(0, 1e9).Draw(rt, "begin")
		var stored state
		for range 60 {
			clock = drawStep(rt, clock, rules[0].window, rules[0].resolution)
			clock = drawStep(rt, clock, rules[0].window, rules[0].resolution)
			r := rapid.SampledFrom(rules).Draw(rt, "rule")
			b := new(flight)
			l := scripted(key, r, func() int64 { return clock })
			limit := rapid.Int64Range(1, 40).Draw(rt, "limit")
			l.limit = limit
			for range rapid.IntRange(0, 3).Draw(rt, "asks") {
				b.asked = append(b.asked, ask{rapid.Int64Range(1, 9).Draw(rt, "n"), rapid.Int64Range(1, 9).Draw(rt, "times")})
			}
			if l.view.epoch, l.view.back = stored.epoch, stored.back; rapid.IntRange(0, 2).Draw(rt, "refund") == 0 {
				for _, p := range stored.parts {
					if rapid.Bool().Draw(rt, "of this") {
						b.refunds = append(b.refunds, part{p.last - rapid.Int64Range(0, r.resolution).Draw(rt, "before"), rapid.Int64Range(1, 9).Draw(rt, "n")})
					}
				}
			}

			var c counts
			if stored.epoch != 0 {
				seen, parts := stored.seen, slices.Clone(stored.parts)
				if behind := seen - clock; behind > standstill { // they are moved before they are counted, with any resolution
					seen = clock
					for i := range parts {
						parts[i].last -= behind
					}
				}
				c.load(&r, seen, parts)
			}
			now := c.advance(&r, clock)
			back := stored.back + max(0, stored.seen-now)
			changed := stored.epoch != 0 && stored.seen > now
			for _, p := range b.refunds {
				if at := p.last - (back - stored.back); back == 0 || at >= now-r.window {
					n := c.remove(&r, at, p.count)
					changed = changed || n > 0
					refunded += int(n)
				}
			}
			var fits []string
			for _, a := range b.asked {
				fit := min(a.times, max(0, limit-c.used(&r, now))/a.n)
				if fit > 0 {
					require.True(rt, c.add(&r, fit*a.n))
					changed = true
					granted++
				}
				fits = append(fits, decimal(fit))
			}

			args, keys := l.arguments(b, 0)
			reply, err := applyScript.Run(ctx, client, keys, args...)
			require.NoError(rt, err)
			require.Len(rt, reply, 3)
			require.Equal(rt, fmt.Sprint(clock, " ", now), reply[0])
			require.Equal(rt, strings.Join(fits, " "), reply[2])
			is, err := client.Get(ctx, key).Result()
			require.True(rt, err == nil || errors.Is(err, redis.Nil), "%v", err)
			require.Equal(rt, is, reply[1])
			if is != "" {
				after, ok := parse(is)
				require.True(rt, ok, is)
				want := stored
				if changed {
					want = state{epoch: after.epoch, seen: now, back: back, parts: c.list()}
				}
				require.Equal(rt, want.String(), is)
				stored = after
			}
			executed++
		}
	})
	t.Logf("%d scripts, %d grants, %d refunded", executed, granted, refunded)
	require.Greater(t, executed, 5000)
	require.Greater(t, refunded, 100)
	require.Greater(t, granted, 600)
}

// Go and Lua accept the same texts as states, and refuse the same; neither overwrites a text that it refuses.
func TestDifferentialCorrupt(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	key := unique(t)
	l := scripted(key, rule{60_000_000, 1_000_000, 60}, func() int64 { return 100_000_000 })
	l.limit = 10
	good, bad := 0, 0
	check := func(t require.TestingT, text string) {
		require.NoError(t, client.Set(ctx, key, text, time.Minute).Err())
		args, keys := l.arguments(&flight{}, 0)
		_, err := applyScript.Run(ctx, client, keys, args...)
		_, ok := parse(text)
		require.Equal(t, ok, err == nil, "%q: %v", text, err)
		if ok {
			good++
			return
		}
		bad++
		require.True(t, redis.HasErrorPrefix(err, "CORRUPT"), "%q: %v", text, err)
		require.Equal(t, text, client.Get(ctx, key).Val())
	}
	for _, text := range []string{
		"sw1 epoch=7 seen=5", "sw1 epoch=7 seen=5 ", "sw1 epoch=7 seen=-5 -7:1", "sw2 epoch=7 seen=5", "", "hello", "7",
		"sw1 epoch=0 seen=5", "sw1 epoch=7 seen=5 5:0", "sw1 epoch=7 seen=5 6:1", "sw1 epoch=7 seen=5 3:1 3:1", "sw1 epoch=7 seen=5 3:1  4:1",
		"sw1 epoch=7 seen=5 4:1 3:1", "sw1 epoch=7 seen=5 0x3:1", "sw1 epoch=7 seen=5 3:1e3", "sw1 epoch=7 seen=99999999999999999999",
		"sw1 epoch=7 seen=5 3:137438953472", "sw1 epoch=7 seen=5 3:137438953473", "sw1 epoch=007 seen=5 03:1", "sw1 epoch=7 seen=5 +3:1",
		"sw1 epoch=7 seen=9007199254740992 9007199254740992:1", "sw1 epoch=7 seen=9007199254740994", strings.Repeat("x", maxText+1),
		"sw1 epoch=7 seen=5 back=2", "sw1 epoch=7 seen=5 back=0 3:1", "sw1 epoch=7 seen=5 limit=3 version=2 3:1", "sw1 epoch=7 seen=5 limit=3 3:1",
		"sw1 epoch=7 seen=5 back=7 limit=2147483648 version=9007199254740992", "sw1 epoch=7 seen=5 limit=2147483649 version=1",
		"sw1 epoch=7 seen=5 limit=3 version=2 back=1", "sw1 epoch=7 seen=5 limit=0 version=1", "sw1 epoch=7 seen=5 limit=1 version=0", "sw1 epoch=7 seen=5 back=-1",
		"sw1 epoch=7 seen=5 back=", "sw1 epoch=7 seen=5 back=2 ", "sw1 epoch=7 seen=5 version=1 limit=1", "sw1 epoch=7 seen=5 limit=1 version=1 ",
		"sw1 epoch=7 seen=5 3:1\n", "sw1 epoch=7 seen=5 3:1\x00", "sw1 epoch=7 seen=100 " + manyParts(maxParts+1), "sw1 epoch=7 seen=2000 " + manyParts(maxParts+1),
		"sw1 epoch=7 seen=2000 " + manyParts(maxParts+2),
	} {
		check(t, text)
	}
	rapid.Check(t, func(t *rapid.T) {
		text := []byte("sw1 epoch=7 seen=1763724915123456 1763724914000123:17 1763724915123456:3")
		for range rapid.IntRange(1, 3).Draw(t, "changes") {
			i := rapid.IntRange(0, len(text)-1).Draw(t, "at")
			switch c := rapid.SampledFrom([]byte(" :=-+0123456789xse.\x00")).Draw(t, "byte"); rapid.IntRange(0, 2).Draw(t, "how") {
			case 0:
				text[i] = c
			case 1:
				text = slices.Insert(text, i, c)
			default:
				text = slices.Delete(text, i, i+1)
			}
		}
		check(t, string(text))
	})
	t.Logf("%d states, %d not", good, bad)
	require.Positive(t, good)
}

func manyParts(n int) string {
	words := make([]string, n)
	for i := range words {
		words[i] = fmt.Sprint(i, ":1")
	}
	return strings.Join(words, " ")
}

// processes returns limiters that share a state, as processes do. The server's clock is the test's. Their own clocks are off by the given
// time, and run too fast by drift.
func processes(t require.TestingT, client RedisClient, name string, n, limit int, window, resolution time.Duration,
	server *atomic.Int64, skew time.Duration, drift float64) []*Limiter {
	var all []*Limiter
	for i := range n {
		off := skew.Microseconds() * int64(i)
		clock := clockOf{now: func() int64 {
			now := server.Load()
			return now + off + int64(drift*float64(i)*float64(now-begin))
		}}
		l, err := New(name, limit, window, resolution, WithRedis(client), WithClock(clock), serverClock(server.Load), patient)
		require.NoError(t, err)
		all = append(all, l)
	}
	return all
}

// clockOf is a clock whose time a function returns.
type clockOf struct {
	clockwork.Clock
	now func() int64
}

func (c clockOf) Now() time.Time { return time.UnixMicro(c.now()) }

func (c clockOf) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// Several processes with wrong clocks, on a server whose clock the test sets, against the log of every admission: calls one after another,
// and many at once.
func TestFleetLog(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		var admitted, refused int64
		rapid.Check(noDeadline{t}, func(rt *rapid.T) {
			window, resolution := drawRule(rt)
			limit := rapid.IntRange(1, 30).Draw(rt, "limit")
			n := rapid.SampledFrom([]int{1, 2, 4}).Draw(rt, "processes")
			var server atomic.Int64
			server.Store(begin + rapid.Int64Range(0, 1e9).Draw(rt, "begin"))
			skew := time.Duration(rapid.Int64Range(-1e13, 1e13).Draw(rt, "skew"))
			all := processes(rt, client, unique(t), n, limit, window, resolution, &server, skew, 0)
			g := &log{window: window.Microseconds(), resolution: resolution.Microseconds()}
			back := rapid.Bool().Draw(rt, "back")
			for range 40 {
				step := drawStep(rt, server.Load(), g.window, g.resolution)
				if back || step > server.Load() {
					server.Store(step)
				}
				l := all[rapid.IntRange(0, n-1).Draw(rt, "process")]
				k := rapid.SampledFrom([]int{1, 1, 3, 16}).Draw(rt, "at once")
				var ok atomic.Int64
				var wg sync.WaitGroup
				for range k {
					wg.Go(func() {
						pass, err := l.Allow(ctx)
						if err != nil {
							panic(err)
						}
						if pass {
							ok.Add(1)
						}
					})
				}
				wg.Wait()
				synctest.Wait()
				// Only a write moves the state's clock, so the state has the time of the log.
				if s, known := parse(client.get(l.machine.key)); known {
					g.observe(s.seen)
					if s.seen < g.seen { // within standstill: a read moved the log's clock, and this write the state's
						g.shift(s.seen)
					}
				}
				refused += int64(k) - ok.Load()
				if ok.Load() == 0 {
					continue
				}
				admitted += ok.Load()
				now := g.seen
				require.LessOrEqual(rt, server.Load(), now)
				g.add(now, ok.Load())
				require.LessOrEqual(rt, g.within(now-g.window, now), int64(limit))
			}
		})
		t.Logf("%d admitted, %d refused", admitted, refused)
		require.Greater(t, admitted, int64(1000))
		require.Greater(t, refused, int64(1000))
	})
}

// holding is a hook that holds back commands.
type holding struct {
	RedisClient
	hold atomic.Bool
	open chan struct{}
}

func (h *holding) Process(ctx context.Context, cmd redis.Cmder) error {
	if h.hold.Load() {
		<-h.open
	}
	return h.RedisClient.Process(ctx, cmd)
}

// A process whose clock is off by hours decides the same. With a clock that runs too fast, a sub-interval seems a little further on than it
// is.
func TestSkew(t *testing.T) {
	inBubble(t, skew)
}

func skew(t *testing.T) {
	client := new(bubbleRedis)
	const n, limit, window, resolution = 4, 100, time.Minute, 5 * time.Second
	run := func(skew time.Duration, drift float64) (admitted, worst int64) {
		var server atomic.Int64
		server.Store(begin)
		all := processes(t, client, unique(t), n, limit, window, resolution, &server, skew, drift)
		g := &log{window: window.Microseconds(), resolution: resolution.Microseconds()}
		random := rand.New(rand.NewPCG(1, 2))
		for range 20_000 {
			server.Add(random.Int64N(20_000))
			l := all[random.IntN(n)]
			pass, err := l.Allow(ctx)
			require.NoError(t, err)
			synctest.Wait()
			if pass {
				admitted++
				g.add(server.Load(), 1)
				worst = max(worst, g.within(server.Load()-g.window, server.Load())-limit)
			}
		}
		return admitted, worst
	}
	admitted, worst := run(0, 0)
	t.Logf("clocks that agree: %d admitted, worst +%d", admitted, worst)
	for _, skew := range []time.Duration{time.Second, -time.Hour, 1000 * time.Hour} {
		a, w := run(skew, 0)
		require.Equal(t, admitted, a, "a clock off by %v", skew)
		require.Equal(t, worst, w)
	}
	for _, drift := range []float64{1e-4, 1e-2, -1e-2} {
		a, w := run(0, drift)
		t.Logf("clocks that run up to %g too fast: %d admitted, worst +%d", 3*drift, a, w)
		require.InEpsilon(t, admitted, a, 0.02)
		require.LessOrEqual(t, w, worst+int64(3*max(0, drift)*limit)+3)
	}
}

// Requests that are refused send nothing: under a hundred times the load, Redis runs at most one script for each request that is allowed, and
// one in each sub-interval for all others.
func TestCommands(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := &bubbleRedis{way: slow(100 * time.Microsecond)}
		const limit, window, resolution, length = 200, time.Second, 100 * time.Millisecond, 2 * time.Second
		l, err := New("x", limit, window, resolution, WithRedis(client))
		require.NoError(t, err)
		var calls, allowed atomic.Int64
		end := time.Now().Add(length)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for time.Now().Before(end) {
					ok, err := l.Allow(ctx)
					if err != nil {
						panic(err)
					}
					calls.Add(1)
					if ok {
						allowed.Add(1)
					}
					time.Sleep(100 * time.Microsecond)
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		scripts := client.executed()
		t.Logf("%d calls, %d allowed, %d scripts", calls.Load(), allowed.Load(), scripts)
		require.Greater(t, calls.Load(), 100*allowed.Load())
		const sub = int64(length/resolution) + 2
		require.LessOrEqual(t, scripts, allowed.Load()+sub)
		require.GreaterOrEqual(t, allowed.Load(), int64(2*limit))
	})
}

// Concurrent calls share scripts.
func TestShare(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := &bubbleRedis{way: slow(100 * time.Microsecond)}
		l, err := New("x", 1_000_000, time.Minute, time.Second, WithRedis(client))
		require.NoError(t, err)
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				for range 100 {
					if ok, err := l.Allow(ctx); !ok || err != nil {
						panic(err)
					}
				}
			})
		}
		wg.Wait()
		scripts := client.executed()
		t.Logf("6400 allowed by %d scripts", scripts)
		require.Less(t, scripts, int64(1600))
		left, err := l.Remaining(ctx)
		require.NoError(t, err)
		require.Equal(t, 1_000_000-6400, left)
	})
}

// pairs runs a test in a bubble, with two processes that share a limit of 3 in an hour, in sub-intervals of a minute. The test
// sets the server's clock.
func pairs(t *testing.T, test func(t *testing.T, client *bubbleRedis, server *atomic.Int64, a, b *Limiter)) {
	inBubble(t, func(t *testing.T) {
		client, server := new(bubbleRedis), new(atomic.Int64)
		server.Store(begin)
		all := processes(t, client, "x", 2, 3, time.Hour, time.Minute, server, 0, 0)
		test(t, client, server, all[0], all[1])
	})
}

// A limiter that refuses makes a round trip once in a sub-interval, and one that was idle does not refuse by its old view.
func TestNextSubInterval(t *testing.T) {
	pairs(t, func(t *testing.T, client *bubbleRedis, server *atomic.Int64, a, b *Limiter) {
		allow := func(l *Limiter, want bool, scripts int64) {
			t.Helper()
			before := client.executed()
			ok, err := l.Allow(ctx)
			require.NoError(t, err)
			require.Equal(t, want, ok)
			synctest.Wait()
			require.Equal(t, scripts, client.executed()-before)
		}
		left, err := b.Remaining(ctx)
		require.NoError(t, err)
		require.Equal(t, 3, left)
		for range 3 {
			allow(a, true, 1)
		}
		allow(a, false, 0)
		server.Add(time.Minute.Microseconds())
		allow(b, false, 1) // its view has none of the permits
		allow(b, false, 0)
		client.forget()
		allow(b, false, 0)
		server.Add(time.Minute.Microseconds())
		allow(b, true, 1) // it does not refuse by the old view
	})
}

// A limit or a refund of another process counts for the first request in the next sub-interval. Concurrent requests do not wait for that round
// trip, and are not refused because of it.
func TestFirstOfASubInterval(t *testing.T) {
	pairs(t, func(t *testing.T, client *bubbleRedis, server *atomic.Int64, a, b *Limiter) {
		taken, err := a.Take(ctx, 3)
		require.NoError(t, err)
		ask := func(n int, want bool) {
			t.Helper()
			ok, err := b.AllowN(ctx, n)
			require.NoError(t, err)
			require.Equal(t, want, ok)
		}
		next := func() {
			ask(1, false)
			server.Add(time.Minute.Microseconds())
		}
		ask(1, false)
		require.NoError(t, a.Refund(ctx, taken, 1))
		next()
		ask(1, true)
		require.NoError(t, a.SetLimit(ctx, 5))
		next()
		ask(2, true)
		require.NoError(t, a.Refund(ctx, taken, 1))
		next()
		client.by(slow(time.Second))
		first := make(chan bool)
		go func() {
			ok, err := b.AllowN(ctx, 3)
			if err != nil {
				t.Error(err)
			}
			first <- ok
		}()
		synctest.Wait()
		began := time.Now()
		ask(1, false) // by the view as it is
		require.Zero(t, time.Since(began))
		require.False(t, <-first, "more than are free")
		ask(1, true)
		require.NoError(t, a.Refund(ctx, taken, 1))
		server.Add(time.Minute.Microseconds())
		left, err := b.Remaining(ctx)
		require.NoError(t, err)
		require.Equal(t, 1, left)
		server.Add(time.Minute.Microseconds())
		go func() {
			ok, err := b.AllowN(ctx, 3)
			if err != nil {
				t.Error(err)
			}
			first <- ok
		}()
		synctest.Wait()
		ask(1, true)
		require.False(t, <-first)
		require.Zero(t, b.machine.queue.pending)
	})
}

// If Redis is away at the first request in a sub-interval, the view refuses it as it does the others, except under FailOpen.
func TestFirstOfASubIntervalAway(t *testing.T) {
	for _, c := range []struct {
		policy Option
		want   bool
	}{{WithFailurePolicy(FailClosed), false}, {WithFailurePolicy(LocalShare(3)), false}, {WithFailurePolicy(FailOpen), true}} {
		inBubble(t, func(t *testing.T) {
			client := new(bubbleRedis)
			open := func() *Limiter {
				l, err := New("x", 3, time.Hour, time.Minute, WithRedis(client), c.policy)
				require.NoError(t, err)
				return l
			}
			ok, err := open().AllowN(ctx, 3)
			require.NoError(t, err)
			require.True(t, ok)
			l := open()
			ok, err = l.Allow(ctx)
			require.NoError(t, err)
			require.False(t, ok)
			client.by(failing(refused))
			time.Sleep(90 * time.Second)
			ok, err = l.Allow(ctx)
			require.NoError(t, err)
			require.Equal(t, c.want, ok)
			synctest.Wait()
		})
	}
}

// A request for more than the limit of the last reply fails only after a round trip, also in the sub-interval of that reply.
func TestRaisedElsewhere(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		client := new(bubbleRedis)
		open := func() *Limiter {
			l, err := New("x", 5, time.Hour, time.Minute, WithRedis(client))
			require.NoError(t, err)
			return l
		}
		a, b := open(), open()
		ok, err := a.Allow(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		require.NoError(t, b.SetLimit(ctx, 30))
		ok, err = a.AllowN(ctx, 10)
		require.NoError(t, err)
		require.True(t, ok)
		_, err = a.AllowN(ctx, 31)
		require.ErrorIs(t, err, ErrInvalidPermits)
		require.ErrorContains(t, err, "30")
	})
}

// Refusals take no memory, in the process and in Redis.
func TestRefusalAllocates(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for _, opts := range [][]Option{nil, {WithRedis(client), patient}} {
		l, err := New(unique(t), 1, time.Hour, time.Hour/60, opts...)
		require.NoError(t, err)
		for range 2 {
			_, err = l.Allow(ctx)
			require.NoError(t, err)
		}
		require.Zero(t, testing.AllocsPerRun(1000, func() {
			if ok, err := l.Allow(ctx); ok || err != nil {
				panic(err)
			}
		}))
	}
}

func BenchmarkRefusal(b *testing.B) {
	client := redistest.Shared(b).Client(b)
	for name, opts := range map[string][]Option{"local": nil, "redis": {WithRedis(client)}} {
		b.Run(name, func(b *testing.B) {
			l, err := New(unique(b), 1, 10*time.Minute, time.Minute/6, opts...)
			require.NoError(b, err)
			_, _ = l.Allow(ctx)
			_, _ = l.Allow(ctx)
			b.ReportAllocs()
			b.SetParallelism(64 / runtime.GOMAXPROCS(0))
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if ok, err := l.Allow(ctx); ok || err != nil {
						panic(err)
					}
				}
			})
		})
	}
}

func BenchmarkAllow(b *testing.B) {
	client := redistest.Shared(b).Client(b, func(o *redis.Options) { o.PoolSize = 64 })
	for name, opts := range map[string][]Option{"local": nil, "redis": {WithRedis(client)}} {
		b.Run(name, func(b *testing.B) {
			l, err := New(unique(b), min(maxLimit, math.MaxInt), time.Minute, time.Second, opts...)
			require.NoError(b, err)
			b.ReportAllocs()
			b.SetParallelism(64 / runtime.GOMAXPROCS(0))
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if ok, err := l.Allow(ctx); !ok || err != nil {
						panic(err)
					}
				}
			})
		})
	}
}

// The memory of a limiter does not depend on the number of requests, in the process and in Redis, and its key expires.
func TestMemory(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	var server atomic.Int64
	sizes := map[int]int64{}
	for _, requests := range []int{10, 100} {
		server.Store(begin)
		name := unique(t)
		l := processes(t, client, name, 1, 1_000_000, time.Minute, time.Second, &server, 0, 0)[0]
		for range 61 {
			for range requests / 10 {
				ok, err := l.AllowN(ctx, 10)
				require.NoError(t, err)
				require.True(t, ok)
			}
			server.Add(1_000_000)
		}
		size, err := client.MemoryUsage(ctx, l.machine.key).Result()
		require.NoError(t, err)
		sizes[requests] = size
		ttl := client.PTTL(ctx, l.machine.key).Val()
		require.Greater(t, ttl, 2*time.Minute)
		require.Less(t, ttl, 3*time.Minute)
		require.LessOrEqual(t, len(l.machine.view.counts.ring), 61)
	}
	t.Logf("a limiter of 60 sub-intervals, all of them used: %d bytes in Redis after 610 permits, %d after 6100", sizes[10], sizes[100])
	require.Less(t, sizes[100], sizes[10]+300)

	local := func(requests int) uint64 {
		const n = 1000
		all := make([]*Limiter, n)
		clock := &handClock{micros: begin}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.GC() // a second collection frees what pools have kept
		runtime.ReadMemStats(&before)
		for i := range all {
			clock.micros = begin
			all[i], _ = New("x", 1_000_000, time.Minute, time.Second, WithClock(clock))
			for range requests {
				clock.micros += 61_000_000 / int64(requests)
				_, _ = all[i].Allow(ctx)
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		runtime.KeepAlive(all)
		return (after.HeapAlloc - before.HeapAlloc) / n
	}
	few, many := local(61), local(610)
	t.Logf("local: %d bytes after 61 requests, %d after 610", few, many)
	require.InDelta(t, few, many, 200)
	require.Less(t, many, uint64(2000))
}
