package redisbucket

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// reviewTimeout bounds how long the server may take to tell its eviction policy.
const reviewTimeout = time.Second

// reviewEviction logs a warning if the server that has a bucket may evict it: the bucket would start again, and more permits would be granted
// than its rate allows. A store asks once, in a goroutine of its own, after a batch was decided, so no call waits for it and an unreachable
// server is not asked. In a cluster the first bucket's server stands for the others. A server that does not tell its policy is not mentioned.
func (s *Store) reviewEviction(bucket string) {
	if s.reviewed.Load() || s.reviewed.Swap(true) {
		return
	}
	go func() {
		defer s.logger.Recovered()
		ctx, cancel := context.WithTimeout(context.Background(), reviewTimeout)
		defer cancel()
		e := script.AskEviction(ctx, s.clientOf(bucket))
		if e.Evicts() {
			s.logger.Get().Warn("tokenbucket: Redis evicts buckets when its memory is short, and an evicted bucket starts again, so more calls pass "+
				"than its rate allows; set maxmemory-policy to noeviction, or use a Redis of its own",
				"maxmemory-policy", e.Policy, "maxmemory", e.MaxMemory)
		}
	}()
}

// clientOf returns a client of the server that has a bucket; the store's client if that server is unknown.
func (s *Store) clientOf(bucket string) Client {
	if server, ok := s.serverOf(script.Ended, bucket).(Client); ok && !s.oneServer {
		return server
	}
	return s.bounded
}
