package main

import (
	"container/list"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// limits are the limiters of the paths that were called of late: a client can make up as many paths as it likes, so their
// number is bounded. The one that was idle the longest makes room, but only when its window is over: forgotten earlier, it
// would forget what it has admitted. When all are busy, further paths share one limiter.
type limits struct {
	most int
	idle time.Duration // after that nothing is lost
	open func(path string) (*slidingwindow.Limiter, error)
	rest *slidingwindow.Limiter

	mu     sync.Mutex
	byPath map[string]*list.Element
	recent list.List // of *entry, the one used last at the front
}

type entry struct {
	path    string
	limiter *slidingwindow.Limiter
	used    time.Time
}

func newLimits(most int, idle time.Duration, open func(path string) (*slidingwindow.Limiter, error)) (*limits, error) {
	rest, err := open("the rest") // no path is called that: they begin with a slash
	return &limits{most: most, idle: idle, open: open, rest: rest, byPath: map[string]*list.Element{}}, err
}

// of is the limiter of a path.
func (l *limits) of(path string) *slidingwindow.Limiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if e := l.byPath[path]; e != nil {
		e.Value.(*entry).used = now
		l.recent.MoveToFront(e)
		return e.Value.(*entry).limiter
	}
	for len(l.byPath) >= l.most {
		oldest := l.recent.Back()
		if oldest == nil || now.Sub(oldest.Value.(*entry).used) <= l.idle {
			return l.rest
		}
		delete(l.byPath, l.recent.Remove(oldest).(*entry).path)
	}
	limiter, err := l.open(path)
	if err != nil { // too long for a name
		return l.rest
	}
	l.byPath[path] = l.recent.PushFront(&entry{path, limiter, now})
	return limiter
}
