package admission

import (
	"container/list"
	"sync"
)

// approach has the calls of this process that wait for their permits before they ask for a place, in the order in which they came. Once a
// call has found no place and waits for one, those behind it have no place either. So they are summoned to the queue, one after the other:
// otherwise their permits would fall due one by one and lapse, and a call that gets a place would wait with it for the permits behind theirs.
type approach struct {
	mu    sync.Mutex
	calls list.List // of *walker
}

// walker is a call in the approach.
type walker struct {
	approach *approach
	element  *list.Element // in its list; guarded by its mu
	summoned chan struct{} // closed when the call is to queue
}

// join puts a call at the end.
func (a *approach) join() *walker {
	w := &walker{approach: a, summoned: make(chan struct{})}
	a.mu.Lock()
	defer a.mu.Unlock()
	w.element = a.calls.PushBack(w)
	return w
}

// leave takes the call out. It reports whether the call is to queue.
func (w *walker) leave() (summoned bool) {
	w.approach.mu.Lock()
	defer w.approach.mu.Unlock()
	w.approach.calls.Remove(w.element) // does nothing if it was summoned
	return isClosed(w.summoned)
}

// summon has the first call queue. When that does, or gives up, it summons the next.
func (a *approach) summon() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if first := a.calls.Front(); first != nil {
		close(a.calls.Remove(first).(*walker).summoned)
	}
}

// empty reports whether no call is there.
func (a *approach) empty() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls.Len() == 0
}
