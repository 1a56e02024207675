package registry_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// priorities records with which priority calls of a bucket were decided.
type priorities struct {
	mu   sync.Mutex
	last map[string]tokenbucket.Priority
}

func (p *priorities) observe() registry.Option {
	p.last = map[string]tokenbucket.Priority{}
	return registry.WithLimiterOptions(tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(_ context.Context, d tokenbucket.Decision) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.last[d.Bucket] = d.Priority
	}}))
}

// The row's priority is that of its calls, unless a call has a lower one. It holds for rows with other limits and for keys, too.
func TestPriorityOfARow(t *testing.T) {
	var decided priorities
	limits := openLocal(t, registry.Static{
		{Name: "/normal", Rate: 100, MaxWait: 500 * time.Millisecond}, {Name: "/low", Rate: 100, MaxWait: 500 * time.Millisecond, Priority: tokenbucket.Low},
		{Name: "/places", Rate: 100, MaxWait: 500 * time.Millisecond, Concurrent: 10, Priority: tokenbucket.Low},
		{Name: "/each/*", Rate: 100, MaxWait: 500 * time.Millisecond, PerKey: true, Priority: tokenbucket.Lowest},
	}, decided.observe())
	for name, row := range map[string]tokenbucket.Priority{
		"/normal": tokenbucket.Normal, "/low": tokenbucket.Low, "/places": tokenbucket.Low, "/each/a": tokenbucket.Lowest,
	} {
		for _, call := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Low, tokenbucket.Lowest} {
			a, err := limits.Enter(gate.WithPriority(t.Context(), call), name)
			require.NoError(t, err)
			require.True(t, a.OK)
			a.Leave()
			l, err := limits.Limiter(name)
			require.NoError(t, err)
			require.Equal(t, row, l.Priority())
			require.Equal(t, max(row, call), decided.last[l.Name()], "%s, a call of %v", name, call)
		}
	}
}

// A change of a row's priority takes effect with the next load, and needs no new version of the configuration.
func TestPriorityOfARowChanges(t *testing.T) {
	row := registry.Limit{Name: "/a", Rate: 100, MaxWait: 500 * time.Millisecond, Version: 1}
	limits := openLocal(t, sourceFunc(func(context.Context) (registry.Table, error) {
		return registry.Table{Limits: []registry.Limit{row}}, nil
	}))
	for _, p := range []tokenbucket.Priority{tokenbucket.Normal, tokenbucket.Lowest, tokenbucket.Low} {
		row.Priority = p
		require.NoError(t, limits.Reload(t.Context()))
		l, err := limits.Limiter("/a")
		require.NoError(t, err)
		require.Equal(t, p, l.Priority())
		_, err = limits.Enter(t.Context(), "/a")
		require.NoError(t, err)
		require.EqualValues(t, 1<<10, l.InForce().Version)
	}
}

// A priority is one of three words, in tables, files and forms, and only for a row with a rate.
func TestPriorityField(t *testing.T) {
	read := func(priority string) (l registry.Limit, wrong *registry.Wrong) {
		wrong = l.Read(registry.InTable, func(f *registry.Field, name int) []byte {
			switch f.Names()[name] {
			case "name":
				return []byte("/a")
			case "rate":
				return []byte("5")
			case "disabled":
				return []byte("0")
			case "priority":
				return []byte(priority)
			}
			return nil
		})
		return l, wrong
	}
	for text, p := range map[string]tokenbucket.Priority{"normal": tokenbucket.Normal, "low": tokenbucket.Low, "Lowest": tokenbucket.Lowest} {
		l, wrong := read(text)
		require.Nil(t, wrong)
		require.Equal(t, p, l.Priority)
	}
	for _, text := range []string{"", "high", "2"} {
		_, wrong := read(text)
		require.Equal(t, "priority", wrong.Field.Key)
		require.Equal(t, "normal, low or lowest, or NULL", wrong.Want)
	}
	l := registry.Limit{Name: "/a", NoRate: true, Concurrent: 2, Priority: tokenbucket.Low}
	var wrong *registry.RowError
	require.ErrorAs(t, l.Check(), &wrong)
	require.Equal(t, "priority", wrong.Field)
	l = registry.Limit{Name: "/a", Rate: 5, MaxWait: 500 * time.Millisecond, Priority: tokenbucket.Lowest}
	require.NoError(t, l.Check())
	require.Equal(t, "5/s, saves up 5, waits up to 500 ms, lowest priority", l.String())
	l.Priority = 3
	require.ErrorAs(t, l.Check(), &wrong)
	require.Equal(t, "priority", wrong.Field)
}
