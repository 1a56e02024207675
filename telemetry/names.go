package telemetry

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
)

// OtherBuckets is the label value that all buckets beyond the bound share.
const OtherBuckets = "other"

// Named returns the label value for a name: the name itself, in quotes if it could be taken for OtherBuckets.
func Named(name string) string {
	if strings.Trim(name, `"`) == OtherBuckets {
		return `"` + name + `"`
	}
	return name
}

// buckets are the buckets that have series of their own, up to a bound, and one for all others. It is safe for concurrent use. Only a new
// name takes the lock: the map is never changed, it is replaced by a larger one.
type buckets struct {
	bound  int
	known  atomic.Pointer[map[string]*bucket]
	others *bucket // shared by the names beyond the bound

	mu sync.Mutex // guards replacing known
}

func newBuckets(bound int) *buckets {
	b := &buckets{bound: bound, others: &bucket{name: OtherBuckets}}
	b.known.Store(&map[string]*bucket{})
	return b
}

// get returns the bucket with a name.
func (b *buckets) get(name string) *bucket {
	if found := b.find(name); found != nil {
		return found
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if found := b.find(name); found != nil {
		return found
	}
	name = strings.Clone(name) // it may be part of a large string
	added := &bucket{name: strings.ToValidUTF8(name, "\uFFFD")}
	next := maps.Clone(*b.known.Load())
	next[name] = added
	b.known.Store(&next)
	return added
}

// find returns nil if the name is new and below the bound.
func (b *buckets) find(name string) *bucket {
	known := *b.known.Load()
	if found := known[name]; found != nil {
		return found
	}
	if len(known) >= b.bound {
		return b.others
	}
	return nil
}
