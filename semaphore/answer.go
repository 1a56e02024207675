package semaphore

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// answer is what one caller waits for. The coordinator's lock guards it, but for since and done.
type answer struct {
	since time.Duration
	done  chan struct{} // closed when it is told; nil: nobody waits
	told  bool
	err   error
}

func newAnswer(now time.Duration) answer { return answer{since: now, done: make(chan struct{})} }

// awaited tells that somebody waits, and was not told.
func (a *answer) awaited() bool { return a.done != nil && !a.told }

// tell gives the answer to who waits. Only the first one counts.
func (a *answer) tell(err error) {
	if a.awaited() {
		a.told, a.err = true, err
		close(a.done)
	}
}

func (a *answer) wait(ctx context.Context) error {
	select {
	case <-a.done:
		return a.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// expectAnswer makes sure that somebody who has asked at a time is answered in time. mu is held.
func (c *coordinator) expectAnswer(since time.Duration) {
	if c.answerBy == 0 {
		c.answerBy = since + c.timeout
		c.alarm.set(c.answerBy, since)
	}
}

// failOverdue tells those who have not been answered in time, whatever the batch does that they are in or behind. mu is held.
func (c *coordinator) failOverdue(now time.Duration) {
	if c.answerBy == 0 || now < c.answerBy {
		return
	}
	const together = time.Millisecond // else each of a crowd would have an alarm of its own
	c.answerBy = 0
	err := fmt.Errorf("semaphore %.80q: %w", c.name, ErrTimeout)
	overdue := func(since time.Duration) bool {
		by := since + c.timeout
		if by > now+together {
			c.answerBy = earlier(c.answerBy, by)
		}
		return by <= now+together
	}
	c.waiters.failFresh(overdue, err)
	for _, a := range c.awaited() {
		if overdue(a.since) {
			a.tell(err)
		}
	}
	c.changes = slices.DeleteFunc(c.changes, func(change *limitChange) bool { return change.told })
	if c.flight != nil {
		for _, r := range c.flight.enter {
			if !r.done && !r.queued && overdue(r.since) {
				c.abandon(r)
				c.waiters.finish(r, nil, err)
			}
		}
	}
}

// awaited returns the answers that somebody waits for, but those to requests for permits. mu is held.
func (c *coordinator) awaited() (all []*answer) {
	releases, changes := slices.Clone(c.releases.list), slices.Clone(c.changes)
	if c.flight != nil {
		releases = append(releases, c.flight.releases...)
		if c.flight.change != nil {
			changes = append(changes, c.flight.change)
		}
	}
	for _, l := range releases {
		all = append(all, &l.answer)
	}
	for _, change := range changes {
		all = append(all, &change.answer)
	}
	return slices.DeleteFunc(all, func(a *answer) bool { return !a.awaited() })
}
