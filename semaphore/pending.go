package semaphore

import (
	"context"
	"time"
)

// pending is a call that waits for the store's reply. The coordinator's mu guards it, except since and done, which do not change.
type pending struct {
	since    time.Duration // when the call began; see clock.Mono
	done     chan struct{} // closed by finish; nil if no caller waits
	finished bool
	err      error
}

// newPending returns the call of a caller that waits.
func newPending(now time.Duration) pending { return pending{since: now, done: make(chan struct{})} }

// waiting reports whether a caller waits and finish has not been called.
func (p *pending) waiting() bool { return p.done != nil && !p.finished }

// finish ends the call, unless it has ended already. c.mu must be held.
func (p *pending) finish(err error) {
	if p.waiting() {
		p.finished, p.err = true, err
		close(p.done)
	}
}

// fail ends a call that is overdue.
func (p *pending) fail(overdue overdue, err error) {
	if p.waiting() && overdue(p.since) {
		p.finish(err)
	}
}

// wait returns the result of the call, or ctx's error if ctx ends first.
func (p *pending) wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return ctx.Err()
	}
}
