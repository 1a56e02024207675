package faultlab

import (
	"math/rand/v2"
	"testing"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The network that misbehaves, by the names that tests of faults use. It is in redistest, which tests of the root module can
// import.
type (
	Proxy   = redistest.Proxy
	Fault   = redistest.Fault
	Network = redistest.Network
)

// The faults.
const (
	None      = redistest.None
	LoseReply = redistest.LoseReply
	CutAfter  = redistest.CutAfter
	CutBefore = redistest.CutBefore
	Twice     = redistest.Twice
)

// The states of a network.
const (
	Up      = redistest.Up
	Stalled = redistest.Stalled
	Cut     = redistest.Cut
	Down    = redistest.Down
)

// StartProxy is redistest.StartProxy.
func StartProxy(t testing.TB, server string) *Proxy {
	t.Helper()
	return redistest.StartProxy(t, server)
}

// Seed is redistest.Seed.
func Seed(t testing.TB) *rand.Rand {
	t.Helper()
	return redistest.Seed(t)
}
