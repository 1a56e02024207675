package telemetrytest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// ErrOther is an error of no known kind.
var ErrOther = errors.New("unknown failure")

// Wrap wraps an error as the library does.
func Wrap(err error) error { return fmt.Errorf("bucket %q: %w", "fares", err) }

// Decisions has a decision of every kind. One waited without shadow, five failed.
var Decisions = []tokenbucket.Decision{
	{Bucket: "fares", Permits: 2, Granted: true, Wait: 200 * time.Millisecond, Elapsed: 201 * time.Millisecond},
	{Bucket: "fares", Permits: 1, Granted: true},
	{Bucket: "fares", Permits: 1, Granted: true, By: tokenbucket.ByPrefetch},
	{Bucket: "fares", Permits: 3, Wait: time.Second}, // refused: no caller waited that second
	{Bucket: "fares", Permits: 1, By: tokenbucket.BySnapshot},
	{Bucket: "fares", Permits: 1, By: tokenbucket.BySnapshot},
	{Bucket: "fares", Permits: 1, By: tokenbucket.BySnapshot, Shadow: true},
	{Bucket: "fares", Permits: 1, Granted: true, Wait: time.Minute, Shadow: true},
	{Bucket: "fares", Permits: 1, Granted: true, By: tokenbucket.BySwitch},
	{Bucket: "fares", Permits: 1, Granted: true, By: tokenbucket.ByPolicy},
	{Bucket: "fares", Permits: 1, By: tokenbucket.ByPolicy, Err: Wrap(tokenbucket.ErrStoreUnavailable)},
	{Bucket: "fares", Permits: 4, Err: Wrap(tokenbucket.ErrStoreTimeout), Elapsed: time.Second},
	{Bucket: "fares", Permits: 1, Err: context.Canceled, Elapsed: 5 * time.Millisecond},
	// Permits of invalid calls are not counted: a counter cannot decrease, and MaxInt would hide all other permits.
	{Bucket: "fares", Permits: -7, By: tokenbucket.ByCheck, Err: Wrap(tokenbucket.ErrInvalidPermits)},
	{Bucket: "fares", Permits: math.MaxInt, By: tokenbucket.ByCheck, Err: Wrap(tokenbucket.ErrInvalidPermits)},
	{Bucket: "hotels", Permits: 1, Granted: true, By: 99},
	{Bucket: "hotels", Permits: 1, Granted: true, Priority: tokenbucket.Low},
	{Bucket: "hotels", Permits: 1, By: tokenbucket.ByPriority, Priority: tokenbucket.Lowest},
}

// Report reports every kind of event to an observer. Its context has ended, as that of a failed call often has.
func Report(observer tokenbucket.Observer) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for _, d := range Decisions {
		observer.Decision(ctx, d)
	}
	observer.Trip(tokenbucket.Trip{Bucket: "fares", Requests: 1, Elapsed: 200 * time.Microsecond})
	observer.Trip(tokenbucket.Trip{Bucket: "fares", Requests: 60, Elapsed: 300 * time.Microsecond, LockWait: 20 * time.Millisecond})
	observer.Trip(tokenbucket.Trip{Bucket: "hotels", Requests: 3, Elapsed: time.Second, Err: Wrap(tokenbucket.ErrStoreTimeout)})
	observer.Prefetch("fares", 10, 7)
	observer.Prefetch("fares", 5, 5)
	observer.Lost("fares", 3)
	observer.Lost("fares", 1)
	observer.Lost("fares", -1)
	observer.Health(tokenbucket.Health{Bucket: "fares", Down: true, Policy: tokenbucket.FailOpen, Err: ErrOther})
	observer.Health(tokenbucket.Health{Bucket: "fares", After: 1500 * time.Millisecond})
}

// ReportPackages reports every kind of event to observers of sliding windows and semaphores.
func ReportPackages(window slidingwindow.Observer, sem semaphore.Observer) {
	ctx := context.Background()
	window.Decision(ctx, slidingwindow.Decision{Limiter: "fares", Permits: 2, Granted: true, Wait: time.Second})
	window.Decision(ctx, slidingwindow.Decision{Limiter: "fares", Permits: 1, Granted: true, By: slidingwindow.ByPolicy}) // did not wait
	window.Decision(ctx, slidingwindow.Decision{Limiter: "fares", Permits: 1, By: slidingwindow.BySnapshot, Wait: time.Second})
	window.Decision(ctx, slidingwindow.Decision{Limiter: "fares", Permits: 1, Err: fmt.Errorf("%w: %w", slidingwindow.ErrStoreUnavailable, ErrOther)})
	window.Trip(slidingwindow.Trip{Requests: 3, Elapsed: time.Second, Err: slidingwindow.ErrCorruptState})
	window.Health(slidingwindow.Health{Down: true})
	window.Health(slidingwindow.Health{Down: true})
	window.Health(slidingwindow.Health{After: 2 * time.Second})
	sem.Decision(ctx, semaphore.Decision{Semaphore: "fares", Permits: 2, Granted: true, Elapsed: time.Second})
	sem.Decision(ctx, semaphore.Decision{Semaphore: "fares", Permits: 2})
	sem.Decision(ctx, semaphore.Decision{Semaphore: "fares", Permits: 4, Err: Wrap(semaphore.ErrStoreTimeout)})
	sem.Decision(ctx, semaphore.Decision{Semaphore: "fares", Permits: -1, Err: Wrap(semaphore.ErrInvalidPermits)})
	for _, err := range []error{nil, semaphore.ErrExpired, semaphore.ErrLost, semaphore.ErrClosed, ErrOther} {
		sem.Lease(semaphore.LeaseUse{Semaphore: "fares", Permits: 2, Held: time.Second, Err: err})
	}
	sem.Trip(semaphore.Trip{Requests: 3, Elapsed: time.Second, Err: semaphore.ErrStoreTimeout})
	sem.Health(semaphore.Health{Down: true})
	sem.Health(semaphore.Health{After: 3 * time.Second})
}

// ReportAll reports every kind of event to observers of all packages.
func ReportAll[O any](t testing.TB, a Adapter[O]) {
	t.Helper()
	limiter, err := a.Limiter()
	require.NoError(t, err)
	window, err := a.SlidingWindow()
	require.NoError(t, err)
	sem, err := a.Semaphore()
	require.NoError(t, err)
	Report(limiter)
	ReportPackages(window, sem)
}
