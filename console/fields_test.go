package console

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// TestValuesInWords: a column's value is shown in the form's unit, and as a person writes it.
func TestValuesInWords(t *testing.T) {
	names := sqlsource.Columns{Rate: "rate", MaxWait: "max_wait", Disabled: "disabled", Window: "window", Concurrent: "concurrent", ColdFactor: "cold"}
	for _, test := range []struct{ column, value, want string }{
		{"rate", "50.000000", "50/s"}, {"rate", "many\n", `many\n`}, {"max_wait", "0.333", "333 ms"}, {"max_wait", "9.99", "9990 ms"}, {"max_wait", "-", "-"},
		{"disabled", "1", "yes"}, {"disabled", "FALSE", "no"}, {"disabled", "7", "7"}, {"window", "0", "none"}, {"window", "60", "60 s"},
		{"concurrent", "0.0", "any number"}, {"cold", "3.50", "3.5"},
	} {
		for _, f := range fields(names) {
			if f.column == test.column {
				require.Equal(t, test.want, f.inWords(&test.value), test.column)
			}
		}
	}
	for _, f := range fields(names) {
		require.NotEmpty(t, f.inWords(nil))
	}
}

// Each choice of the column penalty is one that a row may have.
func TestPenaltyChoices(t *testing.T) {
	all := map[registry.Penalty]bool{}
	i := slices.IndexFunc(registry.Fields(), func(f registry.Field) bool { return f.Key == "penalty" })
	for _, c := range registry.Fields()[i].Choices {
		p, ok := registry.ParsePenalty(c.Value)
		require.True(t, ok, c.Value)
		all[p] = true
	}
	require.Equal(t, map[registry.Penalty]bool{registry.PenaltyNone: true, registry.Penalty503: true, registry.Penalty429: true, registry.PenaltyBoth: true}, all)
}
