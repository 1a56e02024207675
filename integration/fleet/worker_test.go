// Package fleet tests whole gateways: several processes, real databases, a real redis-server, and upstreams that keep count
// themselves.
package fleet

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"
	_ "modernc.org/sqlite"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const workerEnv = "TOKENBUCKET_FLEET_WORKER"

func TestMain(m *testing.M) {
	worker.Main(workerEnv, work)
	faultlab.Parallel(6)
	redistest.Main(m, dbtest.StopShared)
}

// job is what a worker, a gateway of its own process, has to do until its standard input ends.
type job struct {
	Redis, Prefix string
	// Where the limits are: a database, or one fixed limit.
	Driver, DSN string
	Dialect     sqlsource.Dialect
	Fixed       *registry.Limit
	Interval    time.Duration
	// Callers call Path at Upstream one call after another, each; without an Upstream they just take permits.
	Upstream, Path string
	Callers        int
}

// event is a line of a worker's output. Times are microseconds of this machine's one clock.
type event struct {
	At   int64
	What string // granted, followed (the row changed), failed, stalled (At then, for Text); at the end slowest
	Text string
	Slow slowness // at the end
}

// slowness is how slow a machine was at most.
type slowness struct {
	Woken time.Duration // too late
	Trip  time.Duration // to Redis
	Load  time.Duration // of the limits
	Way   time.Duration // of a call that nothing limits, until the upstream has it
}

// most is the slowest of each.
func (s slowness) most(o slowness) slowness {
	return slowness{max(s.Woken, o.Woken), max(s.Trip, o.Trip), max(s.Load, o.Load), max(s.Way, o.Way)}
}

func work(ctx context.Context, j *job, tell func(event)) error {
	client := redis.NewClient(&redis.Options{Addr: j.Redis})
	defer func() { _ = client.Close() }()
	happened := func(what, text string) { tell(event{At: time.Now().UnixMicro(), What: what, Text: text}) }
	var mu sync.Mutex
	var slow slowness
	slower := func(s slowness) {
		mu.Lock()
		defer mu.Unlock()
		slow = slow.most(s)
	}
	var limits *registry.Registry
	source := registry.Source(nil)
	if j.Fixed != nil {
		source = registry.Static{*j.Fixed}
	} else {
		db, err := sql.Open(j.Driver, j.DSN)
		if err != nil {
			return err
		}
		defer func() { _ = db.Close() }()
		if source, err = sqlsource.New(db, j.Dialect); err != nil {
			return err
		}
	}
	limits, err := registry.New(source, tokenbucket.NewRedisScriptStore(client, tokenbucket.WithKeyPrefix(j.Prefix)),
		registry.WithInterval(j.Interval), registry.WithUnknown(registry.Refuse()),
		registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(20*time.Second), // a busy machine is no outage
			tokenbucket.WithObserver(tokenbucket.Observer{Trip: func(trip tokenbucket.Trip) { slower(slowness{Trip: trip.Elapsed}) }})),
		registry.WithHook(func(l registry.Load) {
			if slower(slowness{Load: l.Took}); l.Changed > 0 {
				happened("followed", "")
			}
		}))
	if err != nil {
		return err
	}
	defer limits.Close()
	transport, err := httplimit.NewTransport(limits)
	if err != nil {
		return err
	}
	upstream := &http.Client{Transport: transport, Timeout: 10 * time.Second}

	call := func() error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, j.Upstream+j.Path, nil)
		if err != nil {
			return err
		}
		request.Header.Set("X-Gateway", fmt.Sprint(os.Getpid()))
		response, err := upstream.Do(request)
		if err == nil {
			_, _ = io.Copy(io.Discard, response.Body)
			_ = response.Body.Close()
		}
		return err
	}
	if j.Upstream == "" {
		call = func() error {
			a, err := limits.Enter(ctx, j.Path)
			if err == nil && a.OK {
				happened("granted", "")
			} else if err == nil {
				err = httplimit.ErrRefused
			}
			return err
		}
	}
	var callers sync.WaitGroup
	for range j.Callers {
		callers.Go(func() {
			for ctx.Err() == nil {
				if err := call(); errors.Is(err, httplimit.ErrRefused) {
					time.Sleep(5 * time.Millisecond) // the next of the many that a gateway has
				} else if err != nil && ctx.Err() == nil {
					happened("failed", err.Error())
					time.Sleep(100 * time.Millisecond)
				}
			}
		})
	}
	callers.Go(func() { // how punctual this process is woken
		for ctx.Err() == nil {
			due := time.Now().Add(5 * time.Millisecond)
			time.Sleep(5 * time.Millisecond)
			late := time.Since(due)
			if slower(slowness{Woken: late}); late >= 10*time.Millisecond {
				tell(event{At: due.UnixMicro(), What: "stalled", Text: late.String()})
			}
		}
	})
	if j.Upstream != "" {
		callers.Go(func() { // and how long it takes to the upstream
			for ctx.Err() == nil {
				if way, err := unlimited(ctx, j.Upstream); err == nil {
					slower(slowness{Way: way})
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	callers.Wait()
	mu.Lock() // a trip may be reported late
	defer mu.Unlock()
	tell(event{At: time.Now().UnixMicro(), What: "slowest", Slow: slow})
	return nil
}

// sentHeader is when a call was sent that nothing limits; the upstream answers how long it took.
const sentHeader = "X-Sent"

func unlimited(ctx context.Context, upstream string) (way time.Duration, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, upstream, nil)
	if err != nil {
		return 0, err
	}
	request.Header.Set(sentHeader, fmt.Sprint(time.Now().UnixMicro()))
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err
	}
	return time.ParseDuration(string(text))
}
