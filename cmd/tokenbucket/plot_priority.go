package main

import (
	"context"
	"fmt"
	"image/color"
	"math/rand/v2"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/jonboulle/clockwork"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Bookings beside searches on one bucket, in the picture and in the demo. In the first half all have one priority; in the second half
// searches have the lowest.
const (
	sharedRate     = 20 // permits per second of the bucket
	bookingsPer    = 10 // offered per second
	searchesPer    = 1000
	sharedPatience = 500 * time.Millisecond
	sharedSeconds  = 12
)

// priorities draws the bookings and searches that pass in each second.
func priorities() (*plot.Plot, error) {
	bookings, searches, err := sharedCalls()
	if err != nil {
		return nil, err
	}
	pic := newPlot(fmt.Sprintf("%d bookings and %d searches offered a second, one limit of %d calls/s", bookingsPer, searchesPer, sharedRate),
		"time (s)", "calls in each second")
	var below *plotter.BarChart
	for _, class := range []struct {
		values plotter.Values
		colour color.Color
		name   string
	}{{bookings, blue, "bookings passed"}, {searches, vermilion, "searches passed"}} {
		bars, err := plotter.NewBarChart(class.values, vg.Points(26))
		if err != nil {
			return nil, err
		}
		bars.Color, bars.LineStyle.Width, bars.XMin = class.colour, 0, 0.5
		if below != nil {
			bars.StackOn(below)
		}
		below = bars
		pic.Add(bars)
		pic.Legend.Add(class.name, bars)
	}
	const half = sharedSeconds / 2
	pic.Add(dashed(at(0, sharedRate), at(sharedSeconds, sharedRate)), dashed(at(half, 0), at(half, 1.3*sharedRate)),
		label(at(0, 1.15*sharedRate), "one priority for all", draw.XLeft, 6, 0),
		label(at(half, 1.15*sharedRate), "searches have the lowest priority", draw.XLeft, 6, 0),
		label(at(sharedSeconds, sharedRate), fmt.Sprintf("the limit: %d calls/s", sharedRate), draw.XRight, -6, 5))
	pic.X.Min, pic.X.Max = 0, sharedSeconds
	pic.Y.Min, pic.Y.Max = 0, 1.6*sharedRate
	return pic, nil
}

// sharedCalls simulates bookings and searches at random times, on a fake clock. It counts the calls that pass in each second. A call passes
// when its permit is due. The limiters are shadows, which decide without waiting, by the look-ahead of their priority.
func sharedCalls() (bookings, searches plotter.Values, err error) {
	bookings, searches = make(plotter.Values, sharedSeconds), make(plotter.Values, sharedSeconds)
	clock, now := clockwork.NewFakeClock(), time.Duration(0)
	count := func(passed plotter.Values) tokenbucket.Option {
		return tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(_ context.Context, d tokenbucket.Decision) {
			if due := int((now + d.Wait) / time.Second); d.Granted && due < sharedSeconds {
				passed[due]++
			}
		}})
	}
	store := tokenbucket.NewMemoryStore()
	limiter := func(passed plotter.Values) (l *tokenbucket.RateLimiter) {
		if err == nil {
			l, err = tokenbucket.NewSmoothBursty(bucketName, sharedRate, tokenbucket.WithStore(store), tokenbucket.WithClock(clock),
				tokenbucket.WithMaxPermits(1), tokenbucket.WithMaxWait(sharedPatience), tokenbucket.WithShadow(), count(passed))
		}
		return l
	}
	booking, search := limiter(bookings), limiter(searches)
	random := rand.New(rand.NewPCG(1, 2)) // a fixed seed, so that the picture is always the same
	const tick = time.Millisecond
	for ; err == nil && now < sharedSeconds*time.Second; now += tick {
		if now == sharedSeconds/2*time.Second {
			search = search.ForPriority(tokenbucket.Lowest)
		}
		offers := []offer{{booking, bookingsPer}, {search, searchesPer}}
		random.Shuffle(len(offers), func(i, j int) { offers[i], offers[j] = offers[j], offers[i] })
		for _, o := range offers {
			if err == nil && random.Float64() < o.perSecond*tick.Seconds() {
				_, err = o.limiter.Try(context.Background())
			}
		}
		clock.Advance(tick)
	}
	return bookings, searches, err
}

// offer is calls of one kind, at random times.
type offer struct {
	limiter   *tokenbucket.RateLimiter
	perSecond float64
}
