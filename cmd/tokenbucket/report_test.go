package main

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// every makes n events at a distance, the first ones of them at once.
func every(distance time.Duration, atOnce, n int) []time.Duration {
	times := make([]time.Duration, n)
	for i := range times {
		times[i] = time.Duration(max(0, i-atOnce+1)) * distance
	}
	return times
}

func judged(rate, most float64, arrivals, due []time.Duration) verdict {
	permits := make([]permit, len(due))
	for i, d := range due {
		permits[i] = permit{store: d + time.Hour, here: d} // another machine's clock
	}
	return judge(rate, most, arrivals, permits, &tally{})
}

func TestVerdict(t *testing.T) {
	const ms = time.Millisecond
	onTime := every(200*ms, 5, 50)
	shift := func(times []time.Duration, by time.Duration, which ...int) []time.Duration {
		times = slices.Clone(times)
		for _, i := range which {
			times[i] += by
		}
		return times
	}
	for _, tt := range []struct {
		name           string
		arrivals, due  []time.Duration
		kept           bool
		inTheStatement string
	}{
		{"to the full", onTime, onTime, true, "bound 5 + 0 for 0.0 ms of lateness"},
		// The first five come 2 ms late, the rest in time: 6 calls within 198 ms, where 5.99 are allowed.
		{"late", shift(onTime, 2*ms, 0, 1, 2, 3, 4), onTime, true, "bound 5.99 + 0.01 for 2.0 ms of lateness"},
		{"early by 2 ms", shift(onTime, -2*ms, 5), onTime, false, "the bound was BROKEN"},
		{"six at once", every(200*ms, 6, 50), every(200*ms, 6, 50), false, "the bound was BROKEN"},
		{"1 % too fast, for long", every(198*ms, 5, 200), every(198*ms, 5, 200), false, "the bound was BROKEN"},
		{"one call without a permit", append(slices.Clone(onTime), time.Hour), onTime, false, "saw 51 calls, but only 50 permits"},
		{"nothing", nil, nil, false, "nothing reached the upstream"},
	} {
		v := judged(5, 5, tt.arrivals, tt.due)
		var out bytes.Buffer
		v.print(&out)
		require.Equal(t, tt.kept, v.kept(), "%s\n%s", tt.name, &out)
		require.Contains(t, out.String(), tt.inTheStatement, tt.name)
	}
}

func TestVerdictOfFailedCalls(t *testing.T) {
	calls := &tally{}
	calls.lose(errFake("connection refused"))
	v := judge(5, 5, every(200*time.Millisecond, 1, 3), make([]permit, 3), calls)
	var out bytes.Buffer
	v.print(&out)
	require.False(t, v.kept())
	require.Contains(t, out.String(), "1 call failed, the first: connection refused")
	require.Contains(t, out.String(), "the bound was kept, but calls failed")
}

type errFake string

func (e errFake) Error() string { return string(e) }

func TestRows(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	calls := []call{
		{0, 10 * ms, passed},
		{900 * ms, 1400 * ms, passed}, // offered in one second, passed in the next
		{950 * ms, 950 * ms, refused},
		{1999 * ms, 2300 * ms, passed}, // after the last second
		{1000 * ms, 1000 * ms, failed},
	}
	got := rows(calls, []time.Duration{11 * ms, 1401 * ms, 2301 * ms, 60 * s}, 2)
	require.Equal(t, []row{
		{offered: 3, counts: [outcomes]int{1, 1, 0}, seen: 1, waits: []time.Duration{10 * ms}},
		{offered: 2, counts: [outcomes]int{1, 0, 1}, seen: 1, waits: []time.Duration{500 * ms}},
		{counts: [outcomes]int{1, 0, 0}, seen: 2, waits: []time.Duration{301 * ms}},
		{offered: 5, counts: [outcomes]int{3, 1, 1}, seen: 4, waits: []time.Duration{10 * ms, 301 * ms, 500 * ms}},
	}, got)
}

func TestQuantile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	require.Equal(t, time.Duration(50), quantile(hundred, 0.5))
	require.Equal(t, time.Duration(99), quantile(hundred, 0.99))
	require.Equal(t, time.Duration(1), quantile(hundred[:1], 0.5))
	require.Equal(t, time.Duration(2), quantile(hundred[:2], 0.99))
	require.Equal(t, time.Duration(1), quantile(hundred[:2], 0.5))
}
