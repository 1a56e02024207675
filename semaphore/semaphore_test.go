package semaphore_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/semaphoretest"
)

func TestMain(m *testing.M) {
	if os.Getenv("CI") != "true" { // where it is 100: sequences of batches, on a real server
		if err := flag.Set("rapid.checks", "40"); err != nil {
			panic(err)
		}
	}
	redistest.Main(m)
}

var (
	ctx   = context.Background()
	names atomic.Int64
)

// patient is a timeout that is long enough for a reply on a slow machine.
var patient = semaphore.WithStoreTimeout(30 * time.Second)

func openRedis(t *testing.T, client semaphore.RedisClient, permits int, opts ...semaphore.Option) func() *semaphore.Semaphore {
	name := fmt.Sprint(t.Name(), " {", names.Add(1), time.Now().UnixNano())
	return func() *semaphore.Semaphore {
		s, err := semaphore.NewRedis(client, name, permits, append([]semaphore.Option{patient}, opts...)...)
		require.NoError(t, err)
		t.Cleanup(func() {
			c, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			if err := s.Close(c); err != nil {
				t.Log(err)
			}
		})
		return s
	}
}

func TestConformance(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		semaphoretest.Semaphore(t, func(t *testing.T, permits int, opts ...semaphore.Option) func() *semaphore.Semaphore {
			s, err := semaphore.NewMemory(permits, opts...)
			require.NoError(t, err)
			return func() *semaphore.Semaphore { return s }
		})
	})
	t.Run("redis", func(t *testing.T) {
		client := redistest.Shared(t).Client(t)
		semaphoretest.Semaphore(t, func(t *testing.T, permits int, opts ...semaphore.Option) func() *semaphore.Semaphore {
			return openRedis(t, client, permits, opts...)
		})
	})
}

// Waits, timeouts and order in memory, in a bubble where time is exact.
func TestMemoryWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := semaphore.NewMemory(1)
		require.NoError(t, err)
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		began := time.Now()
		var order []int
		for i := range 100 {
			go func() {
				q, err := s.TryAcquire(ctx, 1, time.Duration(i+1)*time.Second)
				if !errors.Is(err, semaphore.ErrRefused) {
					require.NoError(t, err)
					order = append(order, i)
					require.NoError(t, q.Release(ctx))
				}
			}()
			synctest.Wait()
		}
		time.Sleep(50*time.Second + time.Millisecond)
		synctest.Wait()
		require.NoError(t, p.Release(ctx))
		synctest.Wait()
		require.Len(t, order, 50, "half of the callers had given up")
		for i, k := range order {
			require.Equal(t, 50+i, k)
		}
		require.Equal(t, 50*time.Second+time.Millisecond, time.Since(began))
	})
}

func TestBadOptions(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1", "b": "127.0.0.1:2"}})
	defer func() { _ = ring.Close() }()
	for want, f := range map[string]func() (*semaphore.Semaphore, error){
		"permits 0":        func() (*semaphore.Semaphore, error) { return semaphore.NewRedis(client, "x", 0) },
		"permits -1":       func() (*semaphore.Semaphore, error) { return semaphore.NewMemory(-1) },
		"permits 92233720": func() (*semaphore.Semaphore, error) { return semaphore.NewMemory(math.MaxInt) },
		`name ""`:          func() (*semaphore.Semaphore, error) { return semaphore.NewRedis(client, "", 1) },
		"513 bytes": func() (*semaphore.Semaphore, error) {
			return semaphore.NewRedis(client, strings.Repeat("x", 513), 1)
		},
		`name "\xff"`: func() (*semaphore.Semaphore, error) { return semaphore.NewRedis(client, "\xff", 1) },
		"client nil":  func() (*semaphore.Semaphore, error) { return semaphore.NewRedis(nil, "x", 1) },
		"redis client": func() (*semaphore.Semaphore, error) {
			return semaphore.NewRedis((*redis.Client)(nil), "x", 1)
		},
		"HeartbeatFn": func() (*semaphore.Semaphore, error) { return semaphore.NewRedis(ring, "x", 1) },
		"store nil":   func() (*semaphore.Semaphore, error) { return semaphore.New(nil, "x", 1) },
		"lease 99ms": func() (*semaphore.Semaphore, error) {
			return semaphore.NewRedis(client, "x", 1, semaphore.WithLease(99*time.Millisecond))
		},
		"lease 1h0m1s": func() (*semaphore.Semaphore, error) {
			return semaphore.NewRedis(client, "x", 1, semaphore.WithLease(time.Hour+time.Second))
		},
		"timeout 1ms": func() (*semaphore.Semaphore, error) {
			return semaphore.NewMemory(1, semaphore.WithStoreTimeout(time.Millisecond))
		},
		"failure policy FailurePolicy(2): want FailClosed or FailOpen": func() (*semaphore.Semaphore, error) {
			return semaphore.NewMemory(1, semaphore.WithFailurePolicy(semaphore.FailOpen+1))
		},
		"max waiters 0": func() (*semaphore.Semaphore, error) {
			return semaphore.NewMemory(1, semaphore.WithMaxWaiters(0))
		},
		"label": func() (*semaphore.Semaphore, error) { return semaphore.NewMemory(1, semaphore.WithLabel("\xff")) },
		"201 bytes": func() (*semaphore.Semaphore, error) {
			return semaphore.NewMemory(1, semaphore.WithLabel(strings.Repeat("l", 201)))
		},
		"prefix": func() (*semaphore.Semaphore, error) {
			return semaphore.NewRedis(client, "x", 1, semaphore.WithKeyPrefix("a{b"))
		},
		"option nil": func() (*semaphore.Semaphore, error) { return semaphore.NewMemory(1, nil) },
		"client pipeline": func() (*semaphore.Semaphore, error) {
			return semaphore.NewRedis(pipeline{client.Pipeline(), client}, "x", 1)
		},
		"WithLease 10s: want a semaphore of a fleet": func() (*semaphore.Semaphore, error) {
			return semaphore.NewMemory(1, semaphore.WithLease(10*time.Second))
		},
		"WithFixedLease 10s: want a semaphore of a fleet": func() (*semaphore.Semaphore, error) {
			return semaphore.NewMemory(1, semaphore.WithFixedLease(10*time.Second))
		},
	} {
		_, err := f()
		require.ErrorIs(t, err, semaphore.ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
	}
	require.Equal(t, "FailClosed FailOpen", fmt.Sprint(semaphore.FailClosed, " ", semaphore.FailOpen))
}

// pipeline is a redis.Cmdable that is not a client.
type pipeline struct {
	redis.Pipeliner
	subscriber interface {
		Subscribe(ctx context.Context, channels ...string) *redis.PubSub
	}
}

func (p pipeline) Subscribe(ctx context.Context, channels ...string) *redis.PubSub {
	return p.subscriber.Subscribe(ctx, channels...)
}

// Names with braces, control characters and the like are ordinary names, each with its own permits.
func TestHostileNames(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint("hostile", time.Now().UnixNano(), ":")
	for _, name := range []string{"}", "{", "{}", "a}:held", "a", "%7D", "\x00", "a\nb", "é", "*", " ", strings.Repeat("x", 512)} {
		s, err := semaphore.NewRedis(client, name, 1, semaphore.WithKeyPrefix(prefix), patient)
		require.NoError(t, err)
		label := ""
		if name == "{" {
			label = spread
		}
		p, err := s.Labelled(label).TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.NotNil(t, p, "%q", name)
		defer func() { require.NoError(t, s.Close(ctx)) }()
	}
	keys, err := client.Keys(ctx, prefix+"*").Result()
	require.NoError(t, err)
	require.Len(t, keys, 12+2, "a state for each, and for one also held and info")
	for _, key := range keys {
		ttl := client.PTTL(ctx, key).Val()
		require.Greater(t, ttl, 24*time.Hour, "%q", key)
		require.Less(t, ttl, 49*time.Hour)
	}
}

// A value that is not a semaphore's state is an error that names the key, and stays unchanged.
func TestForeignKeys(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint("foreign", time.Now().UnixNano(), ":")
	for i, set := range []func(key string){
		func(key string) { client.Set(ctx, key+"state", "a string", time.Minute) },
		func(key string) { client.Set(ctx, key+"held", "a string", time.Minute) },
		func(key string) { client.HSet(ctx, key+"state", "fence", "many") },
		func(key string) { client.HSet(ctx, key+"state", "quiet", "many") },
	} {
		name := fmt.Sprint("n", i)
		set(prefix + "{" + name + "}:")
		s, err := semaphore.NewRedis(client, name, 1, semaphore.WithKeyPrefix(prefix), patient)
		require.NoError(t, err)
		_, err = s.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, semaphore.ErrCorruptState)
		require.ErrorContains(t, err, prefix+"{"+name+"}:")
		c, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_ = s.Close(c)
	}
}
