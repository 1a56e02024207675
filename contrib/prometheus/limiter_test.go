package prometheus_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry/telemetrytest"
)

// outcomes adds up a metric by its outcome.
func outcomes(series map[string]float64, metric string) map[string]float64 {
	total := map[string]float64{}
	for key, v := range telemetrytest.Of(series, metric+"{") {
		for _, outcome := range []string{"granted", "refused", "failed"} {
			if strings.Contains(key, fmt.Sprintf("outcome=%q", outcome)) {
				total[outcome] += v
			}
		}
	}
	return total
}

// A limiter in this process: what it answered is what is scraped. Its clock stands still, and so do 5 permits a second.
func TestMemoryLimiter(t *testing.T) {
	registry, observer := observe(t)
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithInitialPermits(5),
		tokenbucket.WithClock(clockwork.NewFakeClock()), tokenbucket.WithObserver(observer))
	require.NoError(t, err)
	telemetrytest.Ten(t, limiter)
	got := scrape(t, registry)
	assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, outcomes(got, "decisions_total"))
	assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, outcomes(got, "permits_total"))
	assert.Equal(t, 5.0, got[`wait_duration_seconds_count{bucket="fares",shadow="false"}`])
	assert.Zero(t, got[`wait_duration_seconds_sum{bucket="fares",shadow="false"}`])
}

// A wait is what the permits took to fall due: the sixth of them at 5 permits a second, 200 ms.
func TestWaits(t *testing.T) {
	registry, observer := observe(t)
	clock := clockwork.NewFakeClock()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithInitialPermits(5),
		tokenbucket.WithClock(clock), tokenbucket.WithObserver(observer))
	require.NoError(t, err)
	_, err = limiter.Acquire(t.Context(), 5)
	require.NoError(t, err)
	answered := make(chan error, 1)
	go func() {
		ok, err := limiter.TryAcquire(context.Background(), 1, time.Second)
		if err == nil && !ok {
			err = errors.New("refused")
		}
		answered <- err
	}()
	require.NoError(t, clock.BlockUntilContext(t.Context(), 1))
	clock.Advance(200 * time.Millisecond)
	require.NoError(t, <-answered)
	got := scrape(t, registry)
	assert.Equal(t, 2.0, got[`wait_duration_seconds_count{bucket="fares",shadow="false"}`])
	assert.InDelta(t, 0.2, got[`wait_duration_seconds_sum{bucket="fares",shadow="false"}`], 1e-6)
	assert.Equal(t, 6.0, outcomes(got, "permits_total")["granted"])
}

// A bucket in Redis: 5 permits an hour, so that no machine is slow enough for a sixth. Every decision of the store came with
// a batch.
func TestRedisLimiter(t *testing.T) {
	for name, store := range map[string]func(redis.UniversalClient) tokenbucket.Store{
		"script": func(c redis.UniversalClient) tokenbucket.Store { return tokenbucket.NewRedisScriptStore(c) },
		"lock":   func(c redis.UniversalClient) tokenbucket.Store { return tokenbucket.NewRedisStore(c) },
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			registry, observer := observe(t)
			limiter, err := tokenbucket.NewSmoothBursty("fares", 5.0/3600, tokenbucket.WithMaxPermits(5), tokenbucket.WithInitialPermits(5),
				tokenbucket.WithStore(store(server.Client(t))), tokenbucket.WithStoreTimeout(30*time.Second),
				tokenbucket.WithObserver(observer))
			require.NoError(t, err)
			telemetrytest.Ten(t, limiter)
			got := scrape(t, registry)
			assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, outcomes(got, "decisions_total"))
			stored := telemetrytest.Sum(telemetrytest.Of(got, `decisions_total{bucket="fares",by="store"`))
			assert.GreaterOrEqual(t, stored, 5.0)
			require.NoError(t, redistest.Poll(10*time.Second, func() error { // a batch may be told after its last call returned
				got = scrape(t, registry)
				return telemetrytest.Is(got, `batch_requests_sum{}`, stored)
			}))
			assert.Equal(t, got[`batch_requests_count{}`], got[`store_trip_duration_seconds_count{result="answered"}`])
			assert.Positive(t, got[`store_trip_duration_seconds_sum{result="answered"}`])
			assert.Zero(t, telemetrytest.Sum(telemetrytest.Of(got, "store_errors_total")))
			assert.Equal(t, 1.0, got[`store_up{}`])
		})
	}
}

// A server that stops answering: every call that failed is counted, batches that were given up are, and the store is seen
// down, then up.
func TestRedisAway(t *testing.T) {
	server := redistest.Start(t)
	registry, observer := observe(t)
	limiter, err := tokenbucket.NewSmoothBursty("fares", 1000, tokenbucket.WithStoreTimeout(2*time.Second), // only the first call waits for so long
		tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(server.Client(t))), tokenbucket.WithObserver(observer))
	require.NoError(t, err)
	var failed float64
	require.NoError(t, redistest.Poll(10*time.Second, func() error { // the first call of a slow machine may take its time
		_, err := limiter.TryAcquire(t.Context(), 1, time.Second)
		if err != nil {
			failed++
		}
		return err
	}))
	before := failed
	require.NoError(t, server.Stop())
	t.Cleanup(func() { _ = server.Continue() })
	for range 5 {
		if _, err := limiter.TryAcquire(t.Context(), 1, time.Second); err != nil {
			failed++
		}
	}
	require.Greater(t, failed, before, "the fault did not bite")
	got := scrape(t, registry)
	assert.Equal(t, failed, outcomes(got, "decisions_total")["failed"])
	assert.Equal(t, failed, telemetrytest.Sum(telemetrytest.Of(got, "failures_total")))
	assert.Equal(t, failed, telemetrytest.Sum(telemetrytest.Of(got, `failures_total{bucket="fares",kind="timeout",shadow="false"}`, `failures_total{bucket="fares",kind="unavailable",shadow="false"}`)))
	require.NoError(t, redistest.Poll(10*time.Second, func() error {
		got = scrape(t, registry)
		if telemetrytest.Sum(telemetrytest.Of(got, "store_errors_total")) == 0 {
			return errors.New("no batch was given up")
		}
		return telemetrytest.Is(got, "store_up{}", 0)
	}))
	assert.Equal(t, 1.0, got[`policy_in_force{policy="FailClosed"}`])

	require.NoError(t, server.Continue())
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		if _, err := limiter.TryAcquire(t.Context(), 1, time.Second); err != nil {
			return err
		}
		got = scrape(t, registry)
		return telemetrytest.Is(got, "store_up{}", 1)
	}))
	assert.GreaterOrEqual(t, got[`store_outages_total{}`], 1.0)
	assert.Positive(t, got[`store_away_seconds_total{}`])
	assert.Zero(t, got[`policy_in_force{policy="FailClosed"}`])
	t.Logf("failed calls %v, batches given up %v, outages %v, away %.3f s", failed, telemetrytest.Sum(telemetrytest.Of(got, "store_errors_total")),
		got[`store_outages_total{}`], got[`store_away_seconds_total{}`])
}
