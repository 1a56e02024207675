package figure_test

import (
	"encoding/json"
	"math"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
)

// TestTable: the pages format the same table in a browser, with the same results.
func TestTable(t *testing.T) {
	text, err := os.ReadFile("testdata/figures.json")
	require.NoError(t, err)
	var table map[string][][2]any
	require.NoError(t, json.Unmarshal(text, &table))
	format := map[string]func(any) string{
		"number": func(v any) string { return figure.Number(v.(float64)) },
		"span":   func(v any) string { return figure.Span(time.Duration(v.(float64) * float64(time.Millisecond))) },
		"exact":  func(v any) string { return figure.Exact(time.Duration(v.(float64) * float64(time.Millisecond))) },
		"share":  func(v any) string { return figure.Share(v.(float64)) },
		"name":   func(v any) string { return figure.Name(v.(string)) },
	}
	require.Len(t, table, len(format))
	for kind, rows := range table {
		for _, row := range rows {
			require.Equal(t, row[1], format[kind](row[0]), "%s %v", kind, row[0])
		}
	}
}

// TestAnyNumber: a number has no exponent of a program, and its digits are within half a percent of it.
func TestAnyNumber(t *testing.T) {
	require.Equal(t, "–", figure.Number(math.NaN()))
	require.Equal(t, "–", figure.Number(math.Inf(-1)))
	shape := regexp.MustCompile(`^-?\d{1,3}(,\d{3})*(\.\d+)?( × 10\^\d+)?$`)
	rapid.Check(t, func(t *rapid.T) {
		text := figure.Number(rapid.Float64().Draw(t, "number"))
		if !shape.MatchString(text) {
			t.Fatal(text)
		}
	})
}

func TestDecimal(t *testing.T) {
	for in, want := range map[string]string{"50.000000": "50", "0.50": "0.5", "-3.0": "-3", "5": "5", "500": "500", "1e3": "1e3", "v1.20": "v1.20", ".5": ".5", "": "", "many": "many"} {
		require.Equal(t, want, figure.Decimal(in), in)
	}
}
