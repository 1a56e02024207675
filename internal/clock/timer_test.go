package clock

import (
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

// jumping is a clock that jumps while a timer is being set, as often as it is told to.
type jumping struct {
	*clockwork.FakeClock
	jumps int
}

// Since is what Local.Now reads.
func (j *jumping) Since(t time.Time) time.Duration {
	since := j.FakeClock.Since(t)
	if j.jumps > 0 {
		j.jumps--
		j.Advance(time.Second)
	}
	return since
}

// However often the clock of a test jumps while a timer is set, the timer fires no later than it shall.
func TestSetTimer(t *testing.T) {
	for jumps := range 6 {
		clock := &jumping{FakeClock: clockwork.NewFakeClock()}
		local := New(clock)
		fired := make(chan struct{}, 9)
		timer := clock.AfterFunc(time.Hour, func() { fired <- struct{}{} })
		now := local.Now()
		at := now + (4 * time.Second).Microseconds()
		if jumps > 0 {
			clock.jumps = jumps - 1
			clock.Advance(time.Second)
		}
		local.SetTimer(timer, at, now)
		if late := time.Duration(at-local.Now()) * time.Microsecond; late > 0 {
			clock.Advance(late)
		}
		select {
		case <-fired:
		case <-time.After(time.Minute):
			require.Fail(t, "it is set for too late a time", "%d jumps", jumps)
		}
	}
}
