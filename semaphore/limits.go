package semaphore

import (
	"fmt"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// change is a change of the number of permits. One of its fields is not 0.
type change struct {
	set int // store.OwnPermits: as configured
	add int
}

// limitChange is a change that a caller waits for.
type limitChange struct {
	pending
	change
}

// limits are the changes to be sent, in this order: one with each batch. The coordinator's mu guards it.
type limits struct{ list []*limitChange }

// add queues a change and returns it.
func (l *limits) add(change change, now time.Duration) *limitChange {
	queued := &limitChange{newPending(now), change}
	l.list = append(l.list, queued)
	return queued
}

// take removes and returns the change of the next batch; nil if there is none.
func (l *limits) take() (next *limitChange) {
	if len(l.list) > 0 {
		next, l.list = l.list[0], l.list[1:]
	}
	return next
}

// putBack undoes take, unless the caller no longer waits.
func (l *limits) putBack(taken *limitChange) {
	if taken != nil && taken.waiting() {
		l.list = append([]*limitChange{taken}, l.list...)
	}
}

// fail ends and removes the overdue changes.
func (l *limits) fail(overdue overdue, err error) {
	l.list = slices.DeleteFunc(l.list, func(queued *limitChange) bool {
		queued.fail(overdue, err)
		return queued.finished
	})
}

// settle ends a change with its result.
func (l *limitChange) settle(name string, report *store.Report) {
	if report.Unchanged {
		l.finish(outOfRange(name, report.Permits, l.add))
	} else {
		l.finish(nil)
	}
}

// outOfRange returns the error of an AddPermits whose sum is out of range.
func outOfRange(name string, permits, add int) error {
	return fmt.Errorf("%w: semaphore %.80q: permits %d + %d: want 1 to 2^31", ErrInvalidPermits, name, permits, add)
}
