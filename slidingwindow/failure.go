package slidingwindow

import (
	"fmt"
	"math"
)

// FailurePolicy decides requests during an outage of Redis. The zero value is [FailClosed].
//
// It is an outage if Redis cannot be reached, does not reply in time ([WithStoreTimeout]), or replies that it cannot serve now: it is
// loading, a replica or full, or its cluster is down. Failures that need a repair are no outage, and are returned as errors under every
// policy: [ErrStoreUnusable] (NOAUTH, WRONGPASS, NOPERM, MOVED, a script that fails, a certificate, an address, a closed client),
// [ErrCorruptState] and [ErrOverflow].
type FailurePolicy int

const (
	// FailClosed returns an [ErrStoreUnavailable]. Requests that the process can refuse from the last reply are still refused.
	FailClosed FailurePolicy = 0
	// FailOpen allows all requests.
	FailOpen FailurePolicy = -1
)

// LocalShare lets each process admit up to the given number of permits in any window by itself, or up to the limit if that is lower; it needs
// [WithRedis]. The share is counted exactly, and includes the permits that the process was granted before the outage. While the last reply
// shows a full window, requests are refused. With a share of limit / processes, the fleet keeps to the limit if no process had more than
// its share before.
//
// A process notices with a request that Redis is back. That request is still decided by the share, which may have more room than the window
// in Redis. Then the process reports what it has admitted: within 2 s if it gets requests, within 45 s if not. A report is counted once, even
// if its reply is lost and it is sent again. In a window in which the
// outage begins or ends, at most limit + (processes − 1) × permits are admitted.
func LocalShare(permits int) FailurePolicy {
	if permits < 1 { // encoded below the constants, so that New's error can name the value
		return FailurePolicy(max(permits, math.MinInt+2) - 2)
	}
	return FailurePolicy(permits)
}

// share returns the number that a LocalShare was made with; ok is false for the other policies.
func (p FailurePolicy) share() (permits int, ok bool) {
	if p < FailOpen {
		return int(p) + 2, true
	}
	return int(p), p > FailClosed
}

// String returns FailClosed, FailOpen or LocalShare(n).
func (p FailurePolicy) String() string {
	switch n, ok := p.share(); {
	case ok:
		return fmt.Sprintf("LocalShare(%d)", n)
	case p == FailOpen:
		return "FailOpen"
	}
	return "FailClosed"
}
