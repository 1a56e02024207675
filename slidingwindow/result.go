package slidingwindow

import (
	"context"
	"fmt"
	"time"
)

// Result is the answer to a Take. It may be copied, and used by many goroutines at once.
type Result struct {
	// Allowed tells that the permits may be used.
	Allowed bool
	// Limit that was in force.
	Limit int
	// Remaining is how many permits could be admitted after this, as far as this process knows: others may have taken some since.
	Remaining int
	// RetryAfter is of a refusal how long it takes at least until the permits can be admitted, as far as this process knows; else 0.
	RetryAfter time.Duration

	receipt *receipt
}

// receipt is what may be refunded of a Result. Its limiter's mu guards it.
type receipt struct {
	limiter *Limiter
	at      int64 // when it was admitted, less by how much everything that this process admitted was moved in time until then
	left    int64
}

// Take is AllowN that tells more, and whose permits can be given back (Refund). Like AllowN it never waits for permits. While Redis is away
// Remaining is of this process's share ([WithShare]), or 0.
func (l *Limiter) Take(ctx context.Context, n int) (Result, error) {
	v, err := l.observed(ctx, n, l.decide)
	if err != nil {
		return Result{}, err
	}
	r := Result{Allowed: v.ok}
	l.mu.Lock()
	defer l.mu.Unlock()
	limit, used, until := l.standing()
	r.Limit, r.Remaining = int(l.limit.Load()), int(max(0, limit-used))
	if v.ok {
		r.receipt = &receipt{l, v.at, int64(n)}
	} else if used+int64(n) > limit {
		r.RetryAfter = time.Duration(until(limit-int64(n))) * time.Microsecond
	}
	return r, nil
}

// Refund gives back n of the permits of a Take that were not used, so that they do not count any more: not in this process, and with Redis
// in none. No window gets more than the limit by it, if what is given back was not used. All refunds of a Result together give back
// what it has taken at most. What is out of the window by now needs no refund, and is none.
//
// With Redis it is one round trip, shared with others, and an error if that fails: then the permits may count until they are out of the
// window. While Redis is known to be away it returns at once, and the permits are given back when Redis answers. If ctx ends
// first they are given back nevertheless. Other processes notice with their next answer, at the latest for a request in the next
// sub-interval.
//
// An [ErrInvalid]: n is below 1 or more than is left of the Result, or the Result is another limiter's, or was refused.
func (l *Limiter) Refund(ctx context.Context, r Result, n int) error {
	p := r.receipt
	if p == nil || p.limiter != l {
		return l.bad("result", "without permits of this limiter", "one that Take has allowed")
	}
	l.mu.Lock()
	if left := p.left; n < 1 || int64(n) > left {
		l.mu.Unlock()
		return l.bad("refund", n, fmt.Sprintf("1 to what is left, %d", left))
	}
	p.left -= int64(n)
	if l.coordinator != nil {
		l.mu.Unlock()
		return l.coordinator.refund(ctx, p.at, int64(n))
	}
	defer l.mu.Unlock()
	l.counts.advance(&l.rule, l.now())
	l.counts.remove(&l.rule, p.at+l.counts.shifted, int64(n))
	l.stopRefusing()
	l.line.wake()
	return nil
}
