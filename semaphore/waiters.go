package semaphore

import (
	"cmp"
	"slices"
	"time"
)

// request is a call that waits for permits, or, with n = 0, until no permit is held.
type request struct {
	id     string
	n      int
	wait   bool
	label  string // "" for the label of the process
	queued bool   // it waits in the store's queue,
	ticket int64  // with this ticket
	permit *Permit
	err    error
	since  time.Duration
	flight *flight // the batch that it was last sent with
	done   bool    // it has its result, or its caller has given up
	ready  chan struct{}
}

// waiters are the requests of this process. A request is in fresh until it is sent, then in sent until it has its result. Those of sent
// whose state in the store is unknown are in resend, too. Requests whose callers have given up may stay in the lists; they are done. The
// coordinator's mu guards it.
type waiters struct {
	live   int // requests that are not done
	fresh  []*request
	resend []*request
	sent   map[string]*request
	apart  bool // the last batch was decided in part: requests were put off
}

func newWaiters() waiters { return waiters{sent: map[string]*request{}} }

// add queues a request. It returns false if most requests are live already.
func (w *waiters) add(r *request, most int) bool {
	if w.live >= most {
		return false
	}
	if len(w.fresh) >= 2*most { // most of them are done
		w.fresh = slices.DeleteFunc(w.fresh, func(r *request) bool { return r.done })
	}
	w.live++
	w.fresh = append(w.fresh, r)
	return true
}

// take removes and returns the requests of the next batch. The first resent of them were sent before; if calm is false, there are none of
// these.
func (w *waiters) take(calm bool) (enter []*request, resent int) {
	wanted := func(r *request) bool { return !r.done }
	if calm {
		enter, w.resend = cut(w.resend, wanted)
	}
	resent = len(enter)
	var fresh []*request
	fresh, w.fresh = cut(w.fresh, wanted)
	if resent == 0 {
		return fresh, 0
	}
	return append(enter, fresh...), resent
}

// depart records that the requests of f are sent.
func (w *waiters) depart(f *flight) {
	for _, r := range f.enter {
		w.sent[r.id], r.flight = r, f
	}
}

// putBack undoes take and depart.
func (w *waiters) putBack(enter []*request, resent int) {
	for _, r := range enter[resent:] {
		w.forget(r)
	}
	w.resend = append(enter[:resent:resent], w.resend...)
	w.fresh = append(enter[resent:], w.fresh...)
}

// patient reports whether any request that was sent waits for a place.
func (w *waiters) patient() bool {
	for _, r := range w.sent {
		if r.wait {
			return true
		}
	}
	return false
}

// end marks a request as done.
func (w *waiters) end(r *request) {
	r.done = true
	w.live--
}

// finish ends a request with a result and wakes its caller.
func (w *waiters) finish(r *request, p *Permit, err error) {
	delete(w.sent, r.id)
	r.permit, r.err = p, err
	w.end(r)
	close(r.ready)
}

// putOff queues requests again that the store could not decide, although it is available. Those that wait do so as in the store's queue, until
// their own timeouts; the others wait for their first reply.
func (w *waiters) putOff(enter []*request) {
	var wait, others []*request
	for _, r := range enter {
		switch {
		case r.done:
		case r.wait:
			r.queued = true
			wait = append(wait, r)
		default:
			w.forget(r)
			others = append(others, r)
		}
	}
	w.resend = append(wait, w.resend...)
	w.fresh = append(others, w.fresh...)
	w.apart = true
}

// queued returns the requests that wait for permits in the store's queue. It leaves out those that wait until no permit is held.
func (w *waiters) queued() (all []*request) {
	for _, r := range w.sent {
		if !r.done && r.queued && r.n > 0 {
			all = append(all, r)
		}
	}
	return all
}

// forget removes a request from sent, and reports whether it was there.
func (w *waiters) forget(r *request) bool {
	sent := w.sent[r.id] == r
	if sent {
		delete(w.sent, r.id)
	}
	return sent
}

// all removes and returns all requests that are not done.
func (w *waiters) all() (all []*request) {
	for _, r := range w.sent {
		all = append(all, r)
	}
	all = slices.DeleteFunc(append(all, w.fresh...), func(r *request) bool { return r.done })
	w.fresh, w.resend = nil, nil
	return all
}

// askAgain queues all requests that were sent to be sent again, in the order of their tickets, except those of the given flight.
func (w *waiters) askAgain(but *flight) {
	w.resend = w.resend[:0]
	for _, r := range w.sent {
		if !r.done && (but == nil || r.flight != but) {
			w.resend = append(w.resend, r)
		}
	}
	slices.SortFunc(w.resend, func(a, b *request) int {
		if a.ticket == 0 || b.ticket == 0 { // without a ticket: behind all others
			return cmp.Or(cmp.Compare(b.ticket, a.ticket), cmp.Compare(a.since, b.since))
		}
		return cmp.Compare(a.ticket, b.ticket)
	})
}

// askAgainOne queues one request to be sent again.
func (w *waiters) askAgainOne(r *request) {
	if !slices.Contains(w.resend, r) {
		w.resend = append(w.resend, r)
	}
}

// notOf reports whether any request was sent with another flight than f.
func (w *waiters) notOf(f *flight) bool {
	for _, r := range w.sent {
		if r.flight != f {
			return true
		}
	}
	return false
}

// failFresh ends the requests that were not sent yet and are overdue.
func (w *waiters) failFresh(overdue overdue, err error) {
	for len(w.fresh) > 0 { // the oldest is first
		r := w.fresh[0]
		if !r.done {
			if !overdue(r.since) {
				return
			}
			w.finish(r, nil, err)
		}
		w.fresh = w.fresh[1:]
	}
}
