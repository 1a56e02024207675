package slidingwindow

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// window is the common part of limiters in a process and in Redis.
type window struct {
	name  string
	rule  rule
	clock clock.Local
	limit atomic.Int64
	// full is a span in which not even one permit can be admitted, so refusals take no lock. nil if there is none.
	full atomic.Pointer[span]

	waiters waiters

	mu sync.Mutex // guards the counts of a Limiter, or the fields of its coordinator
}

// span is from a time up to, and without, another, by the limiter's clock in microseconds.
type span struct{ from, until int64 }

// spanOf returns the span of the given time from now on; the zero value if it is not positive.
func spanOf(now, micros int64) span {
	if micros <= 0 {
		return span{}
	}
	return span{now, now + micros}
}

// now returns the time by the limiter's clock, in microseconds since 1970.
func (w *window) now() int64 { return w.clock.Micros() }

// isFull reports whether no permit can be admitted now.
func (w *window) isFull() bool {
	c := w.full.Load()
	if c == nil {
		return false
	}
	now := w.now()
	return now < c.until && now >= c.from
}

// publish makes the limiter refuse all requests in a span; the zero value ends it. mu must be held.
func (w *window) publish(full span) {
	switch before := w.full.Load(); {
	case full.until == 0 && before != nil: // otherwise a clock that is set back would begin it again
		w.full.Store(nil)
	case full.until != 0 && (before == nil || *before != full):
		w.full.Store(&full)
	}
}

// bad returns an ErrInvalidConfig.
func (w *window) bad(field string, value any, want string) error {
	return &InvalidError{w.name, field, value, want, ErrInvalidConfig}
}

// badPermits returns an ErrInvalidPermits.
func (w *window) badPermits(field string, value any, want string) error {
	return &InvalidError{w.name, field, value, want, ErrInvalidPermits}
}

// tooMany returns the error of a request above the limit.
func (w *window) tooMany(n, limit int64) error {
	return w.badPermits("permits", n, fmt.Sprintf("1 to the limit, %d", limit))
}

// steady turns a clock that may be set back into one that never is. Steps ahead remain.
type steady struct{ last, back int64 }

// read takes the time of the clock and returns the steady time. It reports whether the clock was set back.
func (s *steady) read(micros int64) (now int64, stepped bool) {
	if now = micros + s.back; now < s.last {
		s.back += s.last - now
		return s.last, true
	}
	s.last = now
	return now, false
}
