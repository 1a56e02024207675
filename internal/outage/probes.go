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
	// A probe may take ProbeTimeout, or three times as long as answers took of late, but no longer than a call. As long as nothing was
	// ever answered it may take firstTimeout.
	ProbeTimeout = 250 * time.Millisecond
	firstTimeout = time.Second
	// maxTook bounds what is believed of how long an answer took: more may have been an outage.
	maxTook = time.Second
	// keepFor is how long an answer is awaited after all, unless calls are given up before: though late, it tells that the backend is
	// only slow. At most maxPending probes are kept so.
	keepFor    = 4 * time.Second
	maxPending = 16
)

// Probe asks a backend whether it answers.
type Probe struct {
	Ask     func(context.Context) error
	Timeout time.Duration // of a call: a probe is not given longer
}

// probes sends probes, one at a time, and gives each up in time though it does not return. Those that were given up and have not returned
// are few: a client that ignores contexts costs a goroutine and a connection for each.
type probes struct {
	away    func(error) bool
	timeout error // what the error of one that is given up wraps

	slowest atomic.Int64 // of the answers of late, in nanoseconds; 0: none yet
	pending atomic.Int32 // those that have not returned
	late    chan error   // what came of one that was given up, if it was an answer

	mu      sync.Mutex
	current *round // nil: none is under way
}

// round is a probe that any number may wait for.
type round struct {
	done chan struct{}
	err  error
}

// answered notes how long an answer took.
func (p *probes) answered(took time.Duration) {
	before := p.slowest.Load()
	if after := max(int64(min(took, maxTook)), before-before/16); after != before {
		p.slowest.Store(after) // one that is lost to another goroutine's does not matter
	}
}

// patience is how long a probe may take.
func (p *probes) patience(timeout time.Duration) time.Duration {
	slowest := time.Duration(p.slowest.Load())
	if slowest == 0 {
		return min(timeout, firstTimeout)
	}
	return min(timeout, max(ProbeTimeout, 3*slowest))
}

// ask waits for the probe that is under way, or sends one; lateToo: the answer to one that was given up will do. It returns early if ctx
// ends.
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

func (p *probes) send(probe Probe, lateToo bool) error {
	if p.pending.Load() >= maxPending {
		return fmt.Errorf("%w: probes are not answered", p.timeout)
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
		return fmt.Errorf("%w: a probe was not answered within %v", p.timeout, limit)
	}
}

// run sends one probe, and says what came of it to whoever waits, or to a later one.
func (p *probes) run(probe Probe, limit time.Duration, result chan<- error, givenUp <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), max(limit, min(probe.Timeout, keepFor)))
	defer cancel()
	sent := clock.Mono()
	err := probe.Ask(ctx)
	answer := !p.away(err)
	if answer {
		p.answered(clock.Mono() - sent) // or the next one is given up too early again
	}
	select {
	case result <- err:
	case <-givenUp:
		if answer {
			select {
			case p.late <- err:
			default: // one will do
			}
		}
	}
}

// forgetLate drops what came of probes that were given up.
func (p *probes) forgetLate() {
	select {
	case <-p.late:
	default:
	}
}
