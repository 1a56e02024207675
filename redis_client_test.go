package tokenbucket

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// wrapping is a client of a user's own, with methods that it is made for.
type wrapping struct{ *redis.Client }

// Clients that cannot work are refused by the constructor of the limiter; an embedded client is one.
func TestUnusableClients(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	var none *redis.ClusterClient
	for want, c := range map[string]RedisClient{
		"redis client nil: want a client":                          nil,
		"redis client nil: want a client ":                         none,
		"redis client pipeline: want a client":                     client.Pipeline(),
		"redis client pipeline: want a client ":                    client.TxPipeline(),
		"redis client *tokenbucket.wrapping, whose Options panics": &wrapping{},
		"": &wrapping{client},
	} {
		for kind, store := range map[string]Store{"lock": NewRedisStore(c), "script": NewRedisScriptStore(c)} {
			l, err := NewSmoothBursty("x", 5, WithStore(store))
			if want == "" {
				require.NoError(t, err, kind)
				_, err = l.Try(background)
				require.NoError(t, err, kind)
				continue
			}
			require.ErrorIs(t, err, ErrInvalidConfig, kind)
			require.ErrorContains(t, err, `bucket "x": `+want[:len(want)-1], kind)
		}
	}
}

// usedUp takes all connections of a client, and returns the function that gives them back.
func usedUp(t *testing.T, client *redis.Client) (giveBack func()) {
	var conns []*redis.Conn
	for range client.Options().PoolSize {
		conn := client.Conn()
		require.NoError(t, conn.Ping(background).Err())
		conns = append(conns, conn)
	}
	return func() {
		for _, conn := range conns {
			require.NoError(t, conn.Close())
		}
	}
}

// A pool that the application has used up is no outage: no policy lets calls pass, and each gets an ErrPoolExhausted.
func TestPoolUsedUp(t *testing.T) {
	server := redistest.Shared(t)
	for _, short := range []bool{false, true} {
		for _, kind := range []string{"lock", "script"} {
			for _, policy := range []FailurePolicy{FailClosed, FailOpen, LocalShare(1)} {
				t.Run(fmt.Sprintf("%s, short PoolTimeout %v, %s", kind, short, policy.String()), func(t *testing.T) {
					t.Parallel()
					proxy := redistest.StartProxy(t, server.Addr)
					client := server.Client(t, func(o *redis.Options) {
						if o.Addr, o.PoolSize = proxy.Addr, 2; short {
							o.PoolTimeout = 10 * time.Millisecond
						}
					})
					var store Store = NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t)))
					if kind == "lock" {
						store = NewRedisStore(client, WithKeyPrefix(prefixOf(t)), WithLockTTL(time.Minute))
					}
					// A probe may take as long as three replies took, so that a machine that stalls is no outage either.
					slow, err := NewSmoothBursty("slow", 1000, WithStore(store), patient, quietly)
					require.NoError(t, err)
					defer runtime.KeepAlive(slow)
					for _, trip := range []time.Duration{0, 500 * time.Millisecond, 0} {
						proxy.Delay(trip, 0, nil)
						_, err = slow.Try(background)
						require.NoError(t, err)
					}
					var down atomic.Int64
					l, err := NewSmoothBursty("x", 10, WithStore(store), WithStoreTimeout(time.Second), WithFailurePolicy(policy), quietly,
						WithObserver(Observer{Health: func(Health) { down.Add(1) }}))
					require.NoError(t, err)
					require.Eventually(t, func() bool { _, err := l.Try(background); return err == nil }, 20*time.Second, time.Millisecond)
					giveBack := usedUp(t, client)
					ctx, cancel := context.WithCancel(background)
					defer cancel()
					var wg sync.WaitGroup
					for i := range 10 {
						wg.Go(func() {
							for range 2 {
								with := ctx
								if i%2 == 0 {
									with = background
								}
								ok, err := l.Try(with)
								if ok || !errors.Is(err, ErrPoolExhausted) || errors.Is(err, ErrStoreUnavailable) {
									t.Error(ok, err)
								}
							}
						})
					}
					wg.Wait()
					require.Zero(t, down.Load())
					giveBack()
					require.Eventually(t, func() bool { _, err := l.Try(ctx); return err == nil }, 20*time.Second, 10*time.Millisecond)
				})
			}
		}
	}
}

// A server that hangs while the pool is used up is away all the same.
func TestPoolUsedUpInAnOutage(t *testing.T) {
	proxy := redistest.StartProxy(t, redistest.Shared(t).Addr)
	client := redis.NewClient(&redis.Options{Addr: proxy.Addr, PoolSize: 2})
	t.Cleanup(func() { _ = client.Close() })
	l, err := NewSmoothBursty("x", 10, WithStore(NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t)))), WithFailurePolicy(FailOpen), quietly)
	require.NoError(t, err)
	_, err = l.Try(background)
	require.NoError(t, err)
	defer usedUp(t, client)()
	proxy.Set(redistest.Stalled)
	ok, err := l.Try(background)
	require.NoError(t, err)
	require.True(t, ok)
	healthy(t, l, false)
}

// A client that gives replies less time than they take is reported when a limiter is made, and by Health: it is no silent refusal for ever.
func TestShortReadTimeout(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr)
	for _, callers := range []int{1, 2, 40} {
		t.Run(fmt.Sprint(callers), func(t *testing.T) {
			var log lockedBuffer // the last one's outage may end only now
			client := redis.NewClient(&redis.Options{Addr: proxy.Addr, ReadTimeout: 50 * time.Millisecond})
			defer func() { _ = client.Close() }()
			var down atomic.Int64
			store := NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t)))
			opts := []Option{WithStore(store), WithLogger(slog.New(slog.NewTextHandler(&log, nil))),
				WithObserver(Observer{Health: func(h Health) {
					if h.Down {
						down.Add(1)
					}
				}})}
			l, err := NewSmoothBursty("x", 1000, opts...)
			require.NoError(t, err)
			require.Contains(t, log.String(), `ReadTimeout=50ms "store timeout"=1s`)
			log.Reset()
			_, err = NewSmoothBursty("y", 1000, opts...)
			require.NoError(t, err)
			require.Empty(t, log.String(), "once for each store")
			require.Eventually(t, func() bool { _, err = l.Try(background); return err == nil }, 20*time.Second, time.Millisecond, "50 ms may be too short")
			proxy.Delay(40*time.Millisecond, 0, nil)
			defer proxy.Delay(0, 0, nil)
			stop := make(chan struct{})
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
							_, _ = l.Try(background)
							time.Sleep(time.Millisecond)
						}
					}
				})
			}
			require.Eventually(t, func() bool {
				return down.Load() > 0 && strings.Contains(log.String(), "an outage of the store has begun")
			}, 20*time.Second, time.Millisecond)
			close(stop)
			wg.Wait()
		})
	}
}

// lockedBuffer is a buffer for a log.
type lockedBuffer struct {
	sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.String()
}

func (b *lockedBuffer) Reset() {
	b.Lock()
	defer b.Unlock()
	b.Buffer.Reset()
}

// An unreachable server counts as away although the attempts to connect use up the pool: then no caller has a connection.
func TestPoolUsedUpByDials(t *testing.T) {
	dialing, dropped := make(chan struct{}, 1000), make(chan struct{})
	client := redis.NewClient(&redis.Options{
		PoolSize: 1, PoolTimeout: 20 * time.Millisecond, MaxRetries: -1, DialTimeout: time.Minute, DialerRetries: 1,
		Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) { // whatever is sent is dropped
			dialing <- struct{}{}
			select {
			case <-dropped:
				return nil, net.ErrClosed
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
	})
	t.Cleanup(func() { _ = client.Close() })
	var wg sync.WaitGroup
	wg.Go(func() { _ = client.Ping(background).Err() }) // the application's
	defer wg.Wait()
	defer close(dropped)
	<-dialing
	for kind, store := range map[string]Store{"lock": NewRedisStore(client), "script": NewRedisScriptStore(client)} {
		t.Run(kind, func(t *testing.T) {
			l, err := NewSmoothBursty("x", 10, WithStore(store), WithFailurePolicy(FailOpen), quietly)
			require.NoError(t, err)
			ok, err := l.Try(background)
			require.NoError(t, err)
			require.True(t, ok)
			require.Eventually(t, func() bool { _, _ = l.Try(background); return l.limiter.Coordinator.Down() != nil }, 20*time.Second, 10*time.Millisecond)
		})
	}
}

// undated is a connection without deadlines, as through an SSH tunnel.
type undated struct{ net.Conn }

func (undated) SetDeadline(time.Time) error      { return errors.New("deadline not supported") }
func (undated) SetReadDeadline(time.Time) error  { return errors.New("deadline not supported") }
func (undated) SetWriteDeadline(time.Time) error { return errors.New("deadline not supported") }

// A client that must set no deadlines, since its connections refuse them, works: lone callers, probes, and probes of a pool that is used up.
func TestConnectionsWithoutDeadlines(t *testing.T) {
	client := redistest.Shared(t).Client(t, func(o *redis.Options) {
		o.ReadTimeout, o.WriteTimeout = -2, -2
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, addr)
			return undated{conn}, err
		}
	})
	require.NoError(t, client.Ping(background).Err())
	for kind, store := range map[string]Store{"lock": NewRedisStore(client), "script": NewRedisScriptStore(client)} {
		l, err := NewSmoothBursty(t.Name()+kind, 1000, WithStore(store))
		require.NoError(t, err)
		for range 5 {
			_, err := l.Acquire(background, 1)
			require.NoError(t, err, kind)
		}
		require.NoError(t, l.limiter.Coordinator.AskHealth(background), kind)
		release := usedUp(t, client)
		require.ErrorIs(t, l.limiter.Coordinator.AskHealth(background), ErrPoolExhausted, kind)
		release()
	}
}

// A missing password is called so. Redis replies to a long command of an unknown client with a protocol error, and hangs up.
func TestMissingPassword(t *testing.T) {
	server := redistest.Start(t)
	require.NoError(t, server.Client(t).ConfigSet(t.Context(), "requirepass", "secret").Err())
	for name, open := range map[string]func(RedisClient) Store{
		"script store": func(c RedisClient) Store { return NewRedisScriptStore(c) },
		"lock store":   func(c RedisClient) Store { return NewRedisStore(c) },
	} {
		t.Run(name, func(t *testing.T) {
			client := redis.NewClient(&redis.Options{Addr: server.Addr})
			t.Cleanup(func() { _ = client.Close() })
			told := false
			for range 20 {
				l, err := NewSmoothBursty("x", 5, WithStore(open(client)), WithLogger(slog.New(slog.DiscardHandler)))
				require.NoError(t, err)
				_, err = l.Try(t.Context())
				require.Error(t, err)
				if !errors.Is(err, ErrStoreUnavailable) { // the server hung up before the client had read the reply
					told = true
					require.ErrorIs(t, err, ErrStoreUnusable)
					require.ErrorContains(t, err, "NOAUTH")
				}
			}
			require.True(t, told)
		})
	}
}
