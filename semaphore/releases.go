package semaphore

import (
	"slices"
	"time"
)

// release is an id to be ended.
type release struct {
	answer
	id    string
	until time.Duration // when it would have expired anyway
	was   Standing
}

// maxLeaves bounds what is to be ended once the backend is back. What is beyond ends by itself, within a lease.
const maxLeaves = 16 * maxBatch

// releases are the ids to be ended, in the order in which they are sent. The coordinator's lock guards it.
type releases struct{ list []*release }

// add has an id ended that nobody waits for and that lasts for so long, unless too many are to be already.
func (l *releases) add(id string, now, lasts time.Duration) {
	l.readd(&release{id: id, until: now + lasts}, now)
}

func (l *releases) readd(r *release, now time.Duration) {
	if len(l.list) >= maxLeaves {
		l.list = slices.DeleteFunc(l.list, func(r *release) bool { return !r.awaited() && now >= r.until })
	}
	if len(l.list) < maxLeaves {
		l.list = append(l.list, r)
	}
}

// await has an id ended that somebody waits for.
func (l *releases) await(id string, now, lasts time.Duration) *release {
	r := &release{answer: newAnswer(now), id: id, until: now + lasts}
	l.list = append(l.list, r)
	return r
}

// take returns those that are sent next. Unless calm, these are only those that somebody waits for.
func (l *releases) take(now time.Duration, calm bool) (next []*release) {
	if calm {
		next, l.list = cut(l.list, func(r *release) bool { return r.awaited() || now < r.until })
		return next
	}
	l.list = slices.DeleteFunc(l.list, func(r *release) bool {
		wanted := r.awaited() && len(next) < maxBatch
		if wanted {
			next = append(next, r)
		}
		return wanted
	})
	return next
}

// putBack undoes a take.
func (l *releases) putBack(taken []*release) { l.list = append(taken, l.list...) }
