package clock

// Bounds bounds a server's clock by the times in all replies so far, in microseconds. The server read its clock after each request was sent
// and before its reply was received. So each reply gives bounds, as far apart as its round trip was long. Together, the replies give bounds
// as narrow as the fastest ways there and back. The last reply alone, as in a [Remote], is not enough for decisions by Earliest: after each
// slow round trip followed by a fast one, Earliest would be behind what it was.
//
// The local clock may be any that is read in microseconds. If it was set back, Stepped must be called. The zero value has no bounds. A
// Bounds is not safe for concurrent use.
type Bounds struct {
	known, fresh bool  // fresh: the bounds hold for the local clock, which was not set back since the last reply
	least, most  int64 // how far the server's clock is ahead
	at           int64 // when the last reply was received
}

// drift is how fast two clocks may move apart: 1 µs in 2^drift µs.
const drift = 13

// Observe narrows the bounds by a reply. If it contradicts the earlier ones, a clock was set, and its bounds replace theirs.
func (b *Bounds) Observe(micros, sent, received int64) {
	least, most := micros-received, micros-sent
	if b.fresh {
		apart := (received-b.at)>>drift + 1
		l, m := max(least, b.least-apart), min(most, b.most+apart)
		if l <= m {
			least, most = l, m
		}
	}
	*b = Bounds{true, true, least, most, received}
}

// Stepped records that the local clock was set back. The bounds of the next reply replace the earlier ones.
func (b *Bounds) Stepped() { b.fresh = false }

// Known reports whether there was a reply.
func (b *Bounds) Known() bool { return b.known }

// Earliest returns a time that the server's clock has reached by now.
func (b *Bounds) Earliest(now int64) int64 { return now + b.least }

// Latest returns a time that the server's clock has not passed by now.
func (b *Bounds) Latest(now int64) int64 { return now + b.most }
