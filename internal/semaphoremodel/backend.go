package semaphoremodel

import (
	"context"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Backend keeps a semaphore in this process, for all who use it. Its clock is the system's. The zero value is ready.
type Backend struct {
	mu        sync.Mutex
	model     Model
	listeners map[string]chan semaphore.Grant
}

// Do calls f with the model while nobody else uses it.
func (b *Backend) Do(f func(m *Model)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(&b.model)
}

// Apply implements semaphore.Backend.
func (b *Backend) Apply(ctx context.Context, batch *semaphore.Batch) (*semaphore.Report, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now().UnixMicro()
	if batch.Deadline != 0 && now > batch.Deadline {
		return &semaphore.Report{Now: now, Late: true}, nil
	}
	if b.model.Seen-now <= 2_000_000 {
		now = max(now, b.model.Seen)
	}
	report, told, err := b.model.Apply(batch, now)
	for _, t := range told {
		if to := b.listeners[t.Process]; to != nil {
			to <- t.Grant
		}
	}
	return report, err
}

// Listen implements semaphore.Backend.
func (b *Backend) Listen(ctx context.Context, process string, ready func(), wake func(semaphore.Grant)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	grants := make(chan semaphore.Grant, 1<<16)
	b.mu.Lock()
	if b.listeners == nil {
		b.listeners = map[string]chan semaphore.Grant{}
	}
	b.listeners[process] = grants
	b.mu.Unlock()
	ready()
	for {
		select {
		case g := <-grants:
			wake(g)
		case <-ctx.Done():
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.listeners[process] == grants {
				delete(b.listeners, process)
			}
			return ctx.Err()
		}
	}
}

// Holders implements semaphore.Backend.
func (b *Backend) Holders(ctx context.Context) ([]semaphore.Holder, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.model.Holders(max(time.Now().UnixMicro(), b.model.Seen)), ctx.Err()
}

// Stats implements semaphore.Backend.
func (b *Backend) Stats(ctx context.Context) (semaphore.Stats, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.model.Stats(max(time.Now().UnixMicro(), b.model.Seen)), ctx.Err()
}
