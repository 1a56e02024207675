package network

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// recorder keeps the requests that a proxy has seen.
type recorder struct {
	mu   sync.Mutex
	args [][]string
}

func (r *recorder) record(_ int64, args []string) faultlab.Fault {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.args = append(r.args, slices.Clone(args))
	return faultlab.None
}

// twice returns those that came more than once, word for word. What takes permits names an epoch, a lock's token or a state that
// there is but once.
func (r *recorder) twice() (again [][]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := map[string]bool{}
	for _, args := range r.args {
		text := strings.Join(args, "\x00")
		if known[text] {
			again = append(again, args)
		}
		known[text] = true
	}
	return again
}

// reserve reserves permits.
func reserve(t *testing.T, l *tokenbucket.RateLimiter, n int) *tokenbucket.Reservation {
	t.Helper()
	r, err := l.Reserve(background, n)
	require.NoError(t, err)
	return r
}

// replay sends them again, as often as asked, and returns the last replies.
func (r *recorder) replay(t *testing.T, b *bench, times int) []any {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	require.NotEmpty(t, r.args)
	replies := make([]any, len(r.args))
	for range times {
		for i, words := range r.args {
			args := make([]any, len(words))
			for j, w := range words {
				args[j] = w
			}
			var err error
			replies[i], err = b.direct.Do(background, args...).Result()
			require.NoError(t, err)
		}
	}
	return replies
}

// A refund is sent again, byte for byte: at once, after others have been granted, after a restart and after a reset. It refunds once at the
// tail of the bucket, and not at all where another process has taken behind it.
func TestB5DuplicateGiveBack(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		for name, behind := range map[string]bool{"at the end": false, "others behind": true} {
			t.Run(name, func(t *testing.T) {
				l := b.limiter(t, b.connect(t), slow, size, 5*time.Second)
				require.NoError(t, l.Reset(background))
				other := b.limiter(t, b.direct, slow, size, 5*time.Second)
				reserve(t, other, size+100) // so that nothing is due, and there is room for a refund too many
				r, gone := reserve(t, l, 7), size+100
				if behind { // then the process keeps it for the next caller
					reserve(t, other, 11)
					gone += 7 + 11
				}
				var sent recorder
				b.proxy.Match(b.takes(), sent.record)
				require.NoError(t, r.Cancel(background))
				b.proxy.Match("", nil)
				is := func(want int, when string) {
					t.Helper()
					require.Equal(t, want, taken(state(t, b.direct, slow, size), size), when)
				}
				is(gone, "given back")
				sent.replay(t, b, 5)
				is(gone, "at once")
				reserve(t, other, 100)
				gone += 100
				sent.replay(t, b, 5)
				is(gone, "after others")
				for range 40 {
					mine := reserve(t, l, 1)
					reserve(t, other, 1)
					require.NoError(t, mine.Cancel(background))
					gone++
				}
				if !behind {
					gone++ // the first of mine; the next are what it has left
				}
				sent.replay(t, b, 5)
				is(gone, "after forty others that were given back")
				require.NoError(t, b.direct.Do(background, "DEBUG", "RELOAD").Err())
				sent.replay(t, b, 5)
				is(gone, "after a restart that lost nothing")
				require.NoError(t, l.Reset(background))
				reserve(t, other, 100)
				sent.replay(t, b, 5)
				is(100, "after a reset")
			})
		}
	})
}

// Every request that gives back arrives twice in a row, as a middleman with good intentions would send it. The same history of
// two processes is played with and without: its end is much the same, and nothing that was used is there again.
func TestB5EverythingTwice(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		seed := faultlab.Seed(t).Uint64()
		once, usedOnce, _ := b.history(t, faultlab.None, seed)
		twice, usedTwice, bit := b.history(t, faultlab.Twice, seed)
		t.Logf("%d used; %d lacking when each arrives once, %d when %d arrive twice", usedTwice, once, twice, bit)
		faultlab.Figure(t, "refunds that arrived twice", bit)
		faultlab.Figure(t, "permits back beyond those", once-twice)
		faultlab.Bit(t, usedOnce, bit)
		require.Equal(t, usedOnce, usedTwice)
		require.GreaterOrEqual(t, twice, usedTwice, "a permit that was used came back")
		// What stays with the process, since others have taken behind it, serves its next caller or lapses: that goes by time.
		require.InDelta(t, once, twice, 20, "a refund counted twice would be some five permits each")
	})
}

// history lets two limiters take from a new bucket, and one give back most of what it took, with a fault. It returns what the
// bucket lacks in the end, how many permits were used, and how many requests were hit.
func (b *bench) history(t *testing.T, fault faultlab.Fault, seed uint64) (lacking, used, bit int) {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 0))
	l := b.limiter(t, b.connect(t), slow, size, 5*time.Second)
	require.NoError(t, l.Reset(background))
	other := b.limiter(t, b.direct, slow, size, 5*time.Second)
	_, err := other.Reserve(background, size) // due permits would be used, and not refunded
	require.NoError(t, err)
	used = size
	for range 60 {
		n := 1 + random.IntN(9)
		r, err := l.Reserve(background, n)
		require.NoError(t, err)
		if random.IntN(2) == 0 {
			_, err := other.Reserve(background, 1)
			require.NoError(t, err)
			used++
		}
		if random.IntN(3) == 0 {
			used += n
			continue
		}
		b.proxy.Match(b.takes(), func(int64, []string) faultlab.Fault { return fault })
		require.NoError(t, r.Cancel(background))
		bit += b.proxy.Bit()
		b.proxy.Match("", nil)
	}
	return taken(state(t, b.direct, slow, size), size), used, bit
}

// A settlement is sent again, byte for byte: at once, after others have taken and settled, and after a penalty. It gives permits back once.
func TestB5DuplicateSettle(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		l := b.limiter(t, b.connect(t), slow, size, 5*time.Second)
		require.NoError(t, l.Reset(background))
		other := b.limiter(t, b.direct, slow, size, 5*time.Second)
		mine := reserve(t, l, 20) // due, so its settlement is sent
		var others []*tokenbucket.Reservation
		for range 6 {
			others = append(others, reserve(t, other, 10))
		}
		reserve(t, other, size) // so there is room for what would come back too often
		gone := size + 80
		var sent recorder
		b.proxy.Match(b.takes(), sent.record)
		require.NoError(t, mine.Settle(background, 5))
		b.proxy.Match("", nil)
		is := func(when string) {
			t.Helper()
			sent.replay(t, b, 3)
			require.InDelta(t, gone, taken(state(t, b.direct, slow, size), size), 1, when)
		}
		gone -= 15
		is("at once")
		for _, r := range others {
			require.NoError(t, r.Settle(background, 4))
			gone -= 6
		}
		is("after others")
		require.NoError(t, other.Penalize(background, time.Second))
		gone = taken(state(t, b.direct, slow, size), size)
		is("after a penalty")
	})
}

// Every request of a take arrives twice in a row, while its caller waits. Takes have no number of their own, so a script takes the permits
// twice, at most; under a lock the second finds the state changed. The caller gets the result of one take, and the next one finds the
// remaining permits.
func TestB5PromptTake(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		l := b.limiter(t, b.connect(t), slow, size, 5*time.Second)
		var calls outcomes
		calls.warm(t, l)
		before, bit, all := int(calls.received.Load()), 0, 0
		for i := range 20 {
			n := 1 + i%7
			b.disturb(t, &calls, l) // else it is a guess that no longer fits when it comes again
			was := taken(state(t, b.direct, slow, size), size)
			b.proxy.Match("evalsha", func(int64, []string) faultlab.Fault { return faultlab.Twice })
			require.NoError(t, calls.call(t, background, l, n))
			require.Positive(t, b.proxy.Bit())
			bit += b.proxy.Bit()
			b.proxy.Match("", nil)
			lost := taken(state(t, b.direct, slow, size), size) - was - n
			require.GreaterOrEqual(t, lost, 0, "what was received was taken")
			require.LessOrEqual(t, lost, n, "no more than once again")
			if b.which == "lock" {
				require.Zero(t, lost)
			}
			all += lost
		}
		t.Logf("%v", &calls)
		faultlab.Figure(t, "takes that arrived twice at once", bit)
		faultlab.Figure(t, b.which+": permits that they took on top", all)
		faultlab.Bit(t, before, bit)
		if b.which == "script" {
			require.Positive(t, all, "a guess, that did not fit")
		}
	})
}

// Should a middleman send it again when its caller has long gone, it finds itself too late, and takes nothing.
func TestB5LateTake(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		const timeout = 300 * time.Millisecond
		l := b.limiter(t, b.connect(t), slow, size, timeout)
		new(outcomes).warm(t, l)
		var sent recorder
		b.proxy.Match(b.takes(), sent.record)
		var calls outcomes
		for range 20 {
			b.disturb(t, &calls, l)
		}
		b.proxy.Match("", nil)
		faultlab.Bit(t, int(calls.received.Load()), len(sent.args))
		was := state(t, b.direct, slow, size)
		time.Sleep(2 * timeout) // by the server's clock its caller has gone
		replies := sent.replay(t, b, 2)
		is := state(t, b.direct, slow, size)
		require.Equal(t, was.Seq, is.Seq, "%v", replies)
		require.InDelta(t, was.StoredPermits, is.StoredPermits, 0.1)
	})
}
