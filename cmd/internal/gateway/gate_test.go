package gateway

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Each call is counted once, also that of a client that leaves while it waits.
func TestCallsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := newMetrics()
		require.NoError(t, err)
		limits, err := registry.New(registry.Static{{Name: "/row", Rate: 1, MaxWait: time.Second}}, tokenbucket.NewMemoryStore(),
			registry.WithLogger(slog.New(slog.DiscardHandler)))
		require.NoError(t, err)
		defer limits.Close()
		m.limits.Store(limits)
		g := &counter{Gate: limits, log: slog.New(slog.DiscardHandler), metrics: m}
		a, err := g.Enter(t.Context(), "/row")
		require.NoError(t, err)
		require.True(t, a.OK)
		gone, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			_, err := g.Enter(gone, "/row")
			ended <- err
		}()
		synctest.Wait()
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
		for by, result := range map[string]string{"limit": passed, "none": cancelledCall} {
			var metric dto.Metric
			require.NoError(t, m.admissions.WithLabelValues("/row", by, result).Write(&metric))
			require.Equal(t, 1.0, metric.GetCounter().GetValue(), result)
		}
	})
}
