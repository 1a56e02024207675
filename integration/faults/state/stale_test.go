package state

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// stale is a store that falls back to an older state, while its clients go on.
type stale struct {
	t    *testing.T
	at   atomic.Pointer[faultlab.Node] // where the store is
	keep func()                        // later writes are lost
	lose func()                        // falls back
}

// fallsBack are ways to lose the last writes.
var fallsBack = map[string]func(t *testing.T) *stale{
	// A replica that does not get them takes the place of its master.
	"failover": func(t *testing.T) *stale {
		s := &stale{t: t}
		args := []string{"--repl-diskless-sync-delay", "0"}
		master := faultlab.StartNode(t, args...)
		replica := faultlab.StartNode(t, append(args, "--replicaof", strings.Replace(master.Addr, ":", " ", 1))...)
		replica.InStep(t, master)
		s.at.Store(master)
		s.keep = func() {
			replica.InStep(t, master)
			require.NoError(t, replica.Client(t).ReplicaOf(background, "no", "one").Err())
		}
		s.lose = func() {
			master.Kill()
			s.at.Store(replica)
		}
		return s
	},
	// A server is killed, and starts with its last snapshot.
	"RDB": func(t *testing.T) *stale {
		s := &stale{t: t}
		node := faultlab.StartNode(t, "--dir", t.TempDir())
		s.at.Store(node)
		s.keep = func() { require.NoError(t, node.Client(t).Save(background).Err()) }
		s.lose = func() {
			node.Kill()
			node.Restart(t)
		}
		return s
	},
}

// open returns a process's limiter. Its client goes where the store is.
func (s *stale) open(kind, name string, rate float64, opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
	client := s.at.Load().Client(s.t, func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, s.at.Load().Addr)
		}
	})
	store := faultlab.Stores[kind](client)
	l, err := tokenbucket.NewSmoothBursty(name, rate, append(opts, tokenbucket.WithStore(store), tokenbucket.WithStoreTimeout(patient))...)
	require.NoError(s.t, err)
	return l
}

// fail loses the writes since keep, and waits until all connections are closed.
func (s *stale) fail() {
	s.lose()
	time.Sleep(100 * time.Millisecond)
}

func state(t *testing.T, l *tokenbucket.RateLimiter) tokenbucket.PermitBucket {
	t.Helper()
	b, err := l.State(background)
	require.NoError(t, err)
	return b
}

func eachStale(t *testing.T, name string, test func(t *testing.T, s *stale)) {
	for how, start := range fallsBack {
		t.Run(name+"/"+how, func(t *testing.T) {
			t.Parallel()
			test(t, start(t))
		})
	}
}

// D4: a permit that the dead master granted is cancelled after the failover. The new master has granted others what lies at that place
// now, under the same number: nothing of that comes back. The same holds for a server that falls back to a snapshot.
func TestD4CancelAfterFailover(t *testing.T) {
	for _, kind := range faultlab.Kinds {
		for name, n := range map[string]int{"the same": 1, "more": 100} {
			eachStale(t, kind+"/"+name, func(t *testing.T, s *stale) {
				a := s.open(kind, "x", 0.01)
				_, err := a.Reserve(background, 10) // in debt from now on
				require.NoError(t, err)
				s.keep()
				held, err := a.Reserve(background, 1)
				require.NoError(t, err)
				lost := state(t, a)
				s.fail()

				b := s.open(kind, "x", 0.01)
				others, err := b.Reserve(background, n)
				require.NoError(t, err)
				granted := state(t, a) // so that its client has a connection to the new master
				require.Equal(t, lost.Seq, granted.Seq, "the new master counts as the old one did")
				require.NoError(t, held.Cancel(background))
				require.Equal(t, granted.NextFreeTicketMicros, state(t, b).NextFreeTicketMicros, "what the new master granted")
				require.NoError(t, others.Cancel(background))
				require.Less(t, state(t, b).NextFreeTicketMicros, granted.NextFreeTicketMicros, "its own grants come back")
			})
		}
	}
}

// D4: the failover of a bucket that one process predicts. It remembers a state that the new master never had, and another process has
// asked there first: what that was granted stays granted.
func TestD4PredictionAfterFailover(t *testing.T) {
	for _, kind := range faultlab.Kinds {
		eachStale(t, kind, func(t *testing.T, s *stale) {
			large := []tokenbucket.Option{tokenbucket.WithMaxPermits(1e6), tokenbucket.WithInitialPermits(1e6)}
			a := s.open(kind, "x", 0.001, large...)
			take := func(l *tokenbucket.RateLimiter, n int) {
				t.Helper()
				ok, err := l.TryAcquire(background, n, 0)
				require.NoError(t, err)
				require.True(t, ok)
			}
			for range 20 { // from the fifth on, it predicts
				take(a, 1)
			}
			s.keep()
			take(a, 1)
			s.fail()

			b := s.open(kind, "x", 0.001, large...)
			take(b, 1000)
			for range 20 {
				take(a, 1)
			}
			require.InDelta(t, 1e6-20-1000-20, state(t, b).StoredPermits, 0.5)
		})
	}
}

// D1: a server that is killed and starts with its append-only file has lost nothing: stored permits, debt, and the time to live of the
// state. The processes go on, and predict at once.
func TestD1RestartFromAOF(t *testing.T) {
	const owes11 = 18 * time.Minute // 11 permits at 0.01/s, less what the test takes
	for _, kind := range faultlab.Kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			s := &stale{t: t}
			node := faultlab.StartNode(t, "--dir", t.TempDir(), "--appendonly", "yes", "--appendfsync", "always")
			s.at.Store(node)
			saved := s.open(kind, "saved", 0.001, tokenbucket.WithMaxPermits(1e6), tokenbucket.WithInitialPermits(1e6))
			owes := s.open(kind, "owes", 0.01)
			for range 20 {
				ok, err := saved.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
			}
			held, err := owes.Reserve(background, 10)
			require.NoError(t, err)
			_, err = owes.Reserve(background, 1)
			require.NoError(t, err)
			savedBefore, owesBefore := state(t, saved), state(t, owes)
			node.Kill()
			node.Restart(t)
			time.Sleep(100 * time.Millisecond)
			savedAfter, owesAfter := state(t, saved), state(t, owes)
			require.Equal(t, []int64{savedBefore.Epoch, savedBefore.Seq}, []int64{savedAfter.Epoch, savedAfter.Seq})
			require.InDelta(t, savedBefore.StoredPermits, savedAfter.StoredPermits, 0.5)
			require.Equal(t, owesBefore.NextFreeTicketMicros, owesAfter.NextFreeTicketMicros)
			require.Greater(t, node.Client(t).PTTL(background, "tokenbucket:{owes}").Val(), owes11)
			require.NoError(t, held.Cancel(background)) // others stand behind it, so its permits stay with this process
			for range 20 {
				ok, err := saved.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
			}
			require.InDelta(t, 1e6-40, state(t, saved).StoredPermits, 0.5)
		})
	}
}
