package slidingwindow

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

//go:embed lua/apply.lua
var applySource string

var applyScript = script.New(applySource)

// errStarved is wrapped by the error of a batch for which the application has left no connection, although Redis replies.
var errStarved = errors.New("the application uses all connections of the client")

// send returns a function that runs the script of a batch with a client. Half of the timeout is left to look for the cause of an error without
// details, so that a server that hangs makes no abandoned round trip, and with a pool that is used up, to see whether Redis replies.
func (l *Limiter) send(client script.Client) func(context.Context, *flight) ([]string, error) {
	return func(ctx context.Context, b *flight) ([]string, error) {
		m, run, end := &l.machine, ctx, func() {}
		if script.PoolUsedUp(client, m.key) {
			run, end = context.WithTimeout(ctx, m.policy.timeout/2)
		}
		defer func() { end() }()
		reply, err := applyScript.RunTogether(run, client, b.keys, b.args...)
		if b.keys > 1 && script.KeysApart(err) {
			b.goAlone()
			reply, err = applyScript.Run(run, client, b.keys, b.args...)
		}
		switch {
		case err == nil:
			return reply, nil
		case script.Starved(ctx, client, m.key, err):
			return nil, fmt.Errorf("%w: %w", errStarved, err)
		}
		explain, cancel := context.WithTimeout(ctx, m.policy.timeout/2)
		defer cancel()
		return nil, script.Explain(explain, client, err)
	}
}

// failure returns what an error of a round trip means, and the error as callers get it.
func (m *machine) failure(err error) (waiting.Landing, error) {
	switch {
	case redis.HasErrorPrefix(err, "CORRUPT"):
		return waiting.Unusable, fmt.Errorf("%w: limiter %.80q: key %s: %w", ErrCorruptState, m.name, m.key, err)
	case strings.Contains(err.Error(), "WRONGTYPE"):
		return waiting.Unusable, fmt.Errorf("%w: limiter %.80q: key %s holds no string", ErrCorruptState, m.name, m.key)
	case redis.HasErrorPrefix(err, "OVERFLOW"):
		return waiting.Unusable, fmt.Errorf("%w: limiter %.80q: key %s", ErrOverflow, m.name, m.key)
	case errors.Is(err, errStarved):
		return waiting.Unsent, fmt.Errorf("%w: limiter %.80q: %w", ErrStoreUnavailable, m.name, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return waiting.Failed, fmt.Errorf("%w: limiter %.80q: %w: %w", ErrStoreUnavailable, m.name, ErrStoreTimeout, err)
	case script.Away(err):
		return waiting.Failed, fmt.Errorf("%w: limiter %.80q: %w", ErrStoreUnavailable, m.name, err)
	}
	return waiting.Unusable, fmt.Errorf("%w: limiter %.80q: %w", ErrStoreUnusable, m.name, err)
}
