package main

import "slices"

// point is a rival's throughput at a number of callers.
type point struct {
	callers   int
	perSecond float64
}

// line is a rival's curve.
type line struct {
	rival  string
	points []point
}

// curveCallers double up to the usual limit of a server's connections.
var curveCallers = []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 512}

// curve measures the throughput on one bucket over the number of callers. Its rounds are shorter, since there are many points.
func curve(b *bench, o *outcome) error {
	callers := curveCallers
	if b.quick {
		callers = []int{1, 8, 64}
	}
	names := such(func(r rival) bool { return r.redis })
	lines := make([]line, len(names))
	for _, n := range callers {
		ld := load{Callers: n, Keys: 1, Duration: b.duration / 2}
		cs, err := b.compete(named(names...), min(3, b.rounds), unlimited, ld, allGranted)
		if err != nil {
			return err
		}
		for _, c := range cs {
			f := c.figure()
			i := slices.Index(names, c.name)
			lines[i].rival = c.name
			lines[i].points = append(lines[i].points, point{n, f.perSecond()})
			o.violate(f.wrong)
		}
		b.progress.step("%d callers", n)
	}
	b.lines = lines
	return nil
}
