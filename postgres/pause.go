package postgres

import (
	"context"
	"math/rand/v2"
	"time"
)

// pause is the mean wait before the next attempt of a call that was not executed. It doubles up to a bound, and is spread by half, so that
// callers that met at the same row do not meet again.
type pause time.Duration

const (
	shortestPause = pause(200 * time.Microsecond)
	longestPause  = pause(10 * time.Millisecond)
)

// wait waits for the pause and doubles it. It reports false if the context ends first. If the context's deadline is sooner, it does so at
// once, which leaves the caller time to return the cause.
func (p *pause) wait(ctx context.Context) bool {
	d := time.Duration(*p)
	*p = min(2**p, longestPause)
	d = d/2 + rand.N(d)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= d {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
