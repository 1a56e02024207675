package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// outage is a source that can be away.
type outage struct{ away atomic.Bool }

func (o *outage) Load(context.Context) (registry.Table, error) {
	if o.away.Load() {
		return registry.Table{}, errors.New("connection refused")
	}
	return registry.Table{Limits: []registry.Limit{{Name: "/a", Rate: 1}}}, nil
}

// An unavailable database does not take gateways out of service whose limits hold, unless an option says so.
func TestReadyWithOldLimits(t *testing.T) {
	for age, want := range map[string]int{"": http.StatusOK, "10m": http.StatusServiceUnavailable} {
		synctest.Test(t, func(t *testing.T) {
			args := []string{"--upstream", "http://u:1", "--limits", "sqlite://f", "--store", "memory"}
			if age != "" {
				args = append(args, "--max-age", age)
			}
			o, err := given(t, args, nil, "")
			require.NoError(t, err)
			c, err := o.parse()
			require.NoError(t, err)
			quiet := slog.New(slog.DiscardHandler)
			p, err := newProxy(c, quiet)
			require.NoError(t, err)
			source := new(outage)
			limits, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithLogger(quiet))
			require.NoError(t, err)
			defer limits.Close()
			p.metrics.limits.Store(limits)
			a := &admin{config: c, began: time.Now(), proxy: p}
			source.away.Store(true)
			time.Sleep(time.Hour)
			w := httptest.NewRecorder()
			a.ready(w, nil)
			require.Equal(t, want, w.Code)
			require.Contains(t, w.Body.String(), "limits: loaded 1h0m")
		})
	}
}

// broken is a store whose states are none.
type broken struct{ tokenbucket.Store }

func (broken) Apply(context.Context, *tokenbucket.Batch) error { return tokenbucket.ErrCorruptState }

// A limit whose state cannot be used is in /readyz and in /metrics, and leaves the gateway in service.
func TestFaultsAreTold(t *testing.T) {
	o, err := given(t, []string{"--upstream", "http://u:1", "--limits", "sqlite://f", "--store", "memory"}, nil, "")
	require.NoError(t, err)
	c, err := o.parse()
	require.NoError(t, err)
	quiet := slog.New(slog.DiscardHandler)
	p, err := newProxy(c, quiet)
	require.NoError(t, err)
	limits, err := registry.New(new(outage), broken{}, registry.WithLogger(quiet))
	require.NoError(t, err)
	defer limits.Close()
	p.metrics.limits.Store(limits)
	a := &admin{config: c, began: time.Now(), proxy: p}
	p.metrics.add(a)
	for range 3 {
		_, err = limits.Enter(t.Context(), "/a")
		require.ErrorIs(t, err, tokenbucket.ErrCorruptState)
	}
	w := httptest.NewRecorder()
	a.ready(w, nil)
	require.Equal(t, http.StatusOK, w.Code)
	require.Contains(t, w.Body.String(), `fault: calls of "/a" fail until its limit is repaired: `)
	w = httptest.NewRecorder()
	p.metrics.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Contains(t, w.Body.String(), "tokenbucket_gateway_faults 1")
	require.Contains(t, w.Body.String(), "tokenbucket_gateway_faulty_calls_total 3")
}

// A row named as the calls without a row are counted has series of its own.
func TestRowNamedOther(t *testing.T) {
	m, err := newMetrics()
	require.NoError(t, err)
	limits, err := registry.New(registry.Static{{Name: "other", Rate: 5}}, tokenbucket.NewMemoryStore(), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	defer limits.Close()
	m.limits.Store(limits)
	require.Equal(t, "other", m.label("/unknown"))
	require.Equal(t, `"other"`, m.label("other"))
	require.True(t, m.hasSeries("other"))
}
