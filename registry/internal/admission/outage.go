package admission

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// outage is an outage of the semaphores' backend. One call in a while asks the backend; the others fail at once.
type outage struct {
	until atomic.Int64 // when the next call asks, by clock.Mono; 0 if there is no outage
	err   atomic.Pointer[error]
}

// askAgain is the time between two calls that ask during an outage.
const askAgain = time.Second

// known returns the error of the outage. It returns nil if there is none, and for the one call that shall ask the backend.
func (o *outage) known() error {
	until := o.until.Load()
	if until == 0 {
		return nil
	}
	now := int64(clock.Mono())
	if now < until || !o.until.CompareAndSwap(until, now+int64(askAgain)) {
		return *o.err.Load()
	}
	return nil
}

func (o *outage) began(err error) {
	o.err.Store(&err)
	o.until.Store(int64(clock.Mono() + askAgain))
}

func (o *outage) ended() {
	if o.until.Load() != 0 {
		o.until.Store(0)
	}
}

// isOutage reports whether an error of a semaphore means that its backend is unreachable or does not reply in time.
func isOutage(ctx context.Context, err error) bool {
	return ctx.Err() == nil && (errors.Is(err, semaphore.ErrStoreTimeout) || script.Away(err))
}
