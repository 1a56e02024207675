package main

import (
	"container/list"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// limits holds the limiters of recently called paths. Their number is bounded, because a client can invent any number of paths. At the bound, the
// limiter that has been idle longest is dropped, but only after its window is over: before that, its counts would be lost. If no limiter can be
// dropped, further paths share one.
type limits struct {
	most int
	idle time.Duration // after this idle time a limiter's window is empty
	open func(path string) (*slidingwindow.Limiter, error)
	rest *slidingwindow.Limiter

	mu     sync.Mutex
	byPath map[string]*list.Element
	recent list.List // of *entry, the most recently used at the front
}

type entry struct {
	path    string
	limiter *slidingwindow.Limiter
	used    time.Time
}

func newLimits(most int, idle time.Duration, open func(path string) (*slidingwindow.Limiter, error)) (*limits, error) {
	rest, err := open("the rest") // not a path, since paths begin with a slash
	return &limits{most: most, idle: idle, open: open, rest: rest, byPath: map[string]*list.Element{}}, err
}

// of returns the limiter of a path.
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
