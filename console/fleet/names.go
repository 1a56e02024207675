package fleet

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
)

// names maps names to values, for lookups by every call. Only new names need the lock.
type names[T any] struct {
	known atomic.Pointer[map[string]*T] // immutable; replaced as a whole
	most  int
	full  atomic.Bool // a name was turned away

	mu     sync.Mutex
	fresh  map[string]*T // added since known was made
	misses int
}

func newNames[T any](most int) *names[T] {
	n := &names[T]{most: most, fresh: map[string]*T{}}
	n.known.Store(&map[string]*T{})
	return n
}

// find returns the value of a name without a lock; nil if the name is not in known, even if it is in fresh: see add.
func (n *names[T]) find(name string) *T { return (*n.known.Load())[name] }

// add returns the value of a name, and makes it if the name is new; nil if there are too many names. Once fresh names have
// been looked up often enough to pay for a new map, they are merged into known.
func (n *names[T]) add(name string, make func(name string) *T) *T {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.find(name); t != nil {
		return t
	}
	t := n.fresh[name]
	if t == nil {
		if len(*n.known.Load())+len(n.fresh) >= n.most {
			n.full.Store(true)
			return nil
		}
		name = strings.Clone(name) // it may be part of something large
		t = make(name)
		n.fresh[name] = t
	}
	if n.misses++; n.misses > len(*n.known.Load())+len(n.fresh) {
		n.merge()
	}
	return t
}

// merge moves fresh into known. n.mu must be held.
func (n *names[T]) merge() {
	next := maps.Clone(*n.known.Load())
	maps.Copy(next, n.fresh)
	n.known.Store(&next)
	n.fresh, n.misses = map[string]*T{}, 0
}

// all returns all values by name.
func (n *names[T]) all() map[string]*T {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.fresh) > 0 {
		n.merge()
	}
	return *n.known.Load()
}
