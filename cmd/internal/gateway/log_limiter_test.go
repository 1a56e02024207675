package gateway

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Each kind is logged from time to time, however many kinds there are.
func TestLogLimiterOfManyKinds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s logLimiter
		for round := range 3 {
			for i := range mostKinds {
				n, tell := s.note(fmt.Sprint(i))
				require.Equal(t, round == 0, tell, "round %d, kind %d", round, i)
				require.Equal(t, tell, n == 1)
			}
		}
		time.Sleep(quiet)
		n, tell := s.note("7")
		require.True(t, tell)
		require.Equal(t, 3, n)
	})
}

// An upstream's Retry-After is logged and counted if it holds a bucket back. Those of keys without a row are counted as one, because
// clients choose their paths.
func TestPenaltiesOfManyKeys(t *testing.T) {
	for unknown, want := range map[string]struct {
		of    registry.Otherwise
		lines int
	}{
		"pass": {registry.Pass(), 1}, "a bucket each": {registry.Default(registry.Limit{Rate: 1}), 2},
	} {
		t.Run(unknown, func(t *testing.T) {
			var text bytes.Buffer
			m, err := newMetrics()
			require.NoError(t, err)
			limits, err := registry.New(registry.Static{{Name: "/row", Rate: 1}}, tokenbucket.NewMemoryStore(), registry.WithUnknown(want.of),
				registry.WithLogger(slog.New(slog.DiscardHandler)))
			require.NoError(t, err)
			t.Cleanup(limits.Close)
			m.limits.Store(limits)
			g := &counter{Gate: limits, log: slog.New(slog.NewTextHandler(&text, nil)), metrics: m}
			for i := range 50 {
				require.NoError(t, g.Penalize(t.Context(), "/row", time.Second))
				require.NoError(t, g.Penalize(t.Context(), fmt.Sprint("/", i), time.Second))
			}
			require.Equal(t, want.lines, strings.Count(text.String(), "\n"), text.String())
			require.Contains(t, text.String(), "key=/row")
			require.Len(t, m.heldUntil, want.lines)
		})
	}
}

// A row without a rate is held back, too. That is logged, counted and shown in the metrics until a reset.
func TestPenaltiesAreTold(t *testing.T) {
	var text bytes.Buffer
	m, err := newMetrics()
	require.NoError(t, err)
	rows := registry.Static{
		{Name: "/few", NoRate: true, Concurrent: 3}, {Name: "/row", Rate: 1}, {Name: "/off", Rate: 1, Disabled: true},
		{Name: "/key*", Rate: 1, PerKey: true}, {Name: "/later", Rate: 1}, {Name: "/lately", NoRate: true, Concurrent: 3},
	}
	limits, err := registry.New(rows, tokenbucket.NewMemoryStore(), registry.WithLocalSemaphores(), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	m.limits.Store(limits)
	g := &counter{Gate: limits, log: slog.New(slog.NewTextHandler(&text, nil)), metrics: m}
	for _, name := range []string{"/few", "/row", "/off", "/none", "/keyed", "/later", "/lately"} {
		require.NoError(t, g.Penalize(t.Context(), name, time.Minute))
	}
	for i := range rows[4:] { // nothing limits them any more
		rows[4+i].Disabled = true
	}
	require.NoError(t, limits.Reload(t.Context()))
	require.Equal(t, 5, strings.Count(text.String(), "\n"), text.String())
	require.Contains(t, text.String(), "key=/few")
	held := func() map[string]bool {
		all := map[string]bool{}
		for name, v := range m.views(t.Context()) {
			all[name] = v.until() > 0
		}
		return all
	}
	require.Equal(t, map[string]bool{"/few": true, "/row": true}, held(), "a row for each key has no bucket of its own")
	require.Equal(t, 1, limits.Stats().Limiters)
	counted := m.counts(t.Context())
	require.Equal(t, 1.0, counted["/few"].Penalties)
	require.NotNil(t, counted["/few"].HeldUntil)
	require.Nil(t, counted["/few"].inForce)
	l, err := limits.Limiter("/row")
	require.NoError(t, err)
	require.NoError(t, l.Reset(t.Context()))
	require.Equal(t, map[string]bool{"/few": true, "/row": false}, held())
	require.NoError(t, limits.Reset(t.Context(), "/few"))
	require.Equal(t, map[string]bool{"/row": false}, held())
}
