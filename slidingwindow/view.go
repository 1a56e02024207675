package slidingwindow

import "github.com/go-tokenbucket/tokenbucket/internal/clock"

// view is what the last reply showed, and the bounds of the server's clock. now is always the machine's clock.
//
// A refusal by the view uses the latest time that the server's clock may show: by then as many permits as possible are out of the window.
// During an outage a local share uses the earliest, and counts at the latest.
type view struct {
	valid       bool // the counts are those of the last reply
	counts      counts
	epoch, back int64        // of the state that the counts are from
	server      clock.Bounds // of the clock that decides, by the machine's clock
}

// latest and earliest return the bounds of the server's time. Before the first reply they are the process's own time.
func (v *view) latest(now int64) int64 { return max(v.counts.seen, v.server.Latest(now)) }

func (v *view) earliest(now int64) int64 { return max(v.counts.seen, v.server.Earliest(now)) }

// stale reports whether, at a time of the server's clock, a sub-interval has begun since the last reply.
func (v *view) stale(r *rule, at int64) bool { return r.index(at) != r.index(v.counts.seen) }
