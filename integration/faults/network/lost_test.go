package network

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// size of the buckets from which permits are lost.
const size = 10_000

// The reply to a script is lost: the client waits for it in vain, and would send the script again if it were let.
func TestB1LostReply(t *testing.T) {
	each(t, func(t *testing.T, b *bench) { b.lose(t, faultlab.LoseReply) }, "hasty")
}

// The connection is cut when the script has been executed and before its reply: the client sees the end of it, and would
// send the script again at once.
func TestB2CutAfterExecution(t *testing.T) {
	each(t, func(t *testing.T, b *bench) { b.lose(t, faultlab.CutAfter) })
}

// The connection is cut before the script has reached the server. A client cannot distinguish that from the case above, so it is not sent
// again either: nothing was taken.
func TestB2CutBeforeExecution(t *testing.T) {
	each(t, func(t *testing.T, b *bench) { b.lose(t, faultlab.CutBefore) })
}

// lose lets replies to random calls get lost. Each call is executed once, or not at all if it never arrived; a call that
// was answered was executed; nothing is executed later, when the client has lost its patience.
func (b *bench) lose(t *testing.T, fault faultlab.Fault) {
	timeout := 400 * time.Millisecond
	if b.client == "hasty" {
		timeout = 2 * time.Second
	}
	random := faultlab.Seed(t)
	client := b.connect(t)
	var calls outcomes
	l := b.limiter(t, client, slow, size, timeout, calls.count())
	calls.warm(t, l)

	next, steps := int64(1+random.IntN(3)), rand.New(rand.NewPCG(random.Uint64(), 0))
	b.proxy.Match(b.takes(), func(n int64, _ []string) faultlab.Fault {
		if n != next {
			return faultlab.None
		}
		next += int64(2 + steps.IntN(4))
		return fault
	})
	before := calls.received.Load()
	for began := time.Now(); b.proxy.Bit() < 6 && time.Since(began) < time.Minute; {
		_ = calls.call(t, background, l, 1)
	}
	bit := b.proxy.Bit()
	faultlab.Bit(t, int(before), bit)
	b.balance(t, &calls, fault, bit, 1, "one by one")

	var callers sync.WaitGroup
	const largest = 3
	for range 32 {
		n := 1 + random.IntN(largest)
		callers.Go(func() {
			for i := 0; i < 10; {
				if calls.call(t, background, l, n) != nil || b.proxy.Bit() > bit {
					i++
				}
			}
		})
	}
	callers.Wait()
	faultlab.Bit(t, int(calls.received.Load()), b.proxy.Bit()-bit)
	bit = b.proxy.Bit()
	b.proxy.Match("", nil)
	b.balance(t, &calls, fault, bit, largest, "together")

	began := time.Now()
	returned := 0
	for range 5 {
		returned += b.refund(t, client, &calls, fault)
	}
	require.Equal(t, fault == faultlab.CutBefore, returned == 0)
	if fault == faultlab.LoseReply && b.client != "strict" { // the others wait for up to five seconds, and would try again then
		time.Sleep(time.Until(began.Add(6*time.Second + 500*time.Millisecond)))
	}
	b.balance(t, &calls, fault, bit, largest, "afterwards")
}

// balance compares the permits that callers received with those that the server has taken, when the given requests were hit. No call was
// for more than largest.
func (b *bench) balance(t *testing.T, calls *outcomes, fault faultlab.Fault, bit int, largest int64, when string) {
	t.Helper()
	n := int64(taken(state(t, b.direct, slow, size), size))
	t.Logf("%s: %v; taken %d", when, calls, n)
	name := map[faultlab.Fault]string{faultlab.LoseReply: "reply lost", faultlab.CutAfter: "cut after", faultlab.CutBefore: "cut before"}[fault]
	faultlab.Figure(t, name+": permits that nobody received", n-calls.received.Load())
	faultlab.Figure(t, "executed twice", max(0, n-calls.sent.Load()))
	require.GreaterOrEqual(t, n, calls.received.Load(), "what was received was taken")
	require.LessOrEqual(t, n, calls.most(largest), "nothing was executed twice")
	if fault == faultlab.CutBefore {
		require.LessOrEqual(t, n, calls.most(largest)-int64(bit), "nor what never arrived")
	} else {
		require.Greater(t, n, calls.received.Load(), "though the fault bit")
	}
}

// refund cancels a reservation, and the same fault hits that: the permits come back once, or not at all. It returns how often.
func (b *bench) refund(t *testing.T, client *redis.Client, calls *outcomes, fault faultlab.Fault) int {
	t.Helper()
	l := b.limiter(t, client, slow, size, 20*time.Second) // a store of its own: no other batch is under way
	// More than there is: due permits are used, and not refunded.
	n := int(state(t, b.direct, slow, size).StoredPermits) + 5
	var r *tokenbucket.Reservation
	require.NoError(t, redistest.Poll(20*time.Second, func() (err error) {
		if r, err = l.Reserve(background, n); err != nil {
			calls.sent.Add(int64(n))
			calls.failed.Add(int64(n))
			settled(t, b) // this one may have been executed, and counts as lost
		}
		return err
	}))
	was := state(t, b.direct, slow, size)
	b.proxy.Match(b.refunds(), redistest.Only(1, fault)) // a take that a busy machine has held up may still come
	ctx, cancel := context.WithTimeout(background, 500*time.Millisecond)
	err := r.Cancel(ctx)
	cancel()
	if err == nil { // on a busy machine another refund was hit: of permits that were granted too late
		b.proxy.Match("", nil)
		settled(t, b)
		return b.refund(t, client, calls, fault)
	}
	failure(t, err)
	require.Eventually(t, func() bool { return b.proxy.Bit() == 1 }, 10*time.Second, time.Millisecond)
	b.proxy.Match("", nil)
	is := state(t, b.direct, slow, size)
	for began := time.Now(); fault != faultlab.CutBefore && is.Seq == was.Seq && time.Since(began) < 10*time.Second; time.Sleep(time.Millisecond) {
		is = state(t, b.direct, slow, size)
	}
	if is.Seq == was.Seq { // it never arrived, or so late that its lock was gone
		require.Equal(t, taken(was, size), taken(is, size), "lost")
		calls.sent.Add(int64(n))
		calls.received.Add(int64(n)) // as far as the server knows
		return 0
	}
	require.NotEqual(t, faultlab.CutBefore, fault)
	require.Equal(t, was.Seq+1, is.Seq)
	require.Equal(t, taken(was, size)-n, taken(is, size), "given back once")
	return 1
}
