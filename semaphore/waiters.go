package semaphore

import (
	"cmp"
	"slices"
	"time"
)

// request is somebody who wants permits; 0: until nobody holds any.
type request struct {
	id     string
	n      int
	wait   bool
	label  string // empty: of the process
	queued bool   // the backend has said that it waits there,
	ticket int64  // in this place
	permit *Permit
	err    error
	since  time.Duration
	flight *flight // the last it was sent with
	done   bool    // answered, or given up
	ready  chan struct{}
}

// waiters are the requests for permits of this process. A request is in fresh until it is sent, and in sent until it is answered for
// good; in resend are those of sent of which it is unknown what became of them. Who has given up may still be in the lists, and is
// done. The coordinator's lock guards it.
type waiters struct {
	live   int // neither answered nor given up
	fresh  []*request
	resend []*request
	sent   map[string]*request
}

func newWaiters() waiters { return waiters{sent: map[string]*request{}} }

// add queues a request, unless so many are there already.
func (w *waiters) add(r *request, most int) bool {
	if w.live >= most {
		return false
	}
	if len(w.fresh) >= 2*most { // most of them have given up
		w.fresh = slices.DeleteFunc(w.fresh, func(r *request) bool { return r.done })
	}
	w.live++
	w.fresh = append(w.fresh, r)
	return true
}

// take returns those that are sent next, of which the first so many were sent before: of these none unless calm.
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

// depart notes that a request is sent.
func (w *waiters) depart(r *request, f *flight) { w.sent[r.id], r.flight = r, f }

// putBack undoes a take, and the departure.
func (w *waiters) putBack(enter []*request, resent int) {
	for _, r := range enter[resent:] {
		w.forget(r)
	}
	w.resend = append(enter[:resent:resent], w.resend...)
	w.fresh = append(enter[resent:], w.fresh...)
}

// patient tells whether any of those that are sent waits.
func (w *waiters) patient() bool {
	for _, r := range w.sent {
		if r.wait {
			return true
		}
	}
	return false
}

// end notes that somebody has given up.
func (w *waiters) end(r *request) {
	r.done = true
	w.live--
}

// finish answers a request.
func (w *waiters) finish(r *request, p *Permit, err error) {
	delete(w.sent, r.id)
	r.permit, r.err = p, err
	w.end(r)
	close(r.ready)
}

// forget takes a request back, and tells whether it was sent.
func (w *waiters) forget(r *request) bool {
	sent := w.sent[r.id] == r
	if sent {
		delete(w.sent, r.id)
	}
	return sent
}

// all takes out all who are not answered.
func (w *waiters) all() (all []*request) {
	for _, r := range w.sent {
		all = append(all, r)
	}
	all = slices.DeleteFunc(append(all, w.fresh...), func(r *request) bool { return r.done })
	w.fresh, w.resend = nil, nil
	return all
}

// askAgain asks anew what became of all who were sent, but for those of a flight, in their order.
func (w *waiters) askAgain(but *flight) {
	w.resend = w.resend[:0]
	for _, r := range w.sent {
		if !r.done && (but == nil || r.flight != but) {
			w.resend = append(w.resend, r)
		}
	}
	slices.SortFunc(w.resend, func(a, b *request) int {
		if a.ticket == 0 || b.ticket == 0 { // not heard of yet: behind all others
			return cmp.Compare(b.ticket, a.ticket)
		}
		return cmp.Compare(a.ticket, b.ticket)
	})
}

// askAgainOne is askAgain for one of them.
func (w *waiters) askAgainOne(r *request) {
	if !slices.Contains(w.resend, r) {
		w.resend = append(w.resend, r)
	}
}

// notOf tells whether anybody was sent with another flight than this.
func (w *waiters) notOf(f *flight) bool {
	for _, r := range w.sent {
		if r.flight != f {
			return true
		}
	}
	return false
}

// failFresh fails those who are not sent yet and are overdue.
func (w *waiters) failFresh(overdue func(since time.Duration) bool, err error) {
	for len(w.fresh) > 0 { // who has waited for longest is first
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

// maxBatch bounds each part of a batch, and with it how long it occupies the backend.
const maxBatch = 512

// cut takes up to a batch's worth of those that are wanted off the front. The list is not to be used any more.
func cut[T any](list []T, wanted func(T) bool) (head, rest []T) {
	if len(list) == 1 && wanted(list[0]) {
		return list, nil
	}
	for i, x := range list {
		if len(head) == maxBatch {
			return head, list[i:]
		}
		if wanted(x) {
			head = append(head, x)
		}
	}
	return head, nil
}
