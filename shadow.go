package tokenbucket

import (
	"context"
	"time"
)

// shadowed decides without making anybody wait. The bucket is the shadows' own: its name begins with shadowMark.
func (l *RateLimiter) shadowed(ctx context.Context, permits int, timeout time.Duration) (verdict, error) {
	if permits > 0 && int64(permits) <= maxExact {
		timeout = min(timeout, time.Duration(l.effective().reach(int64(permits), 0))*time.Microsecond)
	}
	_, v, err := l.tryReserve(ctx, permits, timeout)
	return v, err
}
