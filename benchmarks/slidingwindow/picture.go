package main

import (
	"bytes"
	"image/color"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	plotdraw "gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// bursts are so many calls, one after another every 10 ms, from a second on.
var bursts = []struct{ at, calls int }{{5, 60}, {35, 60}, {50, 60}, {70, 60}, {95, 60}, {110, 60}, {140, 60}}

// draw is a picture of what passes of bursts, with a limit of 100 a minute.
func draw() ([]byte, error) {
	const limit, window = 100, time.Minute
	clock := &hand{micros: begin - begin%60_000_000}
	open := func(m slidingwindow.Mode) (func() (bool, error), error) {
		l, err := slidingwindow.New("x", limit, window, window/3, slidingwindow.WithMode(m), slidingwindow.WithClock(clock))
		return func() (bool, error) { return l.Allow(ctx) }, err
	}
	exact, err := open(slidingwindow.Exact)
	if err != nil {
		return nil, err
	}
	approximate, err := open(slidingwindow.Approximate)
	if err != nil {
		return nil, err
	}
	bucket, err := tokenbucket.NewSmoothBursty("x", limit/window.Seconds(), tokenbucket.WithClock(ticking{clock}))
	if err != nil {
		return nil, err
	}
	full, err := tokenbucket.NewSmoothBursty("y", limit/window.Seconds(), tokenbucket.WithClock(ticking{clock}),
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
		{name: "calls", allow: func() (bool, error) { return true, nil }, color: color.RGBA{150, 150, 150, 255}, dash: []vg.Length{vg.Points(2), vg.Points(3)}},
		{name: "bucket of 100", allow: func() (bool, error) { return full.TryAcquire(ctx, 1, 0) }, color: color.RGBA{200, 120, 40, 255}},
		{name: "approximate window", allow: approximate, color: color.RGBA{60, 150, 90, 255}},
		{name: "exact window", allow: exact, color: color.RGBA{30, 90, 180, 255}, dash: []vg.Length{vg.Points(5), vg.Points(2)}},
		{name: "bucket of one second's worth", allow: func() (bool, error) { return bucket.TryAcquire(ctx, 1, 0) }, color: color.RGBA{150, 60, 140, 255}},
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

	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	p := plot.New()
	p.Title.Text = "Bursts of 60 calls; at most 100 in any 60 s, counted in sub-intervals of 20 s"
	p.X.Label.Text, p.Y.Label.Text = "seconds", "calls passed"
	p.BackgroundColor = color.White
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(plotter.NewGrid())
	for _, l := range lines {
		line, err := plotter.NewLine(l.xy)
		if err != nil {
			return nil, err
		}
		line.Color, line.Dashes, line.Width = l.color, l.dash, vg.Points(1.6)
		p.Add(line)
		p.Legend.Add(l.name, line)
	}
	const width, height = 7.5 * vg.Inch, 4.2 * vg.Inch
	c := vgsvg.New(width, height)
	c.SetColor(color.White)
	c.Fill(vg.Rectangle{Max: vg.Point{X: width, Y: height}}.Path())
	p.Draw(plotdraw.Crop(plotdraw.New(c), vg.Points(8), vg.Points(-16), vg.Points(6), vg.Points(-10)))
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		return nil, err
	}
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")), nil
}

// ticking adds what a token bucket wants of a clock.
type ticking struct{ *hand }

func (t ticking) Since(at time.Time) time.Duration { return t.Now().Sub(at) }
