package outage

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

const (
	// The timeout of a probe is ProbeTimeout or three times the slowest recent reply, whichever is longer, but at most the timeout of a
	// call. Until the first reply it is firstTimeout.
	ProbeTimeout = 250 * time.Millisecond
	firstTimeout = time.Second
	// maxTook bounds the duration of a reply as it enters the estimate: a longer one may have spanned an outage.
	maxTook = time.Second
	// keepFor is how long a probe that timed out may still deliver its reply, within the timeout of a call. A late reply shows that the
	// backend is slow, not away. At most maxPending probes are unfinished at a time.
	keepFor    = 4 * time.Second
	maxPending = 16
)

// Probe is a request that shows whether a backend replies.
type Probe struct {
	Ask     func(context.Context) error
	Timeout time.Duration // the longest timeout of any caller, which bounds that of the probe
}

// probes sends one probe at a time, and gives it up when its timeout ends, even if the client does not return. The number of unfinished
// probes is bounded, because each costs a goroutine and a connection if the client ignores contexts.
type probes struct {
	away    func(error) bool
	timeout error // wrapped by the error of a probe that timed out

	slowest atomic.Int64 // decaying maximum of the duration of replies, in nanoseconds; 0 before the first reply
	pending atomic.Int32 // probes that have not returned
	late    chan error   // reply to a probe that had timed out

	mu      sync.Mutex
	current *round // the probe in flight, or nil; guarded by mu
}

// round is a probe in flight, which any number of callers may wait for.
type round struct {
	done chan struct{}
	err  error
}

// answered adds the duration of a reply to the estimate.
func (p *probes) answered(took time.Duration) {
	before := p.slowest.Load()
	if after := max(int64(min(took, maxTook)), before-before/16); after != before {
		p.slowest.Store(after) // losing a concurrent update does not matter
	}
}

// patience returns the timeout of a probe.
func (p *probes) patience(timeout time.Duration) time.Duration {
	slowest := time.Duration(p.slowest.Load())
	if slowest == 0 {
		return min(timeout, firstTimeout)
	}
	return min(timeout, max(ProbeTimeout, 3*slowest))
}

// ask waits for the probe in flight, or sends one if there is none, and returns its error. With lateToo, a late reply to an earlier probe
// counts as well. ask returns early if ctx ends.
func (p *probes) ask(ctx context.Context, probe Probe, lateToo bool) error {
	p.mu.Lock()
	r := p.current
	if r == nil {
		r = &round{done: make(chan struct{})}
		p.current = r
		go func() {
			r.err = p.send(probe, lateToo)
			p.mu.Lock()
			p.current = nil
			p.mu.Unlock()
			close(r.done)
		}()
	}
	p.mu.Unlock()
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// send sends a probe and waits for its reply, or until its timeout ends.
func (p *probes) send(probe Probe, lateToo bool) error {
	if p.pending.Load() >= maxPending {
		return fmt.Errorf("%w: %d probes have no reply yet", p.timeout, maxPending)
	}
	limit := p.patience(probe.Timeout)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	result, givenUp := make(chan error), make(chan struct{})
	defer close(givenUp)
	p.pending.Add(1)
	go func() {
		defer p.pending.Add(-1)
		p.run(probe, limit, result, givenUp)
	}()
	var late <-chan error
	if lateToo {
		late = p.late
	}
	select {
	case err := <-result:
		return err
	case err := <-late:
		return err
	case <-timer.C:
		return fmt.Errorf("%w: no reply to a probe within %v", p.timeout, limit)
	}
}

// run sends one probe. It delivers the result to send, or, if send has given up and the result is a reply, to a later send.
func (p *probes) run(probe Probe, limit time.Duration, result chan<- error, givenUp <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), max(limit, min(probe.Timeout, keepFor)))
	defer cancel()
	sent := clock.Mono()
	err := probe.Ask(ctx)
	answer := !p.away(err)
	if answer {
		p.answered(clock.Mono() - sent) // a late reply counts too, so that the next probe is given enough time
	}
	select {
	case result <- err:
	case <-givenUp:
		if answer {
			select {
			case p.late <- err:
			default: // one late reply is enough
			}
		}
	}
}

// forgetLate drops a late reply.
func (p *probes) forgetLate() {
	select {
	case <-p.late:
	default:
	}
}
