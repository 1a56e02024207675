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

// The fleet of the picture does not depend on the flags. Each gateway starts fleetStep seconds after the previous one.
const (
	fleetRate     = 10 // permits per second of the shared bucket
	fleetOffered  = 15 // calls per second that each gateway offers
	fleetGateways = 3
	fleetStep     = 4
	fleetSeconds  = fleetGateways * fleetStep
	fleetPatience = 500 * time.Millisecond
)

var green = color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}

// gateways draws the calls per second that pass through each gateway of a growing fleet.
func gateways() (*plot.Plot, error) {
	passed, err := fleetCalls()
	if err != nil {
		return nil, err
	}
	pic := newPlot(fmt.Sprintf("Three gateways, one limit of %d calls/s", fleetRate),
		"time (s)", "calls in each second")
	offered := plotter.XYs{}
	for i := range fleetGateways {
		offered = append(offered, at(float64(i*fleetStep), float64((i+1)*fleetOffered)))
	}
	demand := line(grey, 2, append(offered, at(fleetSeconds, fleetGateways*fleetOffered))...)
	demand.StepStyle = plotter.PostStep
	pic.Legend.Add(fmt.Sprintf("calls offered: %d a second by each gateway", fleetOffered), demand)

	colours := [fleetGateways]color.Color{blue, vermilion, green}
	var below *plotter.BarChart
	for i := range passed {
		bars, err := plotter.NewBarChart(passed[i], vg.Points(26))
		if err != nil {
			return nil, err
		}
		bars.Color, bars.LineStyle.Width, bars.XMin = colours[i], 0, 0.5
		if below != nil {
			bars.StackOn(below)
		}
		below = bars
		pic.Add(bars)
		pic.Legend.Add(fmt.Sprintf("calls passed by gateway %d", i+1), bars)
	}
	for i := 1; i < fleetGateways; i++ {
		pic.Add(label(at(float64(i*fleetStep), float64((i+1)*fleetOffered)), fmt.Sprintf("gateway %d joins", i+1), draw.XLeft, 6, 5))
	}
	pic.Add(demand, dashed(at(0, fleetRate), at(fleetSeconds, fleetRate)),
		label(at(0, fleetRate), fmt.Sprintf("the limit: %d calls/s", fleetRate), draw.XLeft, 6, 5))
	pic.X.Min, pic.X.Max = 0, fleetSeconds
	pic.Y.Min, pic.Y.Max = 0, 1.3*fleetGateways*fleetOffered
	return pic, nil
}

// fleetCalls simulates gateways that offer calls at random times, on a fake clock. It counts the calls that pass in each second. A call passes
// when its permit is due.
func fleetCalls() ([fleetGateways]plotter.Values, error) {
	var passed [fleetGateways]plotter.Values
	clock := clockwork.NewFakeClock()
	store := tokenbucket.NewMemoryStore()
	var limiters [fleetGateways]*tokenbucket.RateLimiter
	for i := range limiters {
		var err error
		limiters[i], err = tokenbucket.NewSmoothBursty(bucketName, fleetRate,
			tokenbucket.WithStore(store), tokenbucket.WithClock(clock))
		if err != nil {
			return passed, err
		}
		passed[i] = make(plotter.Values, fleetSeconds)
	}
	random := rand.New(rand.NewPCG(1, 2)) // a fixed seed, so that the picture is always the same
	const tick = time.Millisecond
	for now := time.Duration(0); now < fleetSeconds*time.Second; now += tick {
		for i := range limiters {
			started := now >= time.Duration(i*fleetStep)*time.Second
			if !started || random.Float64() >= fleetOffered*tick.Seconds() {
				continue
			}
			r, err := limiters[i].TryReserve(context.Background(), 1, fleetPatience)
			if err != nil {
				return passed, err
			}
			if due := int((now + r.Delay()) / time.Second); r.OK() && due < fleetSeconds {
				passed[i][due]++
			}
		}
		clock.Advance(tick)
	}
	return passed, nil
}
