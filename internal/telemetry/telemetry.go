// Package telemetry is what the observers for Prometheus and OpenTelemetry count by, whatever they count with.
package telemetry

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"

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
	case errors.Is(err, tokenbucket.ErrInvalidPermits), errors.Is(err, tokenbucket.ErrInvalidConfig):
		return Invalid
	case errors.Is(err, tokenbucket.ErrTooManyWaiters):
		return Crowded
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
	return d.Permits > 0 && (d.Err == nil || d.By != tokenbucket.ByCheck)
}

// Deciders is how many there are, and one for those that came later.
const Deciders = int(tokenbucket.ByCheck) + 2

// Decider is the index of a decision's.
func Decider(d *tokenbucket.Decision) int { return min(int(d.By), Deciders-1) }

// Lease is how many permits of a lease were used, and how many were not.
func Lease(u tokenbucket.LeaseUse) (used, unused int) {
	used = min(max(0, u.Used), max(0, u.Permits))
	return used, max(0, u.Permits) - used
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
	name, _, _ := strings.Cut(h.Policy.String(), "(")
	if i := slices.Index(Policies[:], name); i >= 0 {
		s.InForce[i] = true
	}
	return begins, ends
}
