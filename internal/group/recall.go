package group

// Recall ends the waits of the callers with an error: one of the members' limiters is not in force any longer. If it is for good, later calls end in the
// same way. Granted reservations and settlements keep what they have. The permits of the others go back. With goesOn, those behind which others have taken
// permits serve the callers of a successor, because no call is rarer under the limiter in force.
func (p *Participant) Recall(err error, forGood, goesOn bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if forGood {
		p.recalled = err
	}
	p.ends = p.ends || !goesOn
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
	p.recalled, p.ends, p.successor = nil, false, nil
}

// Succeed takes over from a participant of the same buckets that was recalled for good, if its permits serve another one: what it knows of the buckets,
// and the permits that no call has and that do not go back, also those of batches in flight.
func (p *Participant) Succeed(before *Participant) {
	before.mu.Lock()
	if p == before || before.recalled == nil || before.ends {
		before.mu.Unlock()
		return
	}
	before.successor = p
	at, accounts, grants := before.queue.at, make([]account, len(before.members)), before.handOver(before.local.Now())
	for i := range accounts {
		accounts[i] = before.members[i].account
	}
	before.mu.Unlock()
	p.mu.Lock()
	p.queue.at = at
	for i := range accounts {
		p.members[i].account = accounts[i]
	}
	p.mu.Unlock()
	if len(grants) > 0 {
		p.adopt(grants)
	}
}

// handOver gives the grants without a call back where their buckets may take them, and removes the others, which are for the successor: by its terms the
// time of a grant may hold many more permits. mu must be held.
func (p *Participant) handOver(now int64) (grants spare) {
	if p.successor == nil || p.ends {
		return nil
	}
	p.queue.returnSpare(now)
	for _, g := range p.queue.spare {
		g.confirmed()
	}
	grants, p.queue.spare = p.queue.spare, nil
	return grants
}

// adopt adds grants without a call, and lets the waiters ask: the predecessor has had a reply to its refunds.
func (p *Participant) adopt(grants spare) {
	p.mu.Lock()
	now, successor := p.local.Now(), p.successor
	for _, g := range grants {
		p.queue.spare.add(g)
	}
	if grants = p.handOver(now); successor == nil {
		p.queue.view.drop()
		p.queue.offer(now)
		p.queue.keepSpare(now)
		p.queue.askAt = 0
		p.dispatch(now)
	}
	p.mu.Unlock()
	if successor != nil {
		successor.adopt(grants)
	}
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
