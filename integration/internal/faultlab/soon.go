package faultlab

import (
	"errors"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Soon waits until what holds, and returns how long that took; if it takes longer than the limit, the test fails. Servers are
// other processes: there is no fake clock for them.
func Soon(t testing.TB, limit time.Duration, what func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	if err := redistest.Poll(limit, func() error {
		if !what() {
			return errors.New("it does not come about")
		}
		return nil
	}); err != nil {
		t.Fatalf("within %v: %v", limit, err)
	}
	return time.Since(began)
}
