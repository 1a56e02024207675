// Package fleet tests what must hold of whole fleets: that the rate is kept to, neither more nor less, when processes are
// stopped, killed and starved, when tens of thousands wait and many of them go away, and when permits are leased.
package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

const (
	jobEnv = "TOKENBUCKET_FLEET_JOB"
	// burnEnv makes a process of faultlab starve itself.
	burnEnv = "TOKENBUCKET_FLEET_BURN"
)

func TestMain(m *testing.M) {
	if faultlab.Working() {
		if os.Getenv(burnEnv) != "" {
			go burn()
		}
		os.Exit(faultlab.Main())
	}
	if text := os.Getenv(jobEnv); text != "" {
		var j job
		err := json.Unmarshal([]byte(text), &j)
		if err == nil {
			err = jobs[j.Do](&j)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	redistest.Main(m)
}

var background = context.Background()

// job is what a process of this package does, see jobs.
type job struct {
	Do, Redis, Prefix, Name, Store string
	Rate, Burst                    float64
	Lease, LockTTL                 time.Duration
	Callers                        int
	Upstream                       string
}

var jobs = map[string]func(*job) error{"wait": waitOnce, "spend": spend, "watch": watchLease}

// limiter is the job's, on a store of its own, as every process has one.
func (j *job) limiter(client tokenbucket.RedisClient, opts ...tokenbucket.Option) (*tokenbucket.RateLimiter, error) {
	keys := []tokenbucket.RedisOption{tokenbucket.WithKeyPrefix(j.Prefix)}
	if j.LockTTL > 0 {
		keys = append(keys, tokenbucket.WithLockTTL(j.LockTTL))
	}
	all := []tokenbucket.Option{
		tokenbucket.WithStore(faultlab.Stores[j.Store](client, keys...)),
		tokenbucket.WithMaxPermits(j.Burst), tokenbucket.WithInitialPermits(j.Burst),
	}
	if j.Lease > 0 {
		all = append(all, tokenbucket.WithLease(j.Lease))
	}
	return tokenbucket.NewSmoothBursty(j.Name, j.Rate, append(all, opts...)...)
}

// open is limiter, for a test.
func (j *job) open(t *testing.T, client tokenbucket.RedisClient, opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
	t.Helper()
	l, err := j.limiter(client, opts...)
	require.NoError(t, err)
	return l
}

// on is the job on a bucket of the test's own on that server.
func (j job) on(t *testing.T, server *redistest.Server, store string) *job {
	j.Redis, j.Prefix, j.Name, j.Store = server.Addr, fmt.Sprintf("%s%d:", t.Name(), rand.Uint64()), "x", store
	return &j
}

func (j *job) client() *redis.Client { return redis.NewClient(&redis.Options{Addr: j.Redis}) }

// upstream counts what reaches it, a byte a call, and notes when, in microseconds of this process' clock.
type upstream struct {
	net.Listener
	mu       sync.Mutex
	arrivals []faultlab.Event
	readers  sync.WaitGroup
}

func startUpstream(t *testing.T) *upstream {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	u := &upstream{Listener: l}
	u.readers.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			u.readers.Go(func() { u.read(conn) })
		}
	})
	t.Cleanup(func() { _ = l.Close() })
	return u
}

func (u *upstream) read(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	buf := make([]byte, 4096)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		u.mu.Lock()
		u.arrivals = append(u.arrivals, faultlab.Event{At: micros(), Permits: n})
		u.mu.Unlock()
	}
}

// count is how many calls have arrived from one time until before another, all if they are 0.
func (u *upstream) count(from, until int64) (n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, a := range u.arrivals {
		if a.At >= from && (until == 0 || a.At < until) {
			n += a.Permits
		}
	}
	return n
}

// closed ends the upstream when all who call it have gone, and returns all arrivals.
func (u *upstream) closed() []faultlab.Event {
	_ = u.Close()
	u.readers.Wait()
	return u.arrivals
}

// origin ties this process' monotonic clock to microseconds of the machine's.
var origin = time.Now()

func micros() int64 { return origin.UnixMicro() + time.Since(origin).Microseconds() }

// caller calls an upstream. It may be used by many goroutines at once.
type caller struct {
	mu sync.Mutex
	net.Conn
}

func dial(addr string) (*caller, error) {
	conn, err := net.Dial("tcp", addr)
	return &caller{Conn: conn}, err
}

func (c *caller) call() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.Write([]byte{1})
	return err
}

// burn uses a processor, and gives the garbage collector work, until the process ends; no longer than ten minutes.
func burn() {
	var garbage [][]byte
	for began := time.Now(); time.Since(began) < 10*time.Minute; {
		if garbage = append(garbage, make([]byte, 16<<10)); len(garbage) > 1000 {
			garbage = nil
		}
	}
}
