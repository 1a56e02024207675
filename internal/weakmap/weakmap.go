// Package weakmap provides a concurrent map that shares one value per key for as long as the value is reachable.
package weakmap

import (
	"runtime"
	"sync"
	"weak"
)

// Map holds at most one value per key, by a weak pointer. An entry is removed when its value is no longer reachable from elsewhere. So a
// key must not keep its own value reachable. The zero value is empty. A Map is safe for concurrent use and must not be copied.
//
// Lookups take no lock, because every new limiter looks up a value.
type Map[K comparable, V any] struct {
	values sync.Map // K → weak.Pointer[V]
}

// Get returns the value of a key. It calls make if there is none. Concurrent callers get the same value, even if several of them call make.
func (m *Map[K, V]) Get(key K, make func() *V) *V {
	var own *V
	var fresh weak.Pointer[V]
	for {
		if old, ok := m.values.Load(key); ok {
			if shared := old.(weak.Pointer[V]).Value(); shared != nil {
				return shared
			}
			m.values.CompareAndDelete(key, old)
		}
		if own == nil {
			own = make()
			fresh = weak.Make(own)
		}
		if _, loaded := m.values.LoadOrStore(key, fresh); !loaded {
			runtime.AddCleanup(own, func(key K) { m.values.CompareAndDelete(key, fresh) }, key)
			return own
		}
	}
}

// Find returns the value of a key, or nil if there is none.
func (m *Map[K, V]) Find(key K) *V {
	if p, ok := m.values.Load(key); ok {
		return p.(weak.Pointer[V]).Value()
	}
	return nil
}

// All calls yield with each reachable value, until yield returns false.
func (m *Map[K, V]) All(yield func(*V) bool) {
	m.values.Range(func(_, p any) bool {
		v := p.(weak.Pointer[V]).Value()
		return v == nil || yield(v)
	})
}
