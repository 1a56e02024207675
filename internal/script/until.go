package script

import (
	"context"
	"sync"
	"time"
)

// Until makes contexts of calls whose deadlines are about as far ahead: one timer serves many. It is safe for concurrent use.
type Until struct {
	mu  sync.Mutex
	ctx context.Context
	end time.Time // of ctx
}

// Context returns one that ends a twentieth to a tenth of the time that is left before a deadline: in time to tell why there is no
// answer.
func (u *Until) Context(deadline time.Time) context.Context {
	u.mu.Lock()
	defer u.mu.Unlock()
	left := time.Until(deadline)
	if u.end.After(deadline) || time.Until(u.end) < left-left/10 {
		u.end = deadline.Add(-left / 20)
		ctx, cancel := context.WithDeadline(context.Background(), u.end)
		context.AfterFunc(ctx, cancel) // others may be under way with it
		u.ctx = ctx
	}
	return u.ctx
}
