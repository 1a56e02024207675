package registry_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// The calls of Enter that wait as a row changes use the row's rate: they ask one after the other, a round trip each.
func TestHostileHandOverUsesTheRate(t *testing.T) {
	for _, how := range []string{"no change", "change"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source := &fake{}
				source.set(hostileRow("/a", 1000), hostileRow("/b", 1))
				limits := open(t, source, &hostileFar{tokenbucket.NewMemoryStore(), 5 * time.Millisecond}, registry.WithInterval(time.Hour))
				var calls sync.WaitGroup
				var passed atomic.Int64
				var longest atomic.Int64
				for range 3000 {
					calls.Go(func() {
						came := time.Now()
						if ok, err := allow(ctx, limits, "/a"); ok && err == nil {
							passed.Add(1)
						}
						for now, most := int64(time.Since(came)), longest.Load(); now > most && !longest.CompareAndSwap(most, now); most = longest.Load() {
						}
					})
				}
				time.Sleep(500 * time.Millisecond)
				before, began := passed.Load(), time.Now()
				if how == "change" {
					source.set(hostileRow("/a", 1001), hostileRow("/b", 1))
					calls.Go(func() {
						require.NoError(t, limits.Reload(context.Background()))
						t.Logf("the load took %v", time.Since(began))
					})
				}
				time.Sleep(2 * time.Second)
				got := passed.Load() - before
				calls.Wait()
				limits.Close()
				t.Logf("the longest wait was %v, max_wait is 5s", time.Duration(longest.Load()))
				t.Logf("%d before, %d in the two seconds after, %d in all, in %v", before, got, passed.Load(), time.Since(began))
				time.Sleep(3 * time.Second)
				assert.LessOrEqual(t, time.Duration(longest.Load()), 5100*time.Millisecond, "max_wait")
				require.GreaterOrEqual(t, got, int64(1800), "of 2000")
			})
		})
	}
}
