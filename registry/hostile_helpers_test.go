package registry_test

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

func hostileRow(name string, rate float64, change ...func(*registry.Limit)) registry.Limit {
	one := 1.0
	l := registry.Limit{Name: name, Row: name, Rate: rate, Burst: &one, MaxWait: 5 * time.Second}
	for _, f := range change {
		f(&l)
	}
	return l
}

// hostileWaiters begins n calls, which are counted when they pass.
func hostileWaiters(calls *sync.WaitGroup, n int, call func(ctx context.Context) (bool, error)) (passed, ended *atomic.Int64) {
	passed, ended = new(atomic.Int64), new(atomic.Int64)
	for range n {
		calls.Go(func() {
			ok, err := call(ctx)
			if ended.Add(1); ok && err == nil {
				passed.Add(1)
			}
		})
		time.Sleep(time.Millisecond)
	}
	return passed, ended
}
