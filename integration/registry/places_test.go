package registry

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// distance is how much longer a round trip takes through distant, so that what a call asks for in turn shows on every machine.
const distance = 10 * time.Millisecond

// distant is a connection to a server that is far away.
type distant struct{ net.Conn }

func (d distant) Write(b []byte) (int, error) {
	time.Sleep(distance)
	return d.Conn.Write(b)
}

func dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return distant{c}, nil
}

// A row whose places are the bottleneck uses them as one that has no rate does, from the beginning: its next call asks the rate while the place
// is released. The best of some rounds are compared, as the machine may be busy in others.
func TestPlacesAreUsed(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: redistest.Start(t).Addr, Dialer: dial, PoolSize: 20})
	t.Cleanup(func() { _ = client.Close() })
	type maker = func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error)
	for name, open := range map[string]func(t *testing.T) maker{
		"Redis": func(*testing.T) maker {
			return func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
				return semaphore.NewRedis(client, name, n, opts...)
			}
		},
		"PostgreSQL": func(t *testing.T) maker {
			config, err := pgxpool.ParseConfig(dbtest.PostgreSQL(t).DSN())
			require.NoError(t, err)
			config.ConnConfig.DialFunc, config.MaxConns = dial, 20
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			require.NoError(t, postgres.Migrate(t.Context(), pool))
			store, err := postgres.New(pool)
			require.NoError(t, err)
			return store.Semaphore
		},
	} {
		t.Run(name, func(t *testing.T) {
			places := open(t)
			none := 0.0
			best := map[string]int{}
			for round := range 12 {
				rows := registry.Static{
					{Name: "alone", NoRate: true},
					{Name: "saved up", Rate: 200, MaxWait: time.Second},
					{Name: "none saved up", Rate: 200, MaxWait: time.Second, Burst: &none},
				}
				for i := range rows {
					rows[i].Name += fmt.Sprintf("/%d/%s", round, name)
					rows[i].Concurrent, rows[i].ConcurrentWait, rows[i].Version = 3, time.Second, 1
				}
				limits, err := registry.New(rows, tokenbucket.NewRedisScriptStore(client), registry.WithLogger(slog.New(slog.DiscardHandler)),
					registry.WithSemaphores(func(name string, n int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
						return places(name, n, append(opts, semaphore.WithStoreTimeout(20*time.Second))...)
					}),
					registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(20*time.Second)))
				require.NoError(t, err)
				for _, row := range rows {
					which, _, _ := strings.Cut(row.Name, "/")
					best[which] = max(best[which], crowded(t, limits, row.Name))
				}
				limits.Close()
				if least := float64(min(best["saved up"], best["none saved up"])); round >= 2 && least >= 0.95*float64(best["alone"]) {
					return
				}
			}
			t.Errorf("calls that began in a second: %v: want at least 95 of 100 of those without a rate", best)
		})
	}
}

// crowded has sixty callers call, and returns how many calls began in a second, from the first one on. A call takes 30 ms.
func crowded(t *testing.T, limits *registry.Registry, name string) (calls int) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var first sync.Once
	var began atomic.Int64
	var calling sync.WaitGroup
	for range 60 {
		calling.Go(func() {
			for ctx.Err() == nil {
				a, err := limits.Enter(ctx, name)
				if err != nil {
					if ctx.Err() == nil {
						t.Error(err)
					}
					return
				}
				if a.OK {
					first.Do(func() { time.AfterFunc(time.Second, cancel) })
					began.Add(1)
					time.Sleep(30 * time.Millisecond)
				}
				a.Leave()
			}
		})
	}
	calling.Wait()
	return int(began.Load())
}
