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

// Kinds of errors. Those up to Other may be a store's; the rest are of calls alone.
const (
	NoError Kind = iota
	Timeout
	Unavailable
	Lock
	Corrupt
	Other
	Canceled
	Deadline
	Invalid
	Crowded

	kinds      = Crowded + 1
	storeKinds = Other + 1
)

// String returns the value of the label kind.
func (k Kind) String() string {
	return [kinds]string{"", "timeout", "unavailable", "lock", "corrupt", "other", "canceled", "deadline", "invalid", "crowded"}[k]
}

// ErrorType returns the value of the attribute error.type. The semantic conventions use _OTHER for errors without a name.
func (k Kind) ErrorType() string {
	if k == Other {
		return "_OTHER"
	}
	return k.String()
}

// KindOf returns the kind of a call's error. The order of the checks matters because errors wrap their causes: a store timeout may also match
// context.DeadlineExceeded, which in turn is a net.Error.
func KindOf(err error) Kind {
	if err == nil {
		return NoError
	}
	var met interface{ StoreFailure() error } // the call was sent and failed: its own error counts, not that the store is unavailable
	if errors.As(err, &met) {
		return KindOf(met.StoreFailure())
	}
	if kind := sentinelKind(err); kind != NoError {
		return kind
	}
	var network net.Error
	var reply redis.Error
	isNetwork := errors.As(err, &network) && !isTLSAlert(err)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return Deadline
	case errors.Is(err, context.Canceled):
		return Canceled
	case isNetwork && network.Timeout(), errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return Timeout
	case isNetwork, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &reply) && script.CannotServe(reply.Error()),
		script.Unreachable(err.Error()):
		return Unavailable
	}
	return Other
}

// sentinelKind returns the kind of the packages' own errors, or NoError. The first match counts.
func sentinelKind(err error) Kind {
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			return s.kind
		}
	}
	return NoError
}

var sentinels = [...]struct {
	err  error
	kind Kind
}{
	{tokenbucket.ErrStoreUnavailable, Unavailable},
	{tokenbucket.ErrLockNotObtained, Lock},
	{tokenbucket.ErrCorruptState, Corrupt},
	{tokenbucket.ErrStoreTimeout, Timeout},
	{tokenbucket.ErrInvalidPermits, Invalid},
	{tokenbucket.ErrNeverGranted, Invalid},
	{tokenbucket.ErrInvalidConfig, Invalid},
	{tokenbucket.ErrTooManyWaiters, Crowded},
	{slidingwindow.ErrStoreTimeout, Timeout},
	{semaphore.ErrStoreTimeout, Timeout},
	{slidingwindow.ErrStoreUnavailable, Unavailable},
	{slidingwindow.ErrCorruptState, Corrupt},
	{slidingwindow.ErrOverflow, Corrupt},
	{semaphore.ErrCorruptState, Corrupt},
	{slidingwindow.ErrInvalidConfig, Invalid},
	{slidingwindow.ErrInvalidPermits, Invalid},
	{semaphore.ErrInvalidConfig, Invalid},
	{semaphore.ErrInvalidPermits, Invalid},
	{semaphore.ErrTooMany, Invalid},
	{slidingwindow.ErrTooManyWaiters, Crowded},
	{semaphore.ErrTooManyWaiters, Crowded},
	{slidingwindow.ErrStoreUnusable, Other},
	{slidingwindow.ErrClock, Other},
	{semaphore.ErrClosed, Other},
}

// isTLSAlert reports whether the server refused this client during the TLS handshake. It replies, so it is not unavailable.
func isTLSAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

// StoreKindOf returns the kind of a batch's error. No caller's context is part of a batch.
func StoreKindOf(err error) Kind {
	switch k := KindOf(err); k {
	case Deadline:
		return Timeout
	case Canceled, Invalid, Crowded:
		return Other
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
	Failed

	outcomes = Failed + 1
)

// String returns the value of the label outcome.
func (o Outcome) String() string { return [outcomes]string{"granted", "refused", "failed"}[o] }

// DecisionLabels are the labels of a decision, except for its bucket.
type DecisionLabels struct {
	Outcome Outcome
	Kind    Kind // NoError unless the call failed
	Decider tokenbucket.Decider
	Shadow  bool
}

// LabelsOf returns the labels of a decision.
func LabelsOf(d *tokenbucket.Decision) DecisionLabels {
	l := DecisionLabels{Outcome: Refused, Decider: d.By, Shadow: d.Shadow}
	switch {
	case d.Err != nil:
		l.Outcome, l.Kind = Failed, KindOf(d.Err)
	case d.Granted:
		l.Outcome = Granted
	}
	return l
}

// deciders is the number of values of the label for the decider: those of tokenbucket.Decider, and unknown.
const deciders = int(tokenbucket.ByCheck) + 2

// deciderIndex returns the index of a decider. All unknown deciders share the last index.
func deciderIndex(by tokenbucket.Decider) int { return min(int(by), deciders-1) }

// End is how the holding of a semaphore's permit ended.
type End uint8

// Ends of holdings.
const (
	Released End = iota
	Expired
	Lost
	Closed
	OtherEnd

	ends = OtherEnd + 1
)

// String returns the value of the label end.
func (e End) String() string {
	return [ends]string{"released", "expired", "lost", "closed", "other"}[e]
}

// EndOf returns the end for its cause. It is Released for nil.
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
