package group

import (
	"fmt"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// timeoutError returns why there is no reply: the batch waits for a lock, or for a store. mu must be held.
func (p *Participant) timeoutError(f *flight) error {
	if f != nil {
		for m := range f.batch {
			if s := f.batch[m].Session; s != nil && s.Waits() {
				return p.Failure(m, fmt.Errorf("%w: bucket %q: within %v", permit.ErrLockNotObtained, f.batch[m].Name, p.Timeout))
			}
		}
	}
	return p.Failure(p.awaited(f), fmt.Errorf("%w: no answer within %v", permit.ErrStoreTimeout, p.Timeout))
}

// stores returns one coordinator for each monitor of the members' stores.
func (p *Participant) stores() (some []*engine.Coordinator) {
	for _, m := range p.Members {
		c := m.Limiter.Coordinator
		if c.Health != nil && !slices.ContainsFunc(some, func(o *engine.Coordinator) bool { return o.Health == c.Health }) {
			some = append(some, c)
		}
	}
	return some
}

// report tells the monitor of a member's store of a failure. mu must be held.
func (p *Participant) report(m int, err error) {
	c := p.Members[m].Limiter.Coordinator
	if c.Health != nil && (c.Away(err) || c.NotAsked(err)) {
		c.Health.Suspect(c)
	}
}

// failDown fails the calls that need a store which is unavailable. mu must be held.
func (p *Participant) failDown(now int64) {
	if p.Immediate || len(p.asking) == 0 {
		return
	}
	for m := range p.Members {
		c := p.Members[m].Limiter.Coordinator
		o := c.Down()
		if o == nil || p.Choice == permit.Any && len(p.Parts) > 1 {
			continue
		}
		c.Health.Suspect(c)
		err := p.Failure(m, fmt.Errorf("%w: bucket %q: since %v: %w", permit.ErrStoreUnavailable, c.Name, time.Since(o.Since).Round(time.Millisecond), o.Err))
		calls := p.asking
		p.asking = nil
		for i, q := range calls {
			if p.asks(q, now) && !q.promised {
				p.fail(q, err)
			} else if p.asks(q, now) {
				p.askAt = now + retryMicros
				p.asking = append(p.asking, calls[i])
			} else {
				p.asking = append(p.asking, q)
			}
		}
		return
	}
}
