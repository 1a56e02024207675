package tokenbucket

import (
	"context"
	"fmt"
	"time"
)

// quota is what an upstream allows that counts calls: at most n in any window, wherever the window begins.
//
// It is a bucket that stores one permit and earns n in a window plus the jitter. So its permits fall due one at a time, at least
// (window + jitter) / n apart, and n + 1 of them span at least window + jitter. A call reaches the upstream from 0 to jitter after its
// permit was due. So n + 1 calls span at least window.
//
// Four things would break that: more than one stored permit, another rate, a payment that lets permits fall due before they are paid for, and
// several permits in one request, which fall due together. check, single, SetRate and SetRateAndBurst refuse them.
type quota struct {
	n              int
	window, jitter time.Duration
}

// NewQuota returns a limiter for an upstream that counts calls: at most n in any window, wherever the window begins. Each call may arrive up to
// jitter after its permit was due. So the rate is n / (window + jitter), and no more than one permit is stored:
//
//	limiter, err := tokenbucket.NewQuota("/ibe/AvailFare", 5, time.Second, 2*time.Millisecond)
//
// n and window must be positive, and jitter not negative. Whatever would let more calls into a window is an error. [WithMaxPermits],
// [PayLater] and [WithPrefetch] are [ErrInvalidConfig] here, and so are [RateLimiter.SetRate] and [RateLimiter.SetRateAndBurst] later:
// [RateLimiter.SetQuota] changes a quota. A request for more than one permit is [ErrInvalidPermits], because its permits fall due together.
// For bursts, or requests of several permits, use package slidingwindow.
//
// Two choices remain with the caller. [FailOpen] and [LocalShare] may exceed the quota during an outage of the store. All limiters of the
// bucket must be quotas: another limiter of the same name may set another configuration for the fleet.
func NewQuota(name string, n int, window, jitter time.Duration, opts ...Option) (*RateLimiter, error) {
	q := quota{n, window, jitter}
	return NewSmoothBursty(name, q.rate(), append(opts[:len(opts):len(opts)], q.option())...)
}

// ForQuota returns the rate and the option of a quota for [NewSmoothBursty]. The option accepts no other rate, and in all else the limiter is that of
// [NewQuota].
//
// Deprecated: use [NewQuota].
func ForQuota(n int, window, jitter time.Duration) (permitsPerSecond float64, opt Option) {
	q := quota{n, window, jitter}
	return q.rate(), q.option()
}

// SetQuota changes a quota for the whole fleet, as [RateLimiter.SetRateAndBurst] changes another limit. Windows that begin before the change
// count under neither: at most n of the old quota and n of the new one fall into them. A limiter that [NewQuota] did not return gets
// [ErrInvalidConfig].
//
// A quota with a longer interval, (window + jitter) / n, holds in every window that begins after SetQuota has returned, as far as this process
// is concerned. Its waiters and reservations that are not due give up their permits, and ask for others under the new quota: first the
// reservations, in their order, then the callers. So a reservation that is not due moves back, and [Reservation.Delay] grows. A caller that sleeps for the
// Delay that it read before goes earlier than its permit is due. Another process does the same with the next reply that shows the change: within half a
// second while it has waiters or reservations. Permits that cannot go back, because another process has taken permits behind them, lapse.
func (l *RateLimiter) SetQuota(ctx context.Context, n int, window, jitter time.Duration) error {
	l, err := l.operated()
	if err != nil {
		return err
	}
	q := quota{n, window, jitter}
	if l.quota == nil {
		return invalid(l.Name(), wanted("quota", q, "a limiter of NewQuota"))
	}
	if err := q.validate(); err != nil {
		return invalid(l.Name(), err)
	}
	return l.setRateAndBurst(ctx, q.rate(), 1)
}

// String returns the quota for messages.
func (q quota) String() string { return fmt.Sprintf("%d in %v + %v", q.n, q.window, q.jitter) }

// rate returns the permits per second.
func (q quota) rate() float64 { return float64(q.n) / (q.window.Seconds() + q.jitter.Seconds()) }

// option makes a limiter one for the quota.
func (q quota) option() Option { return func(o *options) { o.quota = &q } }

// validate returns an error that names the first field out of range.
func (q quota) validate() error {
	switch {
	case q.n < 1:
		return wanted("quota", q.n, "at least 1 call")
	case q.window <= 0:
		return wanted("quota window", q.window, "a positive duration")
	case q.jitter < 0:
		return wanted("quota jitter", q.jitter, "a duration that is not negative")
	}
	return nil
}

// check returns the error of options that would break the quota.
func (q quota) check(o *options) error {
	if err := q.validate(); err != nil {
		return err
	}
	switch {
	case o.config.Kind != bursty:
		return wanted("quota", q, "none for a limiter that warms up")
	case o.maxPermits != nil:
		return wanted("max permits", *o.maxPermits, "none for a quota, which stores one permit")
	case o.config.Rate != q.rate():
		return wanted("permits per second", o.config.Rate, fmt.Sprintf("that of the quota, %v", q.rate()))
	case o.config.Payment != PayNow:
		return wanted("payment", o.config.Payment, "PayNow for a quota")
	}
	return nil
}

// single returns the error of a request for more than one permit.
func (q quota) single(bucket string, n int64) error {
	if n == 1 {
		return nil
	}
	return fmt.Errorf("%w: bucket %q: permits %d: want 1: those of a quota fall due one at a time", ErrInvalidPermits, bucket, n)
}
