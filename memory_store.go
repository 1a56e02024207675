package tokenbucket

import (
	"context"
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
	touched int64 // microseconds of the clock that changed the state last
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
		b.touched = out.NowMicros
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
		b = &memoryBucket{touched: now}
		s.buckets[name] = b
	}
	return b
}

// sweep drops expired buckets. Doubling its threshold keeps its cost per new bucket constant.
func (s *MemoryStore) sweep(now int64) {
	for name, b := range s.buckets {
		if b.mu.TryLock() { // one in use is not idle
			if b.swept = b.touched+b.state.TTLMillis(b.touched)*1000 < now; b.swept {
				delete(s.buckets, name)
			}
			b.mu.Unlock()
		}
	}
	s.sweepAt = max(1024, 2*len(s.buckets))
}

func (s *MemoryStore) describe() traits {
	return traits{self: s, decides: byLocalTime, memory: s}
}

// takeNow decides on a request that need not wait, or must wait for too long: without an allocation, a timer or a goroutine, with one
// lock and one look at the clock. While somebody waits already it grants nothing.
func (c *coordinator) takeNow(limiter *RateLimiter, n, maxWait int64) (granted, decided bool) {
	found := c.occupied.Load()
	if found == spare {
		return false, false
	}
	now := c.time.Micros()
	b := c.slot.Load()
	if b == nil {
		b = c.traits.memory.bucket(c.name, now)
		c.slot.Store(b)
	}
	b.mu.Lock()
	if b.swept {
		b.mu.Unlock()
		c.slot.Store(nil)
		return false, false
	}
	defer b.mu.Unlock()
	if found == queued {
		seen := b.state
		granted, decided = seen.takeNow(now, limiter.inForce(), n, maxWait)
		return false, decided && !granted
	}
	if granted, decided = b.state.takeNow(now, limiter.inForce(), n, maxWait); granted {
		b.touched = now
	}
	return granted, decided
}

// inForce is the configuration under which a bucket may decide on the limiter's requests without being told of the limiter's own:
// a newer one that is known, or its own.
func (l *RateLimiter) inForce() *Config {
	if known := l.coordinator.known.Load(); known != nil && known.Version > l.own.Version && known.Kind == l.own.Kind {
		return &known.Config
	}
	return &l.own.Config
}
