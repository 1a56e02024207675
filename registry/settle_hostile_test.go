package registry_test

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"context"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// hostileBusy counts the batches that are on their way.
type hostileBusy struct {
	tokenbucket.Store
	open atomic.Int64
}

func (s *hostileBusy) Apply(ctx context.Context, b *tokenbucket.Batch) error {
	s.open.Add(1)
	defer s.open.Add(-1)
	time.Sleep(100 * time.Millisecond)
	return s.Store.Apply(ctx, b)
}

// Registry.Close: it waits for the settlements in the background that have begun, of all limiters that the registry has made.
func TestHostileCloseWaitsForSettlements(t *testing.T) {
	for _, how := range []string{"Limiter", "group"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &hostileBusy{Store: tokenbucket.NewMemoryStore()}
				limits := open(t, registry.Static{hostileRow("/a", 10)}, store, registry.WithInterval(time.Hour))
				l, err := limits.Limiter("/a")
				require.NoError(t, err)
				var settle func(int)
				if how == "Limiter" {
					r, err := l.Reserve(ctx, 1)
					require.NoError(t, err)
					<-r.Ready()
					settle = r.SettleLater
				} else {
					other, err := tokenbucket.NewSmoothBursty("other", 100, tokenbucket.WithStore(store))
					require.NoError(t, err)
					g, err := tokenbucket.All(l, other)
					require.NoError(t, err)
					r, err := g.Reserve(ctx, 1)
					require.NoError(t, err)
					<-r.Ready()
					settle = r.SettleLater
				}
				settle(3)
				limits.Close()
				synctest.Wait()
				open := store.open.Load()
				time.Sleep(5 * time.Second)
				s, err := l.State(ctx)
				require.NoError(t, err)
				t.Logf("%d open, bucket %+v", open, s)
				require.Zero(t, open, "a settlement is on its way after Close")
			})
		})
	}
}
