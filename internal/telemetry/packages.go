package telemetry

import (
	"errors"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// What packages slidingwindow and semaphore tell is counted as what a limiter of tokenbucket tells.

// Package is what the metrics of one of them, or of tokenbucket itself, are called by.
type Package struct {
	Name  string // of the package: metrics begin with it
	Label string // what the name of a limiter, or of a semaphore, is the value of
	By    bool   // its decisions tell who made them
	Ends  bool   // its permits end

	// Shadow: its calls may be in shadow, and one that need not wait has waited for 0.
	Shadow bool
}

// The packages.
var (
	SlidingWindow = Package{Name: "slidingwindow", Label: "limiter", By: true}
	Limiter       = Package{Name: "tokenbucket", Label: "bucket", By: true, Shadow: true}
	Semaphore     = Package{Name: "semaphore", Label: "semaphore", Ends: true}
)

// What their metrics are, where it is not the same.
const (
	HelpFailures  = "Calls that ended with an error."
	HelpErrors    = "Batches that ended with an error of the store."
	HelpCallWaits = "What granted calls took until they had their permits; of a sliding window, those that had to wait."
	HelpHeld      = "How long permits were held, by how that ended."
)

// Held are the upper bounds of how long permits are held, in seconds.
var Held = []float64{.001, .01, .1, .5, 1, 5, 10, 30, 60, 300, 1800}

// WindowDecision is a decision of a sliding window. A wait of 0 was none.
func WindowDecision(d *slidingwindow.Decision) tokenbucket.Decision {
	by := d.By
	if by > slidingwindow.ByCheck { // label values are few
		by = slidingwindow.ByStore
	}
	return tokenbucket.Decision{
		Bucket: d.Limiter, Permits: d.Permits, Granted: d.Granted, Err: d.Err, By: by.String(), Wait: d.Wait, Elapsed: d.Elapsed,
	}
}

// SemaphoreDecision is a decision of a semaphore.
func SemaphoreDecision(d *semaphore.Decision) tokenbucket.Decision {
	by := "store"
	if errors.Is(d.Err, semaphore.ErrInvalid) {
		by = "check"
	}
	return tokenbucket.Decision{
		Bucket: d.Semaphore, Permits: d.Permits, Granted: d.Granted, Err: d.Err, By: by, Wait: d.Elapsed, Elapsed: d.Elapsed,
	}
}

// End is how a permit of a semaphore ended.
type End uint8

// Ends of permits.
const (
	Released End = iota
	Expired
	Lost
	Closed
	OtherEnd

	Ends = OtherEnd + 1
)

func (e End) String() string {
	return [Ends]string{"released", "expired", "lost", "closed", "other"}[e]
}

// EndOf is how a permit ended for a reason; nil: it was released.
func EndOf(err error) End {
	switch {
	case err == nil:
		return Released
	case errors.Is(err, semaphore.ErrExpired):
		return Expired
	case errors.Is(err, semaphore.ErrLost):
		return Lost
	case errors.Is(err, semaphore.ErrClosed):
		return Closed
	}
	return OtherEnd
}

// packageKind finds the kind of an error of these packages. It reports whether it is one.
func packageKind(err error, kind *Kind) bool {
	for _, k := range []struct {
		is   error
		kind Kind
	}{
		{slidingwindow.ErrTimeout, Timeout}, {semaphore.ErrTimeout, Timeout},
		{slidingwindow.ErrAway, Unavailable},
		{slidingwindow.ErrCorrupt, Corrupt}, {slidingwindow.ErrOverflow, Corrupt}, {semaphore.ErrCorrupt, Corrupt},
		{slidingwindow.ErrInvalid, Invalid}, {semaphore.ErrInvalid, Invalid}, {semaphore.ErrTooMany, Invalid},
		{slidingwindow.ErrTooManyWaiters, Crowded}, {semaphore.ErrTooManyWaiters, Crowded},
		{slidingwindow.ErrUnusable, Other}, {slidingwindow.ErrClock, Other}, {semaphore.ErrClosed, Other},
	} {
		if errors.Is(err, k.is) {
			*kind = k.kind
			return true
		}
	}
	return false
}
