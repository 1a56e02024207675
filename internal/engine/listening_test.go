package engine

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Other buckets of the process begin to listen while a batch is built that only reads. The reads are then farther apart, so the batch is not
// needed yet.
func TestOtherBucketsBeginToListen(t *testing.T) {
	l := open(&book{terms: terms(time.Second, 1)})
	reserveFor(l, 100) // so that there is a waiter
	c := l.Coordinator
	stop := make(chan struct{})
	var others sync.WaitGroup
	others.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				listeners.Add(5000)
				listeners.Add(-5000)
			}
		}
	})
	defer others.Wait()
	defer close(stop)
	c.mu.Lock()
	defer c.mu.Unlock()
	require.NotPanics(t, func() {
		for range 300_000 {
			now := c.Now()
			c.View.at = now - 1_000_000
			if f := c.build(now); f != nil {
				c.inFlight.unused(f)
			}
		}
	})
}
