package prometheus_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tbprometheus "github.com/go-tokenbucket/tokenbucket/contrib/prometheus"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry/telemetrytest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// A sliding window in Redis: what it answered is what is scraped, the outage at its end included.
func TestSlidingWindow(t *testing.T) {
	server := redistest.Start(t)
	registry := prometheus.NewPedanticRegistry()
	observer, err := tbprometheus.NewSlidingWindow(registry)
	require.NoError(t, err)
	l, err := slidingwindow.New("fares", 5, time.Hour, time.Minute, slidingwindow.WithRedis(server.Client(t)),
		slidingwindow.WithTimeout(5*time.Second), slidingwindow.WithObserver(observer))
	require.NoError(t, err)
	ctx := context.Background()
	for range 10 {
		_, err = l.Allow(ctx)
		require.NoError(t, err)
	}
	_, err = l.AllowN(ctx, 6)
	require.Error(t, err)
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	require.Error(t, l.Wait(short))
	got := scrape(t, registry)
	for series, want := range map[string]float64{
		`slidingwindow_decisions_total{by="store",limiter="fares",outcome="granted"}`:    5,
		`slidingwindow_decisions_total{by="snapshot",limiter="fares",outcome="refused"}`: 5,
		`slidingwindow_decisions_total{by="check",limiter="fares",outcome="failed"}`:     1,
		`slidingwindow_permits_total{by="store",limiter="fares",outcome="granted"}`:      5,
		`slidingwindow_failures_total{kind="invalid",limiter="fares"}`:                   1,
		`slidingwindow_failures_total{kind="deadline",limiter="fares"}`:                  1,
		`slidingwindow_store_trip_duration_seconds_count{result="failed"}`:               0,
		`slidingwindow_store_up{}`:            1,
		`slidingwindow_store_outages_total{}`: 0,
	} {
		assert.Equal(t, want, got[series], series)
	}
	require.Eventually(t, func() bool { // a caller may be answered before its trip is told
		return scrape(t, registry)[`slidingwindow_store_trip_duration_seconds_count{result="answered"}`] >= 5
	}, 10*time.Second, time.Millisecond)
	assert.NotContains(t, fmt.Sprint(got), "held_duration")

	server.Stop()
	_, err = l.Allow(ctx)
	require.NoError(t, err, "it is known to be full")
	require.Error(t, l.SetLimit(ctx, 7))
	require.Eventually(t, func() bool { return scrape(t, registry)[`slidingwindow_store_up{}`] == 0 }, 20*time.Second, time.Millisecond)
	got = scrape(t, registry)
	assert.Equal(t, 1.0, got[`slidingwindow_store_outages_total{}`])
	assert.GreaterOrEqual(t, telemetrytest.Sum(telemetrytest.Of(got, "slidingwindow_store_errors_total")), 1.0)
}

// A limiter, or a semaphore, that notices an outage and is used no more does not keep its store away for ever: others are answered.
func TestStoreIsUpAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewPedanticRegistry()
		window, err := tbprometheus.NewSlidingWindow(registry)
		require.NoError(t, err)
		sem, err := tbprometheus.NewSemaphore(registry)
		require.NoError(t, err)
		window.Trip(slidingwindow.Trip{Limiter: "gone", Err: slidingwindow.ErrAway})
		window.Health(slidingwindow.Health{Limiter: "gone", Down: true})
		sem.Trip(semaphore.Trip{Semaphore: "gone", Err: semaphore.ErrTimeout})
		sem.Health(semaphore.Health{Semaphore: "gone", Down: true})
		for _, up := range []float64{0, 1} {
			window.Trip(slidingwindow.Trip{Limiter: "used"})
			sem.Trip(semaphore.Trip{Semaphore: "used"})
			got := scrape(t, registry)
			for _, of := range []string{"slidingwindow", "semaphore"} {
				assert.Equal(t, up, got[of+"_store_up{}"], of)
				assert.Equal(t, 120*up, got[of+"_store_away_seconds_total{}"], of)
				assert.Equal(t, 1.0, got[of+"_store_outages_total{}"], of)
			}
			time.Sleep(2 * time.Minute)
		}
	})
}

// A semaphore in Redis: what was held, for how long, and how it ended.
func TestSemaphore(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	observer, err := tbprometheus.NewSemaphore(registry)
	require.NoError(t, err)
	server := redistest.Start(t)
	s, err := semaphore.NewRedis(server.Client(t), "fares", 2, semaphore.WithTimeout(10*time.Second), semaphore.WithObserver(observer))
	require.NoError(t, err)
	ctx := context.Background()
	p, err := s.Acquire(ctx, 2)
	require.NoError(t, err)
	_, err = s.TryAcquire(ctx, 1, 0)
	require.ErrorIs(t, err, semaphore.ErrRefused)
	_, err = s.Acquire(ctx, 3)
	require.ErrorIs(t, err, semaphore.ErrTooMany)
	require.NoError(t, p.Release(ctx))
	hung, err := semaphore.NewRedis(server.Client(t), "fares", 2, semaphore.WithTimeout(10*time.Second), semaphore.WithFixedLease(2*time.Second),
		semaphore.WithObserver(observer))
	require.NoError(t, err)
	p, err = hung.Acquire(ctx, 1)
	require.NoError(t, err)
	<-p.Context().Done() // and it is never released
	const expired = `semaphore_held_duration_seconds_count{end="expired",semaphore="fares"}`
	require.Eventually(t, func() bool { return scrape(t, registry)[expired] == 1 }, 20*time.Second, time.Millisecond)
	got := scrape(t, registry)
	assert.Greater(t, got[`semaphore_held_duration_seconds_sum{end="expired",semaphore="fares"}`], 0.5, "about its lease, from when it was told of it")
	for series, want := range map[string]float64{
		`semaphore_decisions_total{outcome="granted",semaphore="fares"}`:          2,
		`semaphore_decisions_total{outcome="refused",semaphore="fares"}`:          1,
		`semaphore_decisions_total{outcome="failed",semaphore="fares"}`:           1,
		`semaphore_permits_total{outcome="granted",semaphore="fares"}`:            3,
		`semaphore_failures_total{kind="invalid",semaphore="fares"}`:              1,
		`semaphore_wait_duration_seconds_count{semaphore="fares"}`:                2,
		`semaphore_held_duration_seconds_count{end="released",semaphore="fares"}`: 1,
		`semaphore_store_up{}`: 1,
	} {
		assert.Equal(t, want, got[series], series)
	}
}

// However many names there are, the labels are bounded, and so is each of their values.
func TestPackagesAreBounded(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	window, err := tbprometheus.NewSlidingWindow(registry, tbprometheus.WithMaxBuckets(3))
	require.NoError(t, err)
	sem, err := tbprometheus.NewSemaphore(registry, tbprometheus.WithMaxBuckets(3), tbprometheus.WithBuckets(func(name string) string { return name[:6] }))
	require.NoError(t, err)
	ctx := context.Background()
	for i := range 100 {
		name := fmt.Sprintf("name %02d", i)
		window.Decision(ctx, slidingwindow.Decision{Limiter: name, Permits: 1, Err: fmt.Errorf("%d: %w", i, redis.ErrClosed)})
		window.Decision(ctx, slidingwindow.Decision{Limiter: name, Permits: 1, Granted: true, By: slidingwindow.Decider(i), Wait: time.Second})
		sem.Decision(ctx, semaphore.Decision{Semaphore: name, Permits: 1, Granted: true})
		sem.Lease(semaphore.LeaseUse{Semaphore: name, Permits: 1, Held: time.Second, Err: errors.New(name)})
	}
	names := map[string]bool{}
	total := 0.0
	for key, v := range scrape(t, registry) {
		for _, label := range []string{"limiter=", "semaphore="} {
			if _, rest, ok := strings.Cut(key, label); ok {
				name, _, _ := strings.Cut(rest[1:], `"`)
				names[label+name] = true
			}
		}
		if strings.HasPrefix(key, "slidingwindow_decisions_total") {
			total += v
		}
		assert.NotContains(t, key, "unknown")
	}
	assert.Equal(t, map[string]bool{
		"limiter=name 00": true, "limiter=name 01": true, "limiter=name 02": true, "limiter=other": true,
		"semaphore=name 0": true, "semaphore=name 1": true, "semaphore=name 2": true, "semaphore=other": true,
	}, names)
	assert.Equal(t, 200.0, total)
}

// A second observer of a registerer shares the metrics of the first, with the same bounds only.
func TestPackagesAreShared(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	ctx := context.Background()
	for range 2 {
		o, err := tbprometheus.NewSlidingWindow(registry)
		require.NoError(t, err)
		o.Decision(ctx, slidingwindow.Decision{Limiter: "fares", Permits: 1, Granted: true})
	}
	assert.Equal(t, 2.0, scrape(t, registry)[`slidingwindow_decisions_total{by="store",limiter="fares",outcome="granted"}`])
	_, err := tbprometheus.NewSlidingWindow(registry, tbprometheus.WithMaxBuckets(7))
	require.ErrorContains(t, err, "max buckets 7")
	_, err = tbprometheus.NewSlidingWindow(nil)
	require.Error(t, err)
	_, err = tbprometheus.NewSemaphore(registry, nil)
	require.Error(t, err)
}

// The README names every metric of the packages, with its package or with a … in its place.
func TestReadmeOfPackages(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	registry := prometheus.NewPedanticRegistry()
	window, err := tbprometheus.NewSlidingWindow(registry)
	require.NoError(t, err)
	sem, err := tbprometheus.NewSemaphore(registry)
	require.NoError(t, err)
	ctx := context.Background()
	window.Decision(ctx, slidingwindow.Decision{Permits: 1, Granted: true, Wait: time.Second})
	window.Decision(ctx, slidingwindow.Decision{Permits: 1, Err: slidingwindow.ErrAway})
	sem.Decision(ctx, semaphore.Decision{Permits: 1, Granted: true, Elapsed: time.Second})
	sem.Decision(ctx, semaphore.Decision{Permits: 1, Err: semaphore.ErrTimeout})
	sem.Lease(semaphore.LeaseUse{Held: time.Second})
	families, err := registry.Gather()
	require.NoError(t, err)
	require.Greater(t, len(families), 20)
	for _, f := range families {
		_, rest, _ := strings.Cut(f.GetName(), "_")
		require.True(t, strings.Contains(string(readme), "`"+f.GetName()+"`") || strings.Contains(string(readme), "`…_"+rest+"`"), f.GetName())
	}
}
