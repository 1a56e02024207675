package otel_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"

	tbotel "github.com/go-tokenbucket/tokenbucket/contrib/otel"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// A sliding window in Redis: what it answered is what is collected.
func TestSlidingWindow(t *testing.T) {
	x := newTelemetry(t)
	observer, err := tbotel.NewSlidingWindow(tbotel.WithMeterProvider(x.meters), tbotel.WithAttributes(attribute.String("store", "eu")))
	require.NoError(t, err)
	l, err := slidingwindow.New("fares", 5, time.Hour, time.Minute, slidingwindow.WithRedis(redistest.Start(t).Client(t)),
		slidingwindow.WithTimeout(10*time.Second), slidingwindow.WithObserver(observer))
	require.NoError(t, err)
	ctx := context.Background()
	for range 10 {
		_, err = l.Allow(ctx)
		require.NoError(t, err)
	}
	_, err = l.AllowN(ctx, 6)
	require.Error(t, err)
	got := x.collect(t)
	for series, want := range map[string]float64{
		"slidingwindow.decisions{slidingwindow.decider=store,slidingwindow.limiter=fares,slidingwindow.outcome=granted,store=eu}":                   5,
		"slidingwindow.decisions{slidingwindow.decider=snapshot,slidingwindow.limiter=fares,slidingwindow.outcome=refused,store=eu}":                5,
		"slidingwindow.decisions{error.type=invalid,slidingwindow.decider=check,slidingwindow.limiter=fares,slidingwindow.outcome=failed,store=eu}": 1,
		"slidingwindow.permits{slidingwindow.decider=store,slidingwindow.limiter=fares,slidingwindow.outcome=granted,store=eu}":                     5,
		"slidingwindow.store.up{store=eu}": 1,
	} {
		assert.Equal(t, want, got[series], "%s of %v", series, got)
	}
	assert.Eventually(t, func() bool { // a caller may be answered before its trip is told
		return x.collect(t)["slidingwindow.store.trip.duration:count{store=eu}"] >= 5
	}, 10*time.Second, time.Millisecond)
}

// What packages tell is counted, by kinds of errors and ends that are few, and names that are bounded.
func TestPackages(t *testing.T) {
	x := newTelemetry(t)
	window, err := tbotel.NewSlidingWindow(tbotel.WithMeterProvider(x.meters), tbotel.WithMaxBuckets(1))
	require.NoError(t, err)
	sem, err := tbotel.NewSemaphore(tbotel.WithMeterProvider(x.meters), tbotel.WithMaxBuckets(1))
	require.NoError(t, err)
	ctx := context.Background()
	for i := range 3 {
		name := fmt.Sprint("n", i)
		window.Decision(ctx, slidingwindow.Decision{Limiter: name, Permits: 2, Granted: true, Wait: time.Second})
		window.Decision(ctx, slidingwindow.Decision{Limiter: name, Permits: 1, Err: fmt.Errorf("%w: %w", slidingwindow.ErrAway, errors.New(name))})
		sem.Decision(ctx, semaphore.Decision{Semaphore: name, Permits: 2, Granted: true, Elapsed: time.Second})
		sem.Decision(ctx, semaphore.Decision{Semaphore: name, Permits: 2})
		sem.Lease(semaphore.LeaseUse{Semaphore: name, Permits: 2, Held: time.Second, Err: semaphore.ErrLost})
	}
	window.Trip(slidingwindow.Trip{Requests: 3, Elapsed: time.Second, Err: slidingwindow.ErrCorrupt})
	window.Health(slidingwindow.Health{Down: true})
	window.Health(slidingwindow.Health{Down: true})
	sem.Health(semaphore.Health{Down: true})
	sem.Health(semaphore.Health{After: 3 * time.Second})
	sem.Trip(semaphore.Trip{Requests: 3, Elapsed: time.Second, Err: semaphore.ErrTimeout})
	got := x.collect(t)
	for series, want := range map[string]float64{
		"slidingwindow.wait.duration:sum{slidingwindow.limiter=n0}":                                                                            1,
		"slidingwindow.wait.duration:sum{slidingwindow.limiter=other}":                                                                         2,
		"slidingwindow.permits{slidingwindow.decider=store,slidingwindow.limiter=other,slidingwindow.outcome=granted}":                         4,
		"slidingwindow.decisions{error.type=unavailable,slidingwindow.decider=store,slidingwindow.limiter=other,slidingwindow.outcome=failed}": 2,
		"slidingwindow.store.trip.duration:count{error.type=corrupt}":                                                                          1,
		"slidingwindow.store.up{}":                                               0,
		"slidingwindow.store.outages{}":                                          1,
		"semaphore.decisions{semaphore.name=other,semaphore.outcome=granted}":    2,
		"semaphore.decisions{semaphore.name=n0,semaphore.outcome=refused}":       1,
		"semaphore.wait.duration:count{semaphore.name=other}":                    2,
		"semaphore.held.duration:count{semaphore.end=lost,semaphore.name=other}": 2,
		"semaphore.store.away{}":                                                 3,
		"semaphore.store.up{}":                                                   1,
		"semaphore.store.trip.duration:count{error.type=timeout}":                1,
		"semaphore.batch.requests:sum{}":                                         3,
	} {
		assert.Equal(t, want, got[series], series)
	}
	_, err = tbotel.NewSlidingWindow(nil)
	require.Error(t, err)
	_, err = tbotel.NewSemaphore(tbotel.WithMaxBuckets(0))
	require.Error(t, err)
}

// A limiter that notices an outage and is used no more does not keep its store away for ever: others are answered.
func TestStoreIsUpAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newTelemetry(t)
		window, err := tbotel.NewSlidingWindow(tbotel.WithMeterProvider(x.meters))
		require.NoError(t, err)
		window.Trip(slidingwindow.Trip{Limiter: "gone", Err: slidingwindow.ErrAway})
		window.Health(slidingwindow.Health{Limiter: "gone", Down: true})
		for _, up := range []float64{0, 1} {
			window.Trip(slidingwindow.Trip{Limiter: "used"})
			got := x.collect(t)
			assert.Equal(t, up, got["slidingwindow.store.up{}"])
			assert.Equal(t, 120*up, got["slidingwindow.store.away{}"])
			assert.Equal(t, 1.0, got["slidingwindow.store.outages{}"])
			time.Sleep(2 * time.Minute)
		}
	})
}
