package gate

import (
	"context"
	"errors"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// errNothing is of a gate that breaks its contract.
var errNothing = errors.New("the gate returned neither an admission nor an error")

// Ask enters a gate for an adapter such as httplimit or contrib/grpc, so that all adapters read a gate's reply alike:
//
//   - A call that does not begin holds nothing, whatever the gate returned beside the refusal or the error.
//   - A wait that only ctx is too short for is a refusal, not a failure. Its RetryAfter is when the rest of the wait is as short as what is
//     left of ctx.
//   - If ctx has ended, the error is the context's, even if the call was admitted: nothing would come of it.
func Ask(ctx context.Context, g Gate, key string) (*Admission, error) {
	a, err := g.Enter(ctx, key)
	if err == nil && a == nil {
		err = errNothing
	}
	if a != nil && (err != nil || !a.OK || ctx.Err() != nil) {
		a.Leave()
	}
	var long *tokenbucket.WaitError
	switch {
	case ctx.Err() != nil && (err != nil || a.OK):
		return nil, ctx.Err()
	case errors.As(err, &long) && errors.Is(long.Reason, context.DeadlineExceeded):
		return &Admission{RetryAfter: sooner(ctx, long.Wait)}, nil
	case err != nil:
		return nil, err
	}
	return a, nil
}

// sooner returns when a wait will have become as short as ctx lasts. It is all of the wait if ctx lasts longer: then the gate has a deadline
// of its own.
func sooner(ctx context.Context, wait time.Duration) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return wait
	}
	if left := max(0, time.Until(deadline)); left < wait {
		return wait - left
	}
	return wait
}
