package main

import (
	"image/color"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Colours that colour-blind readers can distinguish (Okabe and Ito).
var (
	blue      = color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}
	vermilion = color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}
	grey      = color.RGBA{R: 0x70, G: 0x70, B: 0x70, A: 0xff}
	paleBlue  = color.RGBA{R: 0xcf, G: 0xe4, B: 0xf2, A: 0xff}
	paleGrey  = color.RGBA{R: 0xee, G: 0xee, B: 0xee, A: 0xff}
)

var sans = font.Font{Typeface: "Liberation", Variant: "Sans"}

func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = color.White
	p.Title.Text = title
	p.Title.Padding = vg.Points(8)
	p.X.Label.Text, p.Y.Label.Text = x, y
	setFont(&p.Title.TextStyle, 12)
	setFont(&p.X.Label.TextStyle, 11)
	setFont(&p.Y.Label.TextStyle, 11)
	setFont(&p.X.Tick.Label, 10)
	setFont(&p.Y.Tick.Label, 10)
	setFont(&p.Legend.TextStyle, 10.5)
	p.X.Padding, p.Y.Padding = 0, 0
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(ticks), plot.TickerFunc(ticks)
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.XOffs, p.Legend.YOffs = vg.Points(8), vg.Points(-4)
	p.Legend.Padding = vg.Points(2)
	return p
}

// ticks returns about six ticks at round numbers.
func ticks(lo, hi float64) []plot.Tick {
	step := math.Pow(10, math.Floor(math.Log10(hi-lo)))
	for _, smaller := range []float64{0.5, 0.4, 0.5} { // steps of 10, 5, 2 and 1
		if (hi-lo)/step >= 5 {
			break
		}
		step *= smaller
	}
	var marks []plot.Tick
	for i := math.Ceil(lo / step); i*step <= hi; i++ {
		marks = append(marks, plot.Tick{Value: i * step, Label: short(i * step)})
	}
	return marks
}

func setFont(s *text.Style, size float64) {
	s.Font = sans
	s.Font.Size = vg.Points(size)
}

func line(c color.Color, width float64, points ...plotter.XY) *plotter.Line {
	l, err := plotter.NewLine(plotter.XYs(points))
	if err != nil {
		panic(err) // only for numbers that are not finite
	}
	l.Color, l.Width = c, vg.Points(width)
	return l
}

func dashed(points ...plotter.XY) *plotter.Line {
	l := line(grey, 1, points...)
	l.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
	return l
}

func area(c color.Color, points ...plotter.XY) *plotter.Polygon {
	p, err := plotter.NewPolygon(plotter.XYs(points))
	if err != nil {
		panic(err) // only for numbers that are not finite
	}
	p.Color, p.LineStyle.Width = c, 0
	return p
}

// label returns a text beside a point. align selects which part of the text is at the point; the offset is in points.
func label(at plotter.XY, s string, align draw.XAlignment, dx, dy float64) *plotter.Labels {
	l, err := plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{at}, Labels: []string{s}})
	if err != nil {
		panic(err) // only for numbers that are not finite
	}
	setFont(&l.TextStyle[0], 10.5)
	l.TextStyle[0].XAlign = align
	l.Offset = vg.Point{X: vg.Points(dx), Y: vg.Points(dy)}
	return l
}
