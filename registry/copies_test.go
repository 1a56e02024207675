package registry_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A row in force is a copy: a source that changes the value behind its pointer changes the row at the next load, as any other change, and
// a caller cannot change it by what Limits returns.
func TestRowsAreCopies(t *testing.T) {
	size := 10.0
	source := registry.Static{{Name: "/a", Rate: 1, Burst: &size}}
	var last registry.Load
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithHook(func(l registry.Load) { last = l }))
	size = 20
	require.Equal(t, 10.0, *r.Limits()[0].Burst, "no load since")
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, 1, last.Changed)
	require.Equal(t, 20.0, *r.Limits()[0].Burst)
	l, err := r.Limiter("/a")
	require.NoError(t, err)
	state, err := l.State(ctx)
	require.NoError(t, err)
	require.Equal(t, 20.0, state.MaxPermits)

	*r.Limits()[0].Burst = 30
	require.Equal(t, 20.0, *r.Limits()[0].Burst)
}

// The limit of Default and of bad rows is a copy, too.
func TestDefaultIsACopy(t *testing.T) {
	for name, policy := range map[string]func(registry.Otherwise) registry.Option{"unknown": registry.WithUnknown, "bad rows": registry.WithBadRows} {
		t.Run(name, func(t *testing.T) {
			size := 10.0
			limit := registry.Default(registry.Limit{Rate: 1, Burst: &size})
			size = 20
			r := open(t, registry.Static{{Name: "/bad", Rate: -1}}, tokenbucket.NewMemoryStore(), policy(limit))
			l, err := r.Limiter(map[string]string{"unknown": "/x", "bad rows": "/bad"}[name])
			require.NoError(t, err)
			state, err := l.State(ctx)
			require.NoError(t, err)
			require.Equal(t, 10.0, state.MaxPermits)
		})
	}
}

// The bucket of a name without a row is never that of a row: of a name that is cut off at 512 bytes, is not UTF-8 or is empty.
func TestUnknownNamesUseNoBucketOfARow(t *testing.T) {
	longest := strings.Repeat("x", 512)
	for row, name := range map[string]string{longest: longest + "y", "/?": "/\xff", "?": ""} {
		size := 3.0
		limit := registry.Limit{Rate: 0.001, Burst: &size}
		r := open(t, registry.Static{{Name: row, Rate: 0.001, Burst: &size}}, tokenbucket.NewMemoryStore(),
			registry.WithUnknown(registry.Default(limit)), registry.WithLimiterOptions(tokenbucket.WithInitialPermits(3)))
		require.Equal(t, 3, pass(t, r, name, 10), "%.10q", name)
		require.Equal(t, 3, pass(t, r, row, 10), "the row %.10q", row)
		require.Zero(t, pass(t, r, name, 10), "one bucket for the name %.10q", name)
	}
}

// Cells of flags and counts may have a fraction of 0, as columns DECIMAL and REAL return them.
func TestCellsWithAFraction(t *testing.T) {
	read := func(cells map[string]string) (registry.Limit, *registry.Wrong) {
		l := registry.Limit{}
		wrong := l.Read(registry.InTable, func(f *registry.Field, name int) []byte {
			if text, ok := cells[f.Names()[name]]; ok {
				return []byte(text)
			}
			return nil
		})
		return l, wrong
	}
	for _, text := range []string{"1", "1.0", "1.000", "1e0", "1e+00"} {
		l, wrong := read(map[string]string{"name": "/a", "status": text, "rate": "5", "shadow": text, "window_limit": text, "window": "60", "concurrent": text})
		require.Nil(t, wrong, text)
		require.Equal(t, []any{false, true, 1, 1}, []any{l.Disabled, l.Shadow, l.WindowLimit, l.Concurrent}, text)
	}
	for _, text := range []string{"0", "0.0", "0.000", "-0.0", "0e0"} {
		l, wrong := read(map[string]string{"name": "/a", "disabled": text, "rate": "5", "window_limit": text, "window": text, "concurrent": text})
		require.Nil(t, wrong, text)
		require.Equal(t, []any{false, 0, 0}, []any{l.Disabled, l.WindowLimit, l.Concurrent}, text)
	}
	l, wrong := read(map[string]string{"name": "/a", "disabled": "0", "rate": "5", "concurrent": "1e+06"})
	require.Nil(t, wrong)
	require.Equal(t, 1_000_000, l.Concurrent)
	for _, text := range []string{"1.5", "0.5", "-1.0", "2147483648.0", "1e300", "NaN", "inf", "."} {
		_, wrong := read(map[string]string{"name": "/a", "disabled": "0", "rate": "5", "concurrent": text})
		require.NotNil(t, wrong, text)
		_, wrong = read(map[string]string{"name": "/a", "disabled": text, "rate": "5"})
		require.NotNil(t, wrong, text)
	}
}
