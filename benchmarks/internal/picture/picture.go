// Package picture draws the pictures of the benchmarks in the style of `tokenbucket plot`.
package picture

import (
	"bytes"
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Colours that colour-blind readers can distinguish (Okabe and Ito).
var (
	Blue      = color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}
	Vermilion = color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}
	Green     = color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}
	Purple    = color.RGBA{R: 0x7b, G: 0x4f, B: 0xa3, A: 0xff}
	Grey      = color.RGBA{R: 0x70, G: 0x70, B: 0x70, A: 0xff}
)

// Width is the width of every picture.
const Width = 7.5 * vg.Inch

// Gap separates a label beside the Y axis from the axis' marks, even in a wider font. It is appended to the label.
const Gap = "\u00a0\u00a0"

// New returns a plot with the fonts of all pictures and a legend at the top left.
func New(title, x, y string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = color.White
	p.Title.Text = title
	p.Title.Padding = vg.Points(8)
	p.X.Label.Text, p.Y.Label.Text = x, y
	SetFont(&p.Title.TextStyle, 12)
	SetFont(&p.X.Label.TextStyle, 11)
	SetFont(&p.Y.Label.TextStyle, 11)
	SetFont(&p.X.Tick.Label, 10)
	SetFont(&p.Y.Tick.Label, 10)
	p.X.Padding, p.Y.Padding = 0, 0
	p.Legend = Legend()
	p.Legend.XOffs, p.Legend.YOffs = vg.Points(8), vg.Points(-4)
	return p
}

// Legend returns an empty legend that begins at the top left.
func Legend() plot.Legend {
	l := plot.NewLegend()
	SetFont(&l.TextStyle, 10.5)
	l.Top, l.Left = true, true
	l.Padding = vg.Points(2)
	return l
}

// SetFont sets the font of all pictures, in a size in points.
func SetFont(s *text.Style, size float64) {
	s.Font = font.Font{Typeface: "Liberation", Variant: "Sans"}
	s.Font.Size = vg.Points(size)
}

// SVG draws on a white canvas with a margin.
func SVG(height vg.Length, paint func(draw.Canvas)) []byte {
	c := vgsvg.New(Width, height)
	c.SetColor(color.White)
	c.Fill(vg.Rectangle{Max: vg.Point{X: Width, Y: height}}.Path())
	paint(draw.Crop(draw.New(c), vg.Points(8), vg.Points(-16), vg.Points(6), vg.Points(-10)))
	var b bytes.Buffer // writing to it never fails
	c.WriteTo(&b)
	// The viewer may lack the font, so name some of the same width.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"),
		[]byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;"))
}
