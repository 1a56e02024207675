package network

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// uses notes when permits were asked for and used, by this process's monotonic clock.
type uses struct {
	mu     sync.Mutex
	origin time.Time
	spans  []faultlab.Span
}

func (u *uses) add(asked time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.spans = append(u.spans, faultlab.Span{From: asked.Sub(u.origin).Microseconds(), To: time.Since(u.origin).Microseconds()})
}

// count is how many permits were used so far.
func (u *uses) count() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.spans)
}

// worst returns the fullest window by the times of use, and by due times: each permit was certainly due between its request, or up to 100
// ms before that, as of the last reply, and its use.
func (u *uses) worst(rate float64) (byUse, surely float64) {
	var events []faultlab.Event
	var spans []faultlab.Span
	for _, s := range u.spans {
		events = append(events, faultlab.Event{At: s.To, Permits: 1})
		spans = append(spans, faultlab.Span{From: s.From - (100 * time.Millisecond).Microseconds(), To: s.To})
	}
	return faultlab.Worst(events, rate), faultlab.Surely(spans, rate)
}

// between is how many permits were used in a part of the test.
func (u *uses) between(from, to time.Time) (n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, s := range u.spans {
		if at := u.origin.Add(time.Duration(s.To) * time.Microsecond); at.After(from) && at.Before(to) {
			n++
		}
	}
	return n
}

// demand lets callers take one permit after another until the context ends, with a pause after each. Failures are passed on.
func demand(
	ctx context.Context, callers *sync.WaitGroup, n int, pause time.Duration, l *tokenbucket.RateLimiter, limit, wait time.Duration, u *uses,
	failed func(err error, took time.Duration),
) {
	for range n {
		callers.Go(func() {
			for ctx.Err() == nil {
				c, cancel := context.WithTimeout(background, limit)
				began := time.Now()
				ok, err := l.TryAcquire(c, 1, wait)
				took := time.Since(began)
				cancel()
				switch {
				case err != nil:
					failed(err, took)
				case ok:
					u.add(began)
					time.Sleep(pause)
					continue
				}
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
}

// The network is slow, by more or less, and then narrow. Waiters share batches, so the rate is used as far as callers and round trips
// allow. No caller gets a permit too many, and a caller that cannot wait for the network returns in time.
func TestG1Slow(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		const rate, burst, callers = 100, 20, 64
		random := faultlab.Seed(t)
		late := faultlab.MeasureLateness(t)
		// A lock must outlive two round trips: from when it is obtained to the commit, with a read in between.
		client := b.connect(t, func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout = 20*time.Second, 20*time.Second })
		store := faultlab.Stores[b.which](client, tokenbucket.WithLockTTL(5*time.Second))
		l := limiter(t, store, rate, burst, 20*time.Second)
		// For those whom only the network lets wait. That they are not answered in time makes the store suspect, which may shut out
		// the others until a probe was answered, but no longer.
		plenty, err := tokenbucket.NewSmoothBursty("plenty", slow, tokenbucket.WithStore(store), tokenbucket.WithMaxPermits(size),
			tokenbucket.WithInitialPermits(size), tokenbucket.WithStoreTimeout(20*time.Second))
		require.NoError(t, err)
		_, err = plenty.TryAcquire(background, 1, 0)
		require.NoError(t, err)
		trips := map[string]float64{"script": 1, "lock": 3}[b.which]
		for _, phase := range []struct {
			trip, jitter time.Duration // both ways together
			lasting      time.Duration
		}{
			{5 * time.Millisecond, 2 * time.Millisecond, faultlab.Lasting(time.Second, 5*time.Second)},
			{50 * time.Millisecond, 20 * time.Millisecond, faultlab.Lasting(1500*time.Millisecond, 5*time.Second)},
			{500 * time.Millisecond, 100 * time.Millisecond, faultlab.Lasting(3*time.Second, 20*time.Second)},
			{0, 0, faultlab.Lasting(3*time.Second, 10*time.Second)},
		} {
			require.NoError(t, l.Reset(background))
			b.proxy.Match("evalsha", nil)
			if phase.trip == 0 {
				b.proxy.Throttle(64_000 / 8)
			} else {
				b.proxy.Delay(phase.trip/2, phase.jitter/2, random)
			}
			u := &uses{origin: time.Now()}
			from, err := b.direct.Time(background).Result()
			require.NoError(t, err)
			began := time.Now()
			ctx, cancel := context.WithCancel(background)
			var running sync.WaitGroup
			demand(ctx, &running, callers, 0, l, time.Minute, 500*time.Millisecond, u, func(err error, _ time.Duration) {
				suspect := phase.trip == 500*time.Millisecond && errors.Is(err, tokenbucket.ErrStoreUnavailable)
				if wait := new(tokenbucket.WaitError); !suspect && !errors.As(err, &wait) { // the phase ends before the permit would be due
					t.Error(err)
				}
			})
			if phase.trip == 500*time.Millisecond {
				took, told, _ := crowd(50, 100*time.Millisecond, late, func(ctx context.Context) error {
					_, err := plenty.TryAcquire(ctx, 1, 0)
					return err
				})
				logTimes(t, "impatient", took, 100*time.Millisecond, late)
				t.Logf("told %v", told)
				require.Zero(t, told["answered"])
				require.GreaterOrEqual(t, took[len(took)/10], 95*time.Millisecond, "they were refused at once")
			}
			time.Sleep(time.Until(began.Add(phase.lasting)))
			// The permits that the trips allow in the given time, on a machine with that lateness.
			possible := func(seconds float64) float64 {
				if phase.trip == 0 {
					return rate * seconds
				}
				return min(rate*seconds, callers*seconds/(trips*(phase.trip+phase.jitter+2*late.Most()).Seconds()))
			}
			enough := func() bool {
				if phase.trip == 0 {
					return u.count() >= burst
				}
				return u.count() > int(possible(time.Since(began).Seconds())/6)
			}
			for !enough() && time.Since(began) < 10*phase.lasting { // a machine that stands still for a second or two makes up for it
				time.Sleep(10 * time.Millisecond)
			}
			seconds := time.Since(began).Seconds()
			n := float64(u.count())
			cancel()
			running.Wait()
			to, err := b.direct.Time(background).Result()
			require.NoError(t, err)
			seen := b.proxy.Seen()
			b.proxy.Delay(0, 0, nil)
			b.proxy.Throttle(0)

			all := float64(u.count())
			worst, surely := u.worst(rate)
			t.Logf("trip %v ± %v: %.0f permits in %.1f s by %d scripts; for certain the fullest window has %.1f above rate × T",
				phase.trip, phase.jitter, n, seconds, seen, surely)
			faultlab.Figure(t, "% of the permits that trips allow", 100*n/possible(seconds))
			faultlab.Figure(t, fmt.Sprintf("fullest window above rate × T, of %d + rate × trips", burst), worst)
			require.LessOrEqual(t, all, burst+rate*(to.Sub(from)+time.Millisecond+500*time.Millisecond).Seconds(), "in all, by the server's clock")
			require.LessOrEqual(t, surely, burst+faultlab.Noise(rate), "in any window")
			if phase.trip > 0 {
				require.GreaterOrEqual(t, n, possible(seconds)/6) // until four answers have shown how slow it is now, what fell due on the way lapses
			} else {
				require.GreaterOrEqual(t, n, float64(burst))
			}
		}
	})
}

// The server, or the way to it, says nothing for a while, in each of the ways that there are for that. Callers return by their
// deadlines; what arrives when it goes on is too late and takes nothing; the service is back soon.
func TestG2Stall(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		pause := faultlab.Lasting(1500*time.Millisecond, 5*time.Second)
		command := func(args ...any) func(t *testing.T) {
			return func(t *testing.T) {
				c := b.server.Client(t, func(o *redis.Options) { o.ReadTimeout = time.Minute })
				require.NoError(t, c.Do(background, args...).Err())
			}
		}
		asleep := make(chan error, 1)
		none := func(*testing.T) {}
		for _, fault := range []struct {
			name       string
			begin, end func(t *testing.T)
		}{
			{"stopped", func(t *testing.T) { require.NoError(t, b.server.Stop()) }, func(t *testing.T) { require.NoError(t, b.server.Continue()) }},
			{"clients paused", command("CLIENT", "PAUSE", pause.Milliseconds(), "ALL"), none},
			{"writes paused", command("CLIENT", "PAUSE", pause.Milliseconds(), "WRITE"), none},
			{"asleep", func(t *testing.T) {
				c := b.server.Client(t, func(o *redis.Options) { o.ReadTimeout = time.Minute })
				require.NoError(t, c.Ping(background).Err())
				sleep := func() { asleep <- c.Do(background, "DEBUG", "SLEEP", pause.Seconds()).Err() }
				go sleep()
				hasty := b.server.Client(t, func(o *redis.Options) { o.MaxRetries, o.ReadTimeout = -1, 10*time.Millisecond })
				for ; hasty.Ping(background).Err() == nil; time.Sleep(time.Millisecond) {
					select {
					case err := <-asleep: // before any caller could look on a busy machine
						require.NoError(t, err)
						go sleep()
					default:
					}
				}
			}, func(t *testing.T) { require.NoError(t, <-asleep) }},
			{"silent network", func(*testing.T) { b.proxy.Set(faultlab.Stalled) }, func(*testing.T) { b.proxy.Set(faultlab.Up) }},
			{"cut network", func(*testing.T) { b.proxy.Set(faultlab.Cut) }, func(*testing.T) { b.proxy.Set(faultlab.Up) }},
		} {
			late := faultlab.MeasureLateness(t)
			var calls outcomes
			l := b.limiter(t, b.connect(t), slow, size, 10*time.Second, calls.count())
			require.NoError(t, redistest.Poll(20*time.Second, func() error { return l.Reset(background) }))
			calls.answered.Store(0)
			calls.warm(t, l)
			b.disturb(t, &calls, l)
			again := calls.again(1)
			fault.begin(t)
			began := time.Now()
			took, told, all := crowd(200, 200*time.Millisecond, late, func(ctx context.Context) error {
				_, err := l.TryAcquire(ctx, 1, 0)
				return err
			})
			for _, err := range all {
				failure(t, err)
			}
			faultlab.Bit(t, int(calls.received.Load()), len(all)-told["answered"])
			logTimes(t, fault.name, took, 200*time.Millisecond, late)
			time.Sleep(time.Until(began.Add(pause)))
			fault.end(t)
			began = time.Now()
			require.NoError(t, redistest.Poll(20*time.Second, func() error { return calls.call(t, background, l, 1) }))
			recovery := time.Since(began)
			settled(t, b)
			n := int64(taken(state(t, b.direct, slow, size), size))
			t.Logf("%s for %v: told %v; %v; taken %d", fault.name, pause, told, &calls, n)
			faultlab.Figure(t, "back after", recovery)
			// A lock that was obtained for a client that is gone ends with its time to live, and a connection is tried again by the kernel
			// after one second.
			inTime(t, recovery, 3*time.Second, late)
			require.GreaterOrEqual(t, n, calls.received.Load())
			require.LessOrEqual(t, n, calls.sent.Load()+again, "what arrived late took nothing")
		}
	})
}
