package otel_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry/telemetrytest"
)

// outcomes adds up a metric by its outcome.
func outcomes(series map[string]float64, metric string) map[string]float64 {
	total := map[string]float64{}
	for key, v := range telemetrytest.Of(series, metric+"{") {
		_, outcome, _ := strings.Cut(key, "outcome=")
		outcome, _, _ = strings.Cut(outcome, ",")
		total[outcome] += v
	}
	return total
}

// A limiter in this process: what it answered is what is collected, and nobody waited, so there is no span. Its clock stands
// still, and so do 5 permits a second.
func TestMemoryLimiter(t *testing.T) {
	x := newTelemetry(t)
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithInitialPermits(5),
		tokenbucket.WithClock(clockwork.NewFakeClock()), tokenbucket.WithObserver(x.observe(t)))
	require.NoError(t, err)
	telemetrytest.Ten(t, limiter)
	got := x.collect(t)
	assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, outcomes(got, "decisions"))
	assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, outcomes(got, "permits"))
	assert.Equal(t, 5.0, got["wait.duration:count{bucket=fares,shadow=false}"])
	assert.Zero(t, got["wait.duration:sum{bucket=fares,shadow=false}"])
	assert.Empty(t, x.spans.GetSpans())
}

// The sixth of five permits at 5 a second waits 200 ms, and has a span in the caller's trace; so has a wait given up.
func TestWaits(t *testing.T) {
	x := newTelemetry(t)
	clock := clockwork.NewFakeClock()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithInitialPermits(5),
		tokenbucket.WithClock(clock), tokenbucket.WithObserver(x.observe(t)))
	require.NoError(t, err)
	_, err = limiter.Acquire(t.Context(), 5)
	require.NoError(t, err)
	ctx, parent := x.traces.Tracer("test").Start(t.Context(), "request")
	answered := make(chan error, 1)
	ask := func(ctx context.Context) {
		ok, err := limiter.TryAcquire(ctx, 1, time.Second)
		if err == nil && !ok {
			err = errors.New("refused")
		}
		answered <- err
	}
	go ask(ctx)
	require.NoError(t, clock.BlockUntilContext(t.Context(), 1))
	clock.Advance(200 * time.Millisecond)
	require.NoError(t, <-answered)
	given, giveUp := context.WithCancel(ctx)
	go ask(given)
	require.NoError(t, clock.BlockUntilContext(t.Context(), 1))
	giveUp()
	require.ErrorIs(t, <-answered, context.Canceled)
	parent.End()

	got := x.collect(t)
	assert.InDelta(t, 0.2, got["wait.duration:sum{bucket=fares,shadow=false}"], 1e-6)
	assert.Equal(t, map[string]float64{"granted": 6, "failed": 1}, outcomes(got, "permits"))
	spans := x.spans.GetSpans()
	require.Len(t, spans, 3)
	for _, s := range spans[:2] {
		assert.Equal(t, parent.SpanContext().SpanID(), s.Parent.SpanID())
		assert.GreaterOrEqual(t, s.EndTime.Sub(s.StartTime), time.Duration(0))
	}
	assert.Contains(t, spans[0].Attributes, attribute.Float64("tokenbucket.wait", 0.2))
	assert.Equal(t, codes.Error, spans[1].Status.Code)
	assert.Contains(t, spans[1].Attributes, attribute.String("error.type", "canceled"))
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
			x := newTelemetry(t)
			limiter, err := tokenbucket.NewSmoothBursty("fares", 5.0/3600, tokenbucket.WithMaxPermits(5), tokenbucket.WithInitialPermits(5),
				tokenbucket.WithStore(store(server.Client(t))), tokenbucket.WithStoreTimeout(30*time.Second),
				tokenbucket.WithObserver(x.observe(t)))
			require.NoError(t, err)
			telemetrytest.Ten(t, limiter)
			got := x.collect(t)
			assert.Equal(t, map[string]float64{"granted": 5, "refused": 5}, outcomes(got, "decisions"))
			stored := telemetrytest.Sum(telemetrytest.Of(got, "decisions{bucket=fares,decider=store"))
			assert.GreaterOrEqual(t, stored, 5.0)
			require.NoError(t, redistest.Poll(10*time.Second, func() error { // a batch may be told after its last call returned
				got = x.collect(t)
				return telemetrytest.Is(got, "batch.requests:sum{}", stored)
			}))
			assert.Equal(t, got["batch.requests:count{}"], got["store.trip.duration:count{}"])
			assert.Positive(t, got["store.trip.duration:sum{}"])
			assert.Empty(t, telemetrytest.Of(got, "store.trip.duration:count{error"))
			assert.Equal(t, 1.0, got["store.up{}"])
		})
	}
}

// A server that stops answering: every call that failed is counted and has a span, batches that were given up are counted,
// and the store is seen down, then up.
func TestRedisAway(t *testing.T) {
	server := redistest.Start(t)
	x := newTelemetry(t)
	limiter, err := tokenbucket.NewSmoothBursty("fares", 1000, tokenbucket.WithStoreTimeout(2*time.Second), // only the first call waits for so long
		tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(server.Client(t))), tokenbucket.WithObserver(x.observe(t)))
	require.NoError(t, err)
	var failed float64
	call := func() error {
		_, err := limiter.TryAcquire(t.Context(), 1, time.Second)
		if err != nil {
			failed++
		}
		return err
	}
	require.NoError(t, redistest.Poll(10*time.Second, call)) // the first call of a slow machine may take its time
	before := failed
	require.NoError(t, server.Stop())
	t.Cleanup(func() { _ = server.Continue() })
	for range 5 {
		_ = call()
	}
	require.Greater(t, failed, before, "the fault did not bite")
	got := x.collect(t)
	assert.Equal(t, failed, outcomes(got, "decisions")["failed"])
	var errored float64
	for _, s := range x.spans.GetSpans() {
		if s.Status.Code == codes.Error {
			errored++
		}
	}
	assert.Equal(t, failed, errored, "spans")
	require.NoError(t, redistest.Poll(10*time.Second, func() error {
		got = x.collect(t)
		if telemetrytest.Sum(telemetrytest.Of(got, "store.trip.duration:count{error")) == 0 {
			return errors.New("no batch was given up")
		}
		return telemetrytest.Is(got, "store.up{}", 0)
	}))
	assert.Equal(t, 1.0, got["policy.in_force{policy=FailClosed}"])

	require.NoError(t, server.Continue())
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		if err := call(); err != nil {
			return err
		}
		got = x.collect(t)
		return telemetrytest.Is(got, "store.up{}", 1)
	}))
	assert.GreaterOrEqual(t, got["store.outages{}"], 1.0)
	assert.Positive(t, got["store.away{}"])
	assert.Zero(t, got["policy.in_force{policy=FailClosed}"])
	t.Logf("failed calls %v, batches given up %v, outages %v, away %.3f s", failed,
		telemetrytest.Sum(telemetrytest.Of(got, "store.trip.duration:count{error")), got["store.outages{}"], got["store.away{}"])
}
