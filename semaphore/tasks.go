package semaphore

import "sync"

// tasks counts what is under way: goroutines, and callers' own trips. Unlike a sync.WaitGroup it may begin anew while somebody waits for
// its end.
type tasks struct {
	mu    sync.Mutex
	count int
	idle  chan struct{} // closed when count is 0; nil: nobody waits
}

func (t *tasks) run(f func()) {
	t.begin()
	go func() {
		defer t.end()
		f()
	}()
}

func (t *tasks) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count++
}

func (t *tasks) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count--; t.count == 0 && t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

// ended is closed once none is under way.
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
