package slidingwindow

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

//go:embed lua/apply.lua
var applySource string

var applyScript = script.New(applySource)

// coordinator is this process's side of a window that is counted in Redis. At most one batch is under way (see source); calls that come
// meanwhile travel together in the next.
//
// Answers bring the server's clock, which is estimated from then on, whatever time of day the process believes it is.
type coordinator struct {
	*window
	client RedisClient
	key    string
	server func() int64 // see options
	policy policy
	told   told
	source source
	trips  batch.Trips[*flight, []string]

	// window.mu guards these.
	queue    queue    // who asks
	look     bool     // somebody wants to know the counts
	version  int64    // of the limit
	known    known    // what the last answer has shown
	admitted admitted // what this process has admitted
	redis    health   // whether Redis answers
	steady   steady   // the clock of all these
}

// policy is what users have set of Redis and its outages.
type policy struct {
	timeout time.Duration
	away    Away
	share   int64
	local   bool // the clock of the limiter decides
}

// told is who is told what happens.
type told struct {
	hook     func(error)
	observer *Observer
}

// health is whether Redis answers. Every round trip is a probe.
type health struct {
	outage    outage.Status
	fault     error // why the last probe has failed, while Redis is down
	broken    bool  // somebody must repair something: the state, or the way to Redis
	abandoned int   // round trips that were given up and have not ended
	watched   bool  // a timer looks whether it is back; see tellLater
}

const (
	// minPause and maxPause bound the time between two looks whether Redis is back.
	minPause = 50 * time.Millisecond
	maxPause = time.Second
	// longPause is maxPause for a client that does not give up by itself: each look may cost a goroutine and a connection. It is also about
	// the time between two looks of a process that nobody asks.
	longPause = 30 * time.Second
)

func (h *health) down() bool { return h.outage.Down() != nil }

// failed notes an outage, or that it goes on.
func (h *health) failed(err error) {
	h.fault = err
	longest := maxPause
	if h.abandoned > 2 {
		longest = longPause
	}
	h.outage.ProbeFailed(err, minPause, longest)
}

// answered notes that Redis has answered. It returns the outage that has ended, if there was one, and reports whether there was that or
// something to repair.
func (h *health) answered() (ended *outage.Outage, back bool) {
	ended = h.outage.ProbeAnswered()
	back = ended != nil || h.broken
	h.broken = false
	return ended, back
}

// now is the limiter's clock without its steps back. What is known must be heard anew after one: nobody can tell how much time has passed.
// mu is held.
func (c *coordinator) now() int64 {
	now, stepped := c.steady.read(c.window.now())
	if stepped {
		c.known.heard, c.known.server.fresh = false, false
	}
	return now
}

func newCoordinator(w *window, o *options, key string) *coordinator {
	c := &coordinator{
		window: w, client: o.client, key: key, server: o.server, told: told{o.hook, o.observer}, version: o.version,
		policy: policy{timeout: o.timeout, away: o.away, local: o.local},
		queue:  queue{most: o.waiters},
	}
	if o.away == share {
		c.policy.share = int64(o.share)
	}
	c.source.coordinator = c
	c.trips = batch.Trips[*flight, []string]{Send: c.send, Max: 1, Parallel: 1}
	if script.HeedsDeadline(o.client) {
		c.trips.Direct, c.trips.Timeout = c.send, o.timeout
	}
	return c
}

// allow refuses what cannot be by what is known, and takes the rest to Redis.
//
// What is known only lacks what others have admitted since, so a refusal by it is right, as long as the state is not lost and
// the server's clock does not jump: both show at the next sub-interval. What this process has already asked for counts as if
// it were granted. While Redis is away what is known stays true.
func (c *coordinator) allow(ctx context.Context, n int64) (verdict, error) {
	c.mu.Lock()
	c.stopRefusing()
	now := c.now()
	down := c.redis.down()
	if down {
		c.probe()
	}
	asks := true
	if c.known.heard && (!down || c.policy.away != Pass) {
		var refused bool
		if refused, asks = c.foresee(n, now, down); refused {
			c.mu.Unlock()
			return verdict{by: BySnapshot}, nil
		}
	}
	if down {
		v, err := c.alone(n, now)
		c.mu.Unlock()
		return v, err
	}
	q := &call{n: n, asks: asks, ready: make(chan struct{})}
	err := c.submit(q)
	c.mu.Unlock()
	if err != nil {
		return verdict{by: ByCheck}, err
	}
	return c.sendAndAwait(ctx, q)
}

// sendAndAwait has a call that was submitted sent, and returns its answer.
func (c *coordinator) sendAndAwait(ctx context.Context, q *call) (verdict, error) {
	c.trips.Take(ctx, "", &c.source)
	return c.await(ctx, q)
}

// foresee decides by what is known: permits are refused, or Redis is asked for them, or it is only told that they were admitted. mu is held.
func (c *coordinator) foresee(n, now int64, down bool) (refused, asks bool) {
	k, r := &c.known, &c.rule
	limit, earliest, latest := c.limit.Load(), k.earliest(now), k.latest(now)
	used := k.counts.used(r, latest) + c.queue.pending
	if used+n <= limit {
		return false, r.mode == Exact || k.stale(r, latest) || k.counts.used(r, earliest)+c.queue.pending+n > limit
	}
	if k.stale(r, earliest) && !down { // by the latest it might be looked twice
		c.look = true
		c.start()
	}
	if used+1 > limit {
		next := (r.index(earliest)+1)*r.resolution - earliest // to look then
		c.refuseFor(min(next, k.counts.until(r, latest, limit-1-c.queue.pending)-latest))
	}
	return true, false
}

// probe looks whether Redis is back, if it is time to. mu is held.
func (c *coordinator) probe() {
	if c.redis.outage.UntilProbe() == 0 {
		c.look = true
		c.start()
	}
}

// tellLater sees to it that Redis is told what it does not know when it is back, though nobody asks this process any more. mu is held.
func (c *coordinator) tellLater() {
	if c.redis.watched || !c.redis.down() {
		return
	}
	if earliest, _ := c.known.bounds(c.now()); !c.admitted.owes(&c.rule, earliest) {
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

// untilProbe is how long it takes until somebody should look whether Redis is back; for ever, if it is not away.
func (c *coordinator) untilProbe() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.redis.down() {
		return math.MaxInt64
	}
	return max(minPause, c.redis.outage.UntilProbe()) // it may be on its way
}

// submit queues a call, which is to be sent, unless too many are there. mu is held.
func (c *coordinator) submit(q *call) error {
	if c.queue.full() {
		return fmt.Errorf("%w: limiter %.80q: %d wait already", ErrTooManyWaiters, c.name, c.queue.most)
	}
	c.queue.push(q)
	return nil
}

// start makes sure that what there is to send is sent.
func (c *coordinator) start() { c.trips.Ready("", &c.source) }

func (c *coordinator) await(ctx context.Context, q *call) (verdict, error) {
	select {
	case <-q.ready:
		return q.verdict, q.err
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-q.ready: // answered in the same instant: it counts
		return q.verdict, q.err
	default:
	}
	c.queue.cancel(q)
	return verdict{}, ctx.Err()
}

// refresh returns when the counts of this sub-interval are known.
func (c *coordinator) refresh(ctx context.Context) error {
	c.mu.Lock()
	down := c.redis.down()
	switch {
	case down && c.policy.away == share:
		c.probe()
		c.mu.Unlock()
		return nil
	case !down && c.known.heard && !c.known.stale(&c.rule, c.known.earliest(c.now())):
		c.mu.Unlock()
		return nil
	}
	return c.exchange(ctx, &call{asks: true})
}

// exchange sends a call that wants no permits, unless Redis is away. It unlocks mu, which is held.
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

// setLimit makes a limit the next version of all processes.
func (c *coordinator) setLimit(ctx context.Context, n int64) error {
	c.mu.Lock()
	return c.exchange(ctx, &call{asks: true, limit: n})
}

// adopt takes over a limit that an answer has brought; version 0: none. mu is held.
func (c *coordinator) adopt(limit, version int64) {
	before := c.limit.Load()
	if version == 0 {
		return
	}
	if limit, c.version = c.newest(limit, version); limit != before {
		c.limit.Store(limit)
		c.line.wake()
	}
}

// newest is which of two limits is in force: the one here, or this one. mu is held.
func (c *coordinator) newest(limit, version int64) (int64, int64) {
	if here := c.limit.Load(); version < c.version || version == c.version && version > 0 && limit > here {
		return here, c.version
	}
	return limit, version
}

// refund gives back permits that were admitted at a time; see receipt. While Redis is away it keeps them.
func (c *coordinator) refund(ctx context.Context, at, n int64) error {
	c.mu.Lock()
	a := &c.admitted
	a.refund(&c.rule, at+a.counts.shifted, n)
	c.stopRefusing()
	c.line.wake()
	if len(a.refunds) == 0 || c.redis.down() || c.queue.full() {
		c.tellLater()
		c.start()
		c.mu.Unlock()
		return nil
	}
	q := &call{asks: true, ready: make(chan struct{})}
	c.queue.push(q)
	c.mu.Unlock()
	_, err := c.sendAndAwait(ctx, q)
	return err
}

// standing: see Limiter.standing. mu is held.
func (c *coordinator) standing(limit int64) (int64, int64, func(int64) int64) {
	now, down := c.now(), c.redis.down()
	if down && c.policy.away != share {
		return limit, limit, func(int64) int64 { return c.redis.outage.UntilProbe().Microseconds() }
	}
	if down {
		own, counts := c.rule.exact(), &c.admitted.counts
		earliest, _ := c.known.bounds(now)
		at := max(counts.seen, earliest)
		return min(c.policy.share, limit), counts.used(own, at), func(room int64) int64 { return counts.until(own, at, room) - at }
	}
	counts, latest, pending := &c.known.counts, c.known.latest(now), c.queue.pending
	return limit, counts.used(&c.rule, latest) + pending, func(room int64) int64 {
		return counts.until(&c.rule, latest, room-pending) - latest
	}
}

// alone decides while Redis is away. mu is held.
func (c *coordinator) alone(n, now int64) (v verdict, err error) {
	if c.policy.away == Refuse {
		return v, c.redis.fault
	}
	earliest, latest := c.known.bounds(now)
	at, ok := c.admitted.take(c.rule.exact(), n, min(c.policy.share, c.limit.Load()), earliest, latest)
	c.tellLater()
	return verdict{ok, ByPolicy, at - c.admitted.counts.shifted}, nil
}
