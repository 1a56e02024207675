package registry

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNumber(t *testing.T) {
	for want, f := range map[string]float64{
		"1,000,000": 1e6, "10,000,000,000": 9.999999999999998e9, "0.1234": 0.1234, "2.5": 2.5, "-1,234.5": -1234.5, "100": 100, "0": 0,
		"0.000000001": 1e-9, "0.3": 0.1 + 0.2, "9,007,199,254,740,990": 1 << 53, "+Inf": math.Inf(1), "NaN": math.NaN(),
	} {
		require.Equal(t, want, number(f))
	}
}
