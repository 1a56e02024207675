package tokenbucket

import (
	"fmt"
	"math"
)

// FailurePolicy is what a call for permits gets while the store is away. The zero value is [FailClosed].
//
// Away means that it cannot be reached, does not answer in time ([WithStoreTimeout]), or says that it cannot serve now: it is
// loading, a replica, full, or its cluster is down. What somebody must repair is never taken for that, and is an error under
// every policy: a wrong password (NOAUTH, WRONGPASS), missing rights (NOPERM), a certificate that is not trusted and the like
// ([ErrStoreUnusable]), a key that holds something else ([ErrCorruptState]), bad input, a context that has ended, a lock that others hold
// for too long ([ErrLockNotObtained]), or a pool whose connections the application uses up ([ErrPoolExhausted]). A name that DNS does not know is an outage: it may come back.
//
// A process notices an outage when a call fails and a probe, which is sent at once, fails too. A probe fails if it is not answered
// within 250 ms, or within three times the slowest of the latest answers if that is longer. If the store has never answered, it is
// given 1 s. It is never given longer than the longest timeout ([WithStoreTimeout]) of the process's limiters of that store, so a limiter
// with little patience makes no outage for the others. From then on a call costs no more than a lock and the error, or the
// decision of the policy. The store is probed every 100 ms, and asked again as soon as it answers. Each process notices by itself. Unless
// the client is one of a single server, an outage is noticed bucket by bucket, since other buckets may be on servers that are well. While more than 32
// buckets are away, each is probed less often: about once a second at the least.
//
// [RateLimiter.SetRate], [RateLimiter.SetRateAndBurst], [RateLimiter.Penalize], [RateLimiter.Reset] and [RateLimiter.State]
// always return the failure. So does [Reservation.Cancel] if it has anything to tell the store. If a batch is under way then, it
// returns nil at once, and the permits may be lost.
type FailurePolicy int

const (
	// FailClosed returns the failure as an error: what it means for the call behind the limiter is its caller's decision.
	FailClosed FailurePolicy = 0
	// FailOpen lets calls pass, unlimited, as if the switch were off.
	FailOpen FailurePolicy = -1
)

// LocalShare decides by a bucket in this process. Its rate and its max permits are those of the limiter, divided by the number of
// live instances. With a Redis store, every process with such a limiter writes a sign of life every two seconds (one small script),
// and reads how many others do. An instance counts for seven seconds after its last sign of life, and the largest number of the last
// seven seconds is used. As long as no number is known, and with other stores, it is the given one, at least 1.
//
// What is counted is stores of one key prefix. So make one store for each Redis and process, and give each fleet a prefix of its own
// ([WithKeyPrefix]).
//
// The local bucket begins empty, and after the last permit that this process has reserved. So in the first T seconds of an outage the
// fleet lets go at most rate × T permits, if all its instances had been counted, besides those that were reserved before. With [PayLater]
// it is one request of each process more.
//
// Later windows may have more: each local bucket saves up its part of max permits, but at least one permit if max permits is at least 1.
// So n instances let go at most max(max permits, n) + rate × T permits in any T seconds of an outage. With a small quota that is more than
// the quota: of [ForQuota](5, time.Second, 0), ten instances that were idle for two seconds let ten calls go at once. With less than a
// permit saved up, a bucket could grant no call without a wait, so this is not bounded further. Where the quota must hold, use
// [FailClosed].
//
// What is reserved in an outage falls due as reserved, even when the store is back, beside what the store then grants. A request that no
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
