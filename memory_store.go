package tokenbucket

import (
	"context"
	"fmt"
	"sync"
)

// MemoryStore keeps buckets in this process. It serves limiters that need no fleet, and tests. Its clock is that of
// the limiter that asks (WithClock). The zero value is ready; it is safe for concurrent use and must not be copied.
type MemoryStore struct {
	mu      sync.Mutex
	buckets map[string]*memoryBucket
	sweepAt int // number of buckets at which the expired ones are dropped
}

type memoryBucket struct {
	mu      sync.Mutex
	state   PermitBucket
	expires int64 // microseconds of the clock that changed the state last
	swept   bool  // no longer in the map
}

// NewMemoryStore returns an empty store.
func NewMemoryStore() *MemoryStore { return &MemoryStore{} }

// Apply implements Store.
func (s *MemoryStore) Apply(_ context.Context, batch *Batch) (Outcome, error) {
	now := batch.LocalMicros()
	b := s.lock(batch.Name, now)
	defer b.mu.Unlock()
	next := b.state
	out, err := next.Apply(now, batch)
	if err == nil && out.Changed {
		b.state = next
		b.expires = out.NowMicros + next.TTLMillis(out.NowMicros)*1000
	}
	return out, err
}

// lock returns the bucket locked.
func (s *MemoryStore) lock(name string, now int64) *memoryBucket {
	for {
		b := s.bucket(name, now)
		b.mu.Lock()
		if !b.swept {
			return b
		}
		b.mu.Unlock()
	}
}

func (s *MemoryStore) bucket(name string, now int64) *memoryBucket {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.buckets[name]
	if b == nil {
		if s.buckets == nil {
			s.buckets = make(map[string]*memoryBucket)
			s.sweepAt = 1024
		}
		if len(s.buckets) >= s.sweepAt {
			s.sweep(now)
		}
		b = &memoryBucket{expires: now + 86_400_000_000}
		s.buckets[name] = b
	}
	return b
}

// sweep drops expired buckets. Doubling its threshold keeps its cost per new bucket constant.
func (s *MemoryStore) sweep(now int64) {
	for name, b := range s.buckets {
		if b.mu.TryLock() { // one in use is not idle
			if b.swept = b.expires < now; b.swept {
				delete(s.buckets, name)
			}
			b.mu.Unlock()
		}
	}
	s.sweepAt = max(1024, 2*len(s.buckets))
}

func (s *MemoryStore) neverBlocks() {}

func (s *MemoryStore) check() error {
	if s == nil {
		return fmt.Errorf("%w: store is a nil *MemoryStore", ErrInvalidConfig)
	}
	return nil
}
