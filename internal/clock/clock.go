// Package clock is this process's monotonic time, the clocks that limiters go by, and what is known of a server's clock.
package clock

import (
	"math"
	"reflect"
	"time"

	"github.com/jonboulle/clockwork"
)

// start is about when this process began, in whole microseconds, and zero fifty years before. Both have a monotonic reading, so
// differences from them are monotonic, whatever happens to the wall clock.
var (
	start = func() time.Time {
		now := time.Now()
		return now.Add(-time.Duration(now.Nanosecond() % 1000))
	}()
	zero = start.Add(-50 * 365 * 24 * time.Hour)
)

// startMicros and zeroMicros are these by the wall clock.
var startMicros, zeroMicros = start.UnixMicro(), zero.UnixMicro()

// Mono is the time since zero by the system's monotonic clock. It costs half of what time.Now does. It is above 0, so 0 may stand for
// no time: also in a bubble of testing/synctest, where it is 2000.
func Mono() time.Duration { return time.Since(zero) }

// At is the moment at which Mono was, or will be, d.
func At(d time.Duration) time.Time { return zero.Add(d) }

// Of is what Mono is at a moment; of one that is too far off, the longest time.Duration.
func Of(t time.Time) time.Duration { return t.Sub(zero) }

// Local is the clock that a limiter goes by, in microseconds. The zero value is the system's. It is safe for concurrent use if the
// clock that it was made of is.
type Local struct {
	clock clockwork.Clock // nil: the system's
}

// New returns the clock as a Local; nil is the system's, and so is clockwork's real clock: it is read at half the price.
func New(c clockwork.Clock) Local {
	if c != nil && reflect.TypeOf(c) == reflect.TypeOf(clockwork.NewRealClock()) {
		c = nil
	}
	return Local{c}
}

// System tells that it is the system's clock.
func (l *Local) System() bool { return l.clock == nil }

// Micros is the time in microseconds since 1970. The clock is asked how long ago a fixed moment was (Since), not what time it is (Now):
// so it does not step where the wall clock behind it is set, if its Since is monotonic as time.Since is. Only a clock that is more
// than 292 years off is asked for its time of day.
func (l *Local) Micros() int64 {
	if l.clock == nil {
		return zeroMicros + Mono().Microseconds()
	}
	if since := l.clock.Since(start); inRange(since) {
		return startMicros + since.Microseconds()
	}
	return l.clock.Now().UnixMicro()
}

// epoch is what Now shows in 1970: more microseconds than 292 years have.
const epoch = 1 << 53

// Now is the time in microseconds on an axis where every time of a clock that is InRange is above 0. So 0 may stand for no time, which it
// could not in Micros: a test's clock may well begin in 1970. Only differences between two of them, or FromMicros, mean anything.
func (l *Local) Now() int64 { return l.Micros() + epoch }

// NowAt is what Now shows, where the system's clock is known to be at mono (see [Mono]): only another clock is read.
func (l *Local) NowAt(mono time.Duration) int64 {
	if l.clock == nil {
		return zeroMicros + mono.Microseconds() + epoch
	}
	return l.Now()
}

// FromMicros is what Now shows when Micros shows so much.
func FromMicros(micros int64) int64 { return micros + epoch }

// InRange tells that the clock is less than 292 years off, as far as a time.Duration reaches.
func (l *Local) InRange() bool { return l.clock == nil || inRange(l.clock.Since(start)) }

func inRange(d time.Duration) bool { return d != math.MinInt64 && d != math.MaxInt64 }

// Remote is the estimate of a server's clock, in microseconds, by what it showed in an answer. The server has read its clock after the
// question was sent and before its answer was received. So at any later moment it is between Earliest and Latest, unless it is set
// or runs at another pace than the clock here, by which sent, received and now are given; this may begin anywhere, but must not be
// set. The zero value knows nothing. It is not safe for concurrent use.
type Remote struct {
	micros         int64
	sent, received time.Duration
	known          bool
}

// Heard notes an answer.
func (r *Remote) Heard(micros int64, sent, received time.Duration) {
	*r = Remote{micros, sent, received, true}
}

// Known tells that there was an answer.
func (r *Remote) Known() bool { return r.known }

// Last is what the server's clock showed in the last answer, and when that was received.
func (r *Remote) Last() (micros int64, received time.Duration) { return r.micros, r.received }

// Earliest is a time that the server's clock has reached by now. A deadline told so to the server is never too late.
func (r *Remote) Earliest(now time.Duration) int64 {
	return r.micros + (now - r.received).Microseconds()
}

// Latest is a time that the server's clock has not passed by now, but for what is left of a microsecond.
func (r *Remote) Latest(now time.Duration) int64 { return r.micros + (now - r.sent).Microseconds() }
