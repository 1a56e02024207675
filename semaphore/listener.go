package semaphore

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// keepListening is how long a process goes on listening after its last waiter has left. To subscribe again costs two round trips.
const keepListening = 5 * time.Second

// listener controls the goroutine that receives grants. It runs while requests wait, and for keepListening after that. The coordinator's mu
// guards it.
type listener struct {
	cancel context.CancelFunc // nil if the goroutine is not running
	until  time.Duration      // when the goroutine may stop
}

// stop stops the goroutine.
func (l *listener) stop() {
	if l.cancel != nil {
		l.cancel()
		l.cancel = nil
	}
}

// listen starts the listener if requests wait and it is not running. c.mu must be held.
func (c *coordinator) listen(now time.Duration) {
	if c.closed || len(c.waiters.sent) == 0 {
		return
	}
	c.listener.until = now + keepListening
	if c.listener.cancel != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	c.listener.cancel = cancel
	c.tasks.run(func() {
		for ctx.Err() == nil {
			_ = c.transport.store.Listen(ctx, c.process, c.onReady, c.onGrant)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
}

// onReady runs when the store has begun to send grants. Earlier ones may have been missed.
func (c *coordinator) onReady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiters.askAgain(nil)
	c.transport.ready(c)
}

// onGrant runs for each grant that the store sends.
func (c *coordinator) onGrant(g store.Grant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	c.view.grants++
	latest := c.view.server.Latest(now)
	r := c.waiters.sent[g.ID]
	if r != nil && !r.done && g.Outcome == store.Granted && g.Expires-c.lease.Microseconds() > latest {
		c.waiters.askAgainOne(r) // the store's clock has leapt, so the end of the lease is unknown until the next report
		c.transport.ready(c)
		return
	}
	c.admitted(g, now+time.Duration(g.Expires-latest)*time.Microsecond, now)
	c.setAlarm(now)
}
