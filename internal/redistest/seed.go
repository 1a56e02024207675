package redistest

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// Seed returns the source of all random numbers of a test. The seed is logged. TOKENBUCKET_SEED sets it.
func Seed(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv("TOKENBUCKET_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("TOKENBUCKET_SEED: %v", err)
		}
	}
	t.Logf("TOKENBUCKET_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}
