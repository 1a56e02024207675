package semaphore

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// keepListening is for how long a process goes on listening when nobody waits any more: to begin costs two round trips.
const keepListening = 5 * time.Second

// listener is the goroutine that hears of grants, while anybody waits and a while longer. The coordinator's lock guards it.
type listener struct {
	cancel context.CancelFunc // nil: nobody listens
	until  time.Duration      // it goes on until then though nobody waits
}

func (l *listener) stop() {
	if l.cancel != nil {
		l.cancel()
		l.cancel = nil
	}
}

// listen makes sure that somebody listens if anybody waits. mu is held.
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
			_ = c.transport.backend.Listen(ctx, c.process, c.onReady, c.onGrant)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
}

// onReady is called when the backend has begun to tell: what it told before is lost.
func (c *coordinator) onReady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiters.askAgain(nil)
	c.transport.ready(c)
}

// onGrant is called for each grant that the backend tells.
func (c *coordinator) onGrant(g Grant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	c.heard.grants++
	latest := c.heard.server.Latest(now)
	r := c.waiters.sent[g.ID]
	if r != nil && !r.done && g.Outcome == Granted && g.Expires-c.lease.Microseconds() > latest {
		c.waiters.askAgainOne(r) // its clock has leapt: how long the lease will last is not known, until it is renewed
		c.transport.ready(c)
		return
	}
	c.admitted(g, now+time.Duration(g.Expires-latest)*time.Microsecond, now)
	c.setAlarm(now)
}
