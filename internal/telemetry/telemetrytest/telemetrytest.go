// Package telemetrytest is what the tests of the observers for Prometheus and OpenTelemetry share.
package telemetrytest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
)

// Of keeps the series whose key begins with one of the prefixes.
func Of(series map[string]float64, prefixes ...string) map[string]float64 {
	kept := map[string]float64{}
	for key, value := range series {
		for _, p := range prefixes {
			if strings.HasPrefix(key, p) {
				kept[key] = value
			}
		}
	}
	return kept
}

// Sum adds up series.
func Sum(series map[string]float64) (total float64) {
	for _, v := range series {
		total += v
	}
	return total
}

// ErrOther is of no kind.
var ErrOther = errors.New("never heard of")

// Wrap wraps an error as the library does.
func Wrap(err error) error { return fmt.Errorf("bucket %q: %w", "fares", err) }

// Decisions are one of every kind.
var Decisions = []tokenbucket.Decision{
	{Bucket: "fares", Permits: 2, Granted: true, Wait: 200 * time.Millisecond, Elapsed: 201 * time.Millisecond},
	{Bucket: "fares", Permits: 1, Granted: true},
	{Bucket: "fares", Permits: 1, Granted: true, By: "lease"},
	{Bucket: "fares", Permits: 3, Wait: time.Second}, // refused: nobody waited that second
	{Bucket: "fares", Permits: 1, By: "snapshot"},
	{Bucket: "fares", Permits: 1, By: "snapshot"},
	{Bucket: "fares", Permits: 1, By: "snapshot", Shadow: true},
	{Bucket: "fares", Permits: 1, Granted: true, Wait: time.Minute, Shadow: true},
	{Bucket: "fares", Permits: 1, Granted: true, By: "switch"},
	{Bucket: "fares", Permits: 1, Granted: true, By: "policy"},
	{Bucket: "fares", Permits: 1, By: "policy", Err: Wrap(tokenbucket.ErrStoreUnavailable)},
	{Bucket: "fares", Permits: 4, Err: Wrap(tokenbucket.ErrStoreTimeout), Elapsed: time.Second},
	{Bucket: "fares", Permits: 1, Err: context.Canceled, Elapsed: 5 * time.Millisecond},
	// A counter cannot go down, and an int full of permits that nobody could get would drown all others.
	{Bucket: "fares", Permits: -7, By: "check", Err: Wrap(tokenbucket.ErrInvalidPermits)},
	{Bucket: "fares", Permits: math.MaxInt, By: "check", Err: Wrap(tokenbucket.ErrInvalidPermits)},
	{Bucket: "hotels", Permits: 1, Granted: true, By: "unknown"},
}

// Happen is everything once, with a context that has ended, as those of failed calls often have.
func Happen(observer tokenbucket.Observer) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for _, d := range Decisions {
		observer.Decision(ctx, d)
	}
	observer.Trip(tokenbucket.Trip{Bucket: "fares", Requests: 1, Elapsed: 200 * time.Microsecond})
	observer.Trip(tokenbucket.Trip{Bucket: "fares", Requests: 60, Elapsed: 300 * time.Microsecond, LockWait: 20 * time.Millisecond})
	observer.Trip(tokenbucket.Trip{Bucket: "hotels", Requests: 3, Elapsed: time.Second, Err: Wrap(tokenbucket.ErrStoreTimeout)})
	observer.Lease("fares", 10, 7)
	observer.Lease("fares", 5, 5)
	observer.Health(tokenbucket.Health{Bucket: "fares", Down: true, Policy: tokenbucket.FailOpen, Err: ErrOther})
	observer.Health(tokenbucket.Health{Bucket: "fares", After: 1500 * time.Millisecond})
}

// Ten asks a full bucket of five for ten permits, one by one and without patience: five are granted, five are refused.
func Ten(t *testing.T, limiter *tokenbucket.RateLimiter) {
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

// Is is an error unless a series has a value.
func Is(series map[string]float64, key string, want float64) error {
	if got, ok := series[key]; !ok || got != want {
		return fmt.Errorf("%s is %v, want %v", key, got, want)
	}
	return nil
}
