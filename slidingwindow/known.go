package slidingwindow

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// known is what the last answer has shown, and an estimate of the clock that decides. now is always the limiter's clock.
//
// What is refused without asking is refused by the latest that it can be, by which as much as can be is out of the window; what is
// admitted without asking, by the earliest, and is counted as if it were at the latest.
type known struct {
	heard  bool // the counts are those of the last answer
	counts counts
	epoch  int64 // of the state that they were in
	server clock.Remote
}

// local is a time of the limiter's clock as the estimate of the server's wants it.
func local(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// latest and earliest are bounds of the time that the server decides by.
func (k *known) latest(now int64) int64 { return max(k.counts.seen, k.server.Latest(local(now))) }

func (k *known) earliest(now int64) int64 { return max(k.counts.seen, k.server.Earliest(local(now))) }

// bounds are both; the process's own time, if the server's was never heard.
func (k *known) bounds(now int64) (earliest, latest int64) {
	if k.server.Known() {
		return k.earliest(now), k.latest(now)
	}
	return now, now
}

// stale tells that a sub-interval has begun since the last answer.
func (k *known) stale(r *rule, now int64) bool {
	return r.index(k.latest(now)) != r.index(k.counts.seen)
}
