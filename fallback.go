package tokenbucket

import (
	"context"
	"errors"
	"fmt"
)

// fallback is what the policy says when the store could not be asked: whether the call passes, after what wait. It returns the
// error if the policy has nothing to say of it.
func (l *RateLimiter) fallback(ctx context.Context, v verdict, err error, ask func(*RateLimiter) (verdict, error)) (verdict, error) {
	if l.policy == FailClosed || ctx.Err() != nil || !away(err) && !notAsked(err) {
		return v, err
	}
	if l.coordinator.down() == nil { // a server that shuts out who has no right to be there looks like one that has gone
		probed := l.coordinator.askHealth(ctx)
		switch {
		case ctx.Err() != nil:
			return v, ctx.Err()
		case probed != nil && !away(probed):
			return v, fmt.Errorf("%w; before that: %v", l.coordinator.failure(probed), err) // which was taken for an outage
		case notAsked(err) && probed == nil:
			return v, err
		}
	}
	if l.policy == FailOpen {
		return verdict{granted: true, by: ByPolicy}, nil
	}
	local, invalid := l.locally()
	if invalid != nil {
		return verdict{}, fmt.Errorf("%w; and no local share: %w", err, invalid)
	}
	v, invalid = ask(local)
	v.by = ByPolicy
	switch {
	case errors.Is(invalid, ErrNeverGranted):
		return verdict{by: ByPolicy}, nil // the whole bucket could grant it in time
	case !errors.Is(invalid, ErrInvalidPermits):
		return v, invalid
	}
	return v, fmt.Errorf("%w; and no local share: %w", err, invalid)
}

// share is a limiter of this process's part of a bucket. In each outage the part begins empty once, behind what this process has
// reserved in the bucket, whoever asks for it first (see coordinator.part): an outage gives nobody more than the process's share.
type share struct {
	whole     config
	instances int
	limiter   *RateLimiter
}

// locally is the limiter that decides while the store is away.
func (l *RateLimiter) locally() (*RateLimiter, error) {
	n, _ := l.policy.Instances()
	if l.member != nil {
		if counted := l.member.Live(); counted > 0 {
			n = int(counted)
		}
	}
	whole := l.effective().config
	if s := l.share.Load(); s != nil && s.whole == whole && s.instances == n {
		l.coordinator.part(&s.limiter.limiter)
		return s.limiter, nil
	}
	c := whole
	c.Version = 0
	c.Rate /= float64(n)
	c.Size /= float64(n)
	if err := c.validate(); err != nil {
		return nil, invalid(l.Name(), fmt.Errorf("divided by %d instances: %w", n, err))
	}
	part := &RateLimiter{limiter: limiter{own: newSetting(c), maxWaiters: l.maxWaiters}, plain: true}
	l.coordinator.part(&part.limiter)
	l.share.Store(&share{whole, n, part})
	return part, nil
}
