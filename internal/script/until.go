package script

import (
	"context"
	"math"
	"sync"
	"time"
)

// Until makes contexts of calls: those with about as much time left share one, and with it one timer. Deadlines may differ as callers'
// do: a context of its own for each call would last until the deadline, long after the call. It is safe for concurrent use.
type Until struct {
	mu    sync.Mutex
	kinds map[int]context.Context // the newest, by the magnitude of the time left
}

// magnitude is by how much times may differ that are of a kind.
const magnitude = 0.01

// Context returns one that ends a twentieth to a tenth of the time that is left before a deadline: in time to tell why there is no
// answer.
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
	context.AfterFunc(ctx, cancel) // others may be under way with it
	if u.kinds == nil {
		u.kinds = map[int]context.Context{}
	}
	u.kinds[kind] = ctx
	return ctx
}
