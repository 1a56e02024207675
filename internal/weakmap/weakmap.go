// Package weakmap keeps the one value that all who want it share, as long as any of them lives.
package weakmap

import (
	"runtime"
	"sync"
	"weak"
)

// Map holds at most one value a key, weakly: it is forgotten when nobody else holds it any more. A value must not hold on to its own
// key if that is how it would be kept alive. The zero value is empty. It is safe for concurrent use and must not be copied.
//
// The values are found without a lock, for every limiter that is made looks for one.
type Map[K comparable, V any] struct {
	values sync.Map // K → weak.Pointer[V]
}

// Get returns the value of a key, and makes it if nobody holds one. If several are made at the same time, all callers get the same one.
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

// All calls a function with each value that is held, until it returns false.
func (m *Map[K, V]) All(yield func(*V) bool) {
	m.values.Range(func(_, p any) bool {
		v := p.(weak.Pointer[V]).Value()
		return v == nil || yield(v)
	})
}
