package group

import "time"

// deadlines fails the callers and the batches without a reply within the store timeout, by the system's clock. The participant's mu must be held for all
// methods.
//
// Invariant: the timer runs while a batch is in flight. It is not stopped by a reply.
type deadlines struct {
	timer   *time.Timer
	running bool

	check    func() // called when the timer fires, without a lock
	config   *Config
	queue    *queue
	inFlight *inFlight
}

// start makes sure that the timer runs.
func (d *deadlines) start(wait time.Duration) {
	switch {
	case d.running:
		return
	case d.timer == nil:
		d.timer = time.AfterFunc(wait, d.check)
	default:
		d.timer.Reset(wait)
	}
	d.running = true
}

// expire fails the calls that have waited for the store timeout, and starts the timer for the others. now is a time of the limiter's clock, mono of the
// system's.
func (d *deadlines) expire(now int64, mono time.Duration) {
	oldest := mono
	keep := func(q *Call) bool {
		if q == nil || q.state != asking || q.promised || q.flight == nil && !d.queue.asks(q, now) {
			return true
		}
		since := max(q.sent, d.inFlight.since)
		if mono-since < d.config.Timeout {
			oldest = min(oldest, since)
			return true
		}
		d.queue.fail(q, d.config.timeoutError(d.inFlight.flight))
		return false
	}
	if f := d.inFlight.flight; f != nil {
		oldest = min(oldest, f.began)
		for _, q := range f.rows {
			keep(q)
		}
	}
	d.queue.keep(keep)
	d.start(d.config.Timeout - (mono - oldest))
}

// expireFlight stops waiting for a flight whose deadline has passed.
func (d *deadlines) expireFlight(f *flight, now int64) {
	f.late, d.queue.at = true, now
	err := d.config.timeoutError(f)
	for i, q := range f.rows {
		if q.flight = nil; q.state == asking {
			d.queue.failOrRetry(q, err, now)
		}
		f.rows[i] = nil
	}
	for m := range f.own {
		for i, o := range f.own[m] {
			if o.refund != nil {
				d.queue.refunded(m, o.refund, false, 0, err, now)
			} else if o.call != nil {
				d.queue.fail(o.call, err)
			}
			f.own[m][i] = own{}
		}
	}
	d.config.suspect()
}
