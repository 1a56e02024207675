package engine

import "sync/atomic"

const (
	// ListenMicros is how long a process that owns permits, or has waiters, goes without a reply before it reads the bucket: it may have
	// been held back, or begun a new epoch.
	ListenMicros = 500_000

	// ListenShare bounds the reads of a process: with more than 1,000 such buckets, each is read every ListenShare microseconds times their
	// number, so there are at most 2,000 reads a second.
	ListenShare = 500
)

// listeners is the number of buckets of this process that are listened to.
var listeners atomic.Int64

// Listeners returns the number of buckets of this process that are read regularly, because it owns permits of them or has waiters.
func Listeners() int64 { return listeners.Load() }

// listening reads a bucket that has had no reply for long, while anything depends on it: the process owns permits of it, or has waiters. A
// penalty or a new epoch then matters. The coordinator's mu must be held for all methods. The zero value never reads: no other process shares
// an Immediate store.
//
// Invariant: a bucket is counted in listeners once, from a call of next that finds that something depends on it until one that does not.
type listening struct {
	counted bool // in listeners

	queue  *queue
	outbox *outbox
	leases *leases
	view   *View
}

// due returns a limiter that should read the bucket, because the last reply is too old; nil if it is recent, if nothing depends on the
// bucket, or if a batch is due anyway.
func (l *listening) due(now int64) *Limiter {
	if l.queue == nil || len(l.outbox.aside) > 0 || l.queue.asks(now) || now-l.view.at < l.interval() {
		return nil
	}
	return l.limiter()
}

// limiter returns a limiter that owns permits or has waiters; nil if there is none.
func (l *listening) limiter() *Limiter {
	if q := l.queue.head(); q != nil {
		return q.limiter
	}
	if e := l.leases.current.Load(); e != nil {
		return e.limiter
	}
	return nil
}

// next returns when to read the bucket, in limiter microseconds; 0 if nothing depends on it. It keeps listeners up to date.
func (l *listening) next() int64 {
	listens := l.queue != nil && l.limiter() != nil
	switch {
	case listens && !l.counted:
		listeners.Add(1)
	case !listens && l.counted:
		listeners.Add(-1)
	}
	if l.counted = listens; !listens {
		return 0
	}
	return l.view.at + l.interval()
}

// interval returns how long a bucket goes without a reply, in microseconds.
func (l *listening) interval() int64 { return max(ListenMicros, ListenShare*listeners.Load()) }
