package main

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Colours that the colour-blind tell apart too (Okabe and Ito), this library's first; dashes and marks help where
// there are more lines than colours.
var colours = map[string]color.Color{
	scriptStore:   color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff},
	lockStore:     color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff},
	leaseStore:    color.RGBA{R: 0x00, G: 0x00, B: 0x00, A: 0xff},
	redisRate:     color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff},
	redisRatePipe: color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 0xff},
	redisRateWait: color.RGBA{R: 0x7b, G: 0x4f, B: 0xa3, A: 0xff},
	throttledName: color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff},
	ululeName:     color.RGBA{R: 0xe6, G: 0x9f, B: 0x00, A: 0xff},
	redisStore:    color.RGBA{R: 0x8a, G: 0x6d, B: 0x3b, A: 0xff},
	ping:          grey,
}

var grey = color.RGBA{R: 0x70, G: 0x70, B: 0x70, A: 0xff}

var sans = font.Font{Typeface: "Liberation", Variant: "Sans"}

// throughputPicture draws the curves, both axes logarithmic.
func throughputPicture(lines []line) []byte {
	p := newPlot("Granted calls per second, one bucket", "callers at once", "calls per second")
	var legends [legendColumns]plot.Legend
	for i := range legends {
		legends[i] = newLegend()
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
	return render(p, legends)
}

// bounds leave room around the lines.
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
	p.X.Padding, p.Y.Padding = 0, 0
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(doublings), plot.TickerFunc(decades)
	return p
}

// legendColumns is how many names stand side by side below the picture, where no line crosses them.
const legendColumns = 3

func newLegend() plot.Legend {
	l := plot.NewLegend()
	setFont(&l.TextStyle, 10)
	l.Top, l.Left = true, true
	l.Padding = vg.Points(2)
	l.ThumbnailWidth = vg.Points(24)
	return l
}

func doublings(lo, hi float64) []plot.Tick {
	var marks []plot.Tick
	for v := 1.0; v <= hi; v *= 2 {
		if v >= lo {
			marks = append(marks, plot.Tick{Value: v, Label: strconv.Itoa(int(v))})
		}
	}
	return marks
}

// decades marks 1, 2 and 5 of each.
func decades(lo, hi float64) []plot.Tick {
	var marks []plot.Tick
	for decade := math.Pow(10, math.Floor(math.Log10(lo))); decade <= hi; decade *= 10 {
		for _, v := range []float64{decade, 2 * decade, 5 * decade} {
			if v >= lo && v <= hi {
				marks = append(marks, plot.Tick{Value: v, Label: thousands(v)})
			}
		}
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

func setFont(s *text.Style, size float64) {
	s.Font = sans
	s.Font.Size = vg.Points(size)
}

func render(p *plot.Plot, legends [legendColumns]plot.Legend) []byte {
	const width, height = 7.5 * vg.Inch, 5.4 * vg.Inch
	c := vgsvg.New(width, height)
	c.SetColor(p.BackgroundColor)
	c.Fill(vg.Rectangle{Max: vg.Point{X: width, Y: height}}.Path())
	compose(draw.New(c), p, legends)
	var b bytes.Buffer // writing to it never fails
	c.WriteTo(&b)
	// Whoever looks at it may not have the font: name some that are as wide.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"),
		[]byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;"))
}

// compose draws the picture and, below it, the legends side by side.
func compose(c draw.Canvas, p *plot.Plot, legends [legendColumns]plot.Legend) {
	const below = 62 // points
	p.Draw(draw.Crop(c, vg.Points(8), vg.Points(-16), vg.Points(below), vg.Points(-10)))
	wide := c.Max.X - c.Min.X
	for i := range legends {
		left := vg.Points(12) + wide*vg.Length(i)/legendColumns
		legends[i].Draw(draw.Crop(c, left, 0, 0, vg.Points(below)-c.Max.Y+vg.Points(-4)))
	}
}
