package telemetry

import "time"

// recovery is how long batches must succeed without a failure before the store counts as up again, if no limiter reports so. A limiter that
// is in use during an outage probes at least every 45 s.
const recovery = time.Minute

// link is the state of the store that several limiters share. The latest event decides, whichever limiter reported it. Unlike an
// outage.Monitor, a link neither probes the store nor decides calls: it sums up what the limiters have detected. The lock of the Recorder
// must be held for its methods.
//
// A limiter of package slidingwindow or semaphore notices the end of an outage only while it is used. One that is never used again, such as
// that of a row that has changed, would keep the store down forever. So successful batches of other limiters end an outage too, once no
// batch has failed for a while. A single success is not enough: the servers of a cluster fail one by one.
type link struct {
	down    bool
	began   time.Time // of the outage
	failed  time.Time // when the last batch failed
	assumed bool      // successful batches ended the outage; no limiter has reported its end
}

// reported records that a limiter reports the beginning or the end of an outage. It reports whether the state of the store changed.
func (l *link) reported(down bool) (begins, ends bool) {
	begins, ends = down && !l.down, !down && l.down
	if begins {
		l.began = time.Now()
		l.failed = l.began
	}
	l.down, l.assumed = down, false
	return begins, ends
}

// tripped records the result of a batch. It reports whether the state of the store changed, and how long an outage lasted that ended.
func (l *link) tripped(kind Kind) (begins, ends bool, lasted time.Duration) {
	now := time.Now()
	switch kind {
	case KindNone:
		if l.down && now.Sub(l.failed) > recovery {
			l.down, l.assumed = false, true
			return false, true, now.Sub(l.began)
		}
	case KindTimeout, KindUnavailable:
		l.failed = now
		if l.assumed { // the limiter that began the outage will not report it again
			begins, _ = l.reported(true)
		}
	}
	return begins, false, 0
}
