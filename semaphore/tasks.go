package semaphore

import "sync"

// tasks counts the goroutines of a coordinator and the trips that its callers make themselves. Unlike a sync.WaitGroup, it may count up
// from 0 while a caller waits for its end.
type tasks struct {
	mu    sync.Mutex // guards the fields below
	count int
	idle  chan struct{} // closed when count is 0; nil if no caller waits
}

// run calls f in a goroutine.
func (t *tasks) run(f func()) {
	t.begin()
	go func() {
		defer t.end()
		f()
	}()
}

// begin counts a task that has begun.
func (t *tasks) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count++
}

// end counts a task that has ended.
func (t *tasks) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count--; t.count == 0 && t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

// ended returns a channel that is closed as soon as no task is running.
func (t *tasks) ended() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	idle := t.idle
	if idle == nil {
		idle = make(chan struct{})
	}
	if t.count == 0 {
		close(idle)
	} else {
		t.idle = idle
	}
	return idle
}
