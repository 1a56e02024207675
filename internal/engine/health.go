package engine

import (
	"context"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/logger"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Health is the outage monitor of a store on one server, or else of one bucket. It also knows how to probe the store, and where outages are
// logged. It is safe for concurrent use.
type Health struct {
	*outage.Monitor
	Logger logger.Logger

	group    *outage.Group
	everyone iter.Seq[*Coordinator]
	policy   atomic.Pointer[string] // of the limiters, for the log

	// longest is the longest store timeout of the coordinators. A probe is given that time, so that a limiter with a short timeout does not
	// cause an outage for the others.
	longest atomic.Int64

	mu       sync.Mutex                // guards the fields below
	last     weak.Pointer[Coordinator] // the last one that needed the store
	reminder *time.Timer               // of the last outage
}

// NewHealth returns a monitor. group counts the outages of all buckets of the store. away reports whether an error means that the store is
// unavailable. everyone yields all coordinators of this process.
func NewHealth(group *outage.Group, away func(error) bool, everyone iter.Seq[*Coordinator]) *Health {
	h := &Health{group: group, everyone: everyone}
	h.Monitor = outage.New(group, outage.Backend{Next: h.next, Away: away, Timeout: permit.ErrStoreTimeout, Changed: h.log})
	return h
}

// Uses records the failure policy of a limiter, for the log.
func (h *Health) Uses(policy string) {
	if before := h.policy.Load(); before == nil || *before != policy && !h.policy.CompareAndSwap(before, &several) {
		h.policy.CompareAndSwap(nil, &policy)
	}
}

// several is in place of the policy if limiters of one store have different ones.
var several = "several"

// serves records the store timeout of a coordinator.
func (h *Health) serves(timeout time.Duration) {
	for {
		longest := h.longest.Load()
		if int64(timeout) <= longest || h.longest.CompareAndSwap(longest, int64(timeout)) {
			return
		}
	}
}

// Suspect records that a call has failed, or was not sent during an outage, and starts a probe.
func (h *Health) Suspect(c *Coordinator) {
	h.mu.Lock()
	h.last = weak.Make(c)
	h.mu.Unlock()
	h.Failed()
}

// Last returns the coordinator that last needed the store; nil if it is no longer in use.
func (h *Health) Last() *Coordinator {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last.Value()
}

// next returns a probe by the coordinator that last needed the store, or by another one if that is no longer in use.
func (h *Health) next() (outage.Probe, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if last := h.last.Value(); last != nil {
		return last.probe(), true
	}
	for other := range h.everyone {
		if other.Health == h {
			h.last = weak.Make(other)
			return other.probe(), true
		}
	}
	return outage.Probe{}, false
}

// remindEvery is the time between two log lines about an outage that lasts.
const remindEvery = time.Minute

// log logs the beginning and the end of an outage, and every minute in between. Of simultaneous outages of one client it logs the first
// beginning, the last end, and one line a minute.
func (h *Health) log(c outage.Change) {
	defer h.Logger.Recovered()
	h.mu.Lock()
	if c.Down {
		h.reminder = time.AfterFunc(remindEvery, h.remind)
	} else {
		h.reminder.Stop()
	}
	h.mu.Unlock()
	switch {
	case c.Others > 0:
	case c.Down:
		h.group.Remind(0)
		h.Logger.Get().Warn("tokenbucket: an outage of the store has begun: the failure policy decides calls until it ends; check the store", "policy", h.inForce(), "error", c.Err)
	case !c.Forgotten:
		h.Logger.Get().Info("tokenbucket: the outage of the store has ended: it decides calls again", "after", c.After)
	}
}

// remind logs that the outage lasts.
func (h *Health) remind() {
	defer h.Logger.Recovered()
	o := h.Down()
	if o == nil {
		return
	}
	h.mu.Lock()
	h.reminder.Reset(remindEvery)
	h.mu.Unlock()
	if h.group.Remind(remindEvery * 9 / 10) {
		h.Logger.Get().Warn("tokenbucket: the outage of the store goes on: the failure policy decides calls until it ends; check the store",
			"for", time.Since(o.Since).Round(time.Second), "policy", h.inForce(), "error", o.Err)
	}
}

func (h *Health) inForce() string {
	if p := h.policy.Load(); p != nil {
		return *p
	}
	return ""
}

// probe returns a probe of the store for this bucket.
func (c *Config) probe() outage.Probe {
	return outage.Probe{Ask: c.Reach, Timeout: time.Duration(c.Health.longest.Load())}
}

// AskHealth probes the store. It returns within the store timeout.
func (c *Config) AskHealth(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	return c.Health.Ask(ctx, c.probe())
}

// Reach asks once whether the store replies for this bucket.
func (c *Config) Reach(ctx context.Context) (err error) {
	log := &c.Health.Logger // a probe that hangs must not keep the coordinator reachable
	defer func() {
		if value := recover(); value != nil { // the panic of a hook, in the goroutine of the probe
			log.Panicked(value)
			err = fmt.Errorf("%w: %v", transport.ErrPanic, value)
		}
	}()
	return c.Probe(ctx, c.Key)
}

// Down returns the outage of the store, or nil. An Immediate store has none.
func (c *Config) Down() *outage.Outage {
	if c.Health == nil {
		return nil
	}
	return c.Health.Down()
}
