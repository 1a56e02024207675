package slidingwindow

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// window is what every limiter has, wherever it counts.
type window struct {
	name  string
	rule  rule
	clock clock.Local
	limit atomic.Int64
	// full is a time during which not even one permit can be admitted: refusing in it takes no lock. nil: none.
	full atomic.Pointer[span]

	line line

	mu sync.Mutex // guards the counts of a Limiter, or what its coordinator says
}

// span is from a time until before another, by the limiter's clock in microseconds.
type span struct{ from, until int64 }

// now is the limiter's clock in microseconds since 1970.
func (w *window) now() int64 { return w.clock.Micros() }

// isFull tells that nothing can be admitted now.
func (w *window) isFull() bool {
	c := w.full.Load()
	if c == nil {
		return false
	}
	now := w.now()
	return now < c.until && now >= c.from
}

// refuseFor refuses everything for so many microseconds, unless the clock is set back. mu is held.
func (w *window) refuseFor(micros int64) {
	if micros > 0 {
		now := w.now()
		w.full.Store(&span{now, now + micros})
	}
}

// stopRefusing ends that: without it, a clock that is set back would bring the refusals back. mu is held.
func (w *window) stopRefusing() {
	if w.full.Load() != nil {
		w.full.Store(nil)
	}
}

func (w *window) bad(field string, value any, want string) error {
	return &InvalidError{w.name, field, value, want}
}

func (w *window) tooMany(n, limit int64) error {
	return w.bad("permits", n, fmt.Sprintf("1 to the limit, %d", limit))
}

// steady reads a clock that may be set back as one that never is: it goes on from where it was. It takes no notice of steps ahead.
type steady struct{ last, back int64 }

// read takes what the clock shows. It reports whether that is less than what it has shown before.
func (s *steady) read(micros int64) (now int64, stepped bool) {
	if now = micros + s.back; now < s.last {
		s.back += s.last - now
		return s.last, true
	}
	s.last = now
	return now, false
}
