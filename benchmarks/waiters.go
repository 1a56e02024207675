package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// waiter is one of many callers that wait for the same bucket.
type waiter struct {
	from, to int64 // bounds of its arrival, in microseconds since the first arrival
	waited   time.Duration
	err      error
}

// queue is a bucket far in debt, with many waiters.
type queue struct {
	limiter  *tokenbucket.RateLimiter
	debt     *tokenbucket.Reservation
	waiters  []waiter
	returned atomic.Int64
	done     sync.WaitGroup
}

const (
	queueRate = 50_000
	queueDebt = 1000 * time.Second // much longer than the measurement
)

// manyWaiters measures the cost of waiting, and checks that waiters are served in order of arrival.
func manyWaiters(b *bench, o *outcome) error {
	bare, err := bareWaiters(b.waiters)
	if err != nil {
		return err
	}
	q, err := openQueue(b.waiters)
	if err != nil {
		return err
	}
	before := memoryInUse()
	if err := q.fill(b); err != nil {
		return err
	}
	each := float64(memoryInUse()-before) / float64(b.waiters)
	cpu, err := cpuShare(time.Second)
	if err != nil {
		return err
	}
	if err := q.release(b); err != nil {
		return err
	}
	o.targets = append(o.targets,
		target{what: memoryStore + ": memory a waiter, beyond a goroutine with a timer", value: (each - bare) / 1024, limit: 2, unit: "KB"},
		target{what: memoryStore + ": CPU while all wait", value: 100 * cpu, limit: 1, unit: "% of a core"},
		target{what: memoryStore + ": permits out of order", value: float64(q.inversions()), limit: 0, unit: "of " + fmt.Sprint(b.waiters)})
	o.notes = append(o.notes, fmt.Sprintf("%d waiters: %.0f bytes of heap and stack each; a blocked goroutine with a timer of its own takes %.0f", b.waiters, each, bare))
	return nil
}

// memoryInUse returns the bytes of heap and stacks, without garbage.
func memoryInUse() int64 {
	runtime.GC()
	runtime.GC() // the second run frees finalizers' objects and pools
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// bareWaiters returns the memory of a goroutine that waits for a timer or a cancellation.
func bareWaiters(n int) (float64, error) {
	release := make(chan struct{})
	var started, done sync.WaitGroup
	before := memoryInUse()
	for range n {
		started.Add(1)
		done.Go(func() {
			timer := time.NewTimer(time.Hour)
			defer timer.Stop()
			started.Done()
			select {
			case <-timer.C:
			case <-release:
			}
		})
	}
	started.Wait()
	each := float64(memoryInUse()-before) / float64(n)
	close(release)
	done.Wait()
	return each, nil
}

func openQueue(n int) (*queue, error) {
	l, err := tokenbucket.NewSmoothBursty("queue", queueRate, tokenbucket.WithMaxPermits(1))
	if err != nil {
		return nil, err
	}
	q := &queue{limiter: l, waiters: make([]waiter, n)}
	q.debt, err = l.Reserve(background, queueRate*int(queueDebt/time.Second))
	return q, err
}

// arrival is a context that never ends. It reports when a call is in the queue: the call then asks for Done.
type arrival struct {
	context.Context
	lined sync.Once
	up    chan struct{}
}

func (a *arrival) Done() <-chan struct{} {
	a.lined.Do(func() { close(a.up) })
	return never
}

var never = make(chan struct{})

// fill starts the waiters one by one, each after the previous one is in the queue.
func (q *queue) fill(b *bench) error {
	began := time.Now()
	for i := range q.waiters {
		w, come := &q.waiters[i], &arrival{Context: background, up: make(chan struct{})}
		w.from = time.Since(began).Microseconds()
		q.done.Go(func() {
			w.waited, w.err = q.limiter.Acquire(come, 1)
			q.returned.Add(1)
		})
		select {
		case <-come.up:
		case <-b.ctx.Done():
			return b.ctx.Err()
		}
		if q.returned.Load() > 0 {
			return errors.New("a waiter returned before its time")
		}
		w.to = time.Since(began).Microseconds()
		b.progress.step("%d waiters of %d", i, len(q.waiters))
	}
	return nil
}

// cpuShare returns the processor time that this process uses in a period, as a share of one core.
func cpuShare(meanwhile time.Duration) (float64, error) {
	before, err := cpuTime()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	<-time.After(meanwhile)
	after, err := cpuTime()
	return float64(after-before) / float64(time.Since(began)), err
}

func cpuTime() (time.Duration, error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, err
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}

// release refunds the debt: the waiters move up and are served at the bucket's rate.
func (q *queue) release(b *bench) error {
	if err := q.debt.Cancel(b.ctx); err != nil {
		return err
	}
	q.done.Wait()
	for i := range q.waiters {
		if err := q.waiters[i].err; err != nil {
			return fmt.Errorf("waiter %d: %w", i, err)
		}
	}
	return nil
}

// inversions counts the waiters whose permit was due before that of an earlier waiter. Arrival times are known to within a few microseconds;
// only certain inversions count.
func (q *queue) inversions() int {
	found := 0
	var latest int64 // lower bound of the latest due time so far
	for i := range q.waiters {
		w := &q.waiters[i]
		if w.to+w.waited.Microseconds() < latest {
			found++
		}
		latest = max(latest, w.from+w.waited.Microseconds())
	}
	return found
}
