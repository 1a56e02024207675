package registry

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
)

// Otherwise is the policy for calls of names without a valid row ([WithUnknown], [WithBadRows]).
type Otherwise struct {
	refuse bool
	limit  *Limit
}

// Pass lets the calls pass at once.
func Pass() Otherwise { return Otherwise{} }

// Refuse refuses the calls.
func Refuse() Otherwise { return Otherwise{refuse: true} }

// Default gives each name a bucket of its own with this limit; its Name is ignored. [WithMaxUnknown] bounds the limiters for names without a
// row. If a limiter is dropped, its bucket stays in the store and is used again when the name returns. Any string is accepted as a name:
// invalid UTF-8 and an empty name become "?", and only the first 512 bytes count. The bucket never is that of a row: its name begins with %unknown: or
// %bad:, so neither a row that has ended nor one that another process has loaded decides about it.
func Default(limit Limit) Otherwise {
	own := limit.clone()
	return Otherwise{limit: &own}
}

// describe returns the outcome of the calls, in words.
func (o *Otherwise) describe() string {
	switch {
	case o.refuse:
		return "its calls are refused"
	case o.limit != nil:
		return "its calls have the limit " + o.limit.String()
	}
	return "its calls pass without a limit"
}

// Option configures a Registry. An option with a bad value makes New fail.
type Option func(*settings) error

func bad(field string, value any, want string) error {
	return fmt.Errorf("registry: %w: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
}

// WithInterval sets the time between two loads: a random time from 0.8 d to d, so that a fleet does not load in step. At least 10 ms,
// default 10 s.
func WithInterval(d time.Duration) Option {
	return func(s *settings) error {
		if d < 10*time.Millisecond {
			return bad("interval", d, "at least 10ms")
		}
		s.interval = d
		return nil
	}
}

// WithLoadTimeout bounds one load. At least 1 ms, default one minute: a table of hundreds of thousands of rows takes some seconds. A load of
// more than five seconds is logged.
func WithLoadTimeout(d time.Duration) Option {
	return func(s *settings) error {
		if d < time.Millisecond {
			return bad("timeout", d, "at least 1ms")
		}
		s.timeout = d
		return nil
	}
}

// WithWait makes New retry the first load until ctx ends. Without it New fails if the first load fails.
func WithWait(ctx context.Context) Option {
	return func(s *settings) error {
		if ctx == nil {
			return bad("wait", "nil", "a context")
		}
		s.wait = ctx
		return nil
	}
}

// WithUnknown sets the policy for names without a row. Default: Pass.
func WithUnknown(o Otherwise) Option {
	return func(s *settings) error {
		s.unknown = o
		return nil
	}
}

// WithBadRows sets the policy for names whose row was bad from its first load on, until the row is repaired or removed. If a valid row turns
// bad, its last valid limit stays in force instead. Default: Refuse.
func WithBadRows(o Otherwise) Option {
	return func(s *settings) error {
		s.badRows = o
		return nil
	}
}

// WithMaxUnknown bounds the number of limiters for names without a row ([Default]). At least 2, default 10,000.
func WithMaxUnknown(n int) Option {
	return func(s *settings) error {
		if n < 2 {
			return bad("max unknown", n, "at least 2")
		}
		s.maxUnknown = n
		return nil
	}
}

// WithMaxKeyLimiters bounds the number of limiters for the keys of all rows (Limit.PerKey). If a limiter is dropped, its bucket stays in the
// store and is used again when the key returns. At least 2, default 10,000.
func WithMaxKeyLimiters(n int) Option {
	return func(s *settings) error {
		if n < 2 {
			return bad("max key limiters", n, "at least 2")
		}
		s.maxKeyLimiters = n
		return nil
	}
}

// WithMaxKeys bounds the number of keys of a row (Limit.PerKey), and of names without a row (Default), that get a bucket of their own in an
// hour. Keys of the hour before keep theirs; together they are at most twice the bound. Until the hour is over, all further keys share one
// bucket with the row's limit. This is logged, and Stats.Shared counts their calls. At least 1, default 10,000.
func WithMaxKeys(n int) Option {
	return func(s *settings) error {
		if n < 1 {
			return bad("max keys", n, "at least 1")
		}
		s.maxKeys = n
		return nil
	}
}

// WithAllowEmpty accepts at once a table that is empty, or has lost more than half of its limits. Without it the lost limits stay in force until three
// consecutive loads agree which these are, and the loss is reported until a person confirms it (Loss). It excludes
// [WithConfirmedLosses].
func WithAllowEmpty() Option {
	return func(s *settings) error {
		return s.believe(rows.AtOnce, "allow empty")
	}
}

// WithStrict makes New fail with [ErrBadRows] if any row is bad. It is for limits in the program itself ([Static]), where a bad row is a
// mistake of the program. It has no effect on later loads: if a row turns bad, its last valid limit stays in force.
func WithStrict() Option {
	return func(s *settings) error {
		s.strict = true
		return nil
	}
}

// WithParts declares that names have parts, as httplimit.Join makes them: separated by |, with | and \ within a part escaped by \. A row then
// matches all names whose first parts it has: /a matches /a|x and /a|y, and /a|x* matches /a|xyz. If several rows match, the longest
// counts. Different names have different buckets, also names that are too long or not UTF-8.
func WithParts() Option {
	return func(s *settings) error {
		s.parts = true
		return nil
	}
}

// WithSwitch sets the global switch. While it is off, every call passes, and no store is used. The log has it every minute, with the result
// of the switch's method Origin() string if there is one.
func WithSwitch(sw Switch) Option {
	return func(s *settings) error {
		if sw == nil {
			return bad("switch", "nil", "a switch")
		}
		s.sw = sw
		return nil
	}
}

// WithLimiterOptions adds options to every limiter, such as WithMaxWaiters or WithPrefetch. A row that they do not fit is rejected: prefer
// tokenbucket.WithInitialPermitsUpTo, since WithInitialPermits may exceed the size of a row's bucket. Without either, the buckets of keys
// (Limit.PerKey) and of names without a row (Default) begin full, and stores drop them a minute after they are full again. All others begin
// with one permit.
func WithLimiterOptions(opts ...tokenbucket.Option) Option {
	return func(s *settings) error {
		s.options = append(s.options, opts...)
		return nil
	}
}

// WithHook sets a function that is called after every load, in their order, one call at a time. A load waits for its call, so a slow hook
// delays the next load. The hook may call all methods of the Registry: a load by its own Reload is passed to it after it has returned. A panic
// of the hook is logged.
func WithHook(f func(Load)) Option {
	return func(s *settings) error {
		s.hook = f
		return nil
	}
}

// WithBypassHook sets a function that is called for every call that passes or is refused without a bucket, and so without a
// tokenbucket.Observer. The goroutine of the call calls it, so it must return quickly.
func WithBypassHook(f func(name string, by gate.Decider, pass bool)) Option {
	return func(s *settings) error {
		s.bypass = f
		return nil
	}
}

// WithLogger sets the logger of the Registry and, unless [WithLimiterOptions] has another, of its limiters. Default slog.Default().
func WithLogger(l *slog.Logger) Option {
	return func(s *settings) error {
		if l == nil {
			return bad("logger", "nil", "a logger")
		}
		s.log = l
		s.options = append([]tokenbucket.Option{tokenbucket.WithLogger(l)}, s.options...)
		return nil
	}
}
