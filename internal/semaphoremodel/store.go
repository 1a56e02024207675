package semaphoremodel

import (
	"context"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// Store keeps a semaphore in this process. Its clock is the system's. The zero value is ready to use.
type Store struct {
	mu        sync.Mutex
	model     Model
	listeners map[string]chan store.Grant
}

// Do calls f with the model, which no other goroutine uses meanwhile.
func (s *Store) Do(f func(m *Model)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.model)
}

// Apply implements store.Store.
func (s *Store) Apply(ctx context.Context, batch *store.Batch) (*store.Report, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now().UnixMicro()
	if batch.Deadline != 0 && now > batch.Deadline {
		return &store.Report{Now: now, Late: true}, nil
	}
	if s.model.Seen-now <= 2_000_000 {
		now = max(now, s.model.Seen)
	}
	report, notices, err := s.model.Apply(batch, now)
	for _, t := range notices {
		if to := s.listeners[t.Process]; to != nil {
			to <- t.Grant
		}
	}
	return report, err
}

// Listen implements store.Store.
func (s *Store) Listen(ctx context.Context, process string, ready func(), wake func(store.Grant)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	grants := make(chan store.Grant, 1<<16)
	s.mu.Lock()
	if s.listeners == nil {
		s.listeners = map[string]chan store.Grant{}
	}
	s.listeners[process] = grants
	s.mu.Unlock()
	ready()
	for {
		select {
		case g := <-grants:
			wake(g)
		case <-ctx.Done():
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.listeners[process] == grants {
				delete(s.listeners, process)
			}
			return ctx.Err()
		}
	}
}

// Holders implements store.Store.
func (s *Store) Holders(ctx context.Context) ([]store.Holder, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.model.Holders(max(time.Now().UnixMicro(), s.model.Seen)), ctx.Err()
}

// Stats implements store.Store.
func (s *Store) Stats(ctx context.Context) (store.Stats, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.model.Stats(max(time.Now().UnixMicro(), s.model.Seen)), ctx.Err()
}
