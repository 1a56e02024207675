// Package storetest holds the conformance suite that every tokenbucket.Store must pass. A store of your own runs it so:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) func() tokenbucket.Store {
//			db := openEmptyDatabase(t)
//			return func() tokenbucket.Store { return mystore.New(db) }
//		})
//	}
//
// Most tests apply batches with states of their own, to compare every byte that the store returns. The others use limiters.
package storetest

import (
	"testing"

	"github.com/go-tokenbucket/tokenbucket"
)

// Run tests a store. It calls open once per test, for an empty place to keep states in. Each call of the function that open returns opens the
// store on that place as another process would. The store's clock must be real.
func Run(t *testing.T, open func(t *testing.T) func() tokenbucket.Store) {
	for name, test := range map[string]func(t *testing.T, store func() tokenbucket.Store){
		"a missing state is nil":            missingState,
		"states come back byte by byte":     bytesComeBack,
		"names are independent":             namesAreApart,
		"one step at a time":                oneStepAtATime,
		"several names in one step":         severalNames,
		"other states stay":                 untouchedStays,
		"when Decide fails nothing happens": failedDecision,
		"the last decision is written":      lastDecision,
		"states live as long as they must":  timeToLive,
		"the clock moves on":                clockMovesOn,
		"a context that has ended":          doneContext,

		"exactly what there is":   exactlyWhatThereIs,
		"keeps every digit":       keepsEveryDigit,
		"reading writes nothing":  readingWritesNothing,
		"a refusal takes nothing": refusalTakesNothing,
		"kinds do not mix":        kindsDoNotMix,
		"a bucket is one bucket":  oneBucketForAll,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}
