package telemetry

import "time"

// forgotten is how long after the last batch that was not answered an answer to anybody tells that the store is back. Who knows that the
// store is away looks again at least every 45 s while it is used.
const forgotten = time.Minute

// Link is whether the store of several limiters is away, by what was heard last, whichever limiter was told.
//
// A limiter of package slidingwindow or semaphore notices that its store is back when it is used, and one may be used no more: a row of a
// registry that has changed has another one. Then the answers to others tell it, once every batch was answered for a while: the
// servers of a cluster fail one by one, and an answer of one says nothing of another.
type Link struct {
	Down    bool
	began   time.Time
	failed  time.Time // the last batch, as it was not answered
	assumed bool      // that it is up: no limiter has said so
}

// Noticed takes over what a limiter has noticed. It tells whether an outage begins or ends.
func (l *Link) Noticed(down bool) (begins, ends bool) {
	begins, ends = down && !l.Down, !down && l.Down
	if begins {
		l.began = time.Now()
		l.failed = l.began
	}
	l.Down, l.assumed = down, false
	return begins, ends
}

// Tripped takes over what came of a batch. It tells whether an outage begins or ends, and how long the store was away then.
func (l *Link) Tripped(err error) (begins, ends bool, away time.Duration) {
	now := time.Now()
	switch {
	case err != nil:
		if kind := StoreKindOf(err); kind != Timeout && kind != Unavailable { // it has answered, or nobody knows
			return false, false, 0
		}
		if l.failed = now; l.assumed { // of one that has known it all the time
			begins, _ = l.Noticed(true)
		}
	case l.Down && now.Sub(l.failed) > forgotten:
		l.Down, l.assumed = false, true
		return false, true, now.Sub(l.began)
	}
	return begins, false, 0
}
