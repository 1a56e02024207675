package group

// Recall ends the waits of the callers with an error: one of the members' limiters is not in force any longer. Their permits go back. If it is for
// good, later calls end in the same way. Granted reservations and settlements keep what they have.
func (p *Participant) Recall(err error, forGood bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if forGood {
		p.recalled = err
	}
	now := p.local.Now()
	p.queue.release(now)
	recalled := p.queue.takeBack(now)
	if f := p.inFlight.flight; f != nil {
		for _, q := range f.rows { // what they are granted goes back
			if q != nil && q.recallable() {
				recalled = append(recalled, q)
			}
		}
	}
	p.dispatch(now)
	for _, q := range recalled { // as late as possible: they ask again, and the permits are back where that needs no round trip
		p.queue.fail(q, err)
	}
	p.setAlarm(now)
}

// Reinstate lets the participant decide again after a Recall for good.
func (p *Participant) Reinstate() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recalled = nil
}

// recallable reports whether a call has no permits that it may keep.
func (q *Call) recallable() bool { return q.settles == nil && !q.promised && q.state <= owned }

// takeBack removes the calls that are not in flight, and returns them in order. Their permits are spare, so they go back.
func (l *queue) takeBack(now int64) (recalled []*Call) {
	kept := l.owned[:0]
	for _, q := range l.owned {
		if !q.recallable() {
			kept = append(kept, q)
			continue
		}
		recalled = append(recalled, q)
		l.spare.add(q.grant)
		q.grant = nil
	}
	clear(l.owned[len(kept):])
	l.owned = kept
	l.keep(func(q *Call) bool {
		if q.recallable() {
			recalled = append(recalled, q)
			return false
		}
		return true
	})
	l.view.drop()
	l.keepSpare(now)
	return recalled
}
