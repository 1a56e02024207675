package fleet

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
)

// names finds what belongs to a name, for every call: without a lock, but for names that are new.
type names[T any] struct {
	known atomic.Pointer[map[string]*T] // never changed, only replaced
	most  int
	full  atomic.Bool // a name found no place

	mu     sync.Mutex
	fresh  map[string]*T // not in known yet
	misses int
}

func newNames[T any](most int) *names[T] {
	n := &names[T]{most: most, fresh: map[string]*T{}}
	n.known.Store(&map[string]*T{})
	return n
}

// find returns nil for a name that is not among those that are found without a lock: see add.
func (n *names[T]) find(name string) *T { return (*n.known.Load())[name] }

// add returns what belongs to a name, which is made if it is new; nil: there are too many. What is looked for often enough to pay for
// a new map gets into it.
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

// merge has mu.
func (n *names[T]) merge() {
	next := maps.Clone(*n.known.Load())
	maps.Copy(next, n.fresh)
	n.known.Store(&next)
	n.fresh, n.misses = map[string]*T{}, 0
}

// all returns all of them.
func (n *names[T]) all() map[string]*T {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.fresh) > 0 {
		n.merge()
	}
	return *n.known.Load()
}
