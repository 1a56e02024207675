package grpclimit_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// What an upstream says holds its key back, once, before the caller hears of it.
func TestPenalizes(t *testing.T) {
	for _, test := range []struct {
		name string
		said error
		most time.Duration // 0: the default
		want time.Duration // 0: no penalty
	}{
		{"exhausted", withRetryInfo(status.New(codes.ResourceExhausted, ""), 3*time.Second), 0, 3 * time.Second},
		{"unavailable", withRetryInfo(status.New(codes.Unavailable, ""), 3*time.Second), 0, 3 * time.Second},
		{"capped", withRetryInfo(status.New(codes.Unavailable, ""), time.Hour), 0, time.Minute},
		{"capped by option", withRetryInfo(status.New(codes.Unavailable, ""), time.Hour), 2 * time.Second, 2 * time.Second},
		{"capped to nothing", withRetryInfo(status.New(codes.Unavailable, ""), time.Hour), -1, 0},
		{"another code", withRetryInfo(status.New(codes.Aborted, ""), 3*time.Second), 0, 0},
		{"no RetryInfo", status.Error(codes.ResourceExhausted, ""), 0, 0},
		{"zero", withRetryInfo(status.New(codes.Unavailable, ""), 0), 0, 0},
		{"negative", withRetryInfo(status.New(codes.Unavailable, ""), -time.Second), 0, 0},
		{"OK", nil, 0, 0},
	} {
		for _, kind := range kinds {
			t.Run(test.name+"/"+kind.name, func(t *testing.T) {
				gate := &stub{}
				opts := []grpclimit.Option{grpclimit.WithKey(func(context.Context, string) string { return "upstream" })}
				if test.most != 0 {
					opts = append(opts, grpclimit.WithMaxPenalty(max(0, test.most)))
				}
				s := &service{answer: func(context.Context) error { return test.said }}
				client := dial(t, serve(t, s), onClient(interceptors(t, gate, opts...))...)
				err := kind.call(limit(t), client)
				require.Equal(t, status.Code(test.said), status.Code(err), err)
				if test.want == 0 {
					require.Empty(t, gate.penalties)
				} else {
					require.Equal(t, []penalty{{"upstream", test.want}}, gate.penalties)
				}
			})
		}
	}
}

// A stream whose status is read again and again is penalized for once.
func TestPenalizesOnce(t *testing.T) {
	gate := &stub{}
	s := &service{answer: func(context.Context) error {
		return withRetryInfo(status.New(codes.Unavailable, ""), time.Second)
	}}
	stream, err := dial(t, serve(t, s), onClient(interceptors(t, gate))...).FullDuplexCall(limit(t))
	require.NoError(t, err)
	for range 3 {
		_, err := stream.Recv()
		require.Equal(t, codes.Unavailable, status.Code(err))
	}
	require.Len(t, gate.penalties, 1)
}

// The penalty does not end with the call's context, and its failure is not the caller's.
func TestPenaltyFails(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	gate := &stub{penalize: func(ctx context.Context, _ string, _ time.Duration) error {
		deadline, ok := ctx.Deadline()
		require.True(t, ok)
		require.Less(t, time.Until(deadline), 2*time.Second)
		require.NoError(t, ctx.Err())
		return errors.New("the store is away")
	}}
	log := new(bytes.Buffer)
	l := interceptors(t, gate, grpclimit.WithLogger(slog.New(slog.NewTextHandler(log, nil))))
	said := withRetryInfo(status.New(codes.Unavailable, ""), time.Second)
	err := l.UnaryClient(ctx, unary, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
		cancel()
		return said
	})
	require.Equal(t, said, err)
	require.Len(t, gate.penalties, 1)
	require.Contains(t, log.String(), "the store is away")
}

// A server's refusal travels to its client's own limit, which then holds the whole fleet back.
func TestServerToClient(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			limiter, clock := bucket(t)
			addr := serve(t, &service{}, onServer(interceptors(t, gate.One(limiter, 0)))...)
			gate := &stub{}
			client := dial(t, addr, onClient(interceptors(t, gate))...)
			require.NoError(t, kind.call(limit(t), client))
			clock.Advance(250 * time.Millisecond)
			err := kind.call(limit(t), client)
			require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
			require.NotErrorIs(t, err, grpclimit.ErrRefused) // it is the upstream's
			require.Equal(t, []penalty{{"/grpc.testing.TestService/" + kind.name, 750 * time.Millisecond}}, gate.penalties)
		})
	}
}

// With a real bucket in a real Redis: after the upstream's word, another instance has to wait too.
func TestPenaltyForTheFleet(t *testing.T) {
	server := redistest.Start(t)
	instance := func() (*tokenbucket.RateLimiter, []grpc.DialOption) {
		limiter, err := tokenbucket.NewSmoothBursty("upstream", 1000, tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(server.Client(t))),
			tokenbucket.WithStoreTimeout(20*time.Second)) // a busy machine is no outage
		require.NoError(t, err)
		return limiter, onClient(interceptors(t, gate.One(limiter, time.Second)))
	}
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			var said error
			s := &service{answer: func(context.Context) error { return said }}
			addr := serve(t, s)
			_, first := instance()
			limiter, second := instance()
			require.NoError(t, limiter.Reset(limit(t)))
			require.NoError(t, kind.call(limit(t), dial(t, addr, second...)))
			said = withRetryInfo(status.New(codes.ResourceExhausted, ""), 50*time.Second)
			require.Equal(t, codes.ResourceExhausted, status.Code(kind.call(limit(t), dial(t, addr, first...))))
			said = nil

			err := kind.call(limit(t), dial(t, addr, second...))
			require.ErrorIs(t, err, grpclimit.ErrRefused)
			after, _ := retryInfo(err)
			require.Greater(t, after, 10*time.Second)
			require.Less(t, after, 50*time.Second) // less the second that a call may wait
			require.EqualValues(t, 2, s.calls.Load())
		})
	}
}

// Of two limits, the outer one does not take the inner one's refusal for the upstream's. Its permit is used.
func TestTwoLimits(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			limiter, _ := bucket(t)
			outer := &counting{Gate: gate.One(limiter, 0)}
			inner := &stub{enter: func() (*gate.Admission, error) { return &gate.Admission{RetryAfter: time.Second}, nil }}
			client := dial(t, serve(t, &service{}), append(onClient(interceptors(t, outer)), onClient(interceptors(t, inner))...)...)
			require.ErrorIs(t, kind.call(limit(t), client), grpclimit.ErrRefused)
			require.Len(t, inner.keys, 1)
			require.Zero(t, outer.penalties.Load())
			require.False(t, full(t, limiter))
		})
	}
}

// Nor does it when an earlier attempt, by an interceptor between the two, was sent.
func TestTwoLimitsAndRetries(t *testing.T) {
	limiter, _ := bucket(t)
	outer := &counting{Gate: gate.One(limiter, 0)}
	few, _ := bucket(t)
	retry := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		_ = invoker(ctx, method, req, reply, cc, opts...)
		return invoker(ctx, method, req, reply, cc, opts...)
	}
	s := &service{answer: func(context.Context) error { return status.Error(codes.Unavailable, "") }}
	client := dial(t, serve(t, s), grpc.WithChainUnaryInterceptor(
		interceptors(t, outer).UnaryClient, retry, interceptors(t, gate.One(few, 0)).UnaryClient))
	require.ErrorIs(t, kinds[0].call(limit(t), client), grpclimit.ErrRefused)
	require.EqualValues(t, 1, s.calls.Load())
	require.Zero(t, outer.penalties.Load())
}

type counting struct {
	gate.Gate
	penalties atomic.Int64
}

func (g *counting) Penalize(context.Context, string, time.Duration) error {
	g.penalties.Add(1)
	return nil
}

// A dialer that can be cut off.
type dialer struct {
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
	after int // attempts to connect since
}

func (d *dialer) option() grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.cut {
			d.after++
			return nil, errors.New("cut off by the test")
		}
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		d.conns = append(d.conns, conn)
		return conn, err
	})
}

func (d *dialer) cutOff() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cut = true
	for _, conn := range d.conns {
		_ = conn.Close()
	}
}

// The permit of a call that finds no connection is used: it was due.
func TestNoConnection(t *testing.T) {
	for _, kind := range kinds {
		for _, test := range []struct {
			name string
			code codes.Code
			ctx  func(t *testing.T) context.Context
			opts []grpc.DialOption
		}{
			{"at once", codes.Unavailable, limit, nil},
			{"until the deadline", codes.DeadlineExceeded, func(t *testing.T) context.Context {
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				t.Cleanup(cancel)
				return ctx
			}, []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.WaitForReady(true))}},
		} {
			t.Run(kind.name+"/"+test.name, func(t *testing.T) {
				limiter, _ := bucket(t)
				d := &dialer{cut: true}
				opts := append(onClient(interceptors(t, gate.One(limiter, 0))), test.opts...)
				client := dial(t, "nobody", append(opts, d.option())...)
				err := kind.call(test.ctx(t), client)
				require.Equal(t, test.code, status.Code(err), err)
				require.False(t, full(t, limiter))
			})
		}
	}
}

// The permit of a call that was sent is used, however the call ends.
func TestLeft(t *testing.T) {
	for _, kind := range kinds {
		for _, test := range []struct {
			name    string
			retries int
			code    codes.Code
			answer  func(ctx context.Context, d *dialer, cancel func()) error
		}{
			{"OK", 0, codes.OK, func(context.Context, *dialer, func()) error { return nil }},
			{"unavailable", 0, codes.Unavailable, func(context.Context, *dialer, func()) error { return status.Error(codes.Unavailable, "") }},
			{"connection lost", 0, codes.Unavailable, func(ctx context.Context, d *dialer, _ func()) error { d.cutOff(); <-ctx.Done(); return nil }},
			{"cancelled", 0, codes.Canceled, func(ctx context.Context, _ *dialer, cancel func()) error { cancel(); <-ctx.Done(); return nil }},
			{"no connection for the second attempt", 1, codes.Unavailable, func(ctx context.Context, d *dialer, _ func()) error { d.cutOff(); <-ctx.Done(); return nil }},
		} {
			t.Run(kind.name+"/"+test.name, func(t *testing.T) {
				run := func() (finished bool) {
					limiter, _ := bucket(t)
					ctx, cancel := context.WithCancel(limit(t))
					d := new(dialer)
					s := &service{answer: func(ctx context.Context) error { return test.answer(ctx, d, cancel) }}
					opts := append(onClient(interceptors(t, gate.One(limiter, 0))), d.option())
					if test.retries > 0 {
						opts = append(opts, grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {
							"maxAttempts": 2, "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1,
							"retryableStatusCodes": ["UNAVAILABLE"]}}]}`))
					}
					err := kind.call(ctx, dial(t, serve(t, s), opts...))
					require.Equal(t, test.code, status.Code(err), err)
					require.EqualValues(t, 1, s.calls.Load())
					require.False(t, full(t, limiter))
					return test.retries == 0 || strings.Contains(err.Error(), "cut off by the test")
				}
				for attempts := 1; !run(); attempts++ { // gRPC does not always see that the call may be sent again
					require.Less(t, attempts, 50, "no second attempt was made")
				}
			})
		}
	}
}

// What another transport than gRPC's own answers is heeded, too, and so is a stream that cannot be opened.
func TestOtherTransports(t *testing.T) {
	for _, said := range []error{
		status.Error(codes.NotFound, ""),
		status.Error(codes.ResourceExhausted, ""),
		withRetryInfo(status.New(codes.Unavailable, ""), time.Second),
	} {
		_, heeded := retryInfo(said)
		gate := new(stub)
		err := interceptors(t, gate).UnaryClient(t.Context(), unary, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			return said
		})
		require.Equal(t, said, err)
		require.Equal(t, heeded, len(gate.penalties) == 1)

		gate = new(stub)
		_, err = interceptors(t, gate).StreamClient(t.Context(), nil, nil, unary, func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
			return nil, said
		})
		require.Equal(t, said, err)
		require.Equal(t, heeded, len(gate.penalties) == 1)
	}
}

// The caller's own options arrive.
func TestCallOptions(t *testing.T) {
	opts := []grpc.CallOption{grpc.WaitForReady(true)}
	l := interceptors(t, &stub{})
	require.NoError(t, l.UnaryClient(t.Context(), unary, nil, nil, nil, func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, got ...grpc.CallOption) error {
		require.Equal(t, opts, got[:1])
		return nil
	}, opts...))
	_, err := l.StreamClient(t.Context(), &grpc.StreamDesc{}, nil, unary, func(_ context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, got ...grpc.CallOption) (grpc.ClientStream, error) {
		require.Equal(t, opts, got[:1])
		return nil, nil
	}, opts...)
	require.NoError(t, err)
}
