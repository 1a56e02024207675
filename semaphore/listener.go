package semaphore

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

const (
	// keepListening is how long a process goes on listening after its last waiter has left. To subscribe again costs two round trips.
	keepListening = 5 * time.Second
	// listenAgain is the pause after a Listen that failed.
	listenAgain = 100 * time.Millisecond
)

// listener receives the grants that the store sends, in a goroutine. It listens while requests wait, and for keepListening after that. The
// coordinator's mu guards the fields below; the others do not change.
type listener struct {
	store   store.Store
	process string
	tasks   *tasks
	ready   func()            // the store has begun to send grants; earlier ones may have been missed
	grant   func(store.Grant) // the store has sent a grant

	cancel context.CancelFunc // nil if the goroutine is not running
	until  time.Duration      // when the goroutine may stop
}

// listen makes sure that the goroutine runs for keepListening.
func (l *listener) listen(now time.Duration) {
	l.until = now + keepListening
	if l.cancel != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.tasks.run(func() {
		for ctx.Err() == nil {
			_ = l.store.Listen(ctx, l.process, l.ready, l.grant)
			select {
			case <-time.After(listenAgain):
			case <-ctx.Done():
			}
		}
	})
}

// rest is called while no request waits. It stops the goroutine if keepListening is over, and otherwise returns when that will be.
func (l *listener) rest(now time.Duration) (over time.Duration) {
	if now < l.until {
		return l.until
	}
	l.stop()
	return 0
}

// stop stops the goroutine. It does not wait for its end; see tasks.
func (l *listener) stop() {
	if l.cancel != nil {
		l.cancel()
		l.cancel = nil
	}
}

// onReady sends the waiters again whose grants may have been missed.
func (c *coordinator) onReady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiters.askAgain(nil)
	c.transport.ready()
}

// onGrant handles a grant that the store has sent.
func (c *coordinator) onGrant(g store.Grant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	c.view.grants++
	latest := c.view.server.Latest(now)
	r := c.waiters.sent[g.ID]
	if r != nil && !r.done && g.Outcome == store.Granted && g.Expires-c.lease.Microseconds() > latest {
		c.waiters.askAgainOne(r) // the store's clock has leapt, so the end of the lease is unknown until the next report
		c.transport.ready()
		return
	}
	c.admitted(g, now+time.Duration(g.Expires-latest)*time.Microsecond, now)
	c.setAlarm(now)
}
