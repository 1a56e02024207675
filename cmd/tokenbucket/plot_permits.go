package main

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/jonboulle/clockwork"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg/draw"
)

// permits draws the permits that limiters grant under full demand.
func (p *pictures) permits() (*plot.Plot, error) {
	end := p.span()
	// The clock stands still: one caller reserves, at one instant, all permits until the end.
	clock := tokenbucket.WithClock(clockwork.NewFakeClock())
	warming, err := p.warmingUp(clock)
	if err != nil {
		return nil, err
	}
	full := max(1, p.rate) // one second's worth
	bursty, err := tokenbucket.NewSmoothBursty(bucketName, p.rate, clock, tokenbucket.WithInitialPermits(full))
	if err != nil {
		return nil, err
	}
	slow, err := p.handedOut(warming, end)
	if err != nil {
		return nil, err
	}
	fast, err := p.handedOut(bursty, end)
	if err != nil {
		return nil, err
	}

	pic := newPlot(p.title("Handed out under full demand"), "time (s)", "permits")
	steady := dashed(at(0, 0), at(end.Seconds(), p.rate*end.Seconds()))
	upper, lower := line(vermilion, 2, fast...), line(blue, 2, slow...)
	upper.StepStyle, lower.StepStyle = plotter.PostStep, plotter.PostStep
	warm := p.warmup.Seconds()
	pic.Add(dashed(at(warm, 0), at(warm, p.rate*warm)), steady, upper, lower,
		label(at(warm, 0), "warm-up period", draw.XLeft, 5, 5))
	pic.Legend.Add(fmt.Sprintf("bursty, starts with a full bucket of %s", short(full)), upper)
	pic.Legend.Add("rate × t", steady)
	pic.Legend.Add("warm-up, starts cold", lower)
	pic.X.Min, pic.X.Max = 0, end.Seconds()
	pic.Y.Min, pic.Y.Max = 0, 1.05*fast[len(fast)-1].Y
	return pic, nil
}

// span returns the length of the time axis: well beyond the warm-up, and at least ten permits.
func (p *pictures) span() time.Duration {
	return time.Duration(math.Ceil(max(2.5*float64(p.warmup), 10/p.rate*float64(time.Second))))
}

// handedOut reserves permits until they are due after the end, and returns the number of permits over due time. If there are more permits
// than pixels, it reserves several at once.
func (p *pictures) handedOut(l *tokenbucket.RateLimiter, end time.Duration) (plotter.XYs, error) {
	const steps = 1000
	each := int(math.Ceil(p.rate * end.Seconds() / steps))
	points := plotter.XYs{at(0, 0)}
	for total := each; ; total += each {
		r, err := l.Reserve(context.Background(), each)
		if err != nil {
			return nil, err
		}
		due := r.Delay()
		if due > end {
			return append(points, at(end.Seconds(), points[len(points)-1].Y)), nil
		}
		points = append(points, at(due.Seconds(), float64(total)))
	}
}
