// Package tokenbucket limits the rate of calls of a whole fleet of processes. It is Guava's RateLimiter with its state in Redis.
//
// A RateLimiter grants permits at a steady rate. All limiters of one name on one store share one bucket, so ten gateways with a limit of 5/s
// make five calls a second, not fifty. Callers can wait for their permit with a timeout ([RateLimiter.TryAcquire]) or without one
// ([RateLimiter.Acquire]), or reserve a permit and do something else meanwhile ([RateLimiter.Reserve]).
//
//	store := tokenbucket.NewRedisScriptStore(redisClient)
//	limiter, err := tokenbucket.NewSmoothBursty("/ibe/AvailFare", 5, tokenbucket.WithStore(store))
//	ok, err := limiter.TryAcquire(ctx, 1, 500*time.Millisecond)
//
// [NewSmoothBursty] stores permits while there are no calls. [NewSmoothWarmingUp] starts slowly after a pause, for upstreams that are slow when
// cold. For an upstream that counts calls in any sliding window, use [NewQuota].
//
// # When the store is unavailable
//
// [WithFailurePolicy] sets the result of calls: they fail with [ErrStoreUnavailable] at once, pass, or get this process's share of the rate.
// [WithObserver] reports every decision, and the state of the store. [WithShadow] tries a limit without refusing calls. With [WithPrefetch] most calls
// need no round trip.
//
// # Guarantees
//
// In any window of T seconds, at most the bucket's size plus rate × T permits fall due. [PayNow] and [PayLater] give the exact formulas.
// That holds for any number of processes, with cancellations, retries and lost replies. Only a store that loses its state loses the
// permits already taken. The long-run rate is exact from 0.001/s to 10,000,000/s. The store's clock decides; gateways' clocks may be wrong. A
// permit whose due time has passed is used: cancelling the call or the [Reservation] then has no effect.
//
// docs/architecture.md in the repository explains how the engine works, its invariants, and where to change what.
package tokenbucket
