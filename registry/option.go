package registry

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// Unknown says what happens to a call for a name without a row.
type Unknown struct {
	refuse bool
	limit  *Limit
}

// Pass lets calls for names without a row pass at once. It is the default.
func Pass() Unknown { return Unknown{} }

// Refuse refuses calls for names without a row.
func Refuse() Unknown { return Unknown{refuse: true} }

// Default gives each name without a row a bucket of its own, by this limit; its Name is ignored. So many limiters are kept as
// WithMaxUnknown says; the bucket of one that was dropped is in the store, and goes on when the name comes back. Any string
// will do for a name: what is no UTF-8 in it counts as "?", and so does an empty one; what is beyond 512 bytes does not count.
func Default(limit Limit) Unknown { return Unknown{limit: &limit} }

// Option configures a Registry. An option with a bad value makes New fail.
type Option func(*Registry) error

func bad(field string, value any, want string) error {
	return fmt.Errorf("registry: %w: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
}

// WithInterval sets how often the source is asked: each time after a random time between four fifths of d and d, so that a
// fleet does not ask in step. At least 10 ms, default 10 s.
func WithInterval(d time.Duration) Option {
	return func(r *Registry) error {
		if d < 10*time.Millisecond {
			return bad("interval", d, "at least 10ms")
		}
		r.interval = d
		return nil
	}
}

// WithTimeout bounds one load. At least 1 ms, default 5 s.
func WithTimeout(d time.Duration) Option {
	return func(r *Registry) error {
		if d < time.Millisecond {
			return bad("timeout", d, "at least 1ms")
		}
		r.timeout = d
		return nil
	}
}

// WithWait lets New wait for a source that cannot be read yet, until ctx is done. Without it New fails at once.
func WithWait(ctx context.Context) Option {
	return func(r *Registry) error {
		if ctx == nil {
			return bad("wait", "nil", "a context")
		}
		r.wait = ctx
		return nil
	}
}

// WithUnknown sets what happens to names without a row. Default: Pass.
func WithUnknown(u Unknown) Option {
	return func(r *Registry) error {
		r.unknown = u
		return nil
	}
}

// WithMaxUnknown bounds how many limiters are kept for names without a row (Default). At least 2, default 10,000.
func WithMaxUnknown(n int) Option {
	return func(r *Registry) error {
		if n < 2 {
			return bad("max unknown", n, "at least 2")
		}
		r.strange.most = n
		return nil
	}
}

// WithSwitch sets the global switch: while it is off every call passes, and no store is touched.
func WithSwitch(s Switch) Option {
	return func(r *Registry) error {
		if s == nil {
			return bad("switch", "nil", "a switch")
		}
		r.sw = s
		return nil
	}
}

// WithLimiterOptions adds options to every limiter, such as WithMaxWaiters or WithLease. A row that they do not fit is
// rejected.
func WithLimiterOptions(opts ...tokenbucket.Option) Option {
	return func(r *Registry) error {
		r.options = append(r.options, opts...)
		return nil
	}
}

// WithHook sets a function that is told of every load, by the goroutine that loads.
func WithHook(f func(Load)) Option {
	return func(r *Registry) error {
		r.hook = f
		return nil
	}
}

// WithLogger sets where changes, rejected rows and outages are logged, each once, and where the limiters log, unless
// WithLimiterOptions says otherwise. Default slog.Default().
func WithLogger(l *slog.Logger) Option {
	return func(r *Registry) error {
		if l == nil {
			return bad("logger", "nil", "a logger")
		}
		r.log = l
		r.options = append([]tokenbucket.Option{tokenbucket.WithLogger(l)}, r.options...)
		return nil
	}
}
