package network

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The network comes and goes every 200 ms: refused, silent, back again; and then it cuts connections only. Goroutines do not pile up, connections neither, each
// caller returns by its deadline, no call is executed twice, and when it is over all is as before.
func TestG3Flap(t *testing.T) {
	inTurn(t, func(t *testing.T, b *bench) {
		const callers, limit, beat = 16, 100 * time.Millisecond, 200 * time.Millisecond
		lasting := faultlab.Lasting(3*time.Second, 15*time.Second)
		random := faultlab.Seed(t)
		late := faultlab.MeasureLateness(t)
		var dials atomic.Int64
		client := b.connect(t, func(o *redis.Options) {
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dials.Add(1)
				return (&net.Dialer{Timeout: o.DialTimeout}).DialContext(ctx, network, addr)
			}
		})
		const plenty = 1_000_000
		l := b.limiter(t, client, slow, plenty, time.Second)
		var sent recorder
		b.proxy.Match(b.takes(), sent.record)
		var calls outcomes
		var latest atomic.Int64
		ctx, cancel := context.WithCancel(background)
		var running sync.WaitGroup
		for range callers {
			running.Go(func() {
				for ctx.Err() == nil {
					c, cancel := context.WithTimeout(background, limit)
					began := time.Now()
					_ = calls.call(t, c, l, 1)
					for took := int64(time.Since(began)); ; {
						if was := latest.Load(); took <= was || latest.CompareAndSwap(was, took) {
							break
						}
					}
					cancel()
					time.Sleep(time.Millisecond)
				}
			})
		}
		beside(ctx, &running, callers/4, limit, late)
		require.Eventually(t, func() bool { return calls.received.Load() >= 100 }, time.Minute, 10*time.Millisecond)
		healthy, accepted, dialled := calls.received.Load(), b.proxy.Accepted(), dials.Load()
		began := time.Now()
		var most [2]int // goroutines, in the first half and in the second
		for rounds := 0; time.Since(began) < lasting; rounds++ {
			state := faultlab.Up
			if rounds%2 == 0 {
				state = []faultlab.Network{faultlab.Down, faultlab.Stalled, faultlab.Cut}[random.IntN(3)]
			}
			b.proxy.Set(state)
			half := int(2 * time.Since(began) / lasting)
			before := 0 // the reading before: a single one may count all that have ended, while the garbage collector frees their stacks
			for end := time.Now().Add(beat); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				now := runtime.NumGoroutine()
				most[min(half, 1)], before = max(most[min(half, 1)], min(before, now)), now
			}
		}
		b.proxy.Set(faultlab.Up)
		seconds := time.Since(began).Seconds()
		accepted, dialled = b.proxy.Accepted()-accepted, dials.Load()-dialled
		for range 15 { // connections end, and a client that tried again could do so at once
			b.proxy.Reset()
			time.Sleep(50 * time.Millisecond)
		}
		cancel()
		running.Wait()
		faultlab.Bit(t, int(healthy), int(calls.failed.Load()+calls.unsent.Load()))
		began = time.Now()
		require.NoError(t, redistest.Poll(20*time.Second, func() error { return calls.call(t, background, l, 1) }))
		t.Logf("%v; at most %d goroutines, then %d; %.1f attempts to connect a second", &calls, most[0], most[1], float64(dialled)/seconds)
		faultlab.Figure(t, "connections a second", float64(accepted)/seconds)
		faultlab.Figure(t, fmt.Sprintf("longest call, with %v", limit), time.Duration(latest.Load()))
		faultlab.Figure(t, "back after", time.Since(began))
		inTime(t, time.Duration(latest.Load()), limit, late)
		require.LessOrEqual(t, most[1], most[0]+100, "goroutines pile up") // a few connections, not thousands of calls
		const reconnects = 30                                              // a second, of a client that tries at most every 100 ms, and releases a lock that it asked for in vain
		require.LessOrEqual(t, float64(accepted)/seconds, float64(reconnects), "connections pile up")
		settled(t, b)
		n := int64(taken(state(t, b.direct, slow, plenty), plenty))
		t.Logf("taken %d, lost %d; %d requests", n, n-calls.received.Load(), len(sent.args))
		require.GreaterOrEqual(t, n, calls.received.Load())
		require.LessOrEqual(t, n, calls.sent.Load(), "nothing was executed twice")
		require.Empty(t, sent.twice(), "nothing was sent twice")
	})
}

// beside lets some wait for a context, again and again, and for nothing else: how late they are, the machine is.
func beside(ctx context.Context, running *sync.WaitGroup, n int, limit time.Duration, late *faultlab.Lateness) {
	for range n {
		running.Go(func() {
			for ctx.Err() == nil {
				due := time.Now().Add(limit)
				c, cancel := context.WithTimeout(background, limit)
				<-c.Done()
				cancel()
				late.Note(time.Since(due))
			}
		})
	}
}

// One of two gateways is cut off from the server, and gets no replies. Its calls fail, each by its deadline, and it lets no call pass on
// its own account; the other goes on as before; together they keep to the rate before, during and after.
func TestG4Partition(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		const rate, burst, limit, wait = 200, 20, 300 * time.Millisecond, 50 * time.Millisecond
		part := faultlab.Lasting(1500*time.Millisecond, 10*time.Second)
		late := faultlab.MeasureLateness(t)
		cutOff, other := b.limiter(t, b.connect(t), rate, burst, 10*time.Second), b.limiter(t, b.direct, rate, burst, 20*time.Second)
		require.NoError(t, other.Reset(background))
		from, err := b.direct.Time(background).Result()
		require.NoError(t, err)
		mine, theirs := &uses{origin: time.Now()}, &uses{origin: time.Now()}
		var failures, latest atomic.Int64
		ctx, cancel := context.WithCancel(background)
		var running sync.WaitGroup
		demand(ctx, &running, 8, 0, cutOff, limit, wait, mine, func(err error, took time.Duration) {
			failure(t, err)
			failures.Add(1)
			for was := latest.Load(); int64(took) > was && !latest.CompareAndSwap(was, int64(took)); was = latest.Load() {
			}
		})
		demand(ctx, &running, 4, 40*time.Millisecond, other, time.Minute, wait, theirs, func(err error, _ time.Duration) { t.Error(err) })
		beside(ctx, &running, 4, limit, late)
		time.Sleep(part)
		require.Eventually(t, func() bool { return mine.between(mine.origin, time.Now()) >= 30 }, time.Minute, 10*time.Millisecond)
		before := mine.between(mine.origin, time.Now())
		b.proxy.Set(faultlab.Cut)
		cut, failed := time.Now(), failures.Load()
		time.Sleep(part)
		healed := time.Now()
		b.proxy.Set(faultlab.Up)
		failed = failures.Load() - failed
		back := redistest.Poll(20*time.Second, func() error {
			if mine.between(healed, time.Now()) == 0 {
				return context.DeadlineExceeded
			}
			return nil
		})
		recovery := time.Since(healed)
		time.Sleep(part / 2)
		cancel()
		running.Wait()
		to, err := b.direct.Time(background).Result()
		require.NoError(t, err)
		require.NoError(t, back)
		faultlab.Bit(t, before, int(failed))
		dark := mine.between(cut.Add(wait+500*time.Millisecond+late.Most()), healed)
		meanwhile := theirs.between(cut, healed)
		all := mine.count() + theirs.count()
		t.Logf("before the cut %d permits; during it %d failures; the other gateway %d; %d in all", before, failed, meanwhile, all)
		faultlab.Figure(t, "permits during the cut", dark)
		faultlab.Figure(t, fmt.Sprintf("longest failure, with %v", limit), time.Duration(latest.Load()))
		faultlab.Figure(t, "back after", recovery)
		require.Zero(t, dark)
		inTime(t, time.Duration(latest.Load()), limit, late)
		require.Positive(t, meanwhile)
		require.LessOrEqual(t, float64(all), burst+rate*(to.Sub(from)+wait).Seconds()+1)
		// The kernel tries a connection again after one second, and two later, and four: not much longer than the cut has lasted.
		inTime(t, recovery, 2*time.Second+healed.Sub(cut), late)
	})
}
