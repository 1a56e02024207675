package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

const plotLong = `Writes four pictures:

  three-gateways     what a growing fleet gets through with one limit; always the same, whatever the flags say
  priority           bookings beside searches on one limit, without priorities and with them; always the same, too
  warmup-curve       what a permit costs, by how many are stored, in a bucket that warms up
  permits-over-time  what a cold limiter hands out under full demand, beside a bursty one with a full bucket

All but the curve show decisions of the library, by simulated clocks.`

// pictures holds the flags of the command.
type pictures struct {
	rate       float64
	warmup     time.Duration
	coldFactor float64
	out        string
	format     string
}

func plotCommand() *cobra.Command {
	var p pictures
	cmd := &cobra.Command{
		Use:   "plot",
		Short: "Draw a fleet with one limit, priorities, the warm-up curve and the permits handed out over time",
		Long:  plotLong,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.validate(); err != nil {
				return err
			}
			return p.write(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.Float64Var(&p.rate, "rate", 5, "permits per second")
	f.DurationVar(&p.warmup, "warmup", 4*time.Second, "warm-up period")
	f.Float64Var(&p.coldFactor, "cold-factor", coldFactor, "ratio of the cold interval to the stable one")
	f.StringVar(&p.out, "out", ".", "directory for the pictures, created if missing")
	f.StringVar(&p.format, "format", "svg", "svg or png")
	return cmd
}

func (p *pictures) validate() error {
	const maxPlotRate, maxFactor = 1e7, 1000
	switch {
	case !(p.rate > 0 && p.rate <= maxPlotRate):
		return flagError("rate", p.rate, fmt.Sprintf("permits per second, above 0 and at most %.0f", maxPlotRate))
	case p.warmup <= 0 || p.warmup > 24*time.Hour:
		return flagError("warmup", p.warmup, "a duration above 0 and at most 24h")
	case !(p.coldFactor > 1 && p.coldFactor <= maxFactor):
		return flagError("cold-factor", p.coldFactor, fmt.Sprintf("a number above 1 and at most %d", maxFactor))
	case p.out == "":
		return flagError("out", `""`, "a directory")
	case p.format != "svg" && p.format != "png":
		return flagError("format", fmt.Sprintf("%q", p.format), "svg or png")
	}
	if _, err := p.warmingUp(); err != nil {
		return fmt.Errorf("--rate %v --warmup %v --cold-factor %v: %w", p.rate, p.warmup, p.coldFactor, err)
	}
	return nil
}

// write draws all pictures before it writes any.
func (p *pictures) write(out io.Writer) error {
	fleet, err := gateways()
	if err != nil {
		return err
	}
	shared, err := priorities()
	if err != nil {
		return err
	}
	curve, err := p.curve()
	if err != nil {
		return err
	}
	permits, err := p.permits()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(p.out, 0o755); err != nil {
		return fmt.Errorf("--out %q: %w", p.out, err)
	}
	for _, picture := range []struct {
		name string
		plot *plot.Plot
	}{{"three-gateways", fleet}, {"priority", shared}, {"warmup-curve", curve}, {"permits-over-time", permits}} {
		file := filepath.Join(p.out, picture.name+"."+p.format)
		if err := os.WriteFile(file, p.render(picture.plot), 0o644); err != nil {
			return fmt.Errorf("--out %q: %w", p.out, err)
		}
		fmt.Fprintln(out, file)
	}
	return nil
}

func (p *pictures) render(picture *plot.Plot) []byte {
	const width, height = 7.5 * vg.Inch, 4.2 * vg.Inch
	var b bytes.Buffer // writing to it never fails
	if p.format == "png" {
		c := vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(144)) // white already
		picture.Draw(margin(draw.New(c)))
		vgimg.PngCanvas{Canvas: c}.WriteTo(&b)
		return b.Bytes()
	}
	c := vgsvg.New(width, height)
	c.SetColor(picture.BackgroundColor)
	c.Fill(vg.Rectangle{Max: vg.Point{X: width, Y: height}}.Path())
	picture.Draw(margin(draw.New(c)))
	c.WriteTo(&b)
	// The viewer may lack the font, so name some of the same width.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"),
		[]byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;"))
}

func margin(c draw.Canvas) draw.Canvas {
	return draw.Crop(c, vg.Points(8), vg.Points(-16), vg.Points(6), vg.Points(-10))
}
