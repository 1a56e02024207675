package slidingwindow

// known is what the last answer has shown, and an estimate of the clock that decides. now is always the coordinator's clock.
//
// A refusal without asking goes by the latest that the server's time can be: by then as much as possible is out of the window. An admission
// without asking goes by the earliest, and is counted as if it were at the latest.
type known struct {
	heard       bool // the counts are those of the last answer
	counts      counts
	epoch, back int64 // of the state that they were in
	server      estimate
}

// latest and earliest are bounds of the time that the server decides by.
func (k *known) latest(now int64) int64 { return max(k.counts.seen, now+k.server.most) }

func (k *known) earliest(now int64) int64 { return max(k.counts.seen, now+k.server.least) }

// bounds are both; the process's own time, if the server's was never heard.
func (k *known) bounds(now int64) (earliest, latest int64) {
	if k.server.known {
		return k.earliest(now), k.latest(now)
	}
	return now, now
}

// stale tells that at a time of the server's clock a sub-interval has begun since the last answer.
func (k *known) stale(r *rule, at int64) bool { return r.index(at) != r.index(k.counts.seen) }

// estimate is how far a server's clock is ahead of the one here, in microseconds. The server has read its clock after a question was sent
// and before its answer was received, so each answer bounds it, by how long the round trip took; the bounds of all answers together are
// as narrow as the fastest ways there and back. The last answer alone would be too little: each time that a slow round trip is
// followed by a fast one, the server would be asked for permits that it cannot admit yet.
type estimate struct {
	known, fresh bool // there was an answer; and since then the clock here was not set
	least, most  int64
	at           int64 // when the last answer was received
}

// drift is what two clocks may move apart in 2^drift µs.
const drift = 13

// hear notes an answer. Bounds that contradict those before show that a clock was set.
func (e *estimate) hear(clock, sent, received int64) {
	least, most := clock-received, clock-sent
	if e.fresh {
		apart := (received-e.at)>>drift + 1
		l, m := max(least, e.least-apart), min(most, e.most+apart)
		if l <= m {
			least, most = l, m
		}
	}
	*e = estimate{true, true, least, most, received}
}
