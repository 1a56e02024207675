package grpclimit_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A refusal by several limits names the one that refused to this process, not to the caller. An upstream's pause holds back what the call used.
func TestSeveral(t *testing.T) {
	clock := tokenbucket.WithClock(clockwork.NewFakeClock())
	second, err := tokenbucket.NewSmoothBursty("second", 5, tokenbucket.WithInitialPermits(5), clock)
	require.NoError(t, err)
	tenant, err := tokenbucket.NewSmoothBursty("tenant acme", 0.1, clock)
	require.NoError(t, err)
	all, err := tokenbucket.All(second, tenant)
	require.NoError(t, err)
	l := interceptors(t, gate.One(all, 0))
	call := func() error {
		return l.UnaryClient(t.Context(), unary, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			return withRetryInfo(status.New(codes.Unavailable, "busy"), 30*time.Second)
		})
	}
	require.Equal(t, codes.Unavailable, status.Code(call()))
	for _, l := range []*tokenbucket.RateLimiter{second, tenant} {
		b, err := l.State(t.Context())
		require.NoError(t, err)
		require.NotZero(t, b.HeldUntilMicros, l.Name())
	}
	err = call()
	var refused *grpclimit.Error
	require.True(t, errors.As(err, &refused))
	require.Equal(t, "tenant acme", refused.Member, "its permit is due 10 s after the pause")
	require.ErrorContains(t, err, `bucket "tenant acme": retry after`)
	require.NotContains(t, refused.GRPCStatus().Message(), "acme")
}

// A program with two API keys sends each call with the key that admitted it: credentials below the limiter read it from the context, and so does an
// interceptor. That holds for calls and streams. Once both keys are used up, the refusal names the one that is due first.
func TestTwoKeys(t *testing.T) {
	for _, by := range []string{"interceptor", "credentials"} {
		for _, kind := range kinds {
			t.Run(by+"/"+kind.name, func(t *testing.T) {
				var mu sync.Mutex
				var sent []string
				s := &service{answer: func(ctx context.Context) error {
					in, _ := metadata.FromIncomingContext(ctx)
					mu.Lock()
					defer mu.Unlock()
					sent = append(sent, in.Get("api-key")...)
					return nil
				}}
				first, err := tokenbucket.NewSmoothBursty("key-a", 0.01)
				require.NoError(t, err)
				second, err := tokenbucket.NewSmoothBursty("key-b", 0.02)
				require.NoError(t, err)
				either, err := tokenbucket.Any(first, second)
				require.NoError(t, err)
				l := interceptors(t, gate.One(either, 0))
				opts := []grpc.DialOption{grpc.WithChainUnaryInterceptor(l.UnaryClient, keyOfUnary), grpc.WithChainStreamInterceptor(l.StreamClient, keyOfStream)}
				if by == "credentials" {
					opts = append(onClient(l), grpc.WithPerRPCCredentials(keyCredentials{}))
				}
				client := dial(t, serve(t, s), opts...)
				for range 2 {
					require.NoError(t, kind.call(limit(t), client))
				}
				mu.Lock()
				require.Equal(t, []string{"key-a", "key-b"}, sent)
				mu.Unlock()
				err = kind.call(limit(t), client)
				var refused *grpclimit.Error
				require.ErrorAs(t, err, &refused)
				require.Equal(t, "key-b", refused.Member, "due in 50 s, not in 100")
				require.EqualValues(t, 2, s.calls.Load())
			})
		}
	}
}

// withKey returns the context of a call with the metadata of the key that admitted it.
func withKey(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "api-key", gate.FromContext(ctx).Member)
}

func keyOfUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return invoker(withKey(ctx), method, req, reply, cc, opts...)
}

func keyOfStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return streamer(withKey(ctx), desc, cc, method, opts...)
}

// keyCredentials are the credentials of the key that admitted a call.
type keyCredentials struct{}

func (keyCredentials) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	return map[string]string{"api-key": gate.FromContext(ctx).Member}, nil
}

func (keyCredentials) RequireTransportSecurity() bool { return false }

// A refusal for hours names the bound that causes it: the limit a day of several, a quota alone, the window of a row.
func TestErrorOfADay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits, err := tokenbucket.NewLimits("fares", tokenbucket.PerSecond(5), tokenbucket.PerDay(1))
		require.NoError(t, err)
		quota, err := tokenbucket.NewQuota("calls a day", 1, 24*time.Hour, 0)
		require.NoError(t, err)
		rows, err := registry.New(registry.Static{{Name: unary, Rate: 5, Window: 24 * time.Hour, WindowLimit: 1}}, tokenbucket.NewMemoryStore(), registry.WithLocalWindows())
		require.NoError(t, err)
		defer rows.Close()
		for _, c := range []struct {
			gate   gate.Gate
			by     gate.Decider
			member string
			text   string
		}{
			{gate.One(limits, 0), gate.ByLimit, "fares/day", `bucket "fares/day": retry after 23h59m58s`},
			{gate.One(quota, 0), gate.ByLimit, "calls a day", `bucket "calls a day": retry after 23h59m58s`},
			{rows, gate.ByWindow, "", `by window: retry after 23h59m5`},
		} {
			l := interceptors(t, c.gate)
			call := func() error {
				return l.UnaryClient(t.Context(), unary, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil })
			}
			require.NoError(t, call())
			time.Sleep(2 * time.Second)
			err := call()
			require.ErrorContains(t, err, c.text)
			var refused *grpclimit.Error
			require.ErrorAs(t, err, &refused)
			require.Equal(t, c.by, refused.By)
			require.Equal(t, c.member, refused.Member)
		}
	})
}

// Bookings pass before searches on the gate of a group, on either side of a connection.
func TestPriorityOfAGroup(t *testing.T) {
	const rate, lasts, timeout = 50, 10 * time.Second, 2 * time.Second
	byMethod := grpclimit.WithPriority(grpclimit.PriorityByMethod(map[string]tokenbucket.Priority{"/shop/Search": tokenbucket.Low}))
	for _, side := range []string{"client", "server"} {
		t.Run(side, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				second, err := tokenbucket.NewSmoothBursty("second", rate, tokenbucket.WithMaxPermits(1))
				require.NoError(t, err)
				hour, err := tokenbucket.NewSmoothBursty("hour", 2*rate, tokenbucket.WithMaxPermits(100))
				require.NoError(t, err)
				all, err := tokenbucket.All(second, hour)
				require.NoError(t, err)
				l := interceptors(t, gate.One(all, timeout), byMethod)
				call := func(method string) error {
					if side == "client" {
						return l.UnaryClient(t.Context(), method, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil })
					}
					_, err := l.UnaryServer(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: method}, func(context.Context, any) (any, error) { return nil, nil })
					return err
				}
				var bookings, searches atomic.Int64
				end := time.Now().Add(lasts)
				var callers sync.WaitGroup
				for method, passed := range map[string]*atomic.Int64{"/shop/Book": &bookings, "/shop/Search": &searches} {
					for range 200 {
						callers.Go(func() {
							for time.Now().Before(end) {
								if err := call(method); err == nil {
									passed.Add(1)
								}
								time.Sleep(time.Duration(50+rand.IntN(100)) * time.Millisecond)
							}
						})
					}
				}
				callers.Wait()
				whole := rate * lasts.Seconds()
				t.Logf("%.0f %% of the rate for bookings, %.0f %% for searches", 100*float64(bookings.Load())/whole, 100*float64(searches.Load())/whole)
				require.Greater(t, float64(bookings.Load()), 0.85*whole)
			})
		})
	}
}
