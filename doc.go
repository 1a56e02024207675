// Package tokenbucket limits the rate of calls that a whole fleet of processes makes together: Guava's RateLimiter, with
// its state in Redis.
//
// A RateLimiter hands out permits at a steady rate. All limiters of one name on one store share one bucket, so ten
// gateways with a limit of 5/s make five calls a second, not fifty. Callers may wait for their permit for as long as they say
// ([RateLimiter.TryAcquire]), for as long as it takes ([RateLimiter.Acquire]), or reserve one and do something else meanwhile
// ([RateLimiter.Reserve]).
//
//	store := tokenbucket.NewRedisScriptStore(redisClient)
//	limiter, err := tokenbucket.NewSmoothBursty("/ibe/AvailFare", 5, tokenbucket.WithStore(store))
//	ok, err := limiter.TryAcquire(ctx, 1, 500*time.Millisecond)
//
// [NewSmoothBursty] saves up permits while nobody asks; [NewSmoothWarmingUp] begins slowly after a pause, for upstreams that
// are slow when cold. An upstream that counts calls in any sliding window wants [ForQuota].
//
// # When the store is away
//
// [WithFailurePolicy] decides: calls fail with [ErrStoreUnavailable] at once, pass, or get this process's share of the rate.
// [WithObserver] tells of every decision, and of the store. [WithShadow] tries a limit and refuses nobody. With [WithPrefetch] most calls
// need no round trip.
//
// # What holds
//
// In any window of T seconds, at most the bucket's size plus rate × T permits fall due. [PayNow] and [PayLater] give the exact formulas.
// That holds for any number of processes, whatever is cancelled, sent again, or not answered. Only a store that loses the state forgets
// what was taken. The long-run rate is exact from 0.001/s to 10,000,000/s. The store's clock decides; gateways' clocks may be wrong. A
// permit whose time has come is used: giving up, or [Reservation.Cancel], then does nothing.
//
// docs/architecture.md, in the repository, tells how the engine works, what must hold in it, and where to change what.
package tokenbucket
