package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// lossy is a table with the given number of rows; if it is below 0, loads fail or hang.
type lossy struct{ rows atomic.Int64 }

// warnings counts log messages.
type warnings struct{ atomic.Int64 }

func (w *warnings) Write(p []byte) (int, error) { w.Add(1); return len(p), nil }

const dropped, locked = -1, -2

func (l *lossy) Load(ctx context.Context) (registry.Table, error) {
	n := l.rows.Load()
	if n == locked {
		<-ctx.Done()
		return registry.Table{}, ctx.Err()
	}
	if n == dropped {
		return registry.Table{}, errors.New("no such table")
	}
	t := registry.Table{}
	for i := range n {
		t.Limits = append(t.Limits, registry.Limit{Name: fmt.Sprintf("/%02d", i+1), Rate: 1})
	}
	return t, nil
}

// What /readyz, the metrics and the log of a gateway have at certain times after its table of 17 rows was changed, by the clock: a load takes
// place every 4 to 5 s.
func TestLostTableByTheClock(t *testing.T) {
	type state struct {
		at                         time.Duration
		ready                      string // a part of it; empty: nothing of the kind
		limits, lost, before, held float64
		warnings                   int // in the log, at least
	}
	const s = time.Second
	gone := func(n int, state string) string {
		return fmt.Sprintf("%d of 17 limits are gone from the table, and ", n) + "%" + state
	}
	for name, test := range map[string]struct {
		rows   int64
		states []state
	}{
		"reduced to one": {1, []state{{0, "", 17, 0, 0, 0, 0}, {5 * s, gone(16, "still in force"), 17, 16, 17, 16, 1}, {15 * s, gone(16, "no longer in force"), 1, 16, 17, 0, 3},
			{60 * s, gone(16, "no longer in force"), 1, 16, 17, 0, 4}, {300 * s, gone(16, "no longer in force"), 1, 16, 17, 0, 7}}},
		"emptied": {0, []state{{5 * s, gone(17, "still in force"), 17, 17, 17, 17, 1}, {15 * s, gone(17, "no longer in force"), 0, 17, 17, 0, 3},
			{60 * s, "there are no limits", 0, 17, 17, 0, 5}, {300 * s, gone(17, "no longer in force"), 0, 17, 17, 0, 12}}},
		"dropped": {dropped, []state{{5 * s, "; loads fail: no such table", 17, 0, 0, 0, 1}, {15 * s, "; loads fail: no such table", 17, 0, 0, 0, 1},
			{60 * s, "; loads fail: no such table", 17, 0, 0, 0, 2}, {300 * s, "; loads fail: no such table", 17, 0, 0, 0, 5}}},
		"locked": {locked, []state{{5 * s, "", 17, 0, 0, 0, 0}, {15 * s, "", 17, 0, 0, 0, 1}, // a load has a minute
			{75 * s, "; loads fail: context deadline exceeded", 17, 0, 0, 0, 2}, {300 * s, "; loads fail: context deadline exceeded", 17, 0, 0, 0, 6}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, err := given(t, []string{"--upstream", "http://u:1", "--limits", "sqlite://f", "--store", "memory"}, nil, "")
				require.NoError(t, err)
				c, err := o.parse()
				require.NoError(t, err)
				var log warnings
				source := new(lossy)
				source.rows.Store(17)
				limits, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithInterval(c.interval), registry.WithLogger(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))))
				require.NoError(t, err)
				defer limits.Close()
				p, err := newProxy(c, slog.New(slog.DiscardHandler))
				require.NoError(t, err)
				p.metrics.limits.Store(limits)
				a := &admin{config: c, began: time.Now(), proxy: p}
				metrics := prometheus.NewRegistry()
				metrics.MustRegister(newCollector(a))
				source.rows.Store(test.rows)
				began := time.Now()
				for _, want := range test.states {
					time.Sleep(time.Until(began.Add(want.at + 900*time.Millisecond))) // loads and reminders of that second are over
					w := httptest.NewRecorder()
					a.ready(w, nil)
					require.Equal(t, 200, w.Code)
					ready := w.Body.String()
					text, state, _ := strings.Cut(want.ready, "%")
					require.Contains(t, ready, text, want.at)
					require.Contains(t, ready, state, want.at)
					require.Equal(t, want.ready != "", strings.Contains(ready, "gone") || strings.Contains(ready, "fail") || strings.Contains(ready, "no limits"), ready)
					figures := map[string]float64{}
					families, err := metrics.Gather()
					require.NoError(t, err)
					for _, f := range families {
						figures[strings.TrimPrefix(f.GetName(), "tokenbucket_gateway_")] = f.GetMetric()[0].GetGauge().GetValue()
					}
					require.Equal(t, []float64{want.limits, want.lost, want.before, want.held},
						[]float64{figures["limits"], figures["limits_lost"], figures["limits_before_loss"], figures["limits_held"]}, want.at)
					require.GreaterOrEqual(t, int(log.Load()), want.warnings, want.at)
				}
			})
		})
	}
}
