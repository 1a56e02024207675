package registry_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// With WithStrict, bad rows make New fail, and each is in the error. If a row turns bad later, its last valid limit stays in force.
func TestStrict(t *testing.T) {
	bad := registry.Static{{Name: "/a", Row: "1", Rate: 5}, {Name: "/b", Row: "2", Rate: -5}, {Name: "/c", Row: "3", Rate: 5, MaxWait: -1}}
	_, err := registry.New(bad, tokenbucket.NewMemoryStore(), registry.WithStrict())
	require.ErrorIs(t, err, registry.ErrBadRows)
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	require.ErrorContains(t, err, "row 2")
	require.ErrorContains(t, err, "row 3")
	var row *registry.RowError
	require.ErrorAs(t, err, &row)

	source := new(fake)
	source.set(bad[0])
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithStrict())
	source.set(registry.Limit{Name: "/a", Row: "1", Rate: -5})
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, 5.0, r.Limits()[0].Rate)
	require.Equal(t, 2, open(t, bad, tokenbucket.NewMemoryStore()).Stats().Bad, "without it the other rows are in force")
}

// Initial permits for all limiters are no reason to reject a row whose bucket is smaller, or warms up.
func TestInitialPermitsFit(t *testing.T) {
	source := new(fake)
	source.set(registry.Limit{Name: "/a", Rate: 10}, registry.Limit{Name: "/warm", Rate: 5, Warmup: time.Second})
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithLimiterOptions(tokenbucket.WithInitialPermitsUpTo(5)))
	require.Empty(t, r.Stats().Rejected)
	two, hundred := 2.0, 100.0 // at a rate that earns no permit meanwhile
	source.set(registry.Limit{Name: "/a", Rate: 2}, registry.Limit{Name: "/b", Rate: 0.01, Burst: &two},
		registry.Limit{Name: "/c", Rate: 0.01, Burst: &hundred})
	require.NoError(t, r.Reload(ctx))
	require.Empty(t, r.Stats().Rejected)
	require.Equal(t, 2.0, r.Limits()[0].Rate)
	require.Equal(t, 2, pass(t, r, "/b", 9), "as many as its bucket can have")
	require.Equal(t, 5, pass(t, r, "/c", 9))
	_, err := registry.New(registry.Static{{Name: "/a", Rate: 2}}, tokenbucket.NewMemoryStore(), registry.WithStrict(),
		registry.WithLimiterOptions(tokenbucket.WithInitialPermitsUpTo(-1)))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
}

// A row whose bucket saves up less than a permit, and whose calls may not wait for one, is bad: every call would end with an error.
func TestRowThatNeverGrants(t *testing.T) {
	zero, half := 0.0, 0.5
	never := registry.Static{{Name: "/a", Row: "1", Rate: 5, Burst: &zero, MaxWait: 100 * time.Millisecond}, {Name: "/b", Row: "2", Rate: 1, Burst: &half, MaxWait: 400 * time.Millisecond}}
	r := open(t, never, tokenbucket.NewMemoryStore())
	require.Len(t, r.Stats().Rejected, 2)
	require.EqualError(t, &r.Stats().Rejected[0], `registry: row 1: bucket "/a": max_wait 100ms: want at least 200ms: its bucket saves up less than a permit, so every call waits for so long`)
	require.Error(t, never[1].Check())
	a := enter(t, r, "/a")
	require.Equal(t, gate.ByBadRow, a.By)
	require.Empty(t, open(t, never, tokenbucket.NewMemoryStore(), registry.WithLimiterOptions(tokenbucket.WithPayment(tokenbucket.PayLater))).Stats().Rejected,
		"a permit that is paid later is due at once")

	fits := registry.Static{{Name: "/a", Rate: 5, Burst: &zero, MaxWait: 200 * time.Millisecond}, {Name: "/b", Rate: 1, Burst: &half, MaxWait: 500 * time.Millisecond},
		{Name: "/c", Burst: &zero}, {Name: "/d", Rate: 1, Quota: true}, {Name: "/e", Rate: 1, Warmup: time.Second}}
	require.Empty(t, open(t, fits, tokenbucket.NewMemoryStore()).Stats().Rejected)
}
