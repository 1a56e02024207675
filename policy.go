package tokenbucket

import (
	"fmt"
	"math"
)

// FailurePolicy decides calls for permits while the store is unavailable. The zero value is [FailClosed].
//
// The store is unavailable if it cannot be reached, does not reply in time ([WithStoreTimeout]), or replies that it cannot serve now: it is
// loading, a replica, full, or its cluster is down. A name that DNS does not know is an outage too, since it may come back.
//
// A failure that needs a repair is never an outage, and is an error under every policy. Such failures are a wrong password (NOAUTH,
// WRONGPASS), missing rights (NOPERM), a certificate that is not trusted and the like ([ErrStoreUnusable]), and a key that holds something
// else ([ErrCorruptState]). Nor are these outages: invalid input, a context that has ended, a lock that other processes hold for too long
// ([ErrLockNotObtained]), or a pool whose connections the application uses up ([ErrPoolExhausted]).
//
// A process notices an outage when a call fails and a probe, which is sent at once, fails too. A probe fails if there is no reply within
// 250 ms, or within three times the slowest of the latest replies if that is longer. A store that has never replied has 1 s. The time is
// never longer than the longest timeout ([WithStoreTimeout]) of the process's limiters of that store, so a limiter with a short timeout
// causes no outage for the others.
//
// During an outage a call costs no more than a lock and the error, or the decision of the policy. The store is probed every 100 ms, and
// used again as soon as it replies. Each process notices outages by itself. With the client of a single server an outage is one of all
// buckets. With other clients it is noticed bucket by bucket, since other buckets may be on servers that work. While more than 32 buckets
// are in an outage, each is probed less often: at least about once a second.
//
// [RateLimiter.SetRate], [RateLimiter.SetRateAndBurst], [RateLimiter.Penalize], [RateLimiter.Reset] and [RateLimiter.State] always return
// the failure. So does [Reservation.Cancel] if it has to send something to the store. If a batch is in flight then, Cancel returns nil at
// once, and the permits may be lost.
type FailurePolicy int

const (
	// FailClosed returns the failure as an error. The caller decides what it means for the call behind the limiter.
	FailClosed FailurePolicy = 0
	// FailOpen lets calls pass without a limit, as if the switch were off.
	FailOpen FailurePolicy = -1
)

// LocalShare decides by a bucket in this process. Its rate and its max permits are those of the limiter, divided by the number of live
// instances. With a Redis store, every process with such a limiter writes a sign of life every two seconds (one small script), and reads
// the number of instances. An instance counts for seven seconds after its last sign of life, and the largest number of the last seven
// seconds is used. As long as no number is known, and with other stores, it is the given one, at least 1.
//
// An instance is a store, and stores of one key prefix are counted together. So create one store for each Redis and process, and give each
// fleet a prefix of its own ([WithKeyPrefix]).
//
// The local bucket begins empty, and after the last permit that this process has reserved. So if all instances had been counted, in the
// first T seconds of an outage the fleet grants at most rate × T permits, besides those that were reserved before. With [PayLater] it is
// one request of each process more.
//
// Later windows may have more: each local bucket stores up to its share of max permits, but at least one permit if max permits is at least
// 1. So n instances grant at most max(max permits, n) + rate × T permits in any T seconds of an outage. With a small quota that is more
// than the quota: with [NewQuota](name, 5, time.Second, 0), ten instances that were idle for two seconds grant ten calls at once. With less than
// one stored permit, a bucket could grant no call without a wait, so this is not bounded further. Where the quota must hold, use
// [FailClosed].
//
// Reservations of an outage keep their due times when the outage has ended, besides the permits that the store then grants. A request that no
// state of the smaller bucket could grant within its timeout is refused.
func LocalShare(instances int) FailurePolicy {
	if instances < 1 { // kept below the constants, so that WithFailurePolicy can name it
		return FailurePolicy(max(instances, math.MinInt+2) - 2)
	}
	return FailurePolicy(instances)
}

// Instances returns the number that a [LocalShare] was made with; ok is false for the other policies.
func (p FailurePolicy) Instances() (n int, ok bool) {
	if p < FailOpen {
		return int(p) + 2, true
	}
	return int(p), p > FailClosed
}

// String returns FailClosed, FailOpen or LocalShare(n).
func (p FailurePolicy) String() string {
	if n, ok := p.Instances(); ok {
		return fmt.Sprintf("LocalShare(%d)", n)
	}
	if p == FailOpen {
		return "FailOpen"
	}
	return "FailClosed"
}
