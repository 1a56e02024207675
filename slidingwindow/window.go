package slidingwindow

import (
	"fmt"
	"sync/atomic"
)

// published are the values of a machine that are read without a lock.
type published struct {
	limit atomic.Int64
	full  atomic.Pointer[span] // nil if there is none; so refusals take no lock
}

// set publishes the values of the machine.
func (p *published) set(limit int64, full span) {
	if p.limit.Load() != limit {
		p.limit.Store(limit)
	}
	switch before := p.full.Load(); {
	case full.until == 0 && before != nil: // otherwise a clock that is set back would begin it again
		p.full.Store(nil)
	case full.until != 0 && (before == nil || *before != full):
		now := full // on the heap, which the parameter would be each time
		p.full.Store(&now)
	}
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

// named is the name of a limiter, which its errors have.
type named string

// bad returns an ErrInvalidConfig.
func (n named) bad(field string, value any, want string) error {
	return &InvalidError{string(n), field, value, want, ErrInvalidConfig}
}

// badPermits returns an ErrInvalidPermits.
func (n named) badPermits(field string, value any, want string) error {
	return &InvalidError{string(n), field, value, want, ErrInvalidPermits}
}

// tooMany returns the error of a request above the limit.
func (n named) tooMany(permits, limit int64) error {
	return n.badPermits("permits", permits, fmt.Sprintf("1 to the limit, %d", limit))
}
