//go:build linux

package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"runtime/metrics"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

const (
	rate  = 300.0
	burst = 50.0
	// patience is the longest wait that callers accept, and so the largest debt of the bucket.
	patience = 200 * time.Millisecond
	// callers of a process: those of two are enough to keep the bucket as deep in debt as they accept.
	callers = 36
	// storeTimeout is the default of all limiters.
	storeTimeout = time.Second
	// hurry is all the time that the hasty callers have.
	hurry  = 300 * time.Millisecond
	prefix = "soak:"
	bucket = "b"
	// holders want the slots of a semaphore, each for up to holds.
	slots, holders = 5, 8
	holds          = 150 * time.Millisecond
	// visitors want to pass a window.
	limit, visitors    = 40, 4
	window, resolution = time.Second, 100 * time.Millisecond
	// breather is how long a caller waits after a failure, and at most after a refusal.
	breather = 60 * time.Millisecond
	// noticed is how late a sleeper must be woken to be reported.
	noticed = 5 * time.Millisecond
)

const jobEnv = "TOKENBUCKET_SOAK_JOB"

// job is the job of a process: with a Store it takes permits of the bucket, otherwise it holds permits of a semaphore and passes a window.
type job struct {
	Addr, Store string
	Seed        uint64
}

// event is one event of a process. Times are by CLOCK_MONOTONIC, in microseconds.
type event struct {
	// What: "permit" was used, "hasty" one by a caller with little time, "held" of the semaphore, "passed" the window, "refused" a
	// hasty one, "late" by which the process was woken, "memory" that it had, or why a call failed.
	What string `json:"w"`
	// Asked and Granted lie about the decision; of "late" they are the beginning and the end.
	Asked   int64 `json:"a"`
	Granted int64 `json:"g"`
	// Due is no later than the permit was due; Used is when its caller was let go, or of "held" when its holder let go.
	Due  int64 `json:"d,omitempty"`
	Used int64 `json:"u,omitempty"`
	// Bytes that Go has of the system, and Goroutines: of "memory", about once a second.
	Bytes      uint64 `json:"b,omitempty"`
	Goroutines uint64 `json:"n,omitempty"`
	// Again: the process had been woken late, so its caller asked again.
	Again bool `json:"x,omitempty"`
	// Owned: no request was sent. The permit was granted earlier to a caller that has given up.
	Owned bool `json:"o,omitempty"`
}

// doer does the job in such a process.
type doer struct {
	ctx     context.Context
	running sync.WaitGroup
	tell    func(event)
	stuck   chan struct{} // closed long after the process was to end
	trips   faultlab.Trips
}

// work does the job until the process is to end.
func work(ctx context.Context, j *job, tell func(event)) error {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the library's log of outages
	w := &doer{ctx: ctx, tell: tell, stuck: make(chan struct{}), trips: faultlab.Trips{Now: monotonic}}
	context.AfterFunc(ctx, func() { time.AfterFunc(20*time.Second, func() { close(w.stuck) }) })
	client := redis.NewClient(&redis.Options{Addr: j.Addr})
	defer func() { _ = client.Close() }()
	finish := func() error { return nil }
	if j.Store == "" {
		s, err := semaphore.NewRedis(client, "s", slots, semaphore.WithKeyPrefix(prefix))
		if err != nil {
			return err
		}
		l, err := slidingwindow.New("w", limit, window, resolution, slidingwindow.WithRedis(client), slidingwindow.WithKeyPrefix(prefix+"w:"))
		if err != nil {
			return err
		}
		finish = func() error { return s.Close(background) }
		for i := range holders {
			random := rand.New(rand.NewPCG(j.Seed, uint64(i)))
			w.repeat(func() time.Duration { return w.hold(s, time.Duration(random.Int64N(int64(holds)))) })
		}
		for range visitors {
			w.repeat(func() time.Duration { return w.visit(l) })
		}
	} else {
		var store tokenbucket.Store = tokenbucket.NewRedisScriptStore(client, tokenbucket.WithKeyPrefix(prefix))
		if j.Store == "lock" {
			store = tokenbucket.NewRedisStore(client, tokenbucket.WithKeyPrefix(prefix))
		}
		limiter, err := tokenbucket.NewSmoothBursty(bucket, rate, tokenbucket.WithMaxPermits(burst), tokenbucket.WithInitialPermits(burst),
			tokenbucket.WithStore(store), tokenbucket.WithObserver(tokenbucket.Observer{Trip: w.trips.Note}))
		if err != nil {
			return err
		}
		for range callers {
			w.repeat(func() time.Duration { return w.take(limiter) })
		}
		w.repeat(func() time.Duration { return w.hasty(limiter) })
	}
	w.repeat(w.sleep)
	w.repeat(w.memory)
	w.running.Wait()
	return finish()
}

// repeat calls again and again, with the pauses that the calls ask for.
func (w *doer) repeat(call func() time.Duration) {
	w.running.Go(func() {
		for w.ctx.Err() == nil {
			if pause := call(); pause > 0 {
				select {
				case <-time.After(pause):
				case <-w.ctx.Done():
				}
			}
		}
	})
}

// take takes a permit and uses it when it is due.
func (w *doer) take(l *tokenbucket.RateLimiter) time.Duration {
	answers := w.trips.Answers()
	e := event{What: "permit", Asked: monotonic()}
	r, err := l.TryReserve(background, 1, patience)
	e.Granted = monotonic()
	e.Owned = w.trips.Answers() == answers
	if err != nil {
		e.What = why(err)
		w.tell(e)
		return breather
	}
	if !r.OK() {
		return min(max(r.RetryAfter(), time.Millisecond), breather)
	}
	told := r.Delay()
	select {
	case <-r.Ready():
	case <-w.stuck:
		e.What = "stuck"
	}
	e.Used = monotonic()
	e.Due = e.Asked + micros(r.Delay()) - w.way(e)
	e.Again = r.Delay()-told > time.Millisecond
	w.tell(e)
	return 0
}

// way is by how much the permits of an event may have been due before the process said so. Those that it owned were granted earlier: the
// answer is not known, but none is believed after more than 100 ms.
func (w *doer) way(e event) int64 {
	if e.Owned {
		return micros(100 * time.Millisecond)
	}
	return w.trips.Way(e.Asked)
}

// hasty takes a permit if that takes no time.
func (w *doer) hasty(l *tokenbucket.RateLimiter) time.Duration {
	ctx, cancel := context.WithTimeout(background, hurry)
	defer cancel()
	answers := w.trips.Answers()
	e := event{What: "hasty", Asked: monotonic()}
	ok, err := l.TryAcquire(ctx, 1, patience)
	e.Granted = monotonic()
	e.Owned = w.trips.Answers() == answers
	var wait *tokenbucket.WaitError
	switch {
	case errors.As(err, &wait), err == nil && !ok:
		e.What = "refused"
	case err != nil:
		e.What = "hasty: " + why(err)
	default:
		e.Due, e.Used = e.Asked-w.way(e), e.Granted
	}
	w.tell(e)
	return breather
}

// hold holds a permit of the semaphore for a while.
func (w *doer) hold(s *semaphore.Semaphore, d time.Duration) time.Duration {
	ctx, cancel := context.WithTimeout(w.ctx, time.Second)
	defer cancel()
	e := event{What: "held", Asked: monotonic()}
	p, err := s.Acquire(ctx, 1)
	e.Granted = monotonic()
	if err != nil {
		if w.ctx.Err() == nil {
			e.What = "semaphore: " + why(err)
			w.tell(e)
		}
		return breather
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.Context().Done():
	}
	e.Used = monotonic()
	if p.Context().Err() != nil { // it may have another holder since; when exactly its own one noticed is unknown
		e.What = "semaphore: lost"
	}
	_ = p.Release(background)
	w.tell(e)
	return 0
}

// visit passes the window, if it may.
func (w *doer) visit(l *slidingwindow.Limiter) time.Duration {
	e := event{What: "passed", Asked: monotonic()}
	ok, err := l.Allow(background)
	e.Granted = monotonic()
	switch {
	case err != nil:
		e.What = "window: " + why(err)
	case !ok:
		return 3 * time.Millisecond
	}
	w.tell(e)
	if err != nil {
		return breather
	}
	return 0
}

// sleep reports a late awakening.
func (w *doer) sleep() time.Duration {
	const nap = time.Millisecond
	began := monotonic()
	time.Sleep(nap)
	if e := (event{What: "late", Asked: began, Granted: monotonic()}); e.Granted-e.Asked > micros(nap+noticed) {
		w.tell(e)
	}
	return 0
}

// memory reports the memory of the process. It is the memory that Go has mapped: the race detector's own, which grows with each access to
// new addresses, is in the resident memory only.
func (w *doer) memory() time.Duration {
	samples := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/sched/goroutines:goroutines"},
	}
	metrics.Read(samples)
	now := monotonic()
	w.tell(event{
		What: "memory", Asked: now, Granted: now,
		Bytes: samples[0].Value.Uint64() - samples[1].Value.Uint64(), Goroutines: samples[2].Value.Uint64(),
	})
	return time.Second
}

// why is a failure in a word; "odd" is none that may be.
func why(err error) string {
	var network net.Error
	var broken syscall.Errno
	var reply redis.Error
	for _, k := range []struct {
		err  error
		name string
	}{
		{tokenbucket.ErrStoreUnavailable, "unavailable"}, {slidingwindow.ErrStoreUnavailable, "unavailable"},
		{tokenbucket.ErrLockNotObtained, "lock"},
		{tokenbucket.ErrStoreTimeout, "timeout"}, {semaphore.ErrStoreTimeout, "timeout"}, {slidingwindow.ErrStoreTimeout, "timeout"},
		{context.DeadlineExceeded, "deadline"}, {io.EOF, "network"}, {io.ErrUnexpectedEOF, "network"}, {net.ErrClosed, "network"},
		{semaphore.ErrExpired, "expired"},
	} {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	switch {
	case errors.As(err, &reply):
		word, _, _ := strings.Cut(reply.Error(), " ")
		if word == "OOM" || word == "LOADING" {
			return word
		}
	case errors.As(err, &network), errors.As(err, &broken):
		return "network"
	}
	fmt.Fprintln(os.Stderr, "soak: a failure of no known kind:", err)
	return "odd"
}
