package semaphore_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// who is a hook that records which goroutine sent the last script.
type who struct {
	mu   sync.Mutex
	sent string
}

func (w *who) DialHook(next redis.DialHook) redis.DialHook { return next }

func (w *who) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (w *who) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" {
			w.mu.Lock()
			w.sent = goroutine()
			w.mu.Unlock()
		}
		return next(ctx, cmd)
	}
}

// goroutine returns the id of the calling goroutine.
func goroutine() string {
	buf := make([]byte, 30)
	return string(buf[:runtime.Stack(buf, false)])
}

// A lone caller makes the round trip itself if its context lasts for the timeout: with a default client, and with one that heeds the
// deadlines of contexts. The hooks of the latter see the scripts, those of the former do not.
func TestCallerAsksItself(t *testing.T) {
	proxy := redistest.StartProxy(t, redistest.Shared(t).Addr)
	open := func(heeds bool) (*semaphore.Semaphore, *who) {
		client := redis.NewClient(&redis.Options{Addr: proxy.Addr, ContextTimeoutEnabled: heeds, ReadTimeout: time.Minute})
		t.Cleanup(func() { _ = client.Close() })
		w := new(who)
		client.AddHook(w)
		s, err := semaphore.NewRedis(client, t.Name(), 1, semaphore.WithStoreTimeout(20*time.Second))
		require.NoError(t, err)
		return s, w
	}
	direct := func(s *semaphore.Semaphore, w *who, ctx context.Context) (acquired, released bool) {
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		w.mu.Lock()
		acquired = w.sent == goroutine()
		w.mu.Unlock()
		require.NoError(t, p.Release(ctx))
		w.mu.Lock()
		defer w.mu.Unlock()
		return acquired, w.sent == goroutine()
	}
	cancelled, cancel := context.WithCancel(ctx)
	defer cancel()
	patient, cancel := context.WithTimeout(ctx, time.Hour)
	defer cancel()
	short := func() context.Context { // for a call that begins now
		short, cancel := context.WithTimeout(ctx, 19*time.Second)
		t.Cleanup(cancel)
		return short
	}

	s, w := open(false)
	unseen := func(ctx context.Context) bool {
		w.mu.Lock()
		w.sent = ""
		w.mu.Unlock()
		_, _ = direct(s, w, ctx)
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.sent == ""
	}
	require.Eventually(t, func() bool { return unseen(cancelled) }, 20*time.Second, time.Millisecond)
	require.False(t, unseen(short()), "a goroutine of the transport sent the script")
	require.NoError(t, s.Close(ctx))
	s, w = open(true)
	_, _ = direct(s, w, ctx) // so that the last trip was in time
	for _, c := range []struct {
		ctx  func() context.Context
		want bool
	}{
		{func() context.Context { return ctx }, true}, {func() context.Context { return cancelled }, true},
		{func() context.Context { return patient }, true}, {short, false},
	} {
		require.Eventually(t, func() bool { // the last trip may still be looking for waiting sources
			a, r := direct(s, w, c.ctx())
			return a == c.want && r == c.want
		}, 20*time.Second, time.Millisecond)
	}
	require.NoError(t, s.Close(ctx))
}

// A caller that makes the round trip itself returns within the timeout even if the server hangs: on an open connection and on a new one, with
// a client that heeds the deadlines of contexts and with a default client.
func TestCallerIsBackInTime(t *testing.T) {
	t.Parallel()
	for _, heeds := range []bool{false, true} {
		t.Run(fmt.Sprint(heeds), func(t *testing.T) {
			t.Parallel()
			proxy := redistest.StartProxy(t, redistest.Shared(t).Addr)
			client := redis.NewClient(&redis.Options{Addr: proxy.Addr, ContextTimeoutEnabled: heeds, ReadTimeout: time.Minute})
			defer func() { _ = client.Close() }()
			s, err := semaphore.NewRedis(client, t.Name(), 1, semaphore.WithStoreTimeout(time.Second))
			require.NoError(t, err)
			patient, cancel := context.WithTimeout(ctx, time.Hour)
			defer cancel()
			for range 2 {
				require.Eventually(t, func() bool { // a second may be too short
					p, err := s.Acquire(ctx, 1)
					return err == nil && p.Release(ctx) == nil
				}, 20*time.Second, time.Millisecond)
			}
			proxy.Set(redistest.Stalled)
			began := time.Now()
			for range 2 {
				_, err = s.Acquire(patient, 1)
				require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
			}
			require.Less(t, time.Since(began), 20*time.Second)
			proxy.Set(redistest.Up)
			require.Eventually(t, func() bool {
				p, err := s.Acquire(patient, 1)
				return err == nil && p.Release(ctx) == nil
			}, 20*time.Second, time.Millisecond)
			require.NoError(t, s.Close(ctx))
		})
	}
}

// stuck is a hook that delays a script of one goroutine until its context has ended, and then delivers it, as a network may.
type stuck struct {
	whose   atomic.Pointer[string] // the goroutine's id; nil for none
	deliver func(cmd redis.Cmder, sent time.Time)
}

func (s *stuck) DialHook(next redis.DialHook) redis.DialHook { return next }

func (s *stuck) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (s *stuck) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if whose := s.whose.Load(); cmd.Name() == "evalsha" && whose != nil && *whose == goroutine() {
			sent := time.Now()
			<-ctx.Done()
			go s.deliver(cmd.Clone(), sent)
			cmd.SetErr(ctx.Err())
			return ctx.Err()
		}
		return next(ctx, cmd)
	}
}

// A script that a caller sent itself is not decided after the caller has given up: its permit would not be released.
func TestCallersScriptComesLate(t *testing.T) {
	const timeout = 2 * time.Second
	server := redistest.Shared(t)
	other := server.Client(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr, ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = client.Close() })
	delivered := make(chan error, 1)
	s := &stuck{deliver: func(cmd redis.Cmder, sent time.Time) {
		time.Sleep(time.Until(sent.Add(timeout * 98 / 100)))
		delivered <- other.Process(context.Background(), cmd)
	}}
	client.AddHook(s)
	sem, err := semaphore.NewRedis(client, fmt.Sprint(t.Name(), time.Now().UnixNano()), 1, semaphore.WithStoreTimeout(timeout))
	require.NoError(t, err)
	for range 3 { // until callers make trips themselves and the server's clock is known
		p, err := sem.Acquire(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, p.Release(ctx))
	}
	self := goroutine()
	s.whose.Store(&self)
	for soon := time.Now().Add(20 * time.Second); ; { // the last trip may still be looking for waiting sources, and then takes the batch
		require.True(t, time.Now().Before(soon), "no caller makes the trip itself")
		p, err := sem.TryAcquire(ctx, 1, 0)
		if err != nil {
			require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
			break
		}
		s.whose.Store(nil)
		require.NoError(t, p.Release(ctx))
		s.whose.Store(&self)
	}
	s.whose.Store(nil)
	require.NoError(t, <-delivered)
	stats, err := sem.Stats(ctx)
	require.NoError(t, err)
	require.Zero(t, stats.Used)
}
