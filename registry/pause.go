package registry

import (
	"context"
	"errors"
	"fmt"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/admission"
)

// keeperOf returns the bucket that keeps the penalty of a row without a rate.
func (r *Registry) keeperOf(e *entry) admission.Bucket {
	return admission.Bucket{
		Shadow:  r.shadows(&e.limit),
		Limiter: func(warm bool) (*tokenbucket.RateLimiter, error) { return r.visitor(&e.limit, warm) },
	}
}

// visitor returns a limiter of one kind for the penalty of a row's bucket. It has no version, so the bucket's configuration stays in force.
func (r *Registry) visitor(c *Limit, warm bool) (l *tokenbucket.RateLimiter, err error) {
	opts := append(r.limiterOptions(), tokenbucket.WithObserver(tokenbucket.Observer{})) // it decides no call
	if r.shadows(c) {
		opts = append(opts, tokenbucket.WithShadow())
	}
	if warm {
		l, err = tokenbucket.NewSmoothWarmingUp(c.Name, 1, time.Second, opts...)
	} else {
		l, err = tokenbucket.NewSmoothBursty(c.Name, 1, opts...)
	}
	if err != nil {
		return nil, fmt.Errorf("registry: bucket %.80q: %w", c.Name, err)
	}
	return l, nil
}

// renew resets a bucket that is of the other kind than its row, and restores its penalty. Between the two steps there is no penalty.
func (r *Registry) renew(ctx context.Context, l *tokenbucket.RateLimiter, c *Limit) error {
	before, err := r.visitor(c, c.Warmup == 0)
	if err != nil {
		return err
	}
	held, err := admission.HeldFor(ctx, before)
	switch {
	case errors.Is(err, tokenbucket.ErrInvalidConfig): // another process has reset it
		return nil
	case err != nil:
		return err
	}
	if err = l.Reset(ctx); err != nil || held == 0 {
		return err
	}
	return l.Penalize(ctx, held)
}
