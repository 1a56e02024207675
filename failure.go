package tokenbucket

import (
	"context"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// fallback is this process's part of the bucket, for when the store is away.
type fallback struct {
	local  *coordinator   // nil: not needed yet
	served bool           // the store has served the bucket since local was asked last
	outage *outage.Outage // in which that was
}

// part gives a limiter the line of this process's part of the bucket, while the store is away. It is the same line in every outage, so that
// what was reserved in one counts in the next. In another outage, or if the store has served the bucket meanwhile, the part begins empty:
// after a penalty that is known of, and after what is reserved in the bucket itself unless somebody waits in the part already.
func (c *coordinator) part(limiter *limiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := &c.fallback
	begins := f.served
	if f.local == nil {
		f.local, begins = coordinatorOf(c.parts, c.name, c.clock, 0), true
	}
	if o := c.down(); o != nil && o != f.outage {
		f.outage, begins = o, true
	}
	p := f.local
	if limiter.coordinator == nil {
		limiter.coordinator = p
	}
	if !begins {
		return
	}
	f.served = false
	now := c.now()
	ahead := max(1, c.heard.heldTill-now) // at least that: a hold drops what is saved up
	p.mu.Lock()
	idle := p.waiters.last() <= now
	p.mu.Unlock()
	if idle {
		ahead = max(ahead, c.waiters.last()-now)
	}
	p.submit(context.Background(), &call{limiter: limiter, verb: penalize, order: &order{micros: ahead}, ready: make(chan struct{})})
}

// down is the outage that was noticed, or nil: a store in this process has none.
func (c *coordinator) down() *outage.Outage {
	if c.health == nil {
		return nil
	}
	return c.health.Down()
}

// failAll fails all calls that want to ask the store, which is away. It leaves out calls that are under way, and those whose turn to ask
// has not come.
func (c *coordinator) failAll(o *outage.Outage) {
	c.health.failed(c)
	now := c.now()
	c.heard.at = now
	err := fmt.Errorf("%w: bucket %q: since %v: %w", ErrStoreUnavailable, c.label(), time.Since(o.Since).Round(time.Millisecond), o.Err)
	for _, q := range c.aside {
		c.fail(q, err)
	}
	c.aside, c.leases.refill = nil, false
	for w := c.waiters.asker(now); w != nil; {
		q := w.Value
		if w = w.Following(); q.flight == nil {
			c.fail(q, err)
		}
	}
	for _, r := range c.refunds {
		r.settle(false, err, now)
	}
	c.refunds = nil
	if line := c.waiters.line; line.Refund() != nil {
		line.Refunded(false, false, now)
		c.waiters.confirmFailed(err)
	}
}
