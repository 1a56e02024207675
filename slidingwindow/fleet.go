package slidingwindow

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

//go:embed lua/apply.lua
var applySource string

var applyScript = script.New(applySource)

// fleet is what a limiter needs whose counts are in Redis. One batch at most is under way (see source); what comes up meanwhile
// travels together in the next. Limiter.tally is what the last answer showed, and Limiter.mu guards everything.
//
// Clocks: answers bring the server's clock, which is estimated from then on, whatever time of day the process believes it is. What
// is refused without asking is refused by the latest that it can be, by which as much as can be is out of the window; what is
// admitted without asking, by the earliest, and is counted as if it were at the latest.
type fleet struct {
	client  RedisClient
	key     string
	timeout time.Duration
	most    int          // callers in queue
	server  func() int64 // see options
	away    Away
	share   int64
	hook    func(error)
	source  source
	trips   batch.Trips[*flight, []string]

	heard  bool // Limiter.tally is what there was, when it was heard of last
	timed  bool // there was an answer: mine and owed are by the server's clock
	broken bool // somebody must repair something: the state, or the way to Redis
	epoch  int64
	remote clock.Remote // the server's clock

	queue   []*call
	gone    int   // of the queue, those whose callers have given up
	look    bool  // somebody wants to know the counts
	pending int64 // permits of those that were submitted and not settled

	mine tally // what this process admitted, by the server's clock at the latest
	owed tally // what of it Redis does not know

	outage outage.Status // of Redis; every round trip is a probe
	fault  error         // why the last probe has failed, while Redis is down
	strays int           // round trips that were given up and have not ended
}

const (
	// minPause and maxPause bound the time between two looks whether Redis is back.
	minPause = 50 * time.Millisecond
	maxPause = time.Second
	// longPause is maxPause for a client that does not give up by itself: each look may cost a goroutine and a connection.
	longPause = 30 * time.Second
	// maxBatch bounds the requests of a batch.
	maxBatch = 1024
)

func (l *Limiter) newFleet(o *options, key string) *fleet {
	f := &fleet{
		client: o.client, key: key, timeout: o.timeout, most: o.waiters, server: o.server, away: o.away, share: int64(o.share), hook: o.hook,
		source: source{l: l},
	}
	f.trips = batch.Trips[*flight, []string]{Send: l.send, Max: 1, Parallel: 1}
	if script.HeedsDeadline(o.client) {
		f.trips.Direct, f.trips.Timeout = l.send, o.timeout
	}
	return f
}

// call is one request on its way.
type call struct {
	n     int64
	asks  bool // the server decides; else it was admitted and is only told
	sent  bool // or settled: it is in the queue no more
	gone  bool // its caller has given up
	tries int
	ok    bool
	err   error
	ready chan struct{}
}

// latest and earliest are bounds of the time that the server decides by.
func (l *Limiter) latest(now int64) int64 {
	return max(l.tally.seen, l.fleet.remote.Latest(local(now)))
}

func (l *Limiter) earliest(now int64) int64 {
	return max(l.tally.seen, l.fleet.remote.Earliest(local(now)))
}

// local is a time of the limiter's clock as the estimate of the server's wants it.
func local(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// stale tells that a sub-interval has begun since the last answer.
func (l *Limiter) stale(latest int64) bool {
	return l.rule.index(latest) != l.rule.index(l.tally.seen)
}

// allowShared refuses what cannot be by what is known, and takes the rest to Redis.
//
// What is known only lacks what others have admitted since, so a refusal by it is right, as long as the state is not lost and
// the server's clock does not jump: both show at the next sub-interval. What this process has already asked for counts as if
// it were granted. While Redis is away what is known stays true.
func (l *Limiter) allowShared(ctx context.Context, n int64) (bool, error) {
	l.mu.Lock()
	l.unbar()
	f := l.fleet
	now := l.now()
	down := f.outage.Down() != nil
	if down {
		l.probe()
	}
	asks := true
	if f.heard && (!down || f.away != Pass) {
		limit, latest := l.limit.Load(), l.latest(now)
		used, stale := l.tally.used(&l.rule, latest)+f.pending, l.stale(latest)
		if used+n > limit {
			if stale && !down {
				f.look = true
				l.start()
			}
			if used+1 > limit {
				l.shut(now, latest, limit-1)
			}
			l.mu.Unlock()
			return false, nil
		}
		asks = l.rule.mode == Exact || stale || l.tally.used(&l.rule, l.earliest(now))+f.pending+n > limit
	}
	if down {
		ok, err := l.alone(n, now)
		l.mu.Unlock()
		return ok, err
	}
	c := &call{n: n, asks: asks, ready: make(chan struct{})}
	err := l.submit(c)
	l.mu.Unlock()
	if err != nil {
		return false, err
	}
	f.trips.Take(ctx, "", &f.source)
	return l.await(ctx, c)
}

// probe looks whether Redis is back, if it is time to. mu is held.
func (l *Limiter) probe() {
	if l.fleet.outage.UntilProbe() == 0 {
		l.fleet.look = true
		l.start()
	}
}

// shut sets the gate until at most so much can be used. mu is held.
func (l *Limiter) shut(now, latest, room int64) {
	next := (l.rule.index(latest) + 1) * l.rule.resolution // to be noticed
	until := min(next, l.tally.until(&l.rule, latest, room-l.fleet.pending))
	l.bar(now, now+until-latest)
}

// submit queues a call, which is to be sent, unless too many are there. mu is held.
func (l *Limiter) submit(c *call) error {
	if f := l.fleet; len(f.queue)-f.gone >= f.most {
		return fmt.Errorf("%w: limiter %.80q: %d wait already", ErrTooManyWaiters, l.name, f.most)
	}
	l.fleet.queue = append(l.fleet.queue, c)
	l.fleet.pending += c.n
	return nil
}

// start makes sure that what there is to send is sent.
func (l *Limiter) start() { l.fleet.trips.Ready("", &l.fleet.source) }

func (l *Limiter) await(ctx context.Context, c *call) (bool, error) {
	select {
	case <-c.ready:
		return c.ok, c.err
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-c.ready: // answered in the same instant: it counts
		return c.ok, c.err
	default:
	}
	if c.gone = true; !c.sent {
		l.fleet.pending -= c.n
		l.fleet.leave()
	}
	return false, ctx.Err()
}

// leave counts one more of the queue who has given up. They are dropped when they are most of it: for each that moves another one
// has gone. mu is held.
func (f *fleet) leave() {
	if f.gone++; 2*f.gone > len(f.queue) {
		f.queue = slices.DeleteFunc(f.queue, func(c *call) bool { return c.gone })
		f.gone = 0
	}
}

// refresh returns when the counts of this sub-interval are known.
func (l *Limiter) refresh(ctx context.Context) error {
	l.mu.Lock()
	f := l.fleet
	down := f.outage.Down() != nil
	switch {
	case down && f.outage.UntilProbe() > 0 && f.away != share:
		defer l.mu.Unlock()
		return f.fault
	case down && f.away == share:
		l.probe()
		l.mu.Unlock()
		return nil
	case !down && f.heard && !l.stale(l.latest(l.now())):
		l.mu.Unlock()
		return nil
	}
	c := &call{asks: true, ready: make(chan struct{})}
	err := l.submit(c)
	l.mu.Unlock()
	if err == nil {
		f.trips.Take(ctx, "", &f.source)
		_, err = l.await(ctx, c)
	}
	return err
}

// standing: see Limiter.standing. mu is held.
func (f *fleet) standing(l *Limiter, limit, now int64) (int64, int64, func(int64) int64) {
	down := f.outage.Down() != nil
	if down && f.away != share {
		return limit, limit, func(int64) int64 { return f.outage.UntilProbe().Microseconds() }
	}
	if down {
		own := l.own()
		earliest, _ := l.bounds(now)
		at := max(f.mine.seen, earliest)
		return f.share, f.mine.used(own, at), func(room int64) int64 { return f.mine.until(own, at, room) - at }
	}
	latest := l.latest(now)
	return limit, l.tally.used(&l.rule, latest) + f.pending, func(room int64) int64 {
		return l.tally.until(&l.rule, latest, room-f.pending) - latest
	}
}

// own is the rule that a share goes by.
func (l *Limiter) own() *rule {
	r := l.rule
	r.mode = Exact
	return &r
}

// bounds of the time that the server would decide by; the process' own time, if that was never heard.
func (l *Limiter) bounds(now int64) (earliest, latest int64) {
	if l.fleet.timed {
		return l.earliest(now), l.latest(now)
	}
	return now, now
}

// alone decides while Redis is away. mu is held.
func (l *Limiter) alone(n, now int64) (bool, error) {
	f := l.fleet
	if f.away == Refuse {
		return false, f.fault
	}
	r := l.own()
	earliest, latest := l.bounds(now)
	f.owed.advance(r, earliest)
	if at := f.mine.advance(r, earliest); f.away == share && f.mine.used(r, at)+n > f.share {
		return false, nil
	}
	f.mine.addAt(r, latest, n) // beyond 2^37 it counts no more
	f.owed.addAt(r, latest, n)
	return true, nil
}
