package preview_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/preview"
)

// flat is traffic that is the same in every step.
func flat(steps int, calls int64) []preview.Point {
	return slices.Repeat([]preview.Point{{Granted: calls}}, steps)
}

func Example() {
	five := preview.Limit{Rate: 5, MaxWait: 500 * time.Millisecond}
	day := preview.Of(preview.Input{Limit: five, Minutes: flat(1440, 432), Period: "today's traffic"})
	fmt.Println(day.Text)
	fmt.Println(strings.Join(day.Notes, "\n"))
	// By the second it is known more exactly.
	minute := preview.Of(preview.Input{Limit: five, Seconds: append(flat(59, 7), flat(1, 19)...)})
	fmt.Println(minute.Text)
	// Output:
	// 5/s, at most 5 at once, waits up to 500 ms; today's traffic of 7.2/s would be refused to at least 31 %
	// What came within each minute is not known: if it came in bursts, up to 99 % would be refused.
	// Callers that are refused may come again: then there are more calls than there were.
	// 5/s, at most 5 at once, waits up to 500 ms; the last minute's traffic of 7.2/s would be refused to between 29 % and 30 %
}

func ExampleOf_quota() {
	limit := preview.Limit{Rate: 2, Quota: true, Window: time.Hour, WindowLimit: 1000, Concurrent: 3, Shadow: true}
	r := preview.Of(preview.Input{Limit: limit, Minutes: flat(120, 60)})
	fmt.Println(r.Text)
	// Output:
	// in shadow: at most 2 in any second, at most 1000 in any 1 h, at most 3 under way at the same time, does not wait; the last 2 hours' traffic of 1/s would be refused if it were not in shadow to at least 72 %
}

// TestWords: what stands in a sentence, and what a figure is rounded to.
func TestWords(t *testing.T) {
	size := func(n float64) *float64 { return &n }
	for want, in := range map[string]preview.Input{
		"off: every call passes; none of the last minute's traffic of 10/s would be refused": {Limit: preview.Limit{Off: true}, Minutes: flat(1, 600)},
		"no limit: every call passes; none of":                                               {Limit: preview.Limit{NoRate: true}, Minutes: flat(1, 600)},
		"nothing passes; all of the last 3 minutes' traffic of 0.0167/s":                     {Limit: preview.Limit{}, Minutes: flat(3, 1)},
		"nothing passes; there was no call in the last 2 minutes' traffic":                   {Limit: preview.Limit{}, Minutes: flat(2, 0)},
		"nothing passes; there was no call":                                                  {},
		"2.5/s, at most 20 at once, does not wait; ":                                         {Limit: preview.Limit{Rate: 2.5, Burst: size(20)}},
		"0.4/s, at most 1 at once, waits up to 1.25 s; ":                                     {Limit: preview.Limit{Rate: 0.4, MaxWait: 1250 * time.Millisecond}},
		"3/s, warms up from 1/s in 2 min, does not wait; ":                                   {Limit: preview.Limit{Rate: 3, Warmup: 2 * time.Minute}},
		"less than 1 % of the last 101 seconds' traffic of 10/s would be refused":            {Limit: preview.Limit{Rate: 10}, Seconds: append(flat(100, 10), flat(1, 13)...)},
		"would be refused to more than 99 %":                                                 {Limit: preview.Limit{Rate: 0.01}, Minutes: flat(10, 100_000)},
		"some of the last 2 minutes' traffic of 100/s would be refused, up to 99 %":          {Limit: preview.Limit{Rate: 98.9}, Minutes: flat(2, 6000)},
		"2/s for each key, at most 2 at once, does not wait; up to more than 99 % of the last 2 minutes' traffic": {
			Limit: preview.Limit{Rate: 2, PerKey: true}, Minutes: flat(2, 600)},
		"at most 100 in any 1 min,": {Limit: preview.Limit{NoRate: true, Window: time.Minute, WindowLimit: 100}, Minutes: flat(60, 99)},
	} {
		require.Contains(t, preview.Of(in).Text, want)
	}
	r := preview.Of(preview.Input{Limit: preview.Limit{Rate: 10}, Before: &preview.Limit{Rate: 5}, Minutes: []preview.Point{{Granted: 300, Refused: 100}, {}},
		Seconds: []preview.Point{{Granted: 3}, {Granted: 1}}, Period: "today's traffic"})
	require.Equal(t, "10/s, at most 10 at once, does not wait; none of the last 2 seconds' traffic of 2/s would be refused", r.Text)
	require.Equal(t, []string{"With the limit before, 5/s, at most 5 at once, does not wait, 0 % of it was refused.", "The busiest second had 3/s.",
		"Up to 98 % of today's traffic of 3.33/s would be refused, perhaps nothing."}, r.Notes)
}
