package telemetry

import (
	"context"
	"errors"
	"io"
	"net"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Kind is the class of an error in metrics.
type Kind uint8

// Kinds of errors. Those up to KindOther may be a store's; the rest are of calls alone.
const (
	KindNone        Kind = iota // no error
	KindTimeout                 // the store did not reply in time
	KindUnavailable             // the store cannot be reached, or cannot serve now
	KindLock                    // the bucket's lock was not obtained in time
	KindCorrupt                 // the state was not written by this library
	KindOther                   // none of these kinds
	KindCanceled                // the context of the call was cancelled
	KindDeadline                // the deadline of the call's context has passed, or is before the permits are due
	KindInvalid                 // the call can never be granted
	KindCrowded                 // too many callers wait

	kinds      = KindCrowded + 1
	storeKinds = KindOther + 1
)

// alertKinds are the kinds of failures that are neither the caller's mistake nor its end.
var alertKinds = [...]Kind{KindTimeout, KindUnavailable, KindLock, KindCorrupt, KindOther, KindCrowded}

// String returns the value of the label kind.
func (k Kind) String() string {
	return nameOf(k, "", "timeout", "unavailable", "lock", "corrupt", "other", "canceled", "deadline", "invalid", "crowded")
}

// ErrorType returns the value of the attribute error.type. The semantic conventions use _OTHER for errors without a name.
func (k Kind) ErrorType() string {
	if k == KindOther {
		return "_OTHER"
	}
	return k.String()
}

// KindOf returns the kind of a call's error. The order of the checks matters because errors wrap their causes: a store timeout may also match
// context.DeadlineExceeded, which in turn is a net.Error.
func KindOf(err error) Kind {
	if err == nil {
		return KindNone
	}
	var met interface{ StoreFailure() error } // the call was sent and failed: its own error counts, not that the store is unavailable
	if errors.As(err, &met) {
		return KindOf(met.StoreFailure())
	}
	if kind := sentinelKind(err); kind != KindNone {
		return kind
	}
	var network net.Error
	var reply redis.Error
	isNetwork := errors.As(err, &network) && !isTLSAlert(err)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return KindDeadline
	case errors.Is(err, context.Canceled):
		return KindCanceled
	case isNetwork && network.Timeout(), errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return KindTimeout
	case isNetwork, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &reply) && script.CannotServe(reply.Error()),
		script.Unreachable(err.Error()):
		return KindUnavailable
	}
	return KindOther
}

// sentinelKind returns the kind of the packages' own errors, or KindNone. The first match counts.
func sentinelKind(err error) Kind {
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			return s.kind
		}
	}
	return KindNone
}

var sentinels = [...]struct {
	err  error
	kind Kind
}{
	{tokenbucket.ErrStoreUnavailable, KindUnavailable},
	{tokenbucket.ErrLockNotObtained, KindLock},
	{tokenbucket.ErrCorruptState, KindCorrupt},
	{tokenbucket.ErrStoreTimeout, KindTimeout},
	{tokenbucket.ErrInvalidPermits, KindInvalid},
	{tokenbucket.ErrNeverGranted, KindInvalid},
	{tokenbucket.ErrInvalidConfig, KindInvalid},
	{tokenbucket.ErrTooManyWaiters, KindCrowded},
	{slidingwindow.ErrStoreTimeout, KindTimeout},
	{semaphore.ErrStoreTimeout, KindTimeout},
	{slidingwindow.ErrStoreUnavailable, KindUnavailable},
	{slidingwindow.ErrCorruptState, KindCorrupt},
	{slidingwindow.ErrOverflow, KindCorrupt},
	{semaphore.ErrCorruptState, KindCorrupt},
	{slidingwindow.ErrInvalidConfig, KindInvalid},
	{slidingwindow.ErrInvalidPermits, KindInvalid},
	{semaphore.ErrInvalidConfig, KindInvalid},
	{semaphore.ErrInvalidPermits, KindInvalid},
	{semaphore.ErrTooMany, KindInvalid},
	{slidingwindow.ErrTooManyWaiters, KindCrowded},
	{semaphore.ErrTooManyWaiters, KindCrowded},
	{slidingwindow.ErrStoreUnusable, KindOther},
	{slidingwindow.ErrClock, KindOther},
	{semaphore.ErrClosed, KindOther},
}

// isTLSAlert reports whether the server refused this client during the TLS handshake. It replies, so it is not unavailable.
func isTLSAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

// StoreKindOf returns the kind of a batch's error. No caller's context is part of a batch.
func StoreKindOf(err error) Kind {
	switch k := KindOf(err); k {
	case KindDeadline:
		return KindTimeout
	case KindCanceled, KindInvalid, KindCrowded:
		return KindOther
	default:
		return k
	}
}

// Outcome is how a call ended.
type Outcome uint8

// Outcomes of calls.
const (
	Granted Outcome = iota
	Refused
	Failed // with an error

	outcomes = Failed + 1
)

// String returns the value of the label outcome.
func (o Outcome) String() string { return nameOf(o, "granted", "refused", "failed") }

// DecisionLabels are the labels of a decision, except for its bucket.
type DecisionLabels struct {
	Outcome Outcome
	Kind    Kind // KindNone unless the call failed
	Decider tokenbucket.Decider
	Shadow  bool
	// Priority of the limiter.
	Priority tokenbucket.Priority
}

// LabelsOf returns the labels of a decision.
func LabelsOf(d *tokenbucket.Decision) DecisionLabels {
	l := DecisionLabels{Outcome: Refused, Decider: d.By, Shadow: d.Shadow, Priority: min(d.Priority, tokenbucket.Lowest)}
	switch {
	case d.Err != nil:
		l.Outcome, l.Kind = Failed, KindOf(d.Err)
	case d.Granted:
		l.Outcome = Granted
	}
	return l
}

// priorityName returns the value of the label for a priority. Normal has none, so the series of a limiter do not change when callers of a
// lower priority are added.
func priorityName(p tokenbucket.Priority) string {
	if p == tokenbucket.Normal {
		return ""
	}
	return p.String()
}

// deciders is the number of values of the label for the decider: those of tokenbucket.Decider, and unknown.
const deciders = int(tokenbucket.ByPriority) + 2

// deciderIndex returns the index of a decider. All unknown deciders share the last index.
func deciderIndex(by tokenbucket.Decider) int { return min(int(by), deciders-1) }

// End is how the holding of a semaphore's permit ended.
type End uint8

// Ends of holdings.
const (
	EndReleased End = iota
	EndExpired      // of a lease that was not renewed in time: semaphore.ErrExpired
	EndLost         // semaphore.ErrLost
	EndClosed       // semaphore.ErrClosed
	EndOther

	ends = EndOther + 1
)

// String returns the value of the label end.
func (e End) String() string {
	return nameOf(e, "released", "expired", "lost", "closed", "other")
}

// EndOf returns the end for its cause. It is EndReleased for nil.
func EndOf(err error) End {
	switch {
	case err == nil:
		return EndReleased
	case errors.Is(err, semaphore.ErrExpired):
		return EndExpired
	case errors.Is(err, semaphore.ErrLost):
		return EndLost
	case errors.Is(err, semaphore.ErrClosed):
		return EndClosed
	}
	return EndOther
}

// nameOf returns the name of a value of a closed set, and "unknown" for a value outside of it.
func nameOf[T ~uint8](value T, names ...string) string {
	if int(value) < len(names) {
		return names[value]
	}
	return "unknown"
}
