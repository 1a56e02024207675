package tokenbucket

import (
	"context"
	"slices"
	"sync"
	"time"
)

// MemoryStore keeps buckets in this process. It is for limiters of one process, and for tests. It decides by the clock of the limiter
// that asks (WithClock), and by the system's for a Batch that a wrapper has made. The zero value is ready; it is safe for concurrent use
// and must not be copied.
type MemoryStore struct {
	mu      sync.Mutex
	buckets map[string]*memoryBucket
	sweepAt int // number of buckets at which the expired ones are dropped
}

// memoryBucket is a state as a value: deciding on text takes several times as long.
type memoryBucket struct {
	mu      sync.Mutex
	state   PermitBucket
	text    []byte // the state, if it was written as text; nil: state is it
	touched int64  // microseconds of the clock that changed the state last
	ttl     int64  // microseconds that text lives for
	swept   bool   // no longer in the map
}

// NewMemoryStore returns an empty store.
func NewMemoryStore() *MemoryStore { return &MemoryStore{} }

// Apply implements [Store].
func (s *MemoryStore) Apply(_ context.Context, b *Batch) error {
	asked := b.native()
	if asked == nil {
		return s.exchange(b)
	}
	return asked.answered(s.decide(asked))
}

// decide decides what the engine asks of a bucket: the batch has the outcome.
func (s *MemoryStore) decide(batch *batch) error {
	now := batch.LocalMicros()
	b := s.lock(keyName(batch.Name), now)
	defer b.mu.Unlock()
	next := b.state
	if b.text != nil {
		if err := next.parse(string(b.text), batch.own); err != nil {
			return corruptBucket(batch.Name, err)
		}
	}
	err := next.apply(now, batch, &batch.out)
	if err == nil && batch.out.Changed {
		b.state, b.text = next, nil
		b.touched = batch.out.NowMicros
	}
	return err
}

// exchange has a batch decide on states as text, on several buckets together.
func (s *MemoryStore) exchange(batch *Batch) error {
	names := batch.Names
	buckets := make(map[string]*memoryBucket, len(names))
	for _, name := range slices.Sorted(slices.Values(names)) { // in one order, so that nobody waits for each other
		b := s.lock(name, time.Now().UnixMicro())
		defer b.mu.Unlock()
		buckets[name] = b
	}
	now := time.Now().UnixMicro() // read under the locks: it does not run backwards from one step to the next
	states := make([][]byte, len(names))
	for i, name := range names {
		states[i] = buckets[name].bytes()
	}
	next, ttl, err := batch.Decide(now, states)
	if err != nil {
		return err
	}
	for i, name := range names {
		if next[i] != nil {
			b := buckets[name]
			b.state, b.text = PermitBucket{}, slices.Clone(next[i])
			b.touched, b.ttl = now, ttl.Microseconds()
		}
	}
	return nil
}

// bytes is the state as text; nil: there is none.
func (b *memoryBucket) bytes() []byte {
	if b.text != nil || b.state.Epoch == 0 {
		return slices.Clone(b.text)
	}
	return b.state.appendText(nil)
}

// expires is when nobody needs the state any more.
func (b *memoryBucket) expires() int64 {
	if b.text != nil {
		return b.touched + b.ttl
	}
	return b.touched + b.state.ttlMillis(b.touched)*1000
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
			if b.swept = b.expires() < now; b.swept {
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
