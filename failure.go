package tokenbucket

import (
	"context"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// part gives a limiter the line of this process's part of the bucket, while the store is away: the same in every outage, so that what was
// reserved in one counts in the next. In another outage, or if the store has served the bucket meanwhile, it begins empty, once
// what is reserved in the bucket itself is through, or a penalty that is known of; nobody who waits already waits for the former.
func (l *line) part(limiter *RateLimiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	begins := l.served
	if l.local == nil {
		l.local, begins = lineOf(l.parts, l.name, l.clock, 0), true // whatever their timeouts, all limiters of the name share it
	}
	if o := l.down(); o != nil && o != l.outage {
		l.outage, begins = o, true
	}
	p := l.local
	if limiter.line == nil {
		limiter.line = p
	}
	if !begins {
		return
	}
	l.served = false
	now := l.now()
	ahead := max(1, l.heldTill-now) // at least that: a hold drops what is saved up
	p.mu.Lock()
	idle := p.lastDue <= now
	p.mu.Unlock()
	if idle {
		ahead = max(ahead, l.lastDue-now)
	}
	p.submit(context.Background(), &call{limiter: limiter, op: OpHold, hold: ahead, ready: make(chan struct{})})
}

// down is the outage that was noticed, or nil: a store in this process has none.
func (l *line) down() *outage.Outage {
	if l.health == nil {
		return nil
	}
	return l.health.Down()
}

// ground fails all who want to ask the store, which is away.
func (l *line) ground(o *outage.Outage) {
	l.health.failed(l)
	l.listened = l.now()
	err := fmt.Errorf("%w: bucket %q: since %v: %w", ErrStoreUnavailable, l.label(), time.Since(o.Since).Round(time.Millisecond), o.Err)
	var promised []*call
	for _, c := range l.queue {
		if !c.done && c.fail(err) {
			promised = append(promised, c)
		}
	}
	l.queue, l.refill = nil, false
	for _, b := range l.backs {
		l.returned(b, false, err)
		b.err = err
		if b.done != nil {
			close(b.done)
		}
	}
	l.backs = nil
	l.retry(promised)
}
