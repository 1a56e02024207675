package slidingwindow

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// explain looks for the cause of an error without details. It takes at most half of the timeout, so that a server that hangs makes no
// abandoned round trip.
func (c *coordinator) explain(ctx context.Context, client script.Client, err error) error {
	ctx, cancel := context.WithTimeout(ctx, c.policy.timeout/2)
	defer cancel()
	return script.Explain(ctx, client, err)
}

// wrap returns an error of a round trip as callers get it.
func (c *coordinator) wrap(err error) error {
	switch {
	case errors.Is(err, ErrStoreUnavailable), errors.Is(err, ErrClock):
		return err
	case redis.HasErrorPrefix(err, "CORRUPT"):
		return fmt.Errorf("%w: limiter %.80q: key %s: %w", ErrCorruptState, c.name, c.key, err)
	case strings.Contains(err.Error(), "WRONGTYPE"):
		return fmt.Errorf("%w: limiter %.80q: key %s holds no string", ErrCorruptState, c.name, c.key)
	case redis.HasErrorPrefix(err, "OVERFLOW"):
		return fmt.Errorf("%w: limiter %.80q: key %s", ErrOverflow, c.name, c.key)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: limiter %.80q: %w: %w", ErrStoreUnavailable, c.name, ErrStoreTimeout, err)
	case errors.Is(err, ErrStoreTimeout), script.Away(err):
		return fmt.Errorf("%w: limiter %.80q: %w", ErrStoreUnavailable, c.name, err)
	}
	return fmt.Errorf("%w: limiter %.80q: %w", ErrStoreUnusable, c.name, err)
}

// health is the state of outages. Every round trip is a probe. The coordinator's mu guards it.
type health struct {
	outage    outage.Status
	fault     error // of the last probe, during an outage
	broken    bool  // the state or the way to Redis needs a repair
	abandoned int   // round trips that exceeded their timeout and have not ended
	watched   bool  // a timer is set that will probe; see reportLater
}

const (
	// minPause and maxPause bound the time between two probes.
	minPause = 50 * time.Millisecond
	maxPause = time.Second
	// longPause is maxPause for a client that does not return by itself: each probe may cost a goroutine and a connection. It is also about
	// the time between two probes of a process without calls.
	longPause = 30 * time.Second
)

// down reports whether there is an outage.
func (h *health) down() bool { return h.outage.Down() != nil }

// failed records a failed probe.
func (h *health) failed(err error) {
	h.fault = err
	longest := maxPause
	if h.abandoned > 2 {
		longest = longPause
	}
	h.outage.ProbeFailed(err, minPause, longest)
}

// replied records a reply. It returns the outage that ended with it, or nil.
func (h *health) replied() *outage.Outage {
	h.broken = false
	return h.outage.ProbeAnswered()
}

// probe sends a probe if one is due. mu must be held.
func (c *coordinator) probe() {
	if c.redis.outage.UntilProbe() == 0 {
		c.look = true
		c.start()
	}
}

// reportLater makes sure that Redis receives the permits and refunds it lacks when the outage ends, even if this process gets no more
// calls. mu must be held.
func (c *coordinator) reportLater() {
	if c.redis.watched || !c.redis.down() {
		return
	}
	if earliest, _ := c.view.bounds(c.now()); !c.admitted.owes(&c.rule, earliest) {
		return
	}
	c.redis.watched = true
	time.AfterFunc(longPause/2+rand.N(longPause), func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.redis.watched = false; c.redis.down() {
			c.look = true
			c.start()
		}
	})
}

// untilProbe returns the time until the next probe is due; without an outage it is the longest duration.
func (c *coordinator) untilProbe() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.redis.down() {
		return math.MaxInt64
	}
	return max(minPause, c.redis.outage.UntilProbe()) // a probe may be in flight
}

// decideLocally decides a request during an outage. mu must be held.
func (c *coordinator) decideLocally(n, now int64) (v verdict, err error) {
	if c.policy.failure == FailClosed {
		return v, c.redis.fault
	}
	share, _ := c.policy.failure.share() // not above 0 under FailOpen: no bound
	earliest, latest := c.view.bounds(now)
	at, ok := c.admitted.take(&c.rule, n, min(int64(share), c.limit.Load()), earliest, latest)
	c.reportLater()
	return verdict{ok, ByPolicy, at - c.admitted.counts.shifted}, nil
}

// fallBack begins or continues an outage. It decides the calls of a batch, which are settled, and all that are queued. mu must be held.
func (c *coordinator) fallBack(b *flight, err error, now int64) (done []*call) {
	c.redis.failed(err)
	c.reportLater()
	done = append(b.calls, c.queue.takeAll()...)
	c.look = false
	for _, q := range done {
		if q.n == 0 || q.cancelled {
			q.err = err
			continue
		}
		if q.recheck && c.policy.failure != FailOpen && c.view.counts.used(&c.rule, c.view.latest(now))+q.n > c.limit.Load() {
			q.verdict = verdict{by: BySnapshot}
			continue
		}
		q.verdict, q.err = c.decideLocally(q.n, now)
	}
	return done
}
