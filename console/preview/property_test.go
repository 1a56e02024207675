package preview

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// limits draws a limit with everything that can refuse.
func limits(t *rapid.T) limit {
	l := limit{
		Rate:    rapid.SampledFrom([]float64{0.1, 0.5, 1, 2, 3.7, 5, 10, 25}).Draw(t, "rate"),
		MaxWait: time.Duration(rapid.IntRange(0, 4).Draw(t, "wait")) * 250 * time.Millisecond,
	}
	switch rapid.IntRange(0, 4).Draw(t, "kind") {
	case 0:
		size := float64(rapid.IntRange(0, 40).Draw(t, "burst"))
		l.Burst = &size
	case 1:
		l.Quota, l.Rate = true, float64(int(l.Rate)+1)
	case 2:
		l.Warmup = time.Duration(rapid.IntRange(1, 20).Draw(t, "warm-up")) * time.Second
	case 3:
		l.NoRate = rapid.Bool().Draw(t, "no rate")
		l.Window = time.Duration(rapid.SampledFrom([]int{1, 7, 60, 90, 180}).Draw(t, "window")) * time.Second
		l.WindowLimit = rapid.IntRange(1, 300).Draw(t, "window limit")
	}
	if rapid.IntRange(0, 3).Draw(t, "bounded") == 0 {
		l.Concurrent = rapid.IntRange(1, 20).Draw(t, "at once")
	}
	return l
}

// steps draws steps with calls: long stretches of the same, and bursts.
func steps(t *rapid.T, n, most int) (points []Point) {
	for len(points) < n {
		calls := int64(rapid.IntRange(0, most).Draw(t, "calls"))
		points = append(points, slices.Repeat([]Point{{Granted: calls}}, rapid.IntRange(1, 5).Draw(t, "steps"))...)
	}
	return points[:n]
}

// raise makes a limit higher in one respect.
func raise(t *rapid.T, l limit) limit {
	switch rapid.IntRange(0, 5).Draw(t, "raised") {
	case 0:
		size := l.size() // by default it grows with the rate, and not else
		if l.Burst != nil {
			l.Burst = &size
		}
		l.Rate *= float64(rapid.IntRange(2, 3).Draw(t, "times"))
	case 1:
		if l.Burst != nil {
			size := *l.Burst + float64(rapid.IntRange(1, 9).Draw(t, "more"))
			l.Burst = &size
		}
	case 2:
		l.MaxWait += time.Duration(rapid.IntRange(1, 2000).Draw(t, "longer")) * time.Millisecond
	case 3:
		l.WindowLimit += rapid.IntRange(0, 100).Draw(t, "window")
	case 4:
		l.Window, l.WindowLimit = 0, 0
	case 5:
		if l.Concurrent > 0 {
			l.Concurrent += rapid.IntRange(1, 10).Draw(t, "more at once")
		}
	}
	return l
}

// TestTruthIsWithin: whenever the calls of each minute come, no fewer are refused than the least, and no more than the most.
func TestTruthIsWithin(t *testing.T) {
	var known, wide int
	rapid.Check(t, func(t *rapid.T) {
		l, points := limits(t), steps(t, 6, 400)
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		burst := time.Duration(rapid.SampledFrom([]int{1, 1000, 10_000, 60_000}).Draw(t, "burst of")) * time.Millisecond
		trial, err := newTrial(&l)
		require.NoError(t, err)
		var refused float64
		lasts := time.Duration(rapid.SampledFrom([]int{1, 1000, 10_000, 600_000}).Draw(t, "lasts")) * time.Millisecond
		var ends []time.Duration // of the calls that run
		call := func(at time.Duration) bool {
			ends = slices.DeleteFunc(ends, func(end time.Duration) bool { return end <= at })
			if l.Concurrent > 0 && len(ends) >= l.Concurrent || !trial.call(at) {
				return false
			}
			ends = append(ends, at+time.Duration(random.Int64N(int64(lasts))))
			return true
		}
		for i := range points {
			var times []time.Duration
			for range points[i].calls() {
				at := time.Duration(random.Int64N(int64(burst)))
				if random.IntN(2) == 0 {
					at = time.Minute - time.Microsecond - at // at the end, before the next minute's
				}
				times = append(times, max(at, 0).Truncate(time.Microsecond))
			}
			slices.Sort(times)
			for _, at := range times {
				if !call(time.Duration(i)*time.Minute + at) {
					refused++
				}
			}
		}
		r := Of(Input{Limit: registry.Limit(l), Minutes: points})
		least, most := r.Least, r.Most
		share := refused / max(1, float64(total(points)))
		if share < least-1e-9 || share > most+1e-9 {
			t.Fatalf("%s: %v of %v refused: %v, not from %v to %v", (*registry.Limit)(&l).String(), refused, points, share, least, most)
		}
		if l.Concurrent > 0 {
			if !r.Unknown && most-least > 1e-9 && total(points) > int64(l.Concurrent) {
				t.Fatalf("%s", r.Text)
			}
			return
		}
		if known++; least == 0 && most > 0.99 {
			wide++
		}
	})
	require.Less(t, wide, known/2, "bounds that say nothing")
}

// TestTight: the bounds are reached within two calls at certain times of the calls.
func TestTight(t *testing.T) {
	wait := func(l limit, d time.Duration) limit {
		l.MaxWait = d
		return l
	}
	size := 5.0
	window := func(d time.Duration, n int) limit { return limit{NoRate: true, Window: d, WindowLimit: n} }
	for name, test := range map[string]struct {
		limit limit
		calls []int64
		flood bool // spread evenly, for the least; otherwise at the end of the first and the beginning of the others, for the most
	}{
		"flood":               {limit{Rate: 1}, []int64{600, 600}, true},
		"flood that waits":    {wait(limit{Rate: 1}, 5*time.Second), []int64{600, 600}, true},
		"flood of a burst":    {limit{Rate: 1, Burst: &size}, []int64{600}, true},
		"flood of a quota":    {limit{Rate: 2, Quota: true}, []int64{6000, 6000}, true},
		"flood of 7 s":        {window(7*time.Second, 10), []int64{600}, true},
		"flood of a minute":   {window(time.Minute, 50), []int64{600, 600}, true},
		"flood of 3 minutes":  {window(3*time.Minute, 100), []int64{600, 600, 600, 600}, true},
		"edges":               {limit{Rate: 1, Burst: &size}, []int64{5, 5}, false},
		"edges that wait":     {wait(limit{Rate: 1, Burst: &size}, 5*time.Second), []int64{20, 20}, false},
		"edges, all is well":  {limit{Rate: 10}, []int64{5, 5, 5, 5}, false},
		"edges of a minute":   {window(time.Minute, 50), []int64{50, 50}, false},
		"edges of 3 minutes":  {window(3*time.Minute, 100), []int64{100, 0, 0, 100}, false},
		"edges of 90 seconds": {window(90*time.Second, 100), []int64{100, 0, 100}, false},
	} {
		trial, err := newTrial(&test.limit)
		require.NoError(t, err)
		var points []Point
		var refused, calls float64
		for i, n := range test.calls {
			points = append(points, Point{Granted: n})
			for k := range n {
				at := time.Duration(float64(k) / float64(n) * float64(time.Minute))
				if !test.flood {
					at = 0
				}
				if !test.flood && i == 0 {
					at = time.Minute - time.Millisecond
				}
				calls++
				if !trial.call(time.Duration(i)*time.Minute + at) {
					refused++
				}
			}
		}
		least, most := test.limit.bounds(points, time.Minute)
		t.Log(name, least*calls, refused, most*calls)
		if test.flood {
			require.InDelta(t, refused-1, least*calls, 1.001, name)
		} else {
			require.InDelta(t, refused+1, most*calls, 1.001, name)
		}
	}
}

// TestWaitIsSize: a limiter whose callers may wait grants what one with a larger bucket grants whose callers may not.
func TestWaitIsSize(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := limits(t)
		l.Warmup, l.Window, l.NoRate, l.Quota = 0, 0, false, false
		trial, err := newTrial(&l)
		require.NoError(t, err)
		clock := clockwork.NewFakeClock()
		limiter, err := tokenbucket.NewSmoothBursty("waits", l.Rate, tokenbucket.WithStore(tokenbucket.NewMemoryStore()), tokenbucket.WithClock(clock),
			tokenbucket.WithMaxPermits(l.size()), tokenbucket.WithInitialPermits(l.size()))
		require.NoError(t, err)
		var at time.Duration
		var one, other int
		for range rapid.IntRange(1, 60).Draw(t, "calls") {
			pause := time.Duration(rapid.SampledFrom([]int{0, 0, 1, 90_001, 700_001, 5_000_001}).Draw(t, "pause")) * time.Microsecond
			at += pause
			clock.Advance(pause)
			if r, err := limiter.TryReserve(context.Background(), 1, l.wait()); err == nil && r.OK() { // an error: it never would be
				one++
			}
			if trial.call(at) {
				other++
			}
		}
		if one-other < -1 || one-other > 1 { // each rounds to microseconds
			t.Fatalf("%s: %d, %d", (*registry.Limit)(&l).String(), one, other)
		}
	})
}

// TestHigherRefusesNoMore: neither from minutes nor when seconds are simulated. A warm-up with a higher rate may refuse more, since it
// gets cold sooner.
func TestHigherRefusesNoMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		low := limits(t)
		low.Warmup = 0
		high := raise(t, low)
		minutes := Input{Minutes: steps(t, 8, 400)}
		seconds := Input{Seconds: steps(t, 20, 30)}
		for _, in := range []Input{minutes, seconds} {
			in.Limit = registry.Limit(low)
			was := Of(in)
			in.Limit = registry.Limit(high)
			is := Of(in)
			require.Equal(t, in.Seconds != nil, is.Simulated)
			if is.Least > was.Least+1e-9 || is.Most > was.Most+1e-9 {
				t.Fatalf("%s: %v to %v; %s: %v to %v", (*registry.Limit)(&low).String(), was.Least, was.Most, (*registry.Limit)(&high).String(), is.Least, is.Most)
			}
		}
	})
}

// TestExtremes: a rate of 0 refuses all calls, and one above the demand refuses none.
func TestExtremes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := limits(t)
		for _, in := range []Input{{Minutes: steps(t, 8, 400)}, {Seconds: steps(t, 20, 30)}} {
			calls := total(append(slices.Clone(in.Minutes), in.Seconds...))
			none := l
			none.Rate, none.NoRate = 0, false
			in.Limit = registry.Limit(none)
			if r := Of(in); calls > 0 && (r.Least != 1 || r.Most != 1) {
				t.Fatalf("%+v", r)
			}
			all := l
			all.Rate, all.WindowLimit, all.Concurrent, all.Warmup, all.Quota = float64(calls+1), int(calls+1), int(calls+1), 0, false
			if all.Burst != nil {
				all.Burst = &all.Rate
			}
			in.Limit = registry.Limit(all)
			if r := Of(in); r.Least != 0 || r.Most != 0 {
				t.Fatalf("%s: %+v", (*registry.Limit)(&all).String(), r)
			}
			off := l
			off.Disabled = true
			in.Limit = registry.Limit(off)
			if r := Of(in); r.Least != 0 || r.Most != 0 {
				t.Fatalf("%+v", r)
			}
		}
	})
}

// TestManySeconds: of many calls only the newest are simulated, and of too many in one second none.
func TestManySeconds(t *testing.T) {
	began := time.Now()
	r := Of(Input{Limit: registry.Limit{Rate: 100}, Seconds: slices.Repeat([]Point{{Granted: 200}}, 10_000)})
	t.Log(time.Since(began), r.Text)
	require.Equal(t, int64(mostSimulated), r.Calls)
	require.True(t, r.Simulated)
	require.InDelta(t, 0.5, r.Least, 0.01)
	r = Of(Input{Limit: registry.Limit{Rate: 100}, Seconds: []Point{{Granted: 1_000_000}}})
	require.False(t, r.Simulated)
	require.Greater(t, r.Least, 0.99)
}
