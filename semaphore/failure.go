package semaphore

import "fmt"

// FailurePolicy decides requests for permits during an outage of the store. The zero value is [FailClosed].
//
// A process notices an outage when a call fails and a probe, which is sent at once, fails too. From then on calls return at once. The store
// is probed about ten times a second, and asked again as soon as it replies. Failures that need a repair are no outage, and are returned as
// errors under every policy: [ErrStoreUnusable] and [ErrCorruptState].
//
// Permits that are held are renewed when the outage ends. If their lease ends before, they are lost ([ErrExpired]). Release returns an
// [ErrStoreUnavailable], and the permit is released in the store when the outage ends.
type FailurePolicy uint8

const (
	// FailClosed returns an [ErrStoreUnavailable]. Callers that wait in the queue when the outage begins keep waiting, and keep their places.
	FailClosed FailurePolicy = iota
	// FailOpen grants permits that only this process knows (Permit.Passed). They are not bounded: each process may hold any number of them,
	// and they stay held beside the permits that the store grants when the outage ends. Their Fence is 0. They end when they are released,
	// with Close, or with the lease of [WithFixedLease]. Group.Done finds them only in the process that holds them. Use FailOpen where too
	// many permits are better than none, never for a mutex.
	FailOpen
)

// String returns FailClosed or FailOpen.
func (p FailurePolicy) String() string {
	switch p {
	case FailClosed:
		return "FailClosed"
	case FailOpen:
		return "FailOpen"
	}
	return fmt.Sprintf("FailurePolicy(%d)", uint8(p))
}
