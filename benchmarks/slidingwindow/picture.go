package main

import (
	"fmt"
	"image/color"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/benchmarks/internal/picture"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// bursts are series of calls, one every 10 ms, each from the second at on.
var bursts = []struct{ at, calls int }{{5, 60}, {35, 60}, {50, 60}, {70, 60}, {95, 60}, {110, 60}, {140, 60}}

// draw returns a picture of the calls of bursts that pass a limit of 100 a minute.
func draw() ([]byte, error) {
	const limit, window = 100, time.Minute
	clock := &hand{micros: begin - begin%60_000_000}
	exact, err := slidingwindow.New("x", limit, window, window/3, slidingwindow.WithClock(clock))
	if err != nil {
		return nil, err
	}
	bucket, err := tokenbucket.NewSmoothBursty("x", limit/window.Seconds(), tokenbucket.WithClock(clock))
	if err != nil {
		return nil, err
	}
	full, err := tokenbucket.NewSmoothBursty("y", limit/window.Seconds(), tokenbucket.WithClock(clock),
		tokenbucket.WithMaxPermits(limit), tokenbucket.WithInitialPermits(limit))
	if err != nil {
		return nil, err
	}
	lines := []struct {
		name  string
		allow func() (bool, error)
		color color.RGBA
		dash  []vg.Length
		xy    plotter.XYs
		n     float64
	}{
		{name: "calls", allow: func() (bool, error) { return true, nil }, color: picture.Grey, dash: []vg.Length{vg.Points(2), vg.Points(3)}},
		{name: "bucket of 100", allow: func() (bool, error) { return full.TryAcquire(ctx, 1, 0) }, color: picture.Vermilion},
		{name: "sliding window", allow: func() (bool, error) { return exact.Allow(ctx) }, color: picture.Blue, dash: []vg.Length{vg.Points(5), vg.Points(2)}},
		{name: "bucket of one second's worth", allow: func() (bool, error) { return bucket.TryAcquire(ctx, 1, 0) }, color: picture.Purple},
	}
	start := clock.micros
	note := func() {
		for i := range lines {
			lines[i].xy = append(lines[i].xy, plotter.XY{X: float64(clock.micros-start) / 1e6, Y: lines[i].n})
		}
	}
	note()
	for _, b := range bursts {
		clock.micros = start + int64(b.at)*1_000_000
		note()
		for i := range b.calls {
			clock.micros += 10_000
			for k := range lines {
				ok, err := lines[k].allow()
				if err != nil {
					return nil, err
				}
				if ok {
					lines[k].n++
				}
			}
			if i%6 == 5 {
				note()
			}
		}
	}
	clock.micros = start + 150_000_000
	note()

	p := picture.New("At most 100 calls in any 60 s: what passes of bursts of 60", "time (s)", "calls passed")
	p.X.Tick.Marker, p.Y.Tick.Marker = every(30, ""), every(100, picture.Gap)
	p.X.Min, p.X.Max = 0, 150
	p.Y.Min, p.Y.Max = 0, 450
	for _, l := range lines {
		line, err := plotter.NewLine(l.xy)
		if err != nil {
			return nil, err
		}
		line.Color, line.Dashes, line.Width = l.color, l.dash, vg.Points(2)
		p.Add(line)
		p.Legend.Add(l.name, line)
	}
	return picture.SVG(4.2*vg.Inch, p.Draw), nil
}

// every returns ticks at the multiples of a step. after is appended to each label.
func every(step float64, after string) plot.TickerFunc {
	return func(lo, hi float64) []plot.Tick {
		var marks []plot.Tick
		for v := lo; v <= hi; v += step {
			marks = append(marks, plot.Tick{Value: v, Label: fmt.Sprint(v) + after})
		}
		return marks
	}
}
