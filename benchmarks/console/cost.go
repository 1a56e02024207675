package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
)

// load is the result of a run of wrk.
type load struct {
	perSecond float64 // calls per second
	processor float64 // processor time of the gateway for each call, in microseconds
}

var (
	perSecond = regexp.MustCompile(`Requests/sec:\s+([0-9.]+)`)
	calls     = regexp.MustCompile(`(\d+) requests in`)
	failed    = regexp.MustCompile(`Non-2xx or 3xx responses|Socket errors`)
)

// load runs wrk against a gateway.
func (g *gateway) load(ctx context.Context, o *options) (load, error) {
	before, err := g.processor()
	if err != nil {
		return load{}, err
	}
	out, err := exec.CommandContext(ctx, "wrk", "-t2", fmt.Sprintf("-c%d", o.connections), fmt.Sprintf("-d%ds", max(1, int(o.length.Seconds()))), g.url+"/full").CombinedOutput()
	if err != nil {
		return load{}, fmt.Errorf("wrk: %w: %s", err, out)
	}
	after, err := g.processor()
	if err != nil {
		return load{}, err
	}
	rate, n := perSecond.FindSubmatch(out), calls.FindSubmatch(out)
	if rate == nil || n == nil || failed.Match(out) {
		return load{}, fmt.Errorf("wrk: %s", out)
	}
	r, _ := strconv.ParseFloat(string(rate[1]), 64)
	count, _ := strconv.ParseFloat(string(n[1]), 64)
	return load{r, float64((after - before).Microseconds()) / count}, nil
}

// cost measures gateways with and without readers, in turns.
func cost(ctx context.Context, l *lab, o *options) error {
	var pair [2]*gateway
	for i := range pair {
		g, err := l.start(fmt.Sprint("cost", i), o.limits)
		if err != nil {
			return err
		}
		pair[i] = g
	}
	for _, g := range pair { // warm-up
		if _, err := g.load(ctx, o); err != nil {
			return err
		}
	}
	var with, without []load
	for half := range pair {
		watched, alone := pair[half], pair[1-half]
		looking, leave := context.WithCancel(ctx)
		err := watched.readers(looking, o.readers)
		for round := 0; err == nil && round < (o.rounds+1)/2; round++ {
			err = inTurns(ctx, o, round, watched, alone, &with, &without)
		}
		if leave(); err != nil {
			return err
		}
		if half == 0 {
			select {
			case <-time.After(o.change):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	show(o, with, without)
	return nil
}

// readers follow the console of a gateway until ctx ends.
func (g *gateway) readers(ctx context.Context, n int) error {
	for i := range n {
		path := [...]string{"/console/stream", "/console/stream/limit?name=/full"}[i%2]
		if err := read(ctx, g.admin+path); err != nil {
			return err
		}
	}
	return nil
}

// inTurns runs one round: a run with readers and one without, in alternating order.
func inTurns(ctx context.Context, o *options, round int, watched, alone *gateway, with, without *[]load) error {
	for turn := range 2 {
		g, to := watched, with
		if (round+turn)%2 == 1 {
			g, to = alone, without
		}
		result, err := g.load(ctx, o)
		if err != nil {
			return err
		}
		*to = append(*to, result)
	}
	return nil
}

func show(o *options, with, without []load) {
	var rates, times []float64 // one for each round
	for i := range with {
		rates = append(rates, with[i].perSecond/without[i].perSecond)
		times = append(times, with[i].processor/without[i].processor)
	}
	of := func(all []load, f func(load) float64) float64 {
		var list []float64
		for _, one := range all {
			list = append(list, f(one))
		}
		return quantile(list, 0.5)
	}
	rate, took := func(r load) float64 { return r.perSecond }, func(r load) float64 { return r.processor }
	t := table.NewWriter()
	t.SetOutputMirror(os.Stdout)
	t.SetTitle("a gateway of %d limits under wrk, %d rounds of %v in turns", o.limits, len(with), o.length)
	t.AppendHeader(table.Row{"", "nobody looks", fmt.Sprintf("%d readers", o.readers), "ratio, median of the rounds", "quarter, three quarters"})
	line := func(name, format string, f func(load) float64, ratios []float64) {
		t.AppendRow(table.Row{name, fmt.Sprintf(format, of(without, f)), fmt.Sprintf(format, of(with, f)), fmt.Sprintf("%.4f", quantile(ratios, 0.5)),
			fmt.Sprintf("%.4f, %.4f", quantile(ratios, 0.25), quantile(ratios, 0.75))})
	}
	line("calls a second", "%.0f", rate, rates)
	line("µs of the gateway's processor, a call", "%.2f", took, times)
	t.Render()
}

func quantile(list []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}
