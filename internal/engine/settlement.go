package engine

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Limiter returns the limiter of a call.
func (q *Call) Limiter() *Limiter { return q.limiter }

// Origin returns the origin of the permits of a granted call.
func (c *Coordinator) Origin(q *Call) permit.Origin {
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.Origin
}

// Claim ends a granted reservation, so that its caller may settle it. It reports false if the reservation has ended before.
func (c *Coordinator) Claim(q *Call) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.promise.end.Claim(permit.Settled)
}

// Settle replaces the permits of a reservation, the estimate, by those that its call has used, at least 0. deadline is that of the context,
// see [Call].
//
// A reservation that is not due keeps its place in the queue with fewer permits, and the others go back as in Cancel. What it was gathering, and what
// was due before, the store gives back to the bucket. More permits are taken from the bucket as a reservation is, and no caller waits for them.
func (c *Coordinator) Settle(ctx context.Context, q *Call, estimate, actual int64, deadline time.Duration) Result {
	more, r := c.shrink(q, estimate, actual)
	var settlement *Call
	switch {
	case more > 0:
		settlement = NewCharge(q.limiter, more, permit.MaxExact, 0)
	case more < 0:
		settlement = NewOperation(q.limiter, &Operation{Request: permit.Request{Op: permit.Settle, Permits: more, Origin: c.Origin(q)}}, deadline)
	default:
		return Result{Granted: true, Err: r.confirmed(ctx, &c.Config, "settle")}
	}
	got := c.Wait(ctx, settlement, c.Submit(ctx, settlement))
	if got.Err == nil {
		got.Err = r.confirmed(ctx, &c.Config, "settle")
	}
	return got
}

// shrink lowers the number of permits of a reservation that is not due. It returns how many permits more than the estimate are still to be taken,
// and the refund of the permits that it gave up, which is nil if none is sent now.
func (c *Coordinator) shrink(q *Call, estimate, permits int64) (more int64, r *refund) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Now()
	c.queue.release(now)
	if more = permits - estimate; more >= 0 || q.state != waiting {
		return more, nil
	}
	more = -c.queue.shrink(q, permits, now)
	return more, c.sendBack(q, now)
}
