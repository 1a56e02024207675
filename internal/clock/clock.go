// Package clock provides the monotonic time of this process, the clocks of limiters, and estimates of a server's clock.
package clock

import (
	"math"
	"reflect"
	"time"

	"github.com/jonboulle/clockwork"
)

// start is about the time at which this process began, in whole microseconds; zero is fifty years earlier. Both have a monotonic reading,
// so the time since them is monotonic even if the wall clock is set.
var (
	start = func() time.Time {
		now := time.Now()
		return now.Add(-time.Duration(now.Nanosecond() % 1000))
	}()
	zero = start.Add(-50 * 365 * 24 * time.Hour)
)

// startMicros and zeroMicros are start and zero by the wall clock, in microseconds since 1970.
var startMicros, zeroMicros = start.UnixMicro(), zero.UnixMicro()

// Mono returns the time since zero by the system's monotonic clock. It costs half as much as time.Now. The result is positive, so 0 can
// mean no time. That holds in a bubble of testing/synctest too, where the year is 2000.
func Mono() time.Duration { return time.Since(zero) }

// At returns the time at which Mono returns d.
func At(d time.Duration) time.Time { return zero.Add(d) }

// Of returns the value of Mono at t. It is limited to the range of time.Duration.
func Of(t time.Time) time.Duration { return t.Sub(zero) }

// Local is the clock of a limiter, in microseconds. The zero value is the system's clock. A Local is safe for concurrent use if the
// underlying clock is.
type Local struct {
	clock clockwork.Clock // nil for the system's clock
}

// New returns c as a Local. Nil and clockwork's real clock become the system's clock, which is read at half the cost.
func New(c clockwork.Clock) Local {
	if c != nil && reflect.TypeOf(c) == reflect.TypeOf(clockwork.NewRealClock()) {
		c = nil
	}
	return Local{c}
}

// System reports whether l is the system's clock.
func (l *Local) System() bool { return l.clock == nil }

// Micros returns the time in microseconds since 1970. It is computed from the clock's Since of a fixed time, not from its Now. So it does
// not step when the wall clock is set, provided that Since is monotonic, as time.Since is. Now is used only for a clock that is not
// InRange.
func (l *Local) Micros() int64 {
	if l.clock == nil {
		return zeroMicros + Mono().Microseconds()
	}
	if since := l.clock.Since(start); inRange(since) {
		return startMicros + since.Microseconds()
	}
	return l.clock.Now().UnixMicro()
}

// epoch is the value of Now in 1970. It exceeds the number of microseconds in 292 years.
const epoch = 1 << 53

// Now returns the time in microseconds on an axis on which every time of a clock that is InRange is positive. So 0 can mean no time. In
// Micros it cannot, because a test's clock may start in 1970. Results are comparable only with each other and with FromMicros.
func (l *Local) Now() int64 { return l.Micros() + epoch }

// SetTimer sets a timer of the clock for a time by Now. now is what Now has returned just before. The clock of a test may jump meanwhile, even
// more than once: then the timer is set for the rest.
func (l *Local) SetTimer(timer clockwork.Timer, at, now int64) {
	for {
		timer.Reset(time.Duration(max(0, at-now)) * time.Microsecond)
		if l.clock == nil || now >= at {
			return
		}
		before := now
		if now = l.Now(); now == before {
			return
		}
	}
}

// NowAt returns Now for a caller that has just read [Mono]. It reads only a clock that is not the system's.
func (l *Local) NowAt(mono time.Duration) int64 { return l.MicrosAt(mono) + epoch }

// MicrosAt returns Micros for a caller that has just read [Mono].
func (l *Local) MicrosAt(mono time.Duration) int64 {
	if l.clock == nil {
		return zeroMicros + mono.Microseconds()
	}
	return l.Micros()
}

// FromMicros returns the value of Now at the time at which Micros returns micros.
func FromMicros(micros int64) int64 { return micros + epoch }

// InRange reports whether the clock is less than 292 years off, the range of time.Duration.
func (l *Local) InRange() bool { return l.clock == nil || inRange(l.clock.Since(start)) }

func inRange(d time.Duration) bool { return d != math.MinInt64 && d != math.MaxInt64 }

// Remote estimates a server's clock, in microseconds, from the time in the last reply. The server read its clock after the request was sent
// and before the reply was received. So its clock is now between Earliest and Latest, unless it was set or runs at another speed than the
// local clock. The times sent, received and now are of the local clock, which may start anywhere but must not be set. The zero value has
// no estimate. A Remote is not safe for concurrent use.
//
// Three types estimate a server's clock. A Remote forgets all replies but the last: it suffices for deadlines, and a clock that was set is
// right again after one reply. A [Bounds] remembers the fastest round trips, so its bounds are narrower. An [Offset] has one
// bound, from the last few replies: it converts a server's due times to local times that are not too early.
type Remote struct {
	micros         int64
	sent, received time.Duration
	known          bool
}

// Heard replaces the estimate by that of a new reply.
func (r *Remote) Heard(micros int64, sent, received time.Duration) {
	*r = Remote{micros, sent, received, true}
}

// Known reports whether there was a reply.
func (r *Remote) Known() bool { return r.known }

// Last returns the time in the last reply, and when that reply was received.
func (r *Remote) Last() (micros int64, received time.Duration) { return r.micros, r.received }

// Earliest returns a time that the server's clock has reached by now. A deadline converted with it is never too late.
func (r *Remote) Earliest(now time.Duration) int64 {
	return r.micros + (now - r.received).Microseconds()
}

// Latest returns a time that the server's clock has not passed by now, to within a microsecond.
func (r *Remote) Latest(now time.Duration) int64 { return r.micros + (now - r.sent).Microseconds() }
