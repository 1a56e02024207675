package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg/draw"
)

func (p *pictures) warmingUp(opts ...tokenbucket.Option) (*tokenbucket.RateLimiter, error) {
	return tokenbucket.NewSmoothWarmingUp(bucketName, p.rate, p.warmup, append(opts, tokenbucket.WithColdFactor(p.coldFactor))...)
}

// curve draws the interval between permits against the permits stored.
func (p *pictures) curve() (*plot.Plot, error) {
	limiter, err := p.warmingUp()
	if err != nil {
		return nil, err
	}
	state, err := limiter.State(context.Background())
	if err != nil {
		return nil, err
	}
	stable := state.IntervalMicros / 1000
	cold, most := stable*p.coldFactor, state.MaxPermits
	threshold := 0.5 * float64(p.warmup) / float64(time.Millisecond) / stable

	pic := newPlot(p.title("What a permit costs"), "stored permits", "interval between permits (ms)")
	warm := area(paleGrey, at(0, 0), at(0, stable), at(threshold, stable), at(threshold, 0))
	slope := area(paleBlue, at(threshold, 0), at(threshold, stable), at(most, cold), at(most, 0))
	pic.Add(warm, slope,
		dashed(at(0, cold), at(most, cold)),
		dashed(at(threshold, stable), at(most, stable)),
		dashed(at(threshold, 0), at(threshold, stable)),
		dashed(at(most, 0), at(most, cold)),
		line(blue, 2.5, at(0, stable), at(threshold, stable), at(most, cold)),
		label(at(0, cold), "cold: "+short(cold)+" ms", draw.XLeft, 6, 4),
		label(at(0, stable), "stable: "+short(stable)+" ms", draw.XLeft, 6, -13),
		labelThreshold(threshold, most),
		label(at(most, 0), "max: "+short(most), draw.XLeft, 5, 3),
	)
	pic.Legend.Add(fmt.Sprintf("area = %v, the warm-up period: what handing out from max to threshold takes", p.warmup), slope)
	pic.Legend.Add(fmt.Sprintf("area = %v, half of that: from threshold to 0", p.warmup/2), warm)
	pic.X.Min, pic.X.Max = 0, 1.2*most
	pic.Y.Min, pic.Y.Max = 0, 1.35*cold
	return pic, nil
}

// labelThreshold puts the label to the right of the line if there is room for a wider font, which a browser may choose.
func labelThreshold(threshold, most float64) *plotter.Labels {
	s := "threshold: " + short(threshold)
	if most-threshold < most/5 {
		return label(at(threshold, 0), s, draw.XRight, -5, 3)
	}
	return label(at(threshold, 0), s, draw.XLeft, 5, 3)
}

func (p *pictures) title(what string) string {
	return fmt.Sprintf("%s: %s permits/s, warm-up %v, cold factor %s", what, short(p.rate), p.warmup, short(p.coldFactor))
}

func at(x, y float64) plotter.XY { return plotter.XY{X: x, Y: y} }

// short shows four digits, and powers of ten only where there would be many zeros.
func short(f float64) string {
	s := strconv.FormatFloat(f, 'g', 4, 64)
	if f, _ := strconv.ParseFloat(s, 64); f >= 1e4 && f < 1e7 {
		return strconv.FormatFloat(f, 'f', -1, 64)
	}
	return s
}
