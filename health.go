package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	transport "github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/logger"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/weakmap"
)

// health is the outage monitor of a store that is one server, or else of one bucket. It also has what the monitor need not know: which
// coordinators use the store, how one of them asks it, and where outages are logged.
type health struct {
	*outage.Monitor
	logger logger.Logger

	// longest is the longest store timeout of the coordinators that use the store. A probe is given that: the little time that one limiter
	// has for its calls must not make an outage for the others.
	longest atomic.Int64

	mu   sync.Mutex
	last weak.Pointer[coordinator] // that wanted to ask the store
}

// serves notes the store timeout of a coordinator that uses the store.
func (h *health) serves(timeout time.Duration) {
	for {
		longest := h.longest.Load()
		if int64(timeout) <= longest || h.longest.CompareAndSwap(longest, int64(timeout)) {
			return
		}
	}
}

// healths are those of stores that are one server: one lives as long as a coordinator uses it.
var healths weakmap.Map[Store, health]

// healthOf returns the one that all coordinators of a server share, or one for a coordinator alone.
func healthOf(t *traits) *health {
	client := t.outages
	if client == nil {
		client = new(outage.Group)
	}
	fresh := func() *health { return newHealth(client) }
	if !t.oneServer {
		return fresh()
	}
	return healths.Get(t.self, fresh)
}

func newHealth(client *outage.Group) *health {
	h := &health{}
	h.Monitor = outage.New(client, outage.Backend{Next: h.next, Away: away, Timeout: ErrStoreTimeout, Changed: h.log})
	return h
}

// failed notes that a call has failed, or was not sent since the store is down, and has the store probed.
func (h *health) failed(c *coordinator) {
	h.mu.Lock()
	h.last = weak.Make(c)
	h.mu.Unlock()
	h.Failed()
}

// next is the probe of the coordinator that wanted to ask last, or of another if nobody uses that any more.
func (h *health) next() (outage.Probe, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l := h.last.Value(); l != nil {
		return l.probe(), true
	}
	for other := range coordinators.All {
		if other.health == h {
			h.last = weak.Make(other)
			return other.probe(), true
		}
	}
	return outage.Probe{}, false
}

// log is told of outages: of the many of a client the first is logged, and the end of the last.
func (h *health) log(c outage.Change) {
	defer h.logger.Recovered()
	switch {
	case c.Others > 0:
	case c.Down:
		h.logger.Get().Warn("tokenbucket: the store is away", "error", c.Err)
	case !c.Forgotten:
		h.logger.Get().Info("tokenbucket: the store is back", "after", c.After)
	}
}

// probe asks whether the store answers for this bucket.
func (c *coordinator) probe() outage.Probe {
	return outage.Probe{Ask: c.reach, Timeout: time.Duration(c.health.longest.Load())}
}

// askHealth probes the store for a caller, who waits no longer than for a call.
func (c *coordinator) askHealth(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	return c.health.Ask(ctx, c.probe())
}

func (c *coordinator) reach(ctx context.Context) (err error) {
	log := &c.health.logger // and not c: a probe that hangs must not hold the coordinator
	defer func() {
		if value := recover(); value != nil { // of a hook; the goroutine is the probe's
			log.Panicked(value)
			err = fmt.Errorf("%w: %v", transport.ErrPanic, value)
		}
	}()
	if probe := c.traits.probe; probe != nil {
		return probe(ctx, c.key)
	}
	question := permit.Batch{Name: c.label(), Key: c.key, Terms: &placeholder.terms, Epoch: newEpoch(), LocalMicros: c.micros, Probe: true}
	err = askStore(ctx, c.store, &question)
	if errors.Is(err, ErrInvalidConfig) { // of a bucket of the other kind: it was read
		return nil
	}
	return err
}

// placeholder is for asking a store that need not answer anything.
var placeholder = newSetting(config{Kind: bursty, Rate: 1, Size: 1, Floor: 1})
