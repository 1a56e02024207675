package network

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// slack is how much later than its deadline the last of many calls may return, and soon the half of them, on a machine that wakes them on
// time; the lateness of other sleepers is added to it. So is the work of waking many at once, for each of them: two processors that other
// programs use too, and the race detector, make seconds of ten thousand. Where a context's deadline is tested, everything else that ends a
// wait takes five seconds or longer, except the store timeout in TestB4FirstCalls (half a second) and TestG3Flap (one).
const (
	slack, soon        = 500 * time.Millisecond, 400 * time.Millisecond
	lastEach, halfEach = 250 * time.Microsecond, 150 * time.Microsecond
)

// inTime fails the test if a call took longer than it had.
func inTime(t *testing.T, took, deadline time.Duration, late *faultlab.Lateness) {
	t.Helper()
	require.LessOrEqual(t, took, deadline+slack+4*late.Most())
}

// crowd makes the given number of calls at the same time, and returns the duration of each, sorted, and their errors. The contexts begin
// when the callers do. Among the callers there are a tenth as many that only wait for such a context. Their lateness is that of the machine
// for one of a crowd, without the library: many times that of a single sleeper, if it is busy.
func crowd(callers int, timeout time.Duration, late *faultlab.Lateness, call func(ctx context.Context) error) (took []time.Duration, told map[string]int, all []error) {
	return crowdBeside(callers, timeout, timeout, late, call)
}

// crowdBeside is crowd, with others among them that only wait for the given time; 0 for no others.
func crowdBeside(
	callers int, timeout, others time.Duration, late *faultlab.Lateness, call func(ctx context.Context) error,
) (took []time.Duration, told map[string]int, all []error) {
	took, all, told = make([]time.Duration, callers), make([]error, callers), map[string]int{}
	var running sync.WaitGroup
	for i := range callers {
		if others > 0 && i%10 == 0 {
			running.Go(func() {
				due := time.Now().Add(others)
				ctx, cancel := context.WithTimeout(background, others)
				defer cancel()
				<-ctx.Done()
				late.Note(time.Since(due))
			})
		}
		running.Go(func() {
			ctx, cancel := background, context.CancelFunc(func() {})
			began := time.Now()
			if timeout > 0 {
				ctx, cancel = context.WithTimeout(ctx, timeout)
			}
			all[i] = call(ctx)
			took[i] = time.Since(began)
			cancel()
		})
	}
	running.Wait()
	slices.Sort(took)
	for _, err := range all {
		told[kind(err)]++
	}
	return took, told, all
}

func kind(err error) string {
	for name, is := range map[string]error{
		"unavailable": tokenbucket.ErrStoreUnavailable, "store timeout": tokenbucket.ErrStoreTimeout,
		"lock": tokenbucket.ErrLockNotObtained, "deadline": context.DeadlineExceeded, "pool timeout": tokenbucket.ErrPoolExhausted,
	} {
		if errors.Is(err, is) {
			return name
		}
	}
	if err == nil {
		return "answered"
	}
	return "network"
}

// logTimes logs how late the calls of a crowd were, and fails the test if any, or half of them, were later than they may be.
func logTimes(t *testing.T, what string, took []time.Duration, deadline time.Duration, late *faultlab.Lateness) {
	t.Helper()
	n := len(took)
	t.Logf("%s: %d calls with %v: half within %v, 99 %% %v, all %v; the machine wakes sleepers up to %v late", what, n, deadline,
		took[n/2].Round(time.Millisecond), took[n*99/100].Round(time.Millisecond), took[n-1].Round(time.Millisecond),
		late.Most().Round(time.Millisecond))
	faultlab.Figure(t, fmt.Sprintf("slowest of %d calls with %v", n, deadline), took[n-1])
	require.LessOrEqual(t, took[n/2], deadline+soon+time.Duration(n)*halfEach+2*late.Most(), "woken late, and late again by the others who were woken")
	inTime(t, took[n-1], deadline+time.Duration(n)*lastEach, late)
}

// The server hangs for 1.2 s, and ten thousand callers with 300 ms each return by then, though the client may wait for five
// seconds and the store's timeout is ten. What the server finds when it goes on is too late, and takes nothing.
func TestB4TenThousandDeadlines(t *testing.T) {
	inTurn(t, func(t *testing.T, b *bench) {
		const callers, timeout, hang = 10_000, 300 * time.Millisecond, 1200 * time.Millisecond
		late := faultlab.MeasureLateness(t)
		var calls outcomes
		l := b.limiter(t, b.connect(t), slow, size, 10*time.Second, calls.count())
		calls.warm(t, l)
		b.disturb(t, &calls, l)
		again := calls.again(1)
		require.NoError(t, b.server.Stop())
		began := time.Now()
		took, told, all := crowd(callers, timeout, late, func(ctx context.Context) error {
			_, err := l.TryAcquire(ctx, 1, 0)
			return err
		})
		for _, err := range all {
			failure(t, err)
		}
		t.Logf("told %v", told)
		logTimes(t, "hung", took, timeout, late)
		faultlab.Bit(t, int(calls.received.Load()), callers-told["answered"])
		time.Sleep(time.Until(began.Add(hang)))
		require.NoError(t, b.server.Continue())
		began = time.Now()
		require.NoError(t, redistest.Poll(20*time.Second, func() error { return calls.call(t, background, l, 1) }))
		faultlab.Figure(t, "granted after the server went on", time.Since(began))
		settled(t, b)
		n := int64(taken(state(t, b.direct, slow, size), size))
		t.Logf("%v; taken %d", &calls, n)
		require.GreaterOrEqual(t, n, calls.received.Load())
		require.LessOrEqual(t, n, calls.sent.Load()+again, "what arrived late took nothing")
	})
}

// settled waits until nothing that was under way to the server can still change the bucket.
func settled(t *testing.T, b *bench) {
	t.Helper()
	was := state(t, b.direct, slow, size)
	for since := time.Now(); time.Since(since) < 500*time.Millisecond; time.Sleep(10 * time.Millisecond) {
		if is := state(t, b.direct, slow, size); is.Seq != was.Seq {
			was, since = is, time.Now()
		}
	}
}

// The server hangs before the first call, so its clock is not known and no deadline can be sent. When it goes on, it executes only the
// batch in flight: one at a time, given up when its callers have left or the store timeout has passed. The permits are refunded, except
// those of batches whose reply the client no longer waits for.
func TestB4FirstCalls(t *testing.T) {
	sideBySide(t, func(t *testing.T, b *bench) {
		const callers, timeout, storeTimeout, hang = 2000, 100 * time.Millisecond, 500 * time.Millisecond, 1200 * time.Millisecond
		late := faultlab.MeasureLateness(t)
		warm := b.limiter(t, b.direct, slow, size, 5*time.Second)
		var before outcomes
		before.warm(t, warm)
		client := b.connect(t, func(o *redis.Options) { o.PoolSize = 20 })
		ready := make([]*redis.Conn, 16) // connections, so that as many requests could be on their way
		for i := range ready {
			ready[i] = client.Conn()
			require.NoError(t, ready[i].Ping(background).Err())
		}
		for _, c := range ready {
			require.NoError(t, c.Close()) // it goes back to the pool
		}
		l := b.limiter(t, client, slow, size, storeTimeout)
		var sent recorder
		b.proxy.Match("evalsha", sent.record)
		require.NoError(t, b.server.Stop())
		began := time.Now()
		var spread atomic.Int64 // from when the first caller came to when the last did
		took, told, all := crowd(callers, timeout, late, func(ctx context.Context) error {
			for since := int64(time.Since(began)); ; {
				if was := spread.Load(); since <= was || spread.CompareAndSwap(was, since) {
					break
				}
			}
			_, err := l.TryAcquire(ctx, 1, 0)
			return err
		})
		for _, err := range all {
			failure(t, err)
		}
		t.Logf("told %v; they came within %v", told, time.Duration(spread.Load()))
		logTimes(t, "first calls", took, timeout, late)
		faultlab.Bit(t, int(before.received.Load()), callers-told["answered"])
		time.Sleep(time.Until(began.Add(hang)))
		hung, requests := time.Since(began), b.proxy.Seen()
		require.NoError(t, b.server.Continue())
		require.NoError(t, redistest.Poll(20*time.Second, func() error { return before.call(t, background, l, 1) }))
		settled(t, b)
		n := int64(taken(state(t, b.direct, slow, size), size))
		b.proxy.Match("", nil)
		carried := sent.permits(t)
		t.Logf("%v; %d requests while it hung; all for %d permits; taken %d", &before, requests, carried, n)
		faultlab.Figure(t, "permits of first calls that nobody received", n-before.received.Load())
		batches := 1 + callers/1024 + int(hung/storeTimeout) // the first caller's, those of all others, those after one that was given up
		batches += int(spread.Load() / int64(timeout))       // and those of callers who came when others had left
		if b.which == "lock" {
			batches *= 2 // a lock that was asked for is released
		} else {
			require.Empty(t, sent.twice(), "nothing was sent twice")
		}
		require.LessOrEqual(t, requests, batches, "one at a time")
		require.GreaterOrEqual(t, n, before.received.Load())
		require.LessOrEqual(t, n-before.received.Load(), int64(carried))
	})
}

var takes = regexp.MustCompile(`\bT (\d+) 1 `)

// permits is how many the requests want that decide at once; those that ask for a lock do not say it.
func (r *recorder) permits(t *testing.T) (all int) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, args := range r.args {
		for _, arg := range args {
			for _, m := range takes.FindAllStringSubmatch(arg, -1) {
				n, err := strconv.Atoi(m[1])
				require.NoError(t, err)
				all += n
			}
		}
	}
	return all
}

// Callers without a deadline of their own return by the store's timeout, also the one that carries the batch itself.
func TestB4NoDeadline(t *testing.T) {
	sideBySide(t, func(t *testing.T, b *bench) {
		const callers, timeout = 500, 400 * time.Millisecond
		late := faultlab.MeasureLateness(t)
		l := b.limiter(t, b.connect(t), slow, size, timeout)
		var calls outcomes
		calls.warm(t, l)
		require.NoError(t, b.server.Stop())
		took, told, all := crowdBeside(callers, 0, timeout, late, func(ctx context.Context) error {
			_, err := l.TryAcquire(ctx, 1, 0)
			return err
		})
		for _, err := range all {
			failure(t, err)
		}
		t.Logf("told %v", told)
		require.NoError(t, b.server.Continue())
		faultlab.Bit(t, int(calls.received.Load()), callers-told["answered"])
		logTimes(t, "no deadline", took, timeout, late)
		require.NoError(t, redistest.Poll(20*time.Second, func() error { return calls.call(t, background, l, 1) }))
	})
}

// A server that hangs is not a lock that others hold: the two errors differ, because they need different actions. The bucket has one user
// here.
func TestB4HungIsNoContention(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		l := b.limiter(t, b.connect(t), slow, size, 1200*time.Millisecond)
		var calls outcomes
		calls.warm(t, l)
		require.NoError(t, b.server.Stop())
		var told []error
		for range 3 {
			_, err := l.TryAcquire(background, 1, 0)
			told = append(told, err)
		}
		require.NoError(t, b.server.Continue())
		faultlab.Bit(t, int(calls.received.Load()), len(told))
		for _, err := range told {
			require.Error(t, err)
			failure(t, err)
			require.NotErrorIs(t, err, tokenbucket.ErrLockNotObtained)
		}
	})
}

// Without a deadline, and with callers that keep arriving: the calls of a batch that is given up return the error, whichever timer finds
// first that it is late.
func TestB4Stream(t *testing.T) {
	inTurn(t, func(t *testing.T, b *bench) {
		const callers, timeout, apart = 4000, 200 * time.Millisecond, 300 * time.Microsecond
		late := faultlab.MeasureLateness(t)
		l := b.limiter(t, b.connect(t), slow, size, timeout)
		var calls outcomes
		calls.warm(t, l)
		require.NoError(t, b.server.Stop())
		began := time.Now()
		var arrived atomic.Int64
		took := make([]time.Duration, callers)
		_, told, all := crowd(callers, 0, late, func(context.Context) error {
			n := arrived.Add(1) - 1
			due := began.Add(time.Duration(n) * apart)
			time.Sleep(time.Until(due))
			start := time.Now()
			late.Note(start.Sub(due))
			_, err := l.TryAcquire(background, 1, 0)
			took[n] = time.Since(start)
			return err
		})
		slices.Sort(took)
		require.NoError(t, b.server.Continue())
		for _, err := range all {
			failure(t, err)
		}
		t.Logf("told %v", told)
		faultlab.Bit(t, int(calls.received.Load()), callers-told["answered"])
		logTimes(t, "stream", took, timeout, late)
		require.NoError(t, redistest.Poll(20*time.Second, func() error { return calls.call(t, background, l, 1) }))
	})
}

// A pool of two connections and ten thousand callers: they share batches, of which one is in flight at a time, so no call waits for a
// connection when the network is slow. When the server hangs, a batch that was given up and a probe may occupy both for a while, so that
// the next batch finds none. That is the error of batches, not of callers by the thousand.
func TestG5PoolExhausted(t *testing.T) {
	inTurn(t, func(t *testing.T, b *bench) {
		const callers, timeout, poolTimeout = 10_000, 300 * time.Millisecond, 50 * time.Millisecond
		late := faultlab.MeasureLateness(t)
		client := b.connect(t, func(o *redis.Options) { o.PoolSize, o.PoolTimeout = 2, poolTimeout })
		l := b.limiter(t, client, slow, 3*callers, 20*time.Second)
		new(outcomes).warm(t, l)
		b.proxy.Delay(2*time.Millisecond, time.Millisecond, faultlab.Seed(t))
		b.proxy.Match(b.takes(), nil)
		b.proxy.Outstanding()
		_, told, _ := crowd(callers, 0, late, func(ctx context.Context) error {
			_, err := l.TryAcquire(ctx, 1, 0)
			return err
		})
		most, timeouts := b.proxy.Outstanding(), client.PoolStats().Timeouts
		t.Logf("slow: told %v; at most %d requests at a time", told, most)
		faultlab.Figure(t, fmt.Sprintf("requests for %d permits", callers), b.proxy.Seen())
		require.Equal(t, map[string]int{"answered": callers}, told)
		require.Less(t, b.proxy.Seen(), callers/10)
		require.Equal(t, 1, most, "at a time")
		require.Zero(t, timeouts)
		b.proxy.Delay(0, 0, nil)

		require.NoError(t, b.server.Stop())
		b.proxy.Outstanding()
		began := time.Now()
		took, told, all := crowd(callers, timeout, late, func(ctx context.Context) error {
			_, err := l.TryAcquire(ctx, 1, 0)
			return err
		})
		for _, err := range all {
			if !errors.Is(err, tokenbucket.ErrPoolExhausted) {
				failure(t, err)
			}
		}
		timeouts = client.PoolStats().Timeouts
		t.Logf("hung: told %v; %d times there was no connection", told, timeouts)
		require.LessOrEqual(t, timeouts, 10+uint32(time.Since(began)/poolTimeout), "one batch after the other")
		faultlab.Bit(t, callers, callers-told["answered"])
		logTimes(t, "hung", took, timeout, late)
		require.LessOrEqual(t, b.proxy.Outstanding(), 2, "the pool's connections")
		require.NoError(t, b.server.Continue())
		require.NoError(t, redistest.Poll(20*time.Second, func() error {
			_, err := l.TryAcquire(background, 1, 0)
			return err
		}))
	})
}
