// Package seam opens what the package tokenbucket keeps to itself to the tools and tests of this repository. That package sets
// the functions when it is initialised.
package seam

import "time"

// Take is a request for permits, and its answer.
type Take struct {
	Permits       int64
	MaxWaitMicros int64

	Granted    bool
	WaitMicros int64 // until the permits are due; of a refusal, what it would have been
}

// Decided is what a store has decided for a limiter.
type Decided struct {
	NowMicros int64 // by the store's clock
	Takes     []Take
	Refunds   int
}

// DecidedIn returns what was decided in a *tokenbucket.Batch.
var DecidedIn func(batch any) Decided

// Force is what is in force in a limiter's bucket, as far as its process has heard.
type Force struct {
	Own           bool   // it is the limiter's own configuration, but perhaps for its version
	Config        string // the limiter's own, as it stands at the end of a state
	OwnRate, Rate float64
	Version       int64
}

// InForce returns what is in force for a *tokenbucket.RateLimiter.
var InForce func(limiter any) Force

// Hopeless tells whether a *tokenbucket.RateLimiter would refuse a request for one permit by what its process knows.
var Hopeless func(limiter any, timeout time.Duration) bool

// Read reads a state as it is stored into a *tokenbucket.PermitBucket.
var Read func(bucket any, state string) error

// Refused returns a *tokenbucket.Reservation that is not OK.
var Refused func(retryAfter time.Duration) any

// Question is what the arithmetic makes of a bucket.
type Question struct {
	State   string // the bucket as it is stored; "": it is a new one
	Config  string // of the limiter that asks, as it stands at the end of a state
	Initial float64
	Epoch   int64
}

// Answer decides takes on a bucket at a time of the store's clock, fills in the answers, and returns the state afterwards.
var Answer func(q Question, nowMicros int64, takes []Take) (state string, err error)

// Waiting returns how many calls a *tokenbucket.RateLimiter's process has under way while somebody waits, and for how long the first of
// them has waited; 0: nobody does.
var Waiting func(limiter any) (calls int, longest time.Duration)
