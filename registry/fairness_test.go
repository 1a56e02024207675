package registry_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

type tenant struct{}

// The names of a row without PerKey share a bucket, whose callers take turns by tenant. A hundred calls of one tenant ask at once, and
// ten of them wait. A call of another tenant passes after one more. In a row with a window or a concurrency, permits are reserved
// in order of arrival, and the call is refused.
func TestTurnsOfARow(t *testing.T) {
	for name, row := range map[string]struct {
		change func(*registry.Limit)
		turns  bool
	}{
		"rate":        {func(*registry.Limit) {}, true},
		"window":      {func(l *registry.Limit) { l.Window, l.WindowLimit = time.Second, 1000 }, false},
		"concurrency": {func(l *registry.Limit) { l.Concurrent = 1000 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				none := 0.0
				limit := registry.Limit{Name: "/a/*", Rate: 20, Burst: &none, MaxWait: 500 * time.Millisecond}
				row.change(&limit)
				r := openLocal(t, registry.Static{limit}, registry.WithLimiterOptions(
					tokenbucket.WithFairness(func(ctx context.Context) string { return ctx.Value(tenant{}).(string) })))
				var passed atomic.Int64
				for range 100 {
					go func() {
						if a, err := r.Enter(context.WithValue(t.Context(), tenant{}, "busy"), "/a/busy"); err == nil && a.OK {
							passed.Add(1)
							a.Leave()
						}
					}()
				}
				synctest.Wait()
				began := time.Now()
				a, err := r.Enter(context.WithValue(t.Context(), tenant{}, "quiet"), "/a/quiet")
				require.NoError(t, err)
				require.Equal(t, row.turns, a.OK)
				require.LessOrEqual(t, time.Since(began), 100*time.Millisecond)
				if a.OK {
					a.Leave()
				}
				time.Sleep(time.Second)
				synctest.Wait()
				require.InDelta(t, 10, passed.Load(), 1, "one at once, and ten in 0.5 s, one of which is of the quiet tenant")
			})
		})
	}
}
