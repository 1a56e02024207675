package tokenbucket

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// bomb panics once each time it is lit.
type bomb struct{ lit, went atomic.Int64 }

func (b *bomb) pass() {
	if n := b.lit.Load(); n > 0 && b.lit.CompareAndSwap(n, n-1) {
		b.went.Add(1)
		panic("bomb")
	}
}

// DialHook implements redis.Hook.
func (b *bomb) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook. A store asks for the server's eviction policy beside its callers: INFO does not set the bomb off.
func (b *bomb) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() != "info" {
			b.pass()
		}
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook implements redis.Hook.
func (b *bomb) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		b.pass()
		return next(ctx, cmds)
	}
}

// panicsIn returns the panic of a call, or nil.
func panicsIn(call func()) (value any) {
	defer func() { value = recover() }()
	call()
	return nil
}

// quietly discards the log: panics are logged with their stacks.
var quietly = WithLogger(slog.New(slog.NewTextHandler(io.Discard, nil)))

// everybodyGoesOn asks limiters from many goroutines.
func everybodyGoesOn(t *testing.T, ctx context.Context, limiters ...*RateLimiter) {
	t.Helper()
	var wg sync.WaitGroup
	for _, l := range limiters {
		for range 20 {
			wg.Go(func() {
				for range 5 {
					if ok, err := l.Try(ctx); !ok || err != nil {
						t.Error(ok, err)
					}
				}
			})
		}
	}
	wg.Wait()
	require.Nil(t, limiters[0].limiter.Coordinator.Down())
}

// A panic of a client's hook or of an observer's Trip reaches the caller in whose goroutine the trip is made. In a goroutine of the
// limiter's own it does not end the process; the callers of the batch get an error if it was the client's. Others go on in either case.
func TestPanicOnATrip(t *testing.T) {
	server := redistest.Shared(t)
	for what, test := range map[string]struct {
		hook   bool // the client panics; otherwise the observer does
		lone   bool // the caller makes the trip itself
		locked bool // the store is the RedisStore
	}{
		"hook, own trip":         {hook: true, lone: true},
		"hook, shared trip":      {hook: true},
		"hook, lock":             {hook: true, locked: true},
		"observer, own trip":     {lone: true},
		"observer, shared trip":  {},
		"observer, under a lock": {locked: true},
	} {
		t.Run(what, func(t *testing.T) {
			var b bomb
			client := server.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
			if test.hook {
				client.AddHook(&b)
			}
			observe := Observer{Trip: func(Trip) {
				if !test.hook {
					b.pass()
				}
			}}
			var store Store = NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t)))
			if test.locked {
				store = NewRedisStore(client, WithKeyPrefix(prefixOf(t)))
			}
			var limiters []*RateLimiter
			for _, name := range []string{"panics", "other"} {
				l, err := NewSmoothBursty(name, 1e5, WithStore(store), patient, WithObserver(observe), quietly)
				require.NoError(t, err)
				limiters = append(limiters, l)
			}
			ctx, cancel := context.WithCancel(background)
			defer cancel()
			if test.lone {
				ctx = background
			}
			_, err := limiters[0].Try(ctx)
			require.NoError(t, err)
			for n := 1; ; n++ {
				require.Less(t, n, 1000, "no caller has made its trip itself")
				b.lit.Add(1)
				value := panicsIn(func() { _, err = limiters[0].Try(ctx) })
				require.EqualValues(t, n, b.went.Load())
				if test.hook {
					require.True(t, value != nil || errors.Is(err, ErrStoreUnusable), "%v", err)
				} else {
					require.True(t, value != nil || err == nil, "%v", err)
				}
				if !test.lone {
					require.Nil(t, value)
					break
				} else if value != nil {
					require.Equal(t, "bomb", value)
					break
				}
				time.Sleep(time.Millisecond) // another goroutine was still on its way
			}
			everybodyGoesOn(t, ctx, limiters...)
		})
	}
}

// explosive is a store of a user's own that panics.
type explosive struct {
	ailing
	bomb
}

func (s *explosive) Apply(ctx context.Context, b *Batch) error {
	s.pass()
	return s.ailing.Apply(ctx, b)
}

// A panic of a user's store fails the callers of its batch, and no others. One in a probe is no outage.
func TestPanicOfAStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := new(explosive)
		l, err := NewSmoothBursty("x", 1e5, WithStore(s), quietly, WithFailurePolicy(FailOpen))
		require.NoError(t, err)
		s.lit.Add(1)
		ok, err := l.Try(background)
		require.False(t, ok)
		require.ErrorIs(t, err, ErrStoreUnusable)
		require.ErrorContains(t, err, `bucket "x"`)
		require.ErrorContains(t, err, "panicked: bomb")
		everybodyGoesOn(t, background, l)
		s.fails.Store(true) // of requests; a probe has none
		s.lit.Add(1)
		_, err = l.Try(background)
		require.Error(t, err)
		for range 3 {
			s.lit.Add(1)
			time.Sleep(time.Second)
			require.Nil(t, l.limiter.Coordinator.Down())
		}
		s.fails.Store(false)
		s.lit.Store(0)
		everybodyGoesOn(t, background, l)
	})
}

// Panics of the other functions of an observer, of a log handler and of a switch leave the bucket as it was.
func TestPanicOfAnObserver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var decision, lease, health, enabled bomb
		s := &sick{}
		l, err := NewSmoothBursty("x", 1e5, WithStore(s), WithInitialPermits(1e5), WithPrefetch(time.Second),
			WithLogger(slog.New(&handler{})), WithSwitch(func() bool { enabled.pass(); return true }),
			WithObserver(Observer{
				Decision: func(context.Context, Decision) { decision.pass() },
				Prefetch: func(string, int, int) { lease.pass() },
				Health:   func(Health) { health.pass() },
			}))
		require.NoError(t, err)
		for range 100 {
			ok, err := l.Try(background)
			require.True(t, ok, "%v", err)
			time.Sleep(time.Millisecond)
		}
		for what, b := range map[string]*bomb{"decision": &decision, "switch": &enabled} {
			b.lit.Store(1)
			require.Equal(t, "bomb", panicsIn(func() { _, _ = l.Try(background) }), what)
			everybodyGoesOn(t, background, l)
		}
		require.True(t, look(l).Lease, "no lease to lose")
		lease.lit.Store(1)
		require.NoError(t, l.Penalize(background, time.Millisecond)) // ends the lease
		require.EqualValues(t, 1, lease.went.Load())
		time.Sleep(time.Second)
		everybodyGoesOn(t, background, l)
		health.lit.Store(2) // the beginning and the end of the outage; the handler panics as well
		s.away(t, l, true)
		s.away(t, l, false)
		require.EqualValues(t, 2, health.went.Load())
		everybodyGoesOn(t, background, l)
	})
}

// A log handler that panics when it is given the news of an overruled configuration ends neither the process nor the calls.
func TestPanicOfAHandlerWhenOverruled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		shared := NewMemoryStore()
		open := func(opts ...Option) *RateLimiter { // in a process of its own
			l, err := NewSmoothBursty("x", 1e5, append(opts, WithStore(&Distant{shared, time.Millisecond}))...)
			require.NoError(t, err)
			return l
		}
		require.NoError(t, open(quietly).SetRate(background, 2e5))
		l := open(WithLogger(slog.New(&handler{})))
		everybodyGoesOn(t, background, l)
		require.True(t, look(l).Overruled, "nothing was logged")
	})
}

// handler is a log handler that always panics.
type handler struct{ slog.TextHandler }

func (*handler) Enabled(context.Context, slog.Level) bool  { return true }
func (*handler) Handle(context.Context, slog.Record) error { panic("handler") }
