package semaphore

import "time"

// deadlines end the calls that wait too long for a reply, whatever becomes of the batch that they are in or wait for. One time stands for
// all calls: it may be earlier than their first deadline, but never later. The coordinator's mu guards it.
type deadlines struct {
	timeout time.Duration
	first   time.Duration // no later than the deadline of any call that waits for a reply; 0 if unset
	alarm   *alarm        // rings at first
}

// overdue reports whether a call that began at the given time is to be ended.
type overdue func(since time.Duration) bool

// everyCall reports that every call is overdue.
func everyCall(time.Duration) bool { return true }

// expect records a call that waits for a reply and began at the given time.
func (d *deadlines) expect(since time.Duration) {
	if d.first == 0 {
		d.first = since + d.timeout
		d.alarm.set(d.first, since)
	}
}

// due returns which calls are overdue; nil if none can be. The result must be called with the start of each call that waits for a reply,
// since it also finds the next deadline.
func (d *deadlines) due(now time.Duration) overdue {
	if d.first == 0 || now < d.first {
		return nil
	}
	const together = time.Millisecond // otherwise each call of a crowd would have an alarm of its own
	d.first = 0
	return func(since time.Duration) bool {
		by := since + d.timeout
		if by <= now+together {
			return true
		}
		d.first = earlier(d.first, by)
		return false
	}
}
