package slidingwindow

import (
	"context"
	"fmt"
	"time"
)

// Result is the result of a Take. It may be copied, and used by many goroutines at once.
type Result struct {
	// Allowed reports whether the permits may be used.
	Allowed bool
	// Limit that was in force.
	Limit int
	// Remaining is how many permits could be admitted after this, according to the last reply: other processes may have taken some since.
	Remaining int
	// RetryAfter of a refusal is the least time until the permits can be admitted, according to the last reply; otherwise 0.
	RetryAfter time.Duration

	receipt *receipt
}

// receipt is the part of a Result that can be refunded. Its limiter's process guards it.
type receipt struct {
	limiter *Limiter
	at      int64 // when it was admitted, less counts.shifted at that time
	left    int64
}

// Take is AllowN with more results, and its permits can be refunded (Refund). Like AllowN it never waits for permits. During an outage of
// Redis, Remaining is that of this process's share ([LocalShare]), or 0.
func (l *Limiter) Take(ctx context.Context, n int) (Result, error) {
	v, err := l.observed(ctx, n, l.decide)
	if err != nil {
		return Result{}, err
	}
	r := Result{Allowed: v.ok}
	limit, used, wait := l.standing(int64(n))
	r.Limit, r.Remaining = l.Limit(), int(max(0, limit-used))
	if v.ok {
		r.receipt = &receipt{l, v.at, int64(n)}
	} else if used+int64(n) > limit {
		r.RetryAfter = wait
	}
	return r, nil
}

// Refund returns n permits of a Take that were not used, so that they no longer count, with Redis in no process. If the permits were not
// used, no window gets more than the limit by it. All refunds of a Result together return at most its permits. Permits that are out of the
// window by now are not refunded.
//
// With Redis it makes one round trip, shared with other calls, and returns an error if that fails: then the permits may count until they
// are out of the window. During an outage it returns at once, and the permits are refunded when Redis replies. If ctx ends first, they are
// refunded nevertheless. Other processes notice with their next reply, at the latest with their first request in the next sub-interval.
//
// It returns an [ErrInvalidPermits] if n is below 1 or above the rest of the Result, or if the Result is another limiter's or was refused.
func (l *Limiter) Refund(ctx context.Context, r Result, n int) error {
	p := r.receipt
	if p == nil || p.limiter != l {
		return l.machine.name.badPermits("result", "without permits of this limiter", "one that Take has allowed")
	}
	l.process.Mu.Lock()
	left := p.left
	ok := n >= 1 && int64(n) <= left
	if ok {
		p.left -= int64(n)
	}
	l.process.Mu.Unlock()
	if !ok {
		return l.machine.name.badPermits("refund", n, fmt.Sprintf("1 to what is left, %d", left))
	}
	_, err := l.do(ctx, &call{kind: refunds, at: p.at, n: int64(n)})
	return err
}
