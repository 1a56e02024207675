package registry_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// lengthy is a source that takes its time, unless its context ends.
type lengthy struct {
	takes atomic.Int64
	table registry.Table
}

func (l *lengthy) Load(ctx context.Context) (registry.Table, error) {
	select {
	case <-time.After(time.Duration(l.takes.Load())):
		return l.table, nil
	case <-ctx.Done():
		return registry.Table{}, ctx.Err()
	}
}

// A load of a large table goes on for a minute, and the log has it after five seconds, once. Close ends it.
func TestSlowLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source, log := &lengthy{table: registry.Table{Limits: []registry.Limit{{Name: "/a", Rate: 5}}}}, new(logged)
		source.takes.Store(int64(40 * time.Second))
		const line = "registry: a load takes long and goes on"
		went := make(chan *registry.Registry)
		go func() {
			r, err := registry.New(source, tokenbucket.NewMemoryStore(), log.option())
			require.NoError(t, err)
			went <- r
		}()
		time.Sleep(6 * time.Second)
		require.Equal(t, 1, strings.Count(log.String(), line))
		r := <-went
		require.Equal(t, 1, r.Stats().Limits)
		require.NoError(t, r.Reload(ctx))
		require.Equal(t, 1, strings.Count(log.String(), line), "it is known")
		source.takes.Store(int64(time.Millisecond))
		require.NoError(t, r.Reload(ctx))
		source.takes.Store(int64(2 * time.Minute))
		require.ErrorIs(t, r.Reload(ctx), context.DeadlineExceeded)
		require.Equal(t, 2, strings.Count(log.String(), line))
		require.Equal(t, 1, r.Stats().Limits, "what was in force stays")
		time.Sleep(10 * time.Second) // the next load has begun
		began := time.Now()
		r.Close()
		require.Zero(t, time.Since(began))
	})
}
