package state

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

const (
	rate  = 200.0
	burst = 20.0
	// longest is the longest wait that callers accept, and so the largest debt of a bucket.
	longest = 500 * time.Millisecond
	// storeTimeout is the library's default.
	storeTimeout = time.Second
	// patient is the store timeout of callers that must get no error. With the default, a machine that is slow to wake its processes causes
	// one, too: a batch of the lock store that follows a slot wakes some forty, one after the other.
	patient = 20 * time.Second
)

// key of a bucket in Redis. The names here have nothing to escape.
func key(name string) string { return "tokenbucket:{" + name + "}" }

// fleet is instances that want more of one bucket than it gives: each is a limiter on a client of its own, with callers who
// take one permit, wait until it is due and use it, again and again.
type fleet struct {
	name     string
	timeout  time.Duration // the store's
	limiters []*tokenbucket.RateLimiter
	stop     func()
	over     chan struct{} // closed when the test no longer waits for calls

	mu      sync.Mutex
	used    []int64 // when permits were used; microseconds
	answers []int64 // when they were promised
	failed  map[string]int
	odd     error         // one of no known kind
	slowest time.Duration // to answer
	overdue time.Duration // after the deadline of one who had little time
	calls   atomic.Int64
}

// startFleet starts callers that shall be enough to keep the bucket as deep in debt as they accept.
func startFleet(t *testing.T, kind string, clients ...tokenbucket.RedisClient) *fleet {
	t.Helper()
	return startNamed(t, t.Name()+"/"+kind, kind, storeTimeout, clients...)
}

// startPatient starts callers who shall not notice what happens to their store: see [fleet.unnoticed].
func startPatient(t *testing.T, kind string, clients ...tokenbucket.RedisClient) *fleet {
	t.Helper()
	return startNamed(t, t.Name()+"/"+kind, kind, patient, clients...)
}

func startNamed(t *testing.T, name, kind string, timeout time.Duration, clients ...tokenbucket.RedisClient) *fleet {
	t.Helper()
	f := &fleet{name: name, timeout: timeout, failed: map[string]int{}, over: make(chan struct{})}
	quit := make(chan struct{})
	var callers sync.WaitGroup
	f.stop = sync.OnceFunc(func() {
		close(quit)
		defer time.AfterFunc(20*time.Second, func() { close(f.over) }).Stop()
		callers.Wait()
	})
	t.Cleanup(f.stop)
	for _, client := range clients {
		l, err := tokenbucket.NewSmoothBursty(f.name, rate, tokenbucket.WithMaxPermits(burst), tokenbucket.WithStore(faultlab.Stores[kind](client)),
			tokenbucket.WithStoreTimeout(timeout))
		require.NoError(t, err)
		f.limiters = append(f.limiters, l)
		for range 128 / len(clients) {
			callers.Go(func() {
				for pause := time.Duration(0); ; {
					select {
					case <-quit:
						return
					case <-time.After(pause):
						pause = f.call(l)
					}
				}
			})
		}
		callers.Go(func() {
			for {
				select {
				case <-quit:
					return
				case <-time.After(20 * time.Millisecond):
					f.hasty(l)
				}
			}
		})
	}
	return f
}

// call takes a permit and uses it. It returns how long to wait before the next call.
func (f *fleet) call(l *tokenbucket.RateLimiter) time.Duration {
	began := time.Now()
	f.calls.Add(1)
	r, err := l.TryReserve(background, 1, longest)
	f.noted(time.Since(began), err == nil && r.OK(), err)
	switch {
	case err != nil: // sooner, a thousand callers would leave no processor time to the others in an outage
		return 50 * time.Millisecond
	case !r.OK():
		return min(max(r.RetryAfter(), time.Millisecond), 20*time.Millisecond)
	}
	select {
	case <-r.Ready():
	case <-f.over: // it lapsed while the machine stood still, and its server is no master any more
		return 0
	}
	f.mu.Lock()
	f.used = append(f.used, time.Now().UnixMicro())
	f.mu.Unlock()
	return 0
}

// hasty is a caller that has little time.
func (f *fleet) hasty(l *tokenbucket.RateLimiter) {
	const limit = 300 * time.Millisecond
	began := time.Now()
	ctx, cancel := context.WithTimeout(background, limit)
	defer cancel()
	f.calls.Add(1)
	ok, err := l.TryAcquire(ctx, 1, 50*time.Millisecond)
	var wait *tokenbucket.WaitError
	if errors.As(err, &wait) {
		err = nil
	}
	took := time.Since(began)
	f.noted(took, ok, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.overdue = max(f.overdue, took-limit)
	if ok {
		f.used = append(f.used, time.Now().UnixMicro())
	}
}

func (f *fleet) noted(took time.Duration, granted bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.slowest = max(f.slowest, took)
	if granted {
		f.answers = append(f.answers, time.Now().UnixMicro())
	}
	if err != nil {
		k := kindOf(err)
		if f.failed[k]++; k == "odd" {
			f.odd = err
		}
	}
}

// kindOf returns the kind of a failure by its text; "odd" if it is unknown.
func kindOf(err error) string {
	var network *net.OpError
	var broken syscall.Errno
	var reply redis.Error
	switch {
	case errors.Is(err, tokenbucket.ErrStoreUnavailable):
		return "unavailable"
	case errors.Is(err, tokenbucket.ErrStoreTimeout):
		return "store timeout"
	case errors.Is(err, tokenbucket.ErrLockNotObtained):
		return "lock not obtained"
	case errors.Is(err, context.DeadlineExceeded):
		return "deadline"
	case errors.As(err, &network), errors.As(err, &broken), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed):
		return "network"
	case errors.As(err, &reply):
		word, _, _ := strings.Cut(reply.Error(), " ")
		return word
	}
	return "odd"
}

// granted returns how many permits were promised so far.
func (f *fleet) granted() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.answers)
}

// awaitGrants waits until more further permits were promised.
func (f *fleet) awaitGrants(t *testing.T, more int) {
	t.Helper()
	from := f.granted()
	require.Eventually(t, func() bool { return f.granted() >= from+more }, 30*time.Second, time.Millisecond, "%s: %v", f.name, f.failures())
}

// after returns how long after a moment a permit was promised. It waits for one until limit at most.
func (f *fleet) after(t *testing.T, moment time.Time, limit time.Duration) time.Duration {
	t.Helper()
	at := moment.UnixMicro()
	var first int64
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		i := slices.IndexFunc(f.answers, func(a int64) bool { return a >= at })
		if i >= 0 {
			first = f.answers[i]
		}
		return i >= 0
	}, time.Until(moment)+limit, time.Millisecond, "%s: nothing granted within %v: %v", f.name, limit, f.failures())
	return time.Duration(first-at) * time.Microsecond
}

func (f *fleet) failures() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[string]int{}
	for k, n := range f.failed {
		all[k] = n
	}
	return all
}

// check ends the fleet and compares its permits with the ledger: no caller used a permit that no server had granted, or used one before its
// due time. The uses exceed the bound by no more than the servers lost, and every call returned in time, with a result or an error of a
// known kind. killed: a server was, and MONITOR may have missed a batch whose server died between the two replies.
func (f *fleet) check(t *testing.T, books *ledger, late *faultlab.Lateness, moved, killed bool) *account {
	t.Helper()
	f.stop()
	books.settle(t)
	a := books.account(t, key(f.name), moved)
	f.mu.Lock()
	defer f.mu.Unlock()
	level := faultlab.Worst(a.due, rate)
	t.Logf("%s: %d calls, %d permits promised and %d used of %d taken, %d of them given back; fullest window %.3f of %v + rate × T + %.3f; failures %v; slowest answer %v, %v after its deadline; the machine was late by %v",
		f.name, f.calls.Load(), len(f.answers), len(f.used), len(a.due)+a.given, a.given, level, burst, a.extra(), f.failed, f.slowest, f.overdue, late.Most())
	faultlab.Figure(t, "slowest answer", f.slowest)
	unheard := 0
	if killed {
		unheard = len(f.used) / 20
	}
	assert.LessOrEqual(t, a.unearned(f.used), unheard, "%s: permits used that no server had granted by then", f.name)
	assert.LessOrEqual(t, level, burst+a.extra()+faultlab.Noise(rate), f.name)
	assert.Zero(t, f.failed["odd"], "%s: %v", f.name, f.odd)
	assert.LessOrEqual(t, f.slowest, f.timeout+time.Second+10*late.Most(), "%s: every call is answered in time", f.name)
	assert.LessOrEqual(t, f.overdue, 500*time.Millisecond+10*late.Most(), "%s: sooner than the store's timeout, by who has less", f.name)
	return a
}

// unnoticed fails the test if callers got errors of the fault. A caller with a short deadline may miss it on a slow machine, fault or not.
// Others get no error, and none waits long: a batch that follows a slot wakes some forty processes and goroutines, one after the other,
// each with the lateness of the machine.
func (f *fleet) unnoticed(t *testing.T, late *faultlab.Lateness) {
	t.Helper()
	require.Equal(t, patient, f.timeout, "who is impatient is told of a slow machine, too")
	for kind, n := range f.failures() {
		if kind == "deadline" {
			faultlab.Figure(t, "had too little time", n)
			continue
		}
		assert.Zero(t, n, "%s: %s", f.name, kind)
	}
	assert.LessOrEqual(t, f.slowest, time.Second+40*late.Most(), "%s: slowest answer", f.name)
}

// debt is the largest debt of a bucket, in permits: the longest wait of its callers, and one permit for the rounding.
const debt = rate*float64(longest)/float64(time.Second) + 1
