package telemetry

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
)

// Series is one T for each name, up to a number of names, and one for all others together. It may be used by many goroutines
// at once, and takes no lock but for a name that is new: the map is never changed, only replaced by a larger one.
type Series[T any] struct {
	most   int
	create func(name string) *T

	known   atomic.Pointer[map[string]*T]
	further *T // of those that are beyond the bound

	mu sync.Mutex // held to add to known
}

// NewSeries returns a Series of at most so many names, besides the one of all others.
func NewSeries[T any](most int, others string, create func(name string) *T) *Series[T] {
	s := &Series[T]{most: most, create: create, further: create(others)}
	s.known.Store(&map[string]*T{})
	return s
}

// Of returns what belongs to a name.
func (s *Series[T]) Of(name string) *T {
	if t := s.find(name); t != nil {
		return t
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.find(name); t != nil {
		return t
	}
	name = strings.Clone(name) // it may be part of something large
	t := s.create(strings.ToValidUTF8(name, "\uFFFD"))
	next := maps.Clone(*s.known.Load())
	next[name] = t
	s.known.Store(&next)
	return t
}

// find returns nil for a name that is new, and has room.
func (s *Series[T]) find(name string) *T {
	known := *s.known.Load()
	if t := known[name]; t != nil {
		return t
	}
	if len(known) >= s.most {
		return s.further
	}
	return nil
}

// Once returns what p points to, made by the first call. Two first calls at once may both make it, so what they make must be
// the same.
func Once[T any](p *atomic.Pointer[T], create func() T) *T {
	v := p.Load()
	if v == nil {
		made := create()
		v = &made
		p.Store(v)
	}
	return v
}

// Index is 1 for true.
func Index(b bool) int {
	if b {
		return 1
	}
	return 0
}
