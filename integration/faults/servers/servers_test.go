package servers

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

const (
	// storeTimeout is long enough to be distinct from a caller's deadline, and its end from that of a client that waits for five seconds.
	storeTimeout = 3 * time.Second
	// slack is how much later than its limit a call may be answered; what the machine is late by comes on top.
	slack = time.Second
	// patient is the store timeout where a slow machine must not cause an error.
	patient = 20 * time.Second
)

// suffers has a limiter of each kind of store live through a fault: thirty permits before it; during it, calls with a deadline
// and without one, all of which fail in time, with an error of a known kind, and some with the server's own word; afterwards the
// bucket is what it was, no lock is left, and permits come again.
func suffers(t *testing.T, name string) {
	t.Helper()
	f := faults[name]
	for _, kind := range faultlab.Kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			late := faultlab.MeasureLateness(t)
			b := f.start(t, kind, tokenbucket.WithStoreTimeout(storeTimeout))
			const before = 30
			was := b.warm(t, before)
			f.begin(t, b)
			told := b.suffer(t, f, late)
			t.Logf("%d calls failed; for example: %v", len(told), told[len(told)-1])
			faultlab.Bit(t, before, len(told))

			f.end(t, b)
			well, trips := time.Now(), faultlab.MeasureTrips(t, b.Addr)
			passed := 0
			require.Eventually(t, func() bool {
				if !f.lost && passed == 0 {
					if is := b.stored(t); is != was {
						t.Errorf("the bucket was %s before and is %s after", was, is)
					}
				}
				ok, err := b.limiter.TryAcquire(background, 1, 0)
				if err == nil && ok {
					passed++
				}
				return passed > 0
			}, 20*time.Second, time.Millisecond)
			took := time.Since(well)
			faultlab.Figure(t, "a permit after the server was well", took)
			assert.LessOrEqual(t, took, 2*time.Second+10*max(late.Most(), trips.Most()))
			if !f.lost {
				requireTaken(t, b, was, passed)
			}
			faultlab.CleanUp(t, b.admin, "tokenbucket:")
		})
	}
}

// requireTaken waits until the bucket has exactly the given number of permits fewer than before, and stays so.
func requireTaken(t *testing.T, b *bench, was string, permits int) {
	t.Helper()
	var old, now tokenbucket.PermitBucket
	require.NoError(t, old.UnmarshalText([]byte(was)))
	time.Sleep(50 * time.Millisecond) // for what may still be under way
	require.NoError(t, now.UnmarshalText([]byte(b.stored(t))))
	require.EqualValues(t, permits, now.Seq-old.Seq, "permits taken since the fault began")
}

// suffer calls for a second, and at least once with and without a deadline, and returns the errors.
func (b *bench) suffer(t *testing.T, f *fault, late *faultlab.Lateness) []error {
	t.Helper()
	var told []error
	slowest, heard := time.Duration(0), false
	for began := time.Now(); time.Since(began) < time.Second || len(told) < 4; {
		ctx, cancel, limit := background, func() {}, storeTimeout
		if len(told)%4 != 3 {
			limit = 200 * time.Millisecond
			ctx, cancel = context.WithTimeout(background, limit)
		}
		began := time.Now()
		ok, err := b.limiter.TryAcquire(ctx, 1, 0)
		took := time.Since(began)
		cancel()
		require.False(t, ok)
		require.Error(t, err)
		slowest = max(slowest, took-limit)
		told = append(told, err)
		heard = heard || f.says(err)
		if !typed(err) {
			t.Fatalf("an error of no kind: %v", err)
		}
		if f.config && (late.Most() < limit/2 || !errors.Is(err, tokenbucket.ErrStoreTimeout)) { // on a machine that is late the reply may come too late
			assert.NotErrorIs(t, err, tokenbucket.ErrStoreUnavailable, "it must be set right, not waited for")
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Logf("the machine was late by %v", late.Most())
	faultlab.Figure(t, "slowest answer after its limit", slowest)
	assert.LessOrEqual(t, slowest, slack+4*late.Most())
	assert.True(t, heard, "nobody was told %q, but %v", f.words, told[:min(8, len(told))])
	return told
}

// F1: no memory for a write.
func TestF1OutOfMemory(t *testing.T) { suffers(t, "F1 OOM") }

// F1: the memory ends between the read and the commit of a holder of the lock. The commit fails as a whole, and the lock is
// released, which needs no memory.
func TestF1LockIsReleasedOutOfMemory(t *testing.T) {
	f := faults["F1 OOM"]
	b := f.start(t, "lock")
	was := b.warm(t, 30)
	client := b.Client(t)
	end := &between{do: func() { f.begin(t, b) }}
	end.scripts.Store(2)
	client.AddHook(end)
	l, err := tokenbucket.NewSmoothBursty(b.name, rate, tokenbucket.WithMaxPermits(1e6), tokenbucket.WithInitialPermits(1e6),
		tokenbucket.WithStore(tokenbucket.NewRedisStore(client, tokenbucket.WithLockTTL(30*time.Second))), tokenbucket.WithStoreTimeout(patient))
	require.NoError(t, err)
	ok, err := l.TryAcquire(background, 1, 0)
	require.True(t, end.done.Load())
	require.False(t, ok)
	require.ErrorContains(t, err, "OOM")
	require.Eventually(t, func() bool { return b.admin.Exists(background, b.key()+":lock").Val() == 0 }, 20*time.Second, time.Millisecond)
	require.Equal(t, was, b.stored(t))
	f.end(t, b)
	require.Eventually(t, func() bool {
		ok, err := l.TryAcquire(background, 1, 0)
		return ok && err == nil
	}, 20*time.Second, time.Millisecond)
	requireTaken(t, b, was, 1)
}

// between is a hook that calls a function once the given number of scripts have run.
type between struct {
	scripts atomic.Int32 // to come
	do      func()
	done    atomic.Bool
}

// DialHook implements redis.Hook.
func (*between) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessPipelineHook implements redis.Hook.
func (*between) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// ProcessHook implements redis.Hook.
func (h *between) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if strings.HasPrefix(cmd.Name(), "eval") && err == nil {
			if h.scripts.Add(-1) == 0 {
				h.do()
				h.done.Store(true)
			}
		}
		return err
	}
}

// F2: the server has become a replica.
func TestF2ReadOnly(t *testing.T) { suffers(t, "F2 READONLY") }

// F2, F3, F5, F6, D9: a request is sent again to a server that replies that it has executed nothing: a caller with enough time waits and
// gets a permit when the server has recovered, without an error.
func TestAskedAgain(t *testing.T) {
	for _, name := range []string{"F2 READONLY", "F3 LOADING", "F5 NOREPLICAS", "F6 MASTERDOWN", "CLUSTERDOWN"} {
		for _, kind := range faultlab.Kinds {
			t.Run(name+" "+kind, func(t *testing.T) {
				t.Parallel()
				for try := 1; !askedAgain(t, faults[name], kind); try++ {
					require.Less(t, try, 5, "the machine is too slow to tell")
				}
			})
		}
	}
}

// askedAgain takes one call through a fault. It returns false if the result means nothing, because the machine was too late.
func askedAgain(t *testing.T, f *fault, kind string) bool {
	t.Helper()
	const away = 300 * time.Millisecond
	late := faultlab.MeasureLateness(t)
	b := f.start(t, kind, tokenbucket.WithStoreTimeout(patient))
	was := b.warm(t, 30)
	f.begin(t, b)
	answer := make(chan error, 1)
	go func() {
		ok, err := b.limiter.TryAcquire(background, 1, 0)
		if err == nil {
			assert.True(t, ok)
		}
		answer <- err
	}()
	select {
	case err := <-answer:
		f.end(t, b)
		if late.Most() > away*2/3 {
			t.Logf("answered with %v; the machine was late by %v: once more", err, late.Most())
			return false
		}
		t.Errorf("answered while the server could not decide: %v", err)
	case <-time.After(away):
		f.end(t, b)
		require.NoError(t, <-answer)
		requireTaken(t, b, was, 1)
	}
	return true
}

// F3: the server reads its file.
func TestF3Loading(t *testing.T) { suffers(t, "F3 LOADING") }

// F4: the server cannot save and refuses to write.
func TestF4Misconfigured(t *testing.T) { suffers(t, "F4 MISCONF") }

// F5: the server has fewer replicas than it must have to write.
func TestF5NoReplicas(t *testing.T) { suffers(t, "F5 NOREPLICAS") }

// F6: a replica has lost its master and does not answer from what it remembers.
func TestF6MasterDown(t *testing.T) { suffers(t, "F6 MASTERDOWN") }

// F7: the configuration is wrong: a password, a right, or the value under the key. The call returns that error; it is no outage.
func TestF7Configuration(t *testing.T) {
	for name, f := range faults {
		if f.config {
			t.Run(name, func(t *testing.T) { t.Parallel(); suffers(t, name) })
		}
	}
}

// F7: a call that is refused a right asks once, not again and again: one script a call, with the lock three, of which one cleans up;
// and a few more for what may be under way.
func TestF7NoStorm(t *testing.T) {
	for _, kind := range faultlab.Kinds {
		f := faults["F7 TIME denied"]
		b := f.start(t, kind)
		b.warm(t, 30)
		f.begin(t, b)
		scripts := func() (n int64) {
			for _, command := range []string{"evalsha", "eval"} {
				info, err := b.admin.Info(background, "commandstats").Result()
				require.NoError(t, err)
				_, rest, _ := strings.Cut(info, "cmdstat_"+command+":calls=")
				text, _, _ := strings.Cut(rest, ",")
				calls, _ := strconv.ParseInt(text, 10, 64) // none yet
				n += calls
			}
			return n
		}
		was := scripts()
		const n = 50
		for range n {
			_, err := b.limiter.TryAcquire(background, 1, 0)
			require.Error(t, err)
		}
		time.Sleep(100 * time.Millisecond) // for what follows in the background
		asked := scripts() - was
		faultlab.Figure(t, fmt.Sprintf("%s: scripts for %d calls", kind, n), asked)
		faultlab.Bit(t, 30, int(asked))
		most := map[string]int64{"script": n, "lock": 3 * n}[kind]
		assert.LessOrEqual(t, asked, most+n/2)
		f.end(t, b)
	}
}

// F8: the server is busy with another client's endless script.
func TestF8Busy(t *testing.T) { suffers(t, "F8 BUSY") }

// F8: the script has written, so that nothing but the server's end ends it.
func TestF8Unkillable(t *testing.T) { suffers(t, "F8 UNKILLABLE") }

// F9: the server takes no more connections.
func TestF9MaxClients(t *testing.T) { suffers(t, "F9 maxclients") }
