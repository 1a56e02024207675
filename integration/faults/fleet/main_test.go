// Package fleet tests what must hold of whole fleets: that the rate is kept to, neither more nor less, when processes are
// stopped, killed and starved, when tens of thousands wait and many of them go away, and when permits are leased.
package fleet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

const (
	jobEnv = "TOKENBUCKET_FLEET_JOB"
	// burnEnv makes a process of faultlab starve itself.
	burnEnv = "TOKENBUCKET_FLEET_BURN"
)

func TestMain(m *testing.M) {
	if os.Getenv(burnEnv) != "" {
		go burn()
	}
	faultlab.Main()
	worker.Main(jobEnv, func(ctx context.Context, j *job, tell func(spent)) error { return jobs[j.Do](ctx, j, tell) })
	faultlab.Parallel(4)
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

var jobs = map[string]func(context.Context, *job, func(spent)) error{"wait": waitOnce, "spend": spend, "watch": watchLease}

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
		all = append(all, tokenbucket.WithPrefetch(j.Lease))
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

// burn uses a processor, and gives the garbage collector work, until the process ends; no longer than ten minutes.
func burn() {
	var garbage [][]byte
	for began := time.Now(); time.Since(began) < 10*time.Minute; {
		if garbage = append(garbage, make([]byte, 16<<10)); len(garbage) > 1000 {
			garbage = nil
		}
	}
}
