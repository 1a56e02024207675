// Package tokenbuckettest helps to test a program that uses limiters: its Store fails on command.
//
// A limiter on a [tokenbucket.MemoryStore] never fails, so a test with one alone leaves out what a program does when the shared store is away.
// A [Store] keeps buckets in memory, or in another store, and has the faults of a network: an outage, a store that hangs or is slow, a reply
// that is lost.
//
//	store := tokenbuckettest.NewStore()
//	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store))
//	…
//	store.Fail(tokenbuckettest.Outage()) // from now on
//	…
//	store.Restore()
//
// The package starts no goroutine and reads no clock except by timers of package time, so it works in a bubble of testing/synctest: timeouts
// and slow replies then take no real time. It imports nothing beyond the library and the standard library.
package tokenbuckettest
