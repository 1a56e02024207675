package registry

import (
	"log/slog"
	"runtime/debug"
	"sync"
)

// hooked passes loads to the hook of WithHook, in their order, one at a time. It holds no lock meanwhile, so the hook may reload and close.
type hooked struct {
	mu    sync.Mutex // guards the fields below
	loads []Load     // not passed yet, oldest first
	busy  bool       // a goroutine passes them
}

// add appends a load. The order of loads is that of the calls, so r.turn must be held.
func (h *hooked) add(l *Load) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.loads = append(h.loads, *l)
}

// begin reports whether the caller must pass the loads: there are some, and no other goroutine passes them.
func (h *hooked) begin() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.busy || len(h.loads) == 0 {
		return false
	}
	h.busy = true
	return true
}

// next removes the oldest load. After the last one, and once closed, there is none, and the goroutine must end.
func (h *hooked) next(closed bool) (l Load, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if closed {
		h.loads = nil
	}
	if len(h.loads) == 0 {
		h.busy = false
		return Load{}, false
	}
	l, h.loads = h.loads[0], h.loads[1:]
	return l, true
}

// callHook passes the loads to the hook, and returns when all were passed, or at Close. While the hook is running it returns at once, since
// the caller may be the hook.
func (r *Registry) callHook() {
	if r.hook == nil || !r.hooked.begin() {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			l, ok := r.hooked.next(r.ctx.Err() != nil)
			if !ok {
				return
			}
			r.pass(l)
		}
	}()
	select {
	case <-done:
	case <-r.ctx.Done():
	}
}

// pass calls the hook. A panic is logged, because no caller owns the goroutine.
func (r *Registry) pass(l Load) {
	defer func() {
		if value := recover(); value != nil {
			r.log.Error("registry: the hook panicked; loads go on", slog.Any("panic", value), "stack", string(debug.Stack()))
		}
	}()
	r.hook(l)
}
