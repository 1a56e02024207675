package slidingwindow

import (
	"context"
	_ "embed"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

//go:embed lua/apply.lua
var applySource string

var applyScript = script.New(applySource)

// coordinator is the part of a limiter in Redis that runs in each process. At most one batch is in flight (see source); calls that arrive
// meanwhile travel together in the next.
//
// Replies bring the server's clock. From the first reply on, times are those of that clock, whatever time of day this process has.
type coordinator struct {
	*window
	client   RedisClient
	key      string
	process  string       // the name of this process in the keys of its reports
	server   func() int64 // see options
	policy   policy
	observer *Observer
	source   source
	trips    batch.Trips[*flight, []string]

	// window.mu guards the fields below.
	queue    queue    // calls that wait to be sent
	look     bool     // send a batch even without calls, for its reply
	asked    int64    // the sub-interval whose first request was sent although the view refuses it; 0 if none
	version  int64    // of the limit
	view     view     // what the last reply showed
	admitted admitted // permits that this process has admitted
	redis    health   // whether Redis replies
	steady   steady   // the clock of all these

	putOff time.Duration // until when reports and refunds wait, by clock.Mono
}

// apart is how long reports and refunds wait after the key of a report was found apart from the counts: a slot moves.
const apart = 250 * time.Millisecond

// policy is the configuration of round trips and outages.
type policy struct {
	timeout time.Duration
	failure FailurePolicy
	local   bool // scripts decide by the limiter's clock
}

// now returns the limiter's clock without its steps back. After such a step it is unknown how much time has passed, so the view becomes
// invalid. mu must be held.
func (c *coordinator) now() int64 {
	now, stepped := c.steady.read(c.window.now())
	if stepped {
		c.view.valid = false
		c.view.server.Stepped()
	}
	return now
}

func newCoordinator(w *window, o *options, key string) *coordinator {
	c := &coordinator{
		window: w, client: o.client, key: key, process: strconv.FormatUint(rand.Uint64(), 36), server: o.server, observer: o.observer, version: o.version,
		policy: policy{timeout: o.timeout, failure: o.policy, local: o.local},
		queue:  queue{most: o.waiters},
	}
	c.source.coordinator = c
	c.trips = batch.Trips[*flight, []string]{Send: c.send, Max: 1, Parallel: 1}
	if bounded := script.Bounded(o.client); bounded != nil {
		c.trips.Timeout = o.timeout
		c.trips.Direct = func(_ string, items []*batch.Item[*flight, []string]) { c.ask(bounded, items) }
	}
	return c
}

// allow refuses requests that the view excludes, and sends the others to Redis.
//
// The view only lacks permits that others have admitted since. So a refusal by it is right, as long as the state is not lost and the
// server's clock does not jump. Both show at the next sub-interval, whose first request is sent whatever the view is. Permits that this
// process has requested count as granted. During an outage of Redis the view stays true.
func (c *coordinator) allow(ctx context.Context, n int64) (verdict, error) {
	c.mu.Lock()
	c.stopRefusing()
	now := c.now()
	down := c.redis.down()
	if down {
		c.probe()
	}
	recheck := false
	if c.view.valid && (!down || c.policy.failure != FailOpen) {
		switch c.checkView(n, now, down) {
		case full:
			c.mu.Unlock()
			return verdict{by: BySnapshot}, nil
		case outdated:
			recheck = true
		}
	}
	if down {
		v, err := c.decideLocally(n, now)
		c.mu.Unlock()
		return v, err
	}
	q := &call{n: n, recheck: recheck, ready: make(chan struct{})}
	err := c.submit(q)
	c.mu.Unlock()
	if err != nil {
		return verdict{by: ByCheck}, err
	}
	return c.sendAndAwait(ctx, q)
}

// sendAndAwait sends a call that was submitted, and returns its result.
func (c *coordinator) sendAndAwait(ctx context.Context, q *call) (verdict, error) {
	c.trips.Take(ctx, "", &c.source)
	return c.await(ctx, q)
}

// opinion is what the view says of a request.
type opinion uint8

const (
	fits     opinion = iota // it may have room: Redis decides
	full                    // it has no room
	outdated                // it has no room by the view, but Redis decides: others may have raised the limit or refunded permits
)

// checkView returns what the view says of a request. It is outdated for the first request in a sub-interval. The other requests do not wait for
// that one. If they did and Redis hung, a flood of requests to refuse would hang too. mu must be held.
func (c *coordinator) checkView(n, now int64, down bool) opinion {
	k, r := &c.view, &c.rule
	limit, latest := c.limit.Load(), k.latest(now)
	used := k.counts.used(r, latest) + c.queue.pending
	if used+n <= limit {
		return fits
	}
	earliest := k.earliest(now)
	if k.stale(r, earliest) && !down { // not by the latest, which might send two
		if in := r.index(earliest); in != c.asked {
			c.asked = in
			return outdated
		}
	}
	if used+1 > limit {
		next := (r.index(earliest)+1)*r.resolution - earliest // until a request is sent again
		c.refuseFor(min(next, k.counts.until(r, latest, limit-1-c.queue.pending)-latest))
	}
	return full
}

// submit queues a call, unless too many are queued. mu must be held.
func (c *coordinator) submit(q *call) error {
	if c.queue.full() {
		return fmt.Errorf("%w: limiter %.80q: %d are waiting", ErrTooManyWaiters, c.name, c.queue.most)
	}
	c.queue.push(q)
	return nil
}

// start makes sure that a batch departs if there is something to send.
func (c *coordinator) start() { c.trips.Ready("", &c.source) }

// await returns the result of a call, or withdraws it when ctx ends.
func (c *coordinator) await(ctx context.Context, q *call) (verdict, error) {
	select {
	case <-q.ready:
		return q.verdict, q.err
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if q.settled { // in the same instant: its result counts
		return q.verdict, q.err
	}
	if c.queue.cancel(q); q.recheck && !q.sent {
		c.asked = 0 // the next request is sent in its place
	}
	return verdict{}, ctx.Err()
}

// refresh returns when the counts of this sub-interval are known; with force, after a round trip, except during an outage.
func (c *coordinator) refresh(ctx context.Context, force bool) error {
	c.mu.Lock()
	down := c.redis.down()
	_, shares := c.policy.failure.share()
	switch {
	case down && shares:
		c.probe()
		c.mu.Unlock()
		return nil
	case !force && !down && c.view.valid && !c.view.stale(&c.rule, c.view.earliest(c.now())):
		c.mu.Unlock()
		return nil
	}
	return c.exchange(ctx, new(call))
}

// exchange sends a call without permits, except during an outage. mu must be held; exchange unlocks it.
func (c *coordinator) exchange(ctx context.Context, q *call) error {
	if c.redis.down() && c.redis.outage.UntilProbe() > 0 {
		defer c.mu.Unlock()
		return c.redis.fault
	}
	q.ready = make(chan struct{})
	err := c.submit(q)
	c.mu.Unlock()
	if err == nil {
		_, err = c.sendAndAwait(ctx, q)
	}
	return err
}

// setLimit makes a limit the next version for all processes.
func (c *coordinator) setLimit(ctx context.Context, n int64) error {
	c.mu.Lock()
	return c.exchange(ctx, &call{limit: n})
}

// adopt adopts a limit from a reply, unless its version is 0. mu must be held.
func (c *coordinator) adopt(limit, version int64) {
	before := c.limit.Load()
	if version == 0 {
		return
	}
	if limit, c.version = c.newest(limit, version); limit != before {
		c.limit.Store(limit)
		c.waiters.wake()
	}
}

// newest returns which of two limits is in force: this process's or the given one. mu must be held.
func (c *coordinator) newest(limit, version int64) (int64, int64) {
	if here := c.limit.Load(); version < c.version || version == c.version && version > 0 && limit > here {
		return here, c.version
	}
	return limit, version
}

// refund refunds permits that were admitted at a time; see receipt. During an outage it keeps the refunds until Redis replies.
func (c *coordinator) refund(ctx context.Context, at, n int64) error {
	c.mu.Lock()
	a := &c.admitted
	a.refund(&c.rule, at+a.counts.shifted, n)
	c.stopRefusing()
	c.waiters.wake()
	if len(a.refunds) == 0 || c.redis.down() || c.queue.full() {
		c.reportLater()
		c.start()
		c.mu.Unlock()
		return nil
	}
	q := &call{ready: make(chan struct{})}
	c.queue.push(q)
	c.mu.Unlock()
	_, err := c.sendAndAwait(ctx, q)
	return err
}

// standing implements Limiter.standing. mu must be held.
func (c *coordinator) standing(limit int64) (int64, int64, func(int64) int64) {
	now, down := c.now(), c.redis.down()
	share, shares := c.policy.failure.share()
	if down && !shares {
		return limit, limit, func(int64) int64 { return c.redis.outage.UntilProbe().Microseconds() }
	}
	if down {
		counts := &c.admitted.counts
		earliest, _ := c.view.bounds(now)
		at := max(counts.seen, earliest)
		return min(int64(share), limit), counts.used(&c.rule, at), func(room int64) int64 { return counts.until(&c.rule, at, room) - at }
	}
	counts, latest, pending := &c.view.counts, c.view.latest(now), c.queue.pending
	return limit, counts.used(&c.rule, latest) + pending, func(room int64) int64 {
		return counts.until(&c.rule, latest, room-pending) - latest
	}
}
