package semaphore

import (
	"math/rand/v2"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// view is what the last reports of the store showed. The coordinator's mu guards it.
type view struct {
	permits     int           // in force for this process
	limit       store.Limit   // the newest version for the fleet
	server      clock.Remote  // the store's clock
	heartbeatAt time.Duration // when the next heartbeat is due
	lookAt      time.Duration // when the first lease of the fleet expires; 0 if no permit is held
	grants      int64         // grants received through Listen since the report that was Fresh
	missed      int64         // Report.Notified when it first exceeded grants; 0 if it does not
	missedAt    time.Duration // when missed was set
	checkAt     time.Duration // when all waiters are sent again, to check their places
}

// update records a report.
func (v *view) update(r *store.Report, sent, now, heartbeat time.Duration) {
	v.server.Heard(r.Now, sent, now)
	v.permits = r.Permits
	if r.Limit.Version >= v.limit.Version {
		v.limit = r.Limit
	}
	v.heartbeatAt = sent + heartbeat/2
	v.lookAt = 0
	if r.Earliest != 0 {
		v.lookAt = now + time.Duration(r.Earliest-r.Now)*time.Microsecond + time.Millisecond + rand.N(10*time.Millisecond)
	}
}

// pause postpones the heartbeat and the look to until.
func (v *view) pause(until time.Duration) {
	v.heartbeatAt = max(v.heartbeatAt, until)
	v.lookAt = max(v.lookAt, until)
}

// due reports whether a batch must be sent although it has no requests.
func (v *view) due(now time.Duration) bool {
	return now >= v.heartbeatAt || v.lookAt != 0 && now >= v.lookAt
}

// next returns when due will report true; 0 means never.
func (v *view) next() time.Duration { return earlier(v.heartbeatAt, v.lookAt) }

// check reports whether it is time to send all waiters again. They are sent every ten heartbeats, at most 10,000 a second. Otherwise the
// loss of a single place would never show: Redis may evict the key of the queue, or a batch whose reply was lost may be decided after the
// next one.
func (v *view) check(now, heartbeat time.Duration, waiting int) bool {
	if now < v.checkAt {
		return false
	}
	v.checkAt = now + max(10*heartbeat, time.Duration(waiting)*100*time.Microsecond)
	return true
}

// lost reports whether a grant that was sent at least a quarter of a heartbeat ago has not arrived. Heartbeats are twice as far apart as
// that. resent is set if the batch has sent waiters again already.
func (v *view) lost(notified int64, resent bool, now, heartbeat time.Duration) bool {
	switch {
	case notified <= v.grants:
		v.missed = 0
	case v.missed <= v.grants || v.missed > notified:
		v.missed, v.missedAt = notified, now
	case !resent && now-v.missedAt >= heartbeat/4:
		v.grants, v.missed = notified, 0
		return true
	}
	return false
}
