package gate

import (
	"context"
	"errors"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// errNothing is the error for a gate that breaks its contract.
var errNothing = errors.New("the gate returned neither an admission nor an error")

// Ask enters a gate on behalf of an adapter such as httplimit or contrib/grpc, so that all adapters interpret its reply alike:
//
//   - A call that does not begin holds nothing, even if the gate returned an Admission beside the refusal or the error.
//   - If the deadline of ctx is before the end of the wait, the call is refused, not failed. RetryAfter is the time until the remaining
//     wait fits into what is left of ctx.
//   - If ctx has ended, the error is that of the context, even if the call was admitted, because its result could not be used.
func Ask(ctx context.Context, g Gate, key string) (*Admission, error) {
	a, err := g.Enter(ctx, key)
	return judge(ctx, a, err)
}

// judge returns the reply of a gate to its adapter.
func judge(ctx context.Context, a *Admission, err error) (*Admission, error) {
	if err == nil && a == nil {
		err = errNothing
	}
	ended := ctx.Err() // read once: it may change at any time
	if a != nil && (err != nil || !a.OK || ended != nil) {
		a.Leave()
	}
	var long *tokenbucket.WaitError
	switch {
	case ended != nil && (err != nil || a.OK):
		return nil, ended
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
