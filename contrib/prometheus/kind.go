package prometheus

import (
	"context"
	"errors"
	"io"
	"net"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
)

// kind is what an error is counted as. The first five are those of a store.
type kind uint8

const (
	timeout kind = iota
	unavailable
	lock
	corrupt
	other
	canceled
	deadline
	invalid
	kinds

	storeKinds = canceled
)

var kindNames = [kinds]string{"timeout", "unavailable", "lock", "corrupt", "other", "canceled", "deadline", "invalid"}

func (k kind) String() string { return kindNames[k] }

// kindOf is the kind of a call's error. Order matters: the library's errors wrap what they come from, so that a store timeout
// may match a context's deadline too, and context.DeadlineExceeded is a net.Error.
func kindOf(err error) kind {
	var network net.Error
	isNetwork := errors.As(err, &network)
	switch {
	case errors.Is(err, tokenbucket.ErrStoreUnavailable):
		return unavailable
	case errors.Is(err, tokenbucket.ErrLockNotObtained):
		return lock
	case errors.Is(err, tokenbucket.ErrCorruptState):
		return corrupt
	case errors.Is(err, tokenbucket.ErrStoreTimeout):
		return timeout
	case errors.Is(err, tokenbucket.ErrInvalidPermits), errors.Is(err, tokenbucket.ErrInvalidConfig):
		return invalid
	case errors.Is(err, context.DeadlineExceeded):
		return deadline
	case errors.Is(err, context.Canceled):
		return canceled
	case isNetwork && network.Timeout(), errors.Is(err, redis.ErrPoolTimeout):
		return timeout
	case isNetwork, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), isAway(err):
		return unavailable
	}
	return other
}

// isAway tells whether a Redis server has answered that it cannot serve now.
func isAway(err error) bool {
	return redis.IsLoadingError(err) || redis.IsClusterDownError(err) || redis.IsMasterDownError(err)
}

// storeKind is the kind of a batch's error. No caller's context is part of it.
func storeKind(err error) kind {
	switch k := kindOf(err); k {
	case deadline:
		return timeout
	case canceled, invalid:
		return other
	default:
		return k
	}
}
