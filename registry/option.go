package registry

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// Otherwise says what happens to calls of a name that no good row decides about ([WithUnknown], [WithBadRows]).
type Otherwise struct {
	refuse bool
	limit  *Limit
}

// Pass lets the calls pass at once.
func Pass() Otherwise { return Otherwise{} }

// Refuse refuses the calls.
func Refuse() Otherwise { return Otherwise{refuse: true} }

// Default gives each name a bucket of its own, by this limit; its Name is ignored. Of names without a row so many limiters are
// kept as [WithMaxUnknown] says; the bucket of one that was dropped is in the store, and goes on when the name comes back. Any
// string will do for a name: what is no UTF-8 in it counts as "?", and so does an empty one; what is beyond 512 bytes does not count.
func Default(limit Limit) Otherwise { return Otherwise{limit: &limit} }

// describe is what happens to the calls, for a person.
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

// WithInterval sets how often the source is asked: each time after a random time between four fifths of d and d, so that a
// fleet does not ask in step. At least 10 ms, default 10 s.
func WithInterval(d time.Duration) Option {
	return func(s *settings) error {
		if d < 10*time.Millisecond {
			return bad("interval", d, "at least 10ms")
		}
		s.interval = d
		return nil
	}
}

// WithLoadTimeout bounds one load. At least 1 ms, default one minute: a table of hundreds of thousands of rows takes some seconds. The log has a
// load that takes more than five seconds.
func WithLoadTimeout(d time.Duration) Option {
	return func(s *settings) error {
		if d < time.Millisecond {
			return bad("timeout", d, "at least 1ms")
		}
		s.timeout = d
		return nil
	}
}

// WithWait lets New wait for a source that cannot be read yet, until ctx is done. Without it New fails at once.
func WithWait(ctx context.Context) Option {
	return func(s *settings) error {
		if ctx == nil {
			return bad("wait", "nil", "a context")
		}
		s.wait = ctx
		return nil
	}
}

// WithUnknown sets what happens to names without a row. Default: Pass.
func WithUnknown(o Otherwise) Option {
	return func(s *settings) error {
		s.unknown = o
		return nil
	}
}

// WithBadRows sets what happens to a name whose row is bad, and was bad when it was first seen: a row that turns bad later
// leaves its last good limit in force. It lasts until the row is repaired or removed. Default: Refuse.
func WithBadRows(o Otherwise) Option {
	return func(s *settings) error {
		s.badRows = o
		return nil
	}
}

// WithMaxUnknown bounds how many limiters are kept for names without a row ([Default]). At least 2, default 10,000.
func WithMaxUnknown(n int) Option {
	return func(s *settings) error {
		if n < 2 {
			return bad("max unknown", n, "at least 2")
		}
		s.maxUnknown = n
		return nil
	}
}

// WithMaxKeyLimiters bounds how many limiters are kept for the keys of all rows (Limit.PerKey). The bucket of a limiter that was dropped is
// in the store, and goes on when the key comes back. At least 2, default 10,000.
func WithMaxKeyLimiters(n int) Option {
	return func(s *settings) error {
		if n < 2 {
			return bad("max key limiters", n, "at least 2")
		}
		s.maxKeyLimiters = n
		return nil
	}
}

// WithMaxKeys bounds how many keys of a row (Limit.PerKey), and how many names without a row (Default), begin to have buckets of their own
// within an hour. Those of the hour before keep theirs; together there are at most twice as many. All others share one bucket with the row's limit until the hour is over; this is
// logged, and Stats.Shared counts their calls. At least 1, default 10,000.
func WithMaxKeys(n int) Option {
	return func(s *settings) error {
		if n < 1 {
			return bad("max keys", n, "at least 1")
		}
		s.maxKeys = n
		return nil
	}
}

// WithAllowEmpty believes a table at once that is empty, or has lost more than half of its rows since the load before. Without it
// the limits that are gone stay in force until three loads in a row agree, and the loss lasts until a person confirms it (Loss). It
// excludes [WithConfirmedLosses].
func WithAllowEmpty() Option {
	return func(s *settings) error {
		return s.believe(atOnce, "allow empty")
	}
}

// WithStrict makes New fail with [ErrBadRows] if any row is bad: for limits that the program brings along ([Static]), where a bad one is a
// mistake of its own. Rows that turn bad later are as without it: their last good limits stay.
func WithStrict() Option {
	return func(s *settings) error {
		s.strict = true
		return nil
	}
}

// WithParts says that names are made of parts, as httplimit.Join makes them: a | is between two, and one that belongs to a part has a
// \ before it, as a \ has. A row then holds for all names whose first parts it names: /a for /a|x and /a|y, and so does /a|x* for
// /a|xyz. If several do, the longest counts. All names have buckets of their own, also those that are too long or no UTF-8.
func WithParts() Option {
	return func(s *settings) error {
		s.parts = true
		return nil
	}
}

// WithSwitch sets the global switch: while it is off every call passes, and no store is touched. That it is off is told to the
// log, again every minute, with its Origin() string if it has that method.
func WithSwitch(sw Switch) Option {
	return func(s *settings) error {
		if sw == nil {
			return bad("switch", "nil", "a switch")
		}
		s.sw = sw
		return nil
	}
}

// WithLimiterOptions adds options to every limiter, such as WithMaxWaiters or WithPrefetch. A row that they do not fit is
// rejected: tokenbucket.WithInitialPermitsUpTo fits all, where WithInitialPermits may be beyond what a row's bucket holds. Without either,
// the buckets of keys (Limit.PerKey) and of names without a row (Default) begin full, and stores drop them a minute after they are full again.
// All others begin with one permit.
func WithLimiterOptions(opts ...tokenbucket.Option) Option {
	return func(s *settings) error {
		s.options = append(s.options, opts...)
		return nil
	}
}

// WithHook sets a function that is told of every load, by the goroutine that loads.
func WithHook(f func(Load)) Option {
	return func(s *settings) error {
		s.hook = f
		return nil
	}
}

// WithBypassHook sets a function that is told of every call that passes or is refused without a bucket: what a
// tokenbucket.Observer does not hear of. Calls are told by their own goroutines; it must return quickly.
func WithBypassHook(f func(name string, by gate.Decider, pass bool)) Option {
	return func(s *settings) error {
		s.bypass = f
		return nil
	}
}

// WithLogger sets where changes, rejected rows and outages are logged, each once, and where the limiters log, unless
// [WithLimiterOptions] says otherwise. Default slog.Default().
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
