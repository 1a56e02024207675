// Package seam opens what the package tokenbucket keeps to itself to the tools and tests of this repository. That package sets
// the functions when it is initialised.
package seam

import "time"

// NewBatch returns a *tokenbucket.Batch of names that decides as it is told.
var NewBatch func(names []string, decide func(nowMicros int64, states [][]byte) (next [][]byte, ttl time.Duration, err error)) any
