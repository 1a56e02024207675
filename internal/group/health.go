package group

import (
	"fmt"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// timeoutError returns why there is no reply to a batch: it waits for a lock, or for a store. f is nil if the batch is not built yet. mu must be held.
func (c *Config) timeoutError(f *flight) error {
	if f != nil {
		for m := range f.batch {
			if s := f.batch[m].Session; s != nil && s.Waits() {
				return c.Failure(m, fmt.Errorf("%w: bucket %q: within %v", permit.ErrLockNotObtained, f.batch[m].Name, c.Timeout))
			}
		}
	}
	return c.Failure(c.awaited(f), fmt.Errorf("%w: no answer within %v", permit.ErrStoreTimeout, c.Timeout))
}

// awaited returns a member whose store has not replied to a batch: of the part that is asked, or of the first part whose store may fail.
func (c *Config) awaited(f *flight) int {
	fails := func(m int) bool { return c.Members[m].Limiter.Coordinator.Health != nil }
	if f != nil {
		if m := c.Parts[f.asked.Load()][0]; fails(m) {
			return m
		}
	}
	for _, members := range c.Parts {
		if fails(members[0]) {
			return members[0]
		}
	}
	return 0
}

// suspect reports to the monitors of all members' stores, once to each, that there was no reply.
func (c *Config) suspect() {
	var some []*engine.Health
	for _, m := range c.Members {
		if h := m.Limiter.Coordinator.Health; h != nil && !slices.Contains(some, h) {
			some = append(some, h)
			h.Suspect(m.Limiter.Coordinator)
		}
	}
}

// unavailable returns the error of the calls that need a store which is unavailable; nil if they need none. It has that store probed.
func (c *Config) unavailable() error {
	if c.Immediate {
		return nil
	}
	for m := range c.Members {
		of := c.Members[m].Limiter.Coordinator
		if o := of.Down(); o != nil {
			of.Health.Suspect(of)
			return c.Failure(m, fmt.Errorf("%w: bucket %q: since %v: %w", permit.ErrStoreUnavailable, of.Name, time.Since(o.Since).Round(time.Millisecond), o.Err))
		}
	}
	return nil
}
