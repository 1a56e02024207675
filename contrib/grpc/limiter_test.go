package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestBadInput(t *testing.T) {
	good := &stub{}
	for _, test := range []struct {
		field string
		gate  gate.Gate
		opts  []grpclimit.Option
	}{
		{"gate", nil, nil},
		{"gate", (*stub)(nil), nil},
		{"gate", gate.One((*tokenbucket.RateLimiter)(nil), time.Second), nil},
		{"option", good, []grpclimit.Option{nil}},
		{"key", good, []grpclimit.Option{grpclimit.WithKey(nil)}},
		{"key", good, []grpclimit.Option{grpclimit.WithKey(grpclimit.ByMetadata(""))}},
		{"key", good, []grpclimit.Option{grpclimit.WithKey(grpclimit.ByOutgoingMetadata("a key"))}},
		{"key", good, []grpclimit.Option{grpclimit.WithKey(grpclimit.Join())}},
		{"key", good, []grpclimit.Option{grpclimit.WithKey(grpclimit.Join(grpclimit.ByMethod, nil))}},
		{"skip", good, []grpclimit.Option{grpclimit.WithSkip(nil)}},
		{"error function", good, []grpclimit.Option{grpclimit.WithOnError(nil)}},
		{"max penalty", good, []grpclimit.Option{grpclimit.WithMaxPenalty(-1)}},
		{"max penalty", good, []grpclimit.Option{grpclimit.WithMaxPenalty(time.Hour + 1)}},
		{"logger", good, []grpclimit.Option{grpclimit.WithLogger(nil)}},
	} {
		l, err := grpclimit.New(test.gate, test.opts...)
		require.Nil(t, l)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
		var config *grpclimit.ConfigError
		require.ErrorAs(t, err, &config)
		require.Equal(t, test.field, config.Field)
		require.Contains(t, err.Error(), test.field)
	}

	var none *grpclimit.Limiter
	for _, l := range []*grpclimit.Limiter{none, new(grpclimit.Limiter)} {
		err := l.UnaryClient(t.Context(), unary, nil, nil, nil, nil)
		require.Equal(t, codes.Unavailable, status.Code(err))
		require.ErrorIs(t, err, grpclimit.ErrGate)
	}
}

// The second call of a second is refused, with all that its maker needs to do better.
func TestRefused(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, received int64) {
		limiter, clock := bucket(t)
		s := &service{}
		call := start(s, interceptors(t, gate.One(limiter, 0)))
		require.NoError(t, call(limit(t)))
		clock.Advance(800 * time.Millisecond)

		err := call(limit(t))
		require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
		require.Contains(t, status.Convert(err).Message(), "retry after 200ms")
		after, ok := retryInfo(err)
		require.True(t, ok)
		require.Equal(t, 200*time.Millisecond, after) // 1 s at 1/s, less 0.8 s
		require.EqualValues(t, 1, s.calls.Load())

		clock.Advance(after)
		require.NoError(t, call(limit(t)))
		require.EqualValues(t, 2, s.calls.Load())
		require.Equal(t, 2*received, s.received.Load())
	})
}

// A call waits for its permit, and leaves or is handled when it is due.
func TestWaits(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		limiter, clock := bucket(t)
		s := &service{}
		call := start(s, interceptors(t, gate.One(limiter, time.Second)))
		require.NoError(t, call(limit(t)))
		ended := make(chan error, 1)
		go func() { ended <- call(limit(t)) }()
		require.NoError(t, clock.BlockUntilContext(limit(t), 1))
		clock.Advance(999 * time.Millisecond)
		require.EqualValues(t, 1, s.calls.Load())
		clock.Advance(time.Millisecond)
		require.NoError(t, <-ended)
		require.EqualValues(t, 2, s.calls.Load())
	})
}

// A call given up while it waits leaves no trace: the next one waits no longer than it would have.
func TestCancelled(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		limiter, clock := bucket(t)
		s := &service{}
		call := start(s, interceptors(t, gate.One(limiter, 10*time.Second)))
		require.NoError(t, call(limit(t)))
		ctx, cancel := context.WithCancel(limit(t))
		ended := make(chan error, 1)
		go func() { ended <- call(ctx) }()
		require.NoError(t, clock.BlockUntilContext(limit(t), 1))
		cancel()
		err := <-ended
		require.Equal(t, codes.Canceled, status.Code(err), err)
		require.NoError(t, redistest.Poll(30*time.Second, func() error { // the server hears of it later
			r, err := limiter.Reserve(limit(t), 1)
			require.NoError(t, err)
			require.NoError(t, r.Cancel(limit(t)))
			if r.Delay() != time.Second {
				return errors.New("the next caller would wait " + r.Delay().String())
			}
			return nil
		}))
		require.EqualValues(t, 1, s.calls.Load())
	})
}

// A wait that would outlast the call's deadline is not begun: a minute, and the permit comes in a thousand seconds.
func TestDeadline(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		began := time.Now()
		limiter, err := tokenbucket.NewSmoothBursty("calls", 0.001)
		require.NoError(t, err)
		s := &service{}
		call := start(s, interceptors(t, gate.One(limiter, time.Hour)))
		require.NoError(t, call(limit(t)))
		err = call(limit(t))
		require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
		after, _ := retryInfo(err) // a call with a minute, made then, passes
		require.InDelta(t, 940, after.Seconds(), 30)
		require.Less(t, time.Since(began), 30*time.Second)
		require.EqualValues(t, 1, s.calls.Load())
	})
}

// A deadline that passes during a wait gives the permit back: the next request is again the first in line.
func TestDeadlinePasses(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		limiter, clock := bucket(t) // its clock stands still, so the wait outlasts what it looked like
		s := &service{}
		call := start(s, interceptors(t, gate.One(limiter, time.Hour)))
		require.NoError(t, call(limit(t)))
		clock.Advance(time.Second - time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		err := call(ctx)
		require.Equal(t, codes.DeadlineExceeded, status.Code(err), err)
		require.NoError(t, redistest.Poll(30*time.Second, func() error { // a server hears of it later than the client
			r, err := limiter.TryReserve(t.Context(), 1, time.Hour)
			require.NoError(t, err)
			require.NoError(t, r.Cancel(t.Context()))
			if r.Delay() != time.Millisecond {
				return fmt.Errorf("the permit is gone: the next is due in %v", r.Delay())
			}
			return nil
		}))
		require.EqualValues(t, 1, s.calls.Load())
	})
}

// A call that has ended when its permit is due does not go on. The permit is used.
func TestEndedWhenDue(t *testing.T) {
	limiter, _ := bucket(t)
	ctx, cancel := context.WithCancel(t.Context())
	ending := &stub{enter: func() (*gate.Admission, error) {
		defer cancel()
		return gate.One(limiter, 0).Enter(ctx, unary)
	}}
	_, err := interceptors(t, ending).UnaryServer(ctx, nil, &grpc.UnaryServerInfo{}, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, codes.Canceled, status.Code(err))
	require.False(t, full(t, limiter))
}

// What the interceptor returns to its own process says more than the status.
func TestErrors(t *testing.T) {
	call := func(g gate.Gate) error {
		return interceptors(t, g).UnaryClient(t.Context(), unary, nil, nil, nil, nil)
	}
	away := errors.New("dial tcp 192.0.2.1:6379: refused")

	err := call(&stub{enter: func() (*gate.Admission, error) { return &gate.Admission{RetryAfter: 3 * time.Second}, nil }})
	require.ErrorIs(t, err, grpclimit.ErrRefused)
	var refusal *grpclimit.Error
	require.ErrorAs(t, err, &refusal)
	assert.Equal(t, &grpclimit.Error{Method: unary, Key: unary, Code: codes.ResourceExhausted, RetryAfter: 3 * time.Second, Err: grpclimit.ErrRefused}, refusal)
	assert.EqualError(t, err, `grpclimit: refused: /grpc.testing.TestService/UnaryCall: key "/grpc.testing.TestService/UnaryCall": retry after 3s`)

	err = call(&stub{enter: func() (*gate.Admission, error) { return nil, away }})
	require.ErrorIs(t, err, grpclimit.ErrGate)
	require.ErrorIs(t, err, away)
	require.NotErrorIs(t, err, grpclimit.ErrRefused)
	assert.Contains(t, err.Error(), "192.0.2.1")

	err = call(&stub{enter: func() (*gate.Admission, error) { return nil, nil }})
	require.ErrorIs(t, err, grpclimit.ErrGate)
	assert.Equal(t, codes.Unavailable, status.Code(err))

	// The store's own timeout is not the caller's deadline.
	err = call(&stub{enter: func() (*gate.Admission, error) { return nil, context.DeadlineExceeded }})
	require.ErrorIs(t, err, grpclimit.ErrGate)
	assert.Equal(t, codes.Unavailable, status.Code(err))
}

// A gate that fails does not let calls pass, nor tell the other end about the gate, unless it is told to.
func TestGateFails(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		failing := &stub{enter: func() (*gate.Admission, error) { return nil, errors.New("redis at 192.0.2.1") }}
		s := &service{}
		err := start(s, interceptors(t, failing))(limit(t))
		require.Equal(t, codes.Unavailable, status.Code(err), err)
		require.NotContains(t, status.Convert(err).Message(), "192.0.2.1")
		require.Zero(t, s.calls.Load())

		var told error
		pass := grpclimit.WithOnError(func(_ context.Context, _ string, err error) error { told = err; return nil })
		require.NoError(t, start(s, interceptors(t, failing, pass))(limit(t)))
		require.ErrorIs(t, told, grpclimit.ErrGate)
		require.EqualValues(t, 1, s.calls.Load())

		other := grpclimit.WithOnError(func(context.Context, string, error) error { return status.Error(codes.Aborted, "no") })
		require.Equal(t, codes.Aborted, status.Code(start(s, interceptors(t, failing, other))(limit(t))))
	})
}

// A context that has ended is not a failure of the gate, and does not pass where those do.
func TestGateFailsWithContext(t *testing.T) {
	limiter, _ := bucket(t)
	pass := grpclimit.WithOnError(func(context.Context, string, error) error { return nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := interceptors(t, gate.One(limiter, 0), pass).UnaryClient(ctx, unary, nil, nil, nil, nil)
	require.Equal(t, codes.Canceled, status.Code(err))
	require.ErrorIs(t, err, context.Canceled)
}

func TestSkip(t *testing.T) {
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		g := &stub{enter: func() (*gate.Admission, error) { return &gate.Admission{}, nil }}
		skip := grpclimit.WithSkip(func(_ context.Context, method string) bool { return method != "/another" })
		require.NoError(t, start(&service{}, interceptors(t, g, skip))(limit(t)))
		require.Empty(t, g.keys)
	})
}

// A reservation that a switched-off limiter gives out passes at once.
func TestSwitchedOff(t *testing.T) {
	limiter, err := tokenbucket.NewSmoothBursty("calls", 0.001, tokenbucket.WithSwitch(func() bool { return false }))
	require.NoError(t, err)
	onEverySide(t, func(t *testing.T, start func(*service, *grpclimit.Limiter) func(context.Context) error, _ int64) {
		call := start(&service{}, interceptors(t, gate.One(limiter, 0)))
		for range 5 {
			require.NoError(t, call(limit(t)))
		}
	})
}

// Two instances of a gateway and a server share one bucket in a real Redis.
func TestFleet(t *testing.T) {
	server := redistest.Start(t)
	instance := func() *grpclimit.Limiter {
		limiter, err := tokenbucket.NewSmoothBursty("calls", 0.001, tokenbucket.WithMaxPermits(5), tokenbucket.WithInitialPermits(5),
			tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(server.Client(t))), tokenbucket.WithStoreTimeout(20*time.Second)) // a busy machine is no outage
		require.NoError(t, err)
		return interceptors(t, gate.One(limiter, 0))
	}
	s := &service{}
	addr, limited := serve(t, s), serve(t, s, onServer(instance())...)
	var clients []func(context.Context) error
	for i, kind := range kinds {
		client := dial(t, limited)
		if i%2 == 0 {
			client = dial(t, addr, onClient(instance())...)
		}
		clients = append(clients, func(ctx context.Context) error { return kind.call(ctx, client) })
	}
	results := make(chan error, 5*len(clients))
	for _, call := range clients {
		for range 5 {
			go func() { results <- call(limit(t)) }()
		}
	}
	passed := 0
	for range cap(results) {
		switch err := <-results; status.Code(err) {
		case codes.OK:
			passed++
		default:
			require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
			after, ok := retryInfo(err)
			require.True(t, ok)
			require.Greater(t, after, 900*time.Second)
		}
	}
	require.Equal(t, 5, passed)
	require.EqualValues(t, 5, s.calls.Load())
}

// When Redis hangs while a call waits for its permit, the call ends when it is given up, not when Redis answers.
func TestCancelledWhileRedisHangs(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t, func(o *redis.Options) { o.ReadTimeout = time.Minute })
	limiter, err := tokenbucket.NewSmoothBursty("calls", 0.1, tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(client)),
		tokenbucket.WithStoreTimeout(time.Minute), tokenbucket.WithInitialPermits(0))
	require.NoError(t, err)
	reserved := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	l := interceptors(t, &stub{enter: func() (*gate.Admission, error) {
		r, err := limiter.TryReserve(ctx, 1, time.Minute)
		if err != nil {
			return nil, err
		}
		close(reserved)
		return gate.Wait(ctx, r)
	}})
	ended := make(chan error, 1)
	go func() { ended <- l.UnaryClient(ctx, unary, nil, nil, nil, nil) }()
	<-reserved
	require.NoError(t, server.Stop())
	cancel()
	select {
	case err := <-ended:
		require.Equal(t, codes.Canceled, status.Code(err), err)
	case <-time.After(20 * time.Second):
		t.Error("the call waits for Redis")
	}
	require.NoError(t, server.Continue())
	r, err := limiter.Reserve(limit(t), 1) // it was not lost
	require.NoError(t, err)
	require.LessOrEqual(t, r.Delay(), 10*time.Second)
	require.NoError(t, r.Cancel(limit(t)))
}

func BenchmarkUnaryClient(b *testing.B) {
	limiter, err := tokenbucket.NewSmoothBursty("calls", 10_000_000)
	require.NoError(b, err)
	for _, bench := range []struct {
		name string
		gate gate.Gate
	}{{"no bucket", &passing{gate.Admission{OK: true}}}, {"memory store", gate.One(limiter, time.Second)}} {
		b.Run(bench.name, func(b *testing.B) {
			l, err := grpclimit.New(bench.gate)
			require.NoError(b, err)
			invoke := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil }
			b.ReportAllocs()
			for b.Loop() {
				if err := l.UnaryClient(b.Context(), unary, nil, nil, nil, invoke); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

type passing struct{ gate.Admission }

func (g *passing) Enter(context.Context, string) (*gate.Admission, error) { return &g.Admission, nil }

func (g *passing) Penalize(context.Context, string, time.Duration) error { return nil }

// A gate with a deadline of its own refuses, and says when to come again, whether or not the call has a deadline.
func TestGateWithDeadline(t *testing.T) {
	g := &stub{enter: func() (*gate.Admission, error) {
		return nil, &tokenbucket.WaitError{Wait: 5 * time.Second, Reason: context.DeadlineExceeded}
	}}
	l := interceptors(t, g)
	long, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	for _, ctx := range []context.Context{context.Background(), long} {
		var refused *grpclimit.Error
		require.ErrorAs(t, l.UnaryClient(ctx, unary, nil, nil, nil, nil), &refused)
		require.ErrorIs(t, refused, grpclimit.ErrRefused)
		require.Equal(t, 5*time.Second, refused.RetryAfter)
	}
}
