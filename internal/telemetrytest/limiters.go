package telemetrytest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// The tests of this file observe real limiters.

// tenCalls makes ten calls that do not wait to a full bucket of five permits: five are granted, five refused.
func tenCalls(t *testing.T, limiter *tokenbucket.RateLimiter) {
	t.Helper()
	var granted int
	for range 10 {
		ok, err := limiter.TryAcquire(t.Context(), 1, 0)
		require.NoError(t, err)
		if ok {
			granted++
		}
	}
	require.Equal(t, 5, granted)
}

// poll waits until a series has a value, and returns all series.
func poll[O any](t *testing.T, a Adapter[O], key string, want float64) (got Series) {
	t.Helper()
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		got = a.Collect(t)
		if got[key] != want {
			return fmt.Errorf("%s is %v, want %v", key, got[key], want)
		}
		return nil
	}))
	return got
}

// memoryLimiter observes a limiter in this process whose clock stands still.
func (s suite[O]) memoryLimiter(t *testing.T) {
	a, observer := s.limiter(t)
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithInitialPermits(5),
		tokenbucket.WithClock(clockwork.NewFakeClock()), tokenbucket.WithObserver(observer))
	require.NoError(t, err)
	tenCalls(t, limiter)
	got := a.Collect(t)
	assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, got.outcomes("tokenbucket_decisions_total"))
	assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, got.outcomes("tokenbucket_permits_total"))
	assert.Equal(t, 5.0, got[`tokenbucket_wait_duration_seconds_count{bucket="fares",shadow="false"}`])
	assert.Zero(t, got[`tokenbucket_wait_duration_seconds_sum{bucket="fares",shadow="false"}`])
}

// waits observes the sixth of five permits, which at 5 permits a second is due after 200 ms.
func (s suite[O]) waits(t *testing.T) {
	a, observer := s.limiter(t)
	clock := clockwork.NewFakeClock()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithInitialPermits(5),
		tokenbucket.WithClock(clock), tokenbucket.WithObserver(observer))
	require.NoError(t, err)
	_, err = limiter.Acquire(t.Context(), 5)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		ok, err := limiter.TryAcquire(context.Background(), 1, time.Second)
		if err == nil && !ok {
			err = errors.New("refused")
		}
		done <- err
	}()
	require.NoError(t, clock.BlockUntilContext(t.Context(), 1))
	clock.Advance(200 * time.Millisecond)
	require.NoError(t, <-done)
	got := a.Collect(t)
	assert.Equal(t, 2.0, got[`tokenbucket_wait_duration_seconds_count{bucket="fares",shadow="false"}`])
	assert.InDelta(t, 0.2, got[`tokenbucket_wait_duration_seconds_sum{bucket="fares",shadow="false"}`], 1e-6)
	assert.Equal(t, 6.0, got.outcomes("tokenbucket_permits_total")["granted"])
}

// redisLimiter observes a bucket in Redis of 5 permits an hour, so that no machine is slow enough for a sixth. Every decision of the store is
// a request of a batch.
func (s suite[O]) redisLimiter(t *testing.T) {
	for name, store := range map[string]func(redis.UniversalClient) tokenbucket.Store{
		"script": func(c redis.UniversalClient) tokenbucket.Store { return tokenbucket.NewRedisScriptStore(c) },
		"lock":   func(c redis.UniversalClient) tokenbucket.Store { return tokenbucket.NewRedisStore(c) },
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			a, observer := s.limiter(t)
			limiter, err := tokenbucket.NewSmoothBursty("fares", 5.0/3600, tokenbucket.WithMaxPermits(5), tokenbucket.WithInitialPermits(5),
				tokenbucket.WithStore(store(server.Client(t))), tokenbucket.WithStoreTimeout(30*time.Second), tokenbucket.WithObserver(observer))
			require.NoError(t, err)
			tenCalls(t, limiter)
			got := a.Collect(t)
			assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, got.outcomes("tokenbucket_decisions_total"))
			stored := got.Of(`tokenbucket_decisions_total{bucket="fares",by="store"`).Sum()
			assert.GreaterOrEqual(t, stored, 5.0)
			got = poll(t, a, "tokenbucket_batch_requests_sum{}", stored) // a batch may be reported after its last call has returned
			trips := got.Of("tokenbucket_store_trip_duration_seconds_count")
			assert.Equal(t, Series{
				`tokenbucket_store_trip_duration_seconds_count{result="answered"}`: got["tokenbucket_batch_requests_count{}"],
			}, trips)
			assert.Positive(t, got[`tokenbucket_store_trip_duration_seconds_sum{result="answered"}`])
			assert.Equal(t, 1.0, got["tokenbucket_store_up{}"])
		})
	}
}

// redisOutage observes a server that stops and continues: failed calls and batches are counted, and the store is down, then up.
func (s suite[O]) redisOutage(t *testing.T) {
	server := redistest.Start(t)
	a, observer := s.limiter(t)
	limiter, err := tokenbucket.NewSmoothBursty("fares", 1000, tokenbucket.WithStoreTimeout(2*time.Second), // only the first call waits that long
		tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(server.Client(t))), tokenbucket.WithObserver(observer))
	require.NoError(t, err)
	var failed float64
	call := func() error {
		_, err := limiter.TryAcquire(t.Context(), 1, time.Second)
		if err != nil {
			failed++
		}
		return err
	}
	require.NoError(t, redistest.Poll(10*time.Second, call)) // the first call may time out on a slow machine
	before := failed
	require.NoError(t, server.Stop())
	t.Cleanup(func() { _ = server.Continue() })
	for range 5 {
		_ = call()
	}
	require.Greater(t, failed, before, "no call failed")
	got := a.Collect(t)
	assert.Equal(t, failed, got.outcomes("tokenbucket_decisions_total")["failed"])
	failures := got.Of("tokenbucket_failures_total")
	assert.Equal(t, failed, failures.Sum())
	assert.Equal(t, failures, got.Of(`tokenbucket_failures_total{bucket="fares",kind="timeout"`, `tokenbucket_failures_total{bucket="fares",kind="unavailable"`))
	got = poll(t, a, "tokenbucket_store_up{}", 0)
	assert.Equal(t, 1.0, got[`tokenbucket_policy_in_force{policy="FailClosed"}`])
	require.NoError(t, redistest.Poll(10*time.Second, func() error {
		if a.Collect(t).Of("tokenbucket_store_errors_total").Sum() == 0 {
			return errors.New("no batch was given up")
		}
		return nil
	}))

	require.NoError(t, server.Continue())
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		if err := call(); err != nil {
			return err
		}
		if got = a.Collect(t); got["tokenbucket_store_up{}"] != 1 {
			return errors.New("the store is down")
		}
		return nil
	}))
	assert.GreaterOrEqual(t, got["tokenbucket_store_outages_total{}"], 1.0)
	assert.Positive(t, got["tokenbucket_store_away_seconds_total{}"])
	assert.Zero(t, got[`tokenbucket_policy_in_force{policy="FailClosed"}`])
}

// redisWindow observes a sliding window in Redis, and the outage at the end.
func (s suite[O]) redisWindow(t *testing.T) {
	server := redistest.Start(t)
	a, observer, _ := s.packageObservers(t)
	l, err := slidingwindow.New("fares", 5, time.Hour, time.Minute, slidingwindow.WithRedis(server.Client(t)),
		slidingwindow.WithStoreTimeout(5*time.Second), slidingwindow.WithObserver(observer))
	require.NoError(t, err)
	ctx := context.Background()
	for range 10 {
		_, err = l.Allow(ctx)
		require.NoError(t, err)
	}
	_, err = l.AllowN(ctx, 6)
	require.Error(t, err)
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond) // the next permits are admitted in about an hour
	defer cancel()
	require.Error(t, l.Wait(short))
	got := a.Collect(t)
	requireSeries(t, Series{
		`slidingwindow_decisions_total{by="store",limiter="fares",outcome="granted"}`:    5,
		`slidingwindow_decisions_total{by="snapshot",limiter="fares",outcome="refused"}`: 5,
		`slidingwindow_permits_total{by="store",limiter="fares",outcome="granted"}`:      5,
		`slidingwindow_failures_total{kind="invalid",limiter="fares"}`:                   1,
		`slidingwindow_failures_total{kind="deadline",limiter="fares"}`:                  1,
		`slidingwindow_store_trip_duration_seconds_count{result="failed"}`:               0,
		`slidingwindow_store_up{}`:            1,
		`slidingwindow_store_outages_total{}`: 0,
	}, got)
	require.Equal(t, 2.0, got.outcomes("slidingwindow_decisions_total")["failed"])
	require.NoError(t, redistest.Poll(10*time.Second, func() error { // a batch may be reported after its calls have returned
		if n := a.Collect(t)[`slidingwindow_store_trip_duration_seconds_count{result="answered"}`]; n < 5 {
			return fmt.Errorf("%v batches", n)
		}
		return nil
	}))

	require.NoError(t, server.Stop())
	t.Cleanup(func() { _ = server.Continue() })
	_, err = l.Allow(ctx)
	require.NoError(t, err, "the window is known to be full")
	require.Error(t, l.SetLimit(ctx, 7))
	got = poll(t, a, "slidingwindow_store_up{}", 0)
	assert.Equal(t, 1.0, got["slidingwindow_store_outages_total{}"])
	assert.GreaterOrEqual(t, got.Of("slidingwindow_store_errors_total").Sum(), 1.0)
}

// redisSemaphore observes a semaphore in Redis: what was held, for how long, and how that ended.
func (s suite[O]) redisSemaphore(t *testing.T) {
	server := redistest.Start(t)
	a, _, observer := s.packageObservers(t)
	sem, err := semaphore.NewRedis(server.Client(t), "fares", 2, semaphore.WithStoreTimeout(10*time.Second), semaphore.WithObserver(observer))
	require.NoError(t, err)
	ctx := context.Background()
	p, err := sem.Acquire(ctx, 2)
	require.NoError(t, err)
	_, err = sem.TryAcquire(ctx, 1, 0)
	require.ErrorIs(t, err, semaphore.ErrRefused)
	_, err = sem.Acquire(ctx, 3)
	require.ErrorIs(t, err, semaphore.ErrTooMany)
	require.NoError(t, p.Release(ctx))
	hung, err := semaphore.NewRedis(server.Client(t), "fares", 2, semaphore.WithStoreTimeout(10*time.Second), semaphore.WithFixedLease(2*time.Second),
		semaphore.WithObserver(observer))
	require.NoError(t, err)
	p, err = hung.Acquire(ctx, 1)
	require.NoError(t, err)
	<-p.Context().Done() // it is never released
	got := poll(t, a, `semaphore_held_duration_seconds_count{end="expired",semaphore="fares"}`, 1)
	assert.Greater(t, got[`semaphore_held_duration_seconds_sum{end="expired",semaphore="fares"}`], 0.5, "about its lease")
	requireSeries(t, Series{
		`semaphore_decisions_total{outcome="granted",semaphore="fares"}`:          2,
		`semaphore_decisions_total{outcome="refused",semaphore="fares"}`:          1,
		`semaphore_decisions_total{outcome="failed",semaphore="fares"}`:           1,
		`semaphore_permits_total{outcome="granted",semaphore="fares"}`:            3,
		`semaphore_failures_total{kind="invalid",semaphore="fares"}`:              1,
		`semaphore_wait_duration_seconds_count{semaphore="fares"}`:                2,
		`semaphore_held_duration_seconds_count{end="released",semaphore="fares"}`: 1,
		`semaphore_store_up{}`: 1,
	}, got)
}
