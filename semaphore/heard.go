package semaphore

import (
	"math/rand/v2"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// heard is what the backend has said. The coordinator's lock guards it.
type heard struct {
	permits     int           // in force for this process
	limit       Limit         // the newest of the fleet
	server      clock.Remote  // its clock
	heartbeatAt time.Duration // when it wants to hear from us again
	lookAt      time.Duration // when the first lease of all expires; 0: nobody holds one
	grants      int64         // through Listen, since this process was Fresh
	missed      int64         // Report.Told, when it was more than grants; 0: it is not
	missedAt    time.Duration // then
	checkAt     time.Duration // when all who wait ask again whether they still do
}

// answer notes a report.
func (h *heard) answer(r *Report, sent, now, heartbeat time.Duration) {
	h.server.Heard(r.Now, sent, now)
	h.permits = r.Permits
	if r.Limit.Version >= h.limit.Version {
		h.limit = r.Limit
	}
	h.heartbeatAt = sent + heartbeat/2
	h.lookAt = 0
	if r.Earliest != 0 {
		h.lookAt = now + time.Duration(r.Earliest-r.Now)*time.Microsecond + time.Millisecond + rand.N(10*time.Millisecond)
	}
}

// pause puts off what is due by itself.
func (h *heard) pause(until time.Duration) {
	h.heartbeatAt = max(h.heartbeatAt, until)
	h.lookAt = max(h.lookAt, until)
}

// due tells that the backend is to be asked though there is nothing to ask for.
func (h *heard) due(now time.Duration) bool {
	return now >= h.heartbeatAt || h.lookAt != 0 && now >= h.lookAt
}

// next is when it will be due.
func (h *heard) next() time.Duration { return earlier(h.heartbeatAt, h.lookAt) }

// check tells that it is time for all who wait to ask again: every ten heartbeats, but 10,000 a second at most. A place may be lost and
// nothing else, so that nobody would ever know: Redis has evicted the key of the queue, or a batch that was taken for lost was decided
// after the next, and its answer was lost.
func (h *heard) check(now, heartbeat time.Duration, waiting int) bool {
	if now < h.checkAt {
		return false
	}
	h.checkAt = now + max(10*heartbeat, time.Duration(waiting)*100*time.Microsecond)
	return true
}

// lost tells that a grant that was sent a quarter of a heartbeat ago, or longer, has not arrived: heartbeats come twice as seldom.
// resent: the batch has asked again already.
func (h *heard) lost(told int64, resent bool, now, heartbeat time.Duration) bool {
	switch {
	case told <= h.grants:
		h.missed = 0
	case h.missed <= h.grants || h.missed > told:
		h.missed, h.missedAt = told, now
	case !resent && now-h.missedAt >= heartbeat/4:
		h.grants, h.missed = told, 0
		return true
	}
	return false
}
