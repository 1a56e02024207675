package killswitch

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

const (
	defaultInterval = time.Second
	defaultTimeout  = time.Second
)

// Option configures a Switch. An option with a bad value makes the constructor fail.
type Option func(*options)

type options struct {
	interval, timeout time.Duration
	initial           bool
	hook              func(error)
	log               *slog.Logger
	write             func(context.Context, bool) error
	origin            func() string
	err               error
}

func (o *options) fail(field string, value any, want string) {
	if o.err == nil {
		o.err = bad(field, value, want)
	}
}

// WithInterval sets the longest time between the beginnings of two reads, 10 ms to 1 hour. Default 1 s.
func WithInterval(d time.Duration) Option {
	return func(o *options) {
		if d < 10*time.Millisecond || d > time.Hour {
			o.fail("interval", d, "10ms to 1h")
		}
		o.interval = d
	}
}

// WithTimeout bounds one read, also the first in the constructor: 1 ms to 1 minute. Default 1 s.
func WithTimeout(d time.Duration) Option {
	return func(o *options) {
		if d < time.Millisecond || d > time.Minute {
			o.fail("timeout", d, "1ms to 1m")
		}
		o.timeout = d
	}
}

// WithInitial sets the state of the switch until the first successful read. Default true: limits apply.
func WithInitial(on bool) Option {
	return func(o *options) { o.initial = on }
}

// WithHook sets a function that is called at the beginning of an outage, with the error of the first read that fails, and at its end,
// with nil. Reading waits for the hook, so it must not block; it may call Set and Close. By default outages are logged, see [WithLogger].
func WithHook(hook func(error)) Option {
	return func(o *options) {
		if hook == nil {
			o.fail("hook", "nil", "a function")
		}
		o.hook = hook
	}
}

// WithLogger sets the logger for the beginning and the end of outages, if there is no [WithHook]. Default slog.Default().
func WithLogger(l *slog.Logger) Option {
	return func(o *options) {
		if l == nil {
			o.fail("logger", "nil", "a logger")
		}
		o.log = l
	}
}

// WithWrite sets the function by which Set writes.
func WithWrite(write func(ctx context.Context, on bool) error) Option {
	return func(o *options) {
		if write == nil {
			o.fail("write", "nil", "a function")
		}
		o.write = write
	}
}

// WithOrigin sets a function that returns, for messages, the author and the time of the last change; it returns "" if they are not known.
func WithOrigin(origin func() string) Option {
	return func(o *options) {
		if origin == nil {
			o.fail("origin", "nil", "a function")
		}
		o.origin = origin
	}
}

// logOutage returns the default hook, which logs.
func logOutage(log *slog.Logger) func(error) {
	return func(err error) {
		if err != nil {
			log.Warn("killswitch: the switch cannot be read, so its last known state stays in force", "error", err)
			return
		}
		log.Info("killswitch: the switch can be read again")
	}
}

func bad(field string, value any, want string) error {
	return fmt.Errorf("killswitch: %w: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
}
