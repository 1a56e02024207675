package telemetry_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// library is a metrics library that keeps sums in a map, by the metric's name and the values of its labels.
type library struct {
	mu      sync.Mutex
	created map[string]int // how often each series was created
	sums    map[string]float64
}

func observe(t *testing.T, opts telemetry.Options) (*library, tokenbucket.Observer) {
	l := &library{created: map[string]int{}, sums: map[string]float64{}}
	r, err := telemetry.NewRecorder(telemetry.Limiter, telemetry.Prometheus, opts, l.create)
	require.NoError(t, err)
	return l, r.Limiter(nil)
}

func (l *library) create(m telemetry.Metric) (telemetry.Instrument, error) {
	return func(values []string) telemetry.Series {
		key := m.Name + " " + strings.Join(values, " ")
		l.mu.Lock()
		defer l.mu.Unlock()
		l.created[key]++
		return func(_ context.Context, value float64) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.sums[key] += value
		}
	}, nil
}

// Decisions that differ in a label have separate series, and each series is created once.
func TestDecisions(t *testing.T) {
	l, observer := observe(t, telemetry.DefaultOptions())
	errs := map[string]error{
		"timeout": tokenbucket.ErrStoreTimeout, "unavailable": tokenbucket.ErrStoreUnavailable, "lock": tokenbucket.ErrLockNotObtained,
		"corrupt": tokenbucket.ErrCorruptState, "other": telemetrytest.ErrOther, "canceled": context.Canceled,
		"deadline": context.DeadlineExceeded, "invalid": tokenbucket.ErrInvalidPermits, "crowded": tokenbucket.ErrTooManyWaiters,
	}
	deciders := []tokenbucket.Decider{tokenbucket.ByStore, tokenbucket.BySnapshot, tokenbucket.ByPrefetch, tokenbucket.BySwitch, tokenbucket.ByPolicy, tokenbucket.ByCheck, 99}
	for range 2 {
		for _, by := range deciders {
			for _, shadow := range []bool{false, true} {
				d := tokenbucket.Decision{Bucket: "x", Permits: 1, By: by, Shadow: shadow}
				observer.Decision(t.Context(), d)
				d.Granted = true
				observer.Decision(t.Context(), d)
				d.Granted = false
				for _, d.Err = range errs {
					observer.Decision(t.Context(), d)
				}
			}
		}
	}
	for _, by := range deciders {
		for _, shadow := range []string{"false", "true"} {
			for outcome, want := range map[string]float64{"granted": 2, "refused": 2, "failed": 2 * float64(len(errs))} {
				require.Equal(t, want, l.sums[fmt.Sprintf("tokenbucket_decisions_total x %s %s %s ", outcome, by, shadow)])
			}
			require.Equal(t, 1, l.created[fmt.Sprintf("tokenbucket_decisions_total x granted %s %s ", by, shadow)])
		}
	}
	for kind := range errs {
		require.Equal(t, float64(2*len(deciders)), l.sums[fmt.Sprintf("tokenbucket_failures_total x %s false ", kind)])
	}
}

// Decisions of a lower priority have series of their own, and those of Normal lack the label.
func TestPriorities(t *testing.T) {
	l, observer := observe(t, telemetry.DefaultOptions())
	for _, p := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Low, tokenbucket.Lowest, 7} {
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "x", Granted: true, Wait: time.Second, Priority: p})
	}
	for priority, want := range map[string]float64{"": 1, "low": 1, "lowest": 2} {
		require.Equal(t, want, l.sums["tokenbucket_decisions_total x granted store false "+priority])
		require.Equal(t, want, l.sums["tokenbucket_wait_duration_seconds x false "+priority])
	}
}

// Unknown deciders share a series.
func TestUnknownDeciders(t *testing.T) {
	l, observer := observe(t, telemetry.DefaultOptions())
	for i := range 10 {
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "x", By: tokenbucket.Decider(100 + i)})
	}
	require.Equal(t, 10.0, l.sums["tokenbucket_decisions_total x refused unknown false "])
}

// A bucket has series of its own up to the bound, in the order of first use.
func TestMaxBuckets(t *testing.T) {
	opts := telemetry.DefaultOptions()
	opts.MaxBuckets = 2
	l, observer := observe(t, opts)
	for range 2 {
		for _, name := range []string{"a", "\xff", "b", "c"} {
			observer.Decision(t.Context(), tokenbucket.Decision{Bucket: name})
		}
	}
	for name, want := range map[string]float64{"a": 2, "\uFFFD": 2, "other": 4, "b": 0} {
		require.Equal(t, want, l.sums["tokenbucket_decisions_total "+name+" refused store false "], name)
	}
}

// No name has the label value of the series that other names share, and no two names have the same.
func TestNamed(t *testing.T) {
	seen := map[string]bool{telemetry.OtherBuckets: true}
	for _, name := range []string{"/a", "others", `other"x`, "other", `"other"`, `""other""`} {
		require.False(t, seen[telemetry.Named(name)], "%s", name)
		seen[telemetry.Named(name)] = true
	}
	require.Equal(t, "/a", telemetry.Named("/a"))
}

// Options are checked before anything is registered, and an observer of another package than the recorder's is refused.
func TestInvalidOptions(t *testing.T) {
	valid := telemetry.DefaultOptions()
	for want, opts := range map[string]telemetry.Options{
		"max buckets 0":      {WaitBounds: valid.WaitBounds},
		"max buckets 10001":  {MaxBuckets: 10_001, WaitBounds: valid.WaitBounds},
		"wait bounds []":     {MaxBuckets: 1},
		"wait bounds [0]":    {MaxBuckets: 1, WaitBounds: []float64{0}},
		"wait bounds [2 2]":  {MaxBuckets: 1, WaitBounds: []float64{2, 2}},
		"wait bounds [NaN]":  {MaxBuckets: 1, WaitBounds: []float64{math.NaN()}},
		"wait bounds [+Inf]": {MaxBuckets: 1, WaitBounds: []float64{math.Inf(1)}},
	} {
		_, err := telemetry.NewRecorder(telemetry.Limiter, telemetry.Prometheus, opts, func(telemetry.Metric) (telemetry.Instrument, error) {
			t.Error(want + ": registered")
			return nil, nil
		})
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
	}
	l := &library{created: map[string]int{}, sums: map[string]float64{}}
	r, err := telemetry.NewRecorder(telemetry.Semaphore, telemetry.OpenTelemetry, valid, l.create)
	require.NoError(t, err)
	require.Panics(t, func() { r.Limiter(nil) })
	require.Panics(t, func() { r.SlidingWindow(nil) })
	require.NotPanics(t, func() { r.Semaphore(nil) })
}

// A value outside of a closed set has a name too.
func TestUnknownValues(t *testing.T) {
	for _, v := range []fmt.Stringer{telemetry.Kind(99), telemetry.Outcome(99), telemetry.End(99), telemetry.Naming(99), telemetry.MetricType(99)} {
		require.Equal(t, "unknown", v.String())
	}
}
