package preview_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/preview"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// flat is traffic that is the same in every step.
func flat(steps int, calls int64) []preview.Point {
	return slices.Repeat([]preview.Point{{Granted: calls}}, steps)
}

func Example() {
	five := registry.Limit{Rate: 5, MaxWait: 500 * time.Millisecond}
	day := preview.Of(preview.Input{Limit: five, Minutes: flat(1440, 432), Period: "today's traffic"})
	fmt.Println(day.Text)
	fmt.Println(strings.Join(day.Notes, "\n"))
	// By the second it is known more exactly.
	minute := preview.Of(preview.Input{Limit: five, Seconds: append(flat(59, 7), flat(1, 19)...)})
	fmt.Println(minute.Text)
	// Output:
	// 5/s, saves up 5, waits up to 500 ms; today's traffic of 7.2/s would be refused to at least 31 %
	// The times of the calls within each minute are not known: in bursts, up to 99 % would be refused.
	// Refused callers may try again: that would add calls.
	// 5/s, saves up 5, waits up to 500 ms; the last minute's traffic of 7.2/s would be refused to between 29 % and 30 %
}

func ExampleOf_quota() {
	limit := registry.Limit{Rate: 2, Quota: true, Window: time.Hour, WindowLimit: 1000, Concurrent: 3, Shadow: true}
	r := preview.Of(preview.Input{Limit: limit, Minutes: flat(120, 60)})
	fmt.Println(r.Text)
	// Output:
	// in shadow: at most 2 in any second, at most 1,000 in any 1 h, at most 3 at once, does not wait; at least 72 % of the last 2 hours' traffic of 1/s would be refused if it were not in shadow, how many more is not known: the history does not show how many calls ran at once
}

// TestWords: what stands in a sentence, and what a figure is rounded to.
func TestWords(t *testing.T) {
	size := func(n float64) *float64 { return &n }
	for want, in := range map[string]preview.Input{
		"off: every call passes; none of the last minute's traffic of 10/s would be refused": {Limit: registry.Limit{Disabled: true}, Minutes: flat(1, 600)},
		"no limit: every call passes; none of":                                               {Limit: registry.Limit{NoRate: true}, Minutes: flat(1, 600)},
		"nothing passes; all of the last 3 minutes' traffic of 0.0167/s":                     {Limit: registry.Limit{}, Minutes: flat(3, 1)},
		"nothing passes; there was no call in the last 2 minutes' traffic":                   {Limit: registry.Limit{}, Minutes: flat(2, 0)},
		"nothing passes; there was no call":                                                  {},
		"2.5/s, saves up 20, does not wait; ":                                                {Limit: registry.Limit{Rate: 2.5, Burst: size(20)}},
		"0.4/s, saves up 1, waits up to 1.25 s; ":                                            {Limit: registry.Limit{Rate: 0.4, MaxWait: 1250 * time.Millisecond}},
		"3/s, warms up from 1/s in 2 min, does not wait; ":                                   {Limit: registry.Limit{Rate: 3, Warmup: 2 * time.Minute}},
		"less than 1 % of the last 101 seconds' traffic of 10/s would be refused":            {Limit: registry.Limit{Rate: 10}, Seconds: append(flat(100, 10), flat(1, 13)...)},
		"would be refused to more than 99 %":                                                 {Limit: registry.Limit{Rate: 0.01}, Minutes: flat(10, 100_000)},
		"some of the last 2 minutes' traffic of 100/s would be refused, up to 99 %":          {Limit: registry.Limit{Rate: 98.9}, Minutes: flat(2, 6000)},
		"2/s for each key, saves up 2, does not wait; up to more than 99 % of the last 2 minutes' traffic": {
			Limit: registry.Limit{Rate: 2, PerKey: true}, Minutes: flat(2, 600)},
		"at most 100 in any 1 min; up to": {Limit: registry.Limit{NoRate: true, Window: time.Minute, WindowLimit: 100}, Minutes: flat(60, 99)},
	} {
		require.Contains(t, preview.Of(in).Text, want)
	}
	five, minutes := registry.Limit{Rate: 5}, []preview.Point{{Granted: 300, Refused: 100}, {}}
	r := preview.Of(preview.Input{Limit: registry.Limit{Rate: 10}, Before: &five, BeforeMinutes: minutes, Minutes: minutes,
		Seconds: []preview.Point{{Granted: 3}, {Granted: 1}}, Period: "today's traffic"})
	require.Equal(t, "10/s, saves up 10, does not wait; none of the last 2 seconds' traffic of 2/s would be refused", r.Text)
	require.Equal(t, "5/s, saves up 5, does not wait; 25 % of the last 2 minutes' traffic of 3.33/s was refused.", r.Before)
	require.Equal(t, []string{"The busiest second had 3/s.", "Up to 98 % of today's traffic of 3.33/s would be refused, perhaps nothing."}, r.Notes)
}

// TestConcurrency: the history does not show how long calls ran, so no effect of a concurrency is claimed, unless there were never more
// calls than that.
func TestConcurrency(t *testing.T) {
	for want, in := range map[string]preview.Input{
		"at most 1 at once; how many of the last 2 minutes' traffic of 10/s would be refused is not known: the history": {
			Limit: registry.Limit{NoRate: true, Concurrent: 1}, Minutes: []preview.Point{{Granted: 250, Refused: 350}, {Granted: 250, Refused: 350}}},
		"1/s, saves up 1, at most 8 at once, does not wait; at least 90 % of the last 2 minutes' traffic of 10/s would be refused, how many more": {
			Limit: registry.Limit{Rate: 1, Concurrent: 8}, Minutes: flat(2, 600)},
		"at most 8 at once; none of the last 2 minutes' traffic of 0.0667/s would be refused": {
			Limit: registry.Limit{NoRate: true, Concurrent: 8}, Minutes: flat(2, 4)},
		"at most 8 at once; how many of the last 2 seconds' traffic of 10/s would be refused is not known": {
			Limit: registry.Limit{NoRate: true, Concurrent: 8}, Seconds: flat(2, 10)},
	} {
		r := preview.Of(in)
		require.Contains(t, r.Text, want)
		for _, note := range r.Notes {
			require.NotContains(t, note, "burst")
		}
	}
}

// TestBefore: what the limit has refused that is in force now counts by the minutes in which it was, and no others.
func TestBefore(t *testing.T) {
	five := registry.Limit{Rate: 5}
	in := func(before *registry.Limit, minutes ...preview.Point) string {
		return preview.Of(preview.Input{Limit: registry.Limit{Rate: 9}, Before: before, BeforeMinutes: minutes, Minutes: flat(60, 100)}).Before
	}
	require.Empty(t, in(nil))
	require.Equal(t, "Off: every call passes.", in(&registry.Limit{Disabled: true}))
	require.Equal(t, "5/s, saves up 5, does not wait; it has not been in force for a whole minute yet.", in(&five))
	require.Equal(t, "5/s, saves up 5, does not wait; there was no call in the last minute's traffic.", in(&five, preview.Point{}))
	require.Equal(t, "5/s, saves up 5, does not wait; 75 % of the last minute's traffic of 4/s was refused.", in(&five, preview.Point{Granted: 60, Refused: 180}))
	shadow := five
	shadow.Shadow = true
	require.Contains(t, in(&shadow, preview.Point{Granted: 60, Refused: 60}), "50 % of the last minute's traffic of 2/s would have been refused if it were not in shadow")
}
