// Package telemetry is what the observers for Prometheus and OpenTelemetry count by, whatever they count with.
package telemetry

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"reflect"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// Kind is what an error is counted as.
type Kind uint8

// Kinds of errors. The first StoreKinds of them are those of a store.
const (
	Timeout Kind = iota
	Unavailable
	Lock
	Corrupt
	Other
	Canceled
	Deadline
	Invalid
	Crowded

	Kinds      = Crowded + 1
	StoreKinds = Other + 1
)

func (k Kind) String() string {
	return [Kinds]string{"timeout", "unavailable", "lock", "corrupt", "other", "canceled", "deadline", "invalid", "crowded"}[k]
}

// KindOf is the kind of a call's error. Order matters: the library's errors wrap what they come from, so that a store timeout
// may match a context's deadline too, and context.DeadlineExceeded is a net.Error.
func KindOf(err error) Kind {
	var network net.Error
	var reply redis.Error
	var alert *net.OpError
	var kind Kind
	var met interface{ StoreFailure() error } // as a call has met it: rather than that the store was not asked
	if errors.As(err, &met) {
		return KindOf(met.StoreFailure())
	}
	isNetwork := errors.As(err, &network) && !(errors.As(err, &alert) && alert.Op == "remote error") // a TLS alert: it refuses the client
	switch {
	case errors.Is(err, tokenbucket.ErrStoreUnavailable):
		return Unavailable
	case errors.Is(err, tokenbucket.ErrLockNotObtained):
		return Lock
	case errors.Is(err, tokenbucket.ErrCorruptState):
		return Corrupt
	case errors.Is(err, tokenbucket.ErrStoreTimeout):
		return Timeout
	case errors.Is(err, tokenbucket.ErrInvalidPermits), errors.Is(err, tokenbucket.ErrNeverGranted),
		errors.Is(err, tokenbucket.ErrInvalidConfig):
		return Invalid
	case errors.Is(err, tokenbucket.ErrTooManyWaiters):
		return Crowded
	case packageKind(err, &kind):
		return kind
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

// StoreKindOf is the kind of a batch's error. No caller's context is part of it.
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

	Outcomes = Failed + 1
)

func (o Outcome) String() string { return [Outcomes]string{"granted", "refused", "failed"}[o] }

// OutcomeOf is a decision's.
func OutcomeOf(d *tokenbucket.Decision) Outcome {
	switch {
	case d.Err != nil:
		return Failed
	case d.Granted:
		return Granted
	}
	return Refused
}

// Counts tells whether the permits of a decision are counted. A call that failed its checks may have asked for any number.
func Counts(d *tokenbucket.Decision) bool {
	return d.Permits > 0 && (d.Err == nil || d.By != "check")
}

// Labels are what decisions are told apart by.
type Labels struct {
	Outcome Outcome
	Kind    Kind // of Failed
	Decider string
	Shadow  bool
}

// LabelsOf is a decision's.
func LabelsOf(d *tokenbucket.Decision) Labels {
	l := Labels{Outcome: OutcomeOf(d), Decider: cmp.Or(d.By, Deciders[0]), Shadow: d.Shadow}
	if l.Outcome == Failed {
		l.Kind = KindOf(d.Err)
	}
	return l
}

// Deciders are those who decide, see tokenbucket.Decision.
var Deciders = [...]string{"store", "snapshot", "lease", "switch", "policy", "check"}

// decider is the index of a decider.
func decider(by string) int {
	if i := slices.Index(Deciders[:], cmp.Or(by, Deciders[0])); i >= 0 {
		return i
	}
	return deciders - 1
}

// result is the index of the outcome, and of the kind if it failed.
func (l Labels) result() int { return int(l.Outcome) + int(l.Kind) }

const (
	results = int(Failed) + int(Kinds)
	// deciders is how many there are, and one for those that came later.
	deciders = len(Deciders) + 1
)

// Lease is how many permits of a lease were used, and how many were not.
func Lease(permits, used int) (spent, unused int) {
	spent = min(max(0, used), max(0, permits))
	return spent, max(0, permits) - spent
}

// Bounds of the number of values that the label bucket has.
const (
	DefaultMaxBuckets = 200
	MostBuckets       = 10_000
)

// OtherBuckets is the value that buckets beyond the bound share.
const OtherBuckets = "other"

// What the metrics are, as both observers describe them.
const (
	HelpDecisions = "Calls that were answered."
	HelpPermits   = "Permits that answered calls asked for; those of invalid calls are left out."
	HelpWaits     = "What granted calls waited for their permits; with shadow, would have waited."
	HelpLeases    = "Permits of blocks that have ended."
	HelpTrips     = "From sending a batch to the store until its answer, or until it was given up."
	HelpRequests  = "Requests that shared a batch."
	HelpLockWaits = "Waits for a bucket's lock, of batches that found it held."
	HelpUp        = "1 while the store answers, as far as this process has noticed, 0 while it is away."
	HelpOutages   = "Times that the store was noticed to be away."
	HelpAway      = "How long the store was away, counted when it is back."
	HelpInForce   = "1 for each failure policy that answers calls while the store is away."
)

// Upper bounds of the histograms; those of times are in seconds. Waits are from one millisecond, about what a decision in Redis
// takes, to a minute, which few callers are willing to wait.
var (
	Waits     = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	Trips     = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}
	Requests  = []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}
	LockWaits = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1}
)

// IsNil tells whether v is nil, or holds a pointer that is.
func IsNil(v any) bool {
	rv := reflect.ValueOf(v)
	return v == nil || rv.Kind() == reflect.Pointer && rv.IsNil()
}

// Policies are the names of all. How many instances share is left out, which would be a series each.
var Policies = [...]string{"FailClosed", "FailOpen", "LocalShare"}

// Store is whether a store is away, and by which Policies calls are answered then. It is what was heard last, whichever
// limiter was told: one may be told that the store is away, another that it is back, and an idle one neither.
type Store struct {
	Away    bool
	InForce [len(Policies)]bool
}

// Noticed tells whether an outage begins or ends with an event.
func (s *Store) Noticed(h tokenbucket.Health) (begins, ends bool) {
	begins, ends = h.Down && !s.Away, !h.Down && s.Away
	if s.Away = h.Down; !h.Down {
		s.InForce = [len(Policies)]bool{}
		return begins, ends
	}
	switch h.Policy {
	case tokenbucket.FailClosed:
		s.InForce[0] = true
	case tokenbucket.FailOpen:
		s.InForce[1] = true
	default:
		s.InForce[2] = true
	}
	return begins, ends
}
