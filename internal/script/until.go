package script

import (
	"context"
	"math"
	"sync"
	"time"
)

// Until creates the contexts of calls. Calls with about the same time left share a context, and so a timer. A separate context for each call
// would keep its timer until the deadline, long after most calls have returned. An Until is safe for concurrent use.
type Until struct {
	mu    sync.Mutex
	kinds map[int]context.Context // the latest context, by the logarithm of the time left; guarded by mu
}

// magnitude is the relative difference between the durations of one kind.
const magnitude = 0.01

// Context returns a context that ends before the deadline, by 5 % to 10 % of the time left. That leaves the caller time to return the cause.
func (u *Until) Context(deadline time.Time) context.Context {
	left := max(1, time.Until(deadline))
	kind := int(math.Log(float64(left)) / magnitude)
	u.mu.Lock()
	defer u.mu.Unlock()
	if ctx := u.kinds[kind]; ctx != nil {
		end, _ := ctx.Deadline()
		if rest := left - deadline.Sub(end); left-left/10 <= rest && rest < left {
			return ctx
		}
	}
	least := math.Exp(float64(kind) * magnitude)
	ctx, cancel := context.WithDeadline(context.Background(), deadline.Add(time.Duration(0.95*least)-left))
	context.AfterFunc(ctx, cancel) // not earlier: other calls may share it
	if u.kinds == nil {
		u.kinds = map[int]context.Context{}
	}
	u.kinds[kind] = ctx
	return ctx
}
