package main

import (
	"fmt"
	"image/color"
	"math"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/go-tokenbucket/tokenbucket/benchmarks/internal/picture"
)

// Colours that colour-blind readers can distinguish (Okabe and Ito), this library's first. Dashes and marks distinguish lines of the same
// colour.
var colours = map[string]color.Color{
	scriptStore:   picture.Blue,
	lockStore:     picture.Vermilion,
	leaseStore:    color.RGBA{R: 0x00, G: 0x00, B: 0x00, A: 0xff},
	redisRate:     picture.Green,
	redisRatePipe: color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 0xff},
	redisRateWait: picture.Purple,
	throttledName: color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff},
	ululeName:     color.RGBA{R: 0xe6, G: 0x9f, B: 0x00, A: 0xff},
	redisStore:    color.RGBA{R: 0x8a, G: 0x6d, B: 0x3b, A: 0xff},
	ping:          picture.Grey,
}

// throughputPicture draws the curves, both axes logarithmic.
func throughputPicture(lines []line) []byte {
	// The title names the quantity of the Y axis: gonum puts the label of a logarithmic axis into the space of the title.
	p := picture.New("Granted calls per second, one bucket", "callers at once", "")
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(doublings), plot.TickerFunc(decades)
	var legends [legendColumns]plot.Legend
	for i := range legends {
		legends[i] = picture.Legend()
		legends[i].ThumbnailWidth = vg.Points(24)
	}
	loX, hiX, loY, hiY := bounds(lines)
	for i, l := range lines {
		points := make(plotter.XYs, len(l.points))
		for j, at := range l.points {
			points[j] = plotter.XY{X: float64(at.callers), Y: at.perSecond}
		}
		curve, marks, err := plotter.NewLinePoints(points)
		if err != nil {
			panic(err) // only for numbers that are not finite
		}
		style(l.rival, i, curve, marks)
		p.Add(curve, marks)
		legends[i%legendColumns].Add(l.rival, curve, marks)
	}
	p.X.Min, p.X.Max = loX, hiX
	p.Y.Min, p.Y.Max = loY, hiY
	return picture.SVG(5.2*vg.Inch, compose(p, legends))
}

// bounds returns the ranges of the axes, with space around the lines.
func bounds(lines []line) (loX, hiX, loY, hiY float64) {
	loX, loY = math.Inf(1), math.Inf(1)
	for _, l := range lines {
		for _, at := range l.points {
			loX, hiX = min(loX, float64(at.callers)), max(hiX, float64(at.callers))
			loY, hiY = min(loY, at.perSecond), max(hiY, at.perSecond)
		}
	}
	return loX / 1.1, hiX * 1.1, loY / 1.3, hiY * 1.3
}

func style(rival string, i int, curve *plotter.Line, marks *plotter.Scatter) {
	curve.Color, marks.Color = colours[rival], colours[rival]
	curve.Width = vg.Points(1.5)
	marks.Radius = vg.Points(2.2)
	marks.Shape = []draw.GlyphDrawer{draw.CircleGlyph{}, draw.BoxGlyph{}, draw.TriangleGlyph{}}[i%3]
	switch rival {
	case scriptStore, lockStore, leaseStore:
		curve.Width = vg.Points(2.5)
	case ping:
		curve.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
	}
}

// legendColumns is the number of columns of the legend, which is below the picture, where no line crosses it. Two columns leave space for a
// wider font than that with which the picture was composed.
const legendColumns = 2

func doublings(lo, hi float64) []plot.Tick {
	var marks []plot.Tick
	for v := 1.0; v <= hi; v *= 2 {
		if v >= lo {
			marks = append(marks, plot.Tick{Value: v, Label: strconv.Itoa(int(v))})
		}
	}
	return marks
}

// decades returns ticks at the powers of ten, with few and short labels.
func decades(lo, hi float64) []plot.Tick {
	var marks []plot.Tick
	for v := math.Pow(10, math.Ceil(math.Log10(lo))); v <= hi; v *= 10 {
		label := thousands(v)
		if v >= 1e6 {
			label = thousands(v/1e6) + " million"
		}
		marks = append(marks, plot.Tick{Value: v, Label: label + picture.Gap})
	}
	return marks
}

// thousands groups the digits of a whole number by three.
func thousands(f float64) string {
	s := fmt.Sprintf("%.0f", f)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// compose returns a function that draws the picture and, below it, the legends side by side.
func compose(p *plot.Plot, legends [legendColumns]plot.Legend) func(draw.Canvas) {
	const below = 76 // points
	return func(c draw.Canvas) {
		p.Draw(draw.Crop(c, 0, 0, vg.Points(below), 0))
		wide := c.Max.X - c.Min.X
		for i := range legends {
			left := vg.Points(56) + wide*vg.Length(i)/legendColumns
			legends[i].Draw(draw.Crop(c, left, 0, 0, vg.Points(below-8)-(c.Max.Y-c.Min.Y)))
		}
	}
}
