package registry_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// slowStore takes some time for each batch.
type slowStore struct {
	*tokenbucket.MemoryStore
	takes atomic.Int64
}

func (s *slowStore) Apply(ctx context.Context, b *tokenbucket.Batch) error {
	select {
	case <-time.After(time.Duration(s.takes.Load())):
		return s.MemoryStore.Apply(ctx, b)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close of a registry waits for the settlements of its rows that are on their way: of rows with a rate alone, with further limits, of keys, of names
// without a row, of a lower priority, and of limiters that were replaced since.
func TestCloseWaitsForSettlements(t *testing.T) {
	size := 10.0
	calls := func(c *registry.Limit) { c.Rate, c.Burst, c.MaxWait = 0.001, &size, time.Second }
	for name, c := range map[string]struct {
		calls  string
		change func(*registry.Limit)
		under  context.Context
		after  func(*fake)
	}{
		"rate": {calls: "/a"},
		"window and concurrency": {calls: "/a", change: func(c *registry.Limit) {
			c.Window, c.WindowLimit, c.Concurrent = time.Hour, 50, 2
		}},
		"key":            {calls: "/a|k", change: func(c *registry.Limit) { c.PerKey = true }},
		"no row":         {calls: "/b"},
		"lower priority": {calls: "/a", under: gate.WithPriority(ctx, tokenbucket.Low)},
		"row that changed": {calls: "/a", after: func(f *fake) {
			f.set(registry.Limit{Name: "/a", Rate: 5, Burst: &size, Version: 9}, row("/c", 5, 1), row("/d", 5, 1))
		}},
		"row that is gone": {calls: "/a", after: func(f *fake) { f.set(row("/c", 5, 1), row("/d", 5, 1)) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				limit := registry.Limit{Name: "/a", Version: 1}
				if calls(&limit); c.change != nil {
					c.change(&limit)
				}
				source, store := new(fake), &slowStore{MemoryStore: tokenbucket.NewMemoryStore()}
				source.set(limit, row("/c", 5, 1), row("/d", 5, 1))
				unnamed := registry.Limit{}
				calls(&unnamed)
				r := open(t, source, store, registry.WithLocalWindows(), registry.WithLocalSemaphores(), registry.WithUnknown(registry.Default(unnamed)),
					registry.WithLimiterOptions(tokenbucket.WithInitialPermits(10)))
				under := ctx
				if c.under != nil {
					under = c.under
				}
				a, err := r.Enter(under, c.calls)
				require.NoError(t, err)
				require.True(t, a.OK)
				l, err := r.Limiter(c.calls)
				require.NoError(t, err)
				if name == "row that is gone" { // then the name has another bucket
					l = r.Limiters()["/a"]
				}
				store.takes.Store(int64(700 * time.Millisecond))
				a.Leave()
				a.SettleLater(5)
				if c.after != nil {
					c.after(source)
					require.NoError(t, r.Reload(ctx))
				}
				began := time.Now()
				r.Close()
				require.Equal(t, 700*time.Millisecond, time.Since(began))
				store.takes.Store(0)
				state, err := l.State(ctx)
				require.NoError(t, err)
				require.InDelta(t, 5, state.StoredPermits, 0.1)
				began = time.Now()
				r.Close()
				require.Zero(t, time.Since(began))
			})
		})
	}
}

// A settlement whose store does not reply ends with the store timeout, and so does Close. Calls that settle meanwhile do not hold Close up.
func TestCloseIsBounded(t *testing.T) {
	for name, c := range map[string]struct{ takes, closes time.Duration }{
		"no reply": {2 * time.Second, time.Second}, "later ones": {300 * time.Millisecond, 600 * time.Millisecond}, // after the batch in flight
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				size := 1000.0
				store := &slowStore{MemoryStore: tokenbucket.NewMemoryStore()}
				r := open(t, registry.Static{{Name: "/a", Rate: 0.001, Burst: &size, MaxWait: time.Second}}, store,
					registry.WithLimiterOptions(tokenbucket.WithInitialPermits(1000), tokenbucket.WithStoreTimeout(time.Second)))
				admitted := make([]*gate.Admission, 200)
				for i := range admitted {
					admitted[i] = enter(t, r, "/a")
					require.True(t, admitted[i].OK)
				}
				store.takes.Store(int64(c.takes))
				admitted[0].SettleLater(2)
				go func() {
					for _, a := range admitted[1:] {
						time.Sleep(100 * time.Millisecond)
						a.SettleLater(2)
					}
				}()
				time.Sleep(250 * time.Millisecond)
				began := time.Now()
				r.Close()
				require.LessOrEqual(t, time.Since(began), c.closes)
				store.takes.Store(0)
				time.Sleep(time.Minute)
			})
		})
	}
}
