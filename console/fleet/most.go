package fleet

import (
	"cmp"
	"container/heap"
	"slices"
	"strings"
	"sync"
)

// most finds the most frequent keys in bounded memory. It is the space-saving sketch of Metwally, Agrawal and El Abbadi: a
// new key replaces the least frequent one, and takes its count as the error. Every key with more than 1/size of all counts is
// kept.
type most struct {
	size int

	mu   sync.Mutex
	heap leastFirst
	at   map[pairKey]*item
}

type pairKey struct{ limit, key string }

type item struct {
	pairKey
	count, error int64
	place        int // in the heap
}

func newMost(size int) *most { return &most{size: size, at: map[pairKey]*item{}} }

// add counts a key once.
func (m *most) add(limit, key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := pairKey{shortened(limit, mostName), shortened(key, mostName)}
	i := m.at[k]
	switch {
	case i != nil:
		i.count++
		heap.Fix(&m.heap, i.place)
		return
	case len(m.heap) < m.size:
		i = &item{place: len(m.heap)}
		m.heap = append(m.heap, i)
	default:
		i = m.heap[0]
		delete(m.at, i.pairKey)
	}
	i.error = i.count
	i.count++
	i.pairKey = pairKey{strings.Clone(k.limit), strings.Clone(k.key)} // the strings may be parts of something large
	m.at[i.pairKey] = i
	heap.Fix(&m.heap, i.place)
}

// first returns the n most frequent keys.
func (m *most) first(n int) []Key {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []Key
	for _, i := range m.heap {
		all = append(all, Key{i.limit, i.key, i.count, i.error})
	}
	slices.SortFunc(all, func(a, b Key) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.Key, b.Key))
	})
	return cut(all, n)
}

// leastFirst is a heap with the least count at its root.
type leastFirst []*item

func (h leastFirst) Len() int           { return len(h) }
func (h leastFirst) Less(i, j int) bool { return h[i].count < h[j].count }
func (h leastFirst) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

// Push and Pop are unused: items are replaced, never removed.
func (h *leastFirst) Push(any) {}
func (h *leastFirst) Pop() any { return nil }
