package semaphore

import (
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// release is an id that is to be removed from the store, whether it waits or holds.
type release struct {
	pending
	id    string
	until time.Duration  // when the store would remove it anyway
	was   store.Standing // the state of the id in the store before it was removed
}

// maxLeaves is the most ids that are kept until an outage ends. Ids beyond it are removed by the store, within a lease.
const maxLeaves = 16 * maxBatch

// releases are the ids to be removed, in the order in which they are sent. The coordinator's mu guards it.
type releases struct{ list []*release }

// add queues an id for which no caller waits and which lasts for the given time. It drops the id if too many are queued.
func (l *releases) add(id string, now, lasts time.Duration) {
	l.readd(&release{id: id, until: now + lasts}, now)
}

// readd queues a release, or drops it if too many are queued.
func (l *releases) readd(r *release, now time.Duration) {
	if len(l.list) >= maxLeaves {
		l.list = slices.DeleteFunc(l.list, func(r *release) bool { return !r.waiting() && now >= r.until })
	}
	if len(l.list) < maxLeaves {
		l.list = append(l.list, r)
	}
}

// await queues an id for which a caller waits.
func (l *releases) await(id string, now, lasts time.Duration) *release {
	r := &release{pending: newPending(now), id: id, until: now + lasts}
	l.list = append(l.list, r)
	return r
}

// take removes and returns the next batch. If calm is false, it holds only releases for which callers wait.
func (l *releases) take(now time.Duration, calm bool) (next []*release) {
	if calm {
		next, l.list = cut(l.list, func(r *release) bool { return r.waiting() || now < r.until })
		return next
	}
	l.list = slices.DeleteFunc(l.list, func(r *release) bool {
		wanted := r.waiting() && len(next) < maxBatch
		if wanted {
			next = append(next, r)
		}
		return wanted
	})
	return next
}

// fail ends the calls that are overdue. Their ids stay queued.
func (l *releases) fail(overdue overdue, err error) {
	for _, r := range l.list {
		r.fail(overdue, err)
	}
}

// putBack undoes take.
func (l *releases) putBack(taken []*release) { l.list = append(taken, l.list...) }
