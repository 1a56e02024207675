package slidingwindow

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/internal/step"
)

// errStarved is wrapped by the error of a batch for which the application has left no connection, although Redis replies.
var errStarved = errors.New("the application uses all connections of the client")

// explain looks for the cause of an error without details. It takes at most half of the timeout, so that a server that hangs makes no
// abandoned round trip.
func (c *coordinator) explain(ctx context.Context, client script.Client, err error) error {
	ctx, cancel := context.WithTimeout(ctx, c.policy.timeout/2)
	defer cancel()
	return script.Explain(ctx, client, err)
}

// failure returns what an error of a round trip means, and the error as callers get it.
func (c *coordinator) failure(err error) (step.Landing, error) {
	switch err = c.wrap(err); {
	case errors.Is(err, errStarved):
		return step.Unsent, err
	case errors.Is(err, ErrStoreUnavailable):
		return step.Failed, err
	}
	return step.Unusable, err
}

// wrap implements failure.
func (c *coordinator) wrap(err error) error {
	switch {
	case redis.HasErrorPrefix(err, "CORRUPT"):
		return fmt.Errorf("%w: limiter %.80q: key %s: %w", ErrCorruptState, c.name, c.key, err)
	case strings.Contains(err.Error(), "WRONGTYPE"):
		return fmt.Errorf("%w: limiter %.80q: key %s holds no string", ErrCorruptState, c.name, c.key)
	case redis.HasErrorPrefix(err, "OVERFLOW"):
		return fmt.Errorf("%w: limiter %.80q: key %s", ErrOverflow, c.name, c.key)
	case errors.Is(err, errStarved):
		return fmt.Errorf("%w: limiter %.80q: %w", ErrStoreUnavailable, c.name, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: limiter %.80q: %w: %w", ErrStoreUnavailable, c.name, ErrStoreTimeout, err)
	case errors.Is(err, ErrStoreTimeout), script.Away(err):
		return fmt.Errorf("%w: limiter %.80q: %w", ErrStoreUnavailable, c.name, err)
	}
	return fmt.Errorf("%w: limiter %.80q: %w", ErrStoreUnusable, c.name, err)
}
