// Command waitingline draws the picture in docs/architecture.md of the permits and the waiters of a process, as package schedule decides:
//
//	go run ./benchmarks/waitingline > docs/waiting-line.svg
package main

import (
	"fmt"
	"image/color"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/go-tokenbucket/tokenbucket/benchmarks/internal/picture"
	permits "github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// The bucket of the picture has 10 permits a second.
const (
	lineInterval = 100_000       // microseconds
	lineGranted  = "AAAABBBAAAA" // the process of each grant, in order of due time
	linePermits  = len(lineGranted)
	lineWaiters  = 8 // waiters of process A
	stopFrom     = 150_000
	stopUntil    = 450_000
)

// Areas behind labels.
var (
	paleBlue   = color.RGBA{R: 0xcf, G: 0xe4, B: 0xf2, A: 0xff}
	paleGrey   = color.RGBA{R: 0xee, G: 0xee, B: 0xee, A: 0xff}
	paleOrange = color.RGBA{R: 0xf9, G: 0xdc, B: 0xc4, A: 0xff}
)

func main() {
	if _, err := os.Stdout.Write(render()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// render returns the picture.
func render() []byte { return picture.SVG(4.2*vg.Inch, lines().Draw) }

// even are terms with a constant interval between permits, each paid for before it is used.
type even struct{}

// After implements schedule.Terms.
func (even) After(b permits.Balance, n int64) (permits.Balance, bool) {
	b.Next += n * lineInterval
	return b, true
}

// PayLater implements schedule.Terms.
func (even) PayLater() bool { return false }

// owners holds the waiter that uses each permit, or the fate of a permit that no waiter of A uses. Permits are in order of due time.
type owners [linePermits]string

// Fates of permits that no waiter of A uses.
const (
	ofB      = "B"
	returned = "returned"
	lapsed   = "lapsed"
)

// processA is process A: its queue, its waiters and its permits.
type processA struct {
	line    schedule.Schedule[string]
	waiters []*schedule.Waiter[string]
	owners  owners
}

// newProcessA enqueues the waiters and grants them permits of the store.
func newProcessA() *processA {
	p := &processA{line: schedule.Schedule[string]{Strict: true}}
	for i := range lineWaiters {
		w := &schedule.Waiter[string]{Value: fmt.Sprintf("a%d", i+1), Permits: 1, Until: schedule.Forever}
		p.waiters = append(p.waiters, w)
		p.line.Join(w)
	}
	next := 0
	for i, to := range lineGranted {
		if to == 'B' {
			p.owners[i] = ofB
			continue
		}
		tag := int64(i)
		p.line.Grant(p.waiters[next], &schedule.Grant{Terms: even{}, Before: permits.Balance{Next: tag * lineInterval}, Permits: 1,
			Epoch: 1, Tag: tag + 1, Prev: tag}, 0)
		p.owners[i] = lapsed // unless a waiter uses it
		next++
	}
	return p
}

// use records that a waiter uses the permit with a due time.
func (p *processA) use(w *schedule.Waiter[string], due int64) { p.owners[due/lineInterval-1] = w.Value }

// plan records the permits that the remaining waiters will use.
func (p *processA) plan() owners {
	for _, w := range p.waiters {
		if due, covered := p.line.DueOf(w); covered {
			p.use(w, due)
		}
	}
	return p.owners
}

// leave removes waiter i, and refunds the permit that is left over.
func (p *processA) leave(i int) {
	p.line.Leave(p.waiters[i], 0)
	if r := p.line.Refund(); r != nil {
		for due := r.To.Next + lineInterval; due <= r.End.Next; due += lineInterval {
			p.owners[due/lineInterval-1] = returned
		}
	}
}

// run releases the waiters that are due. A late waiter still uses its permit if that is overdue by at most 100 ms.
func (p *processA) run(now int64) {
	for w, due := p.line.Next(now); w != nil; w, due = p.line.Next(now) {
		p.use(w, due)
	}
}

// lineScenes returns the scenes of the picture, as decided by package schedule, which the limiter uses, too.
func lineScenes() (granted, left, stopped owners) {
	granted = newProcessA().plan()

	p := newProcessA()
	p.leave(1)
	left = p.plan()

	p = newProcessA()
	p.run(lineInterval)
	p.run(stopUntil)
	return granted, left, p.plan()
}

// lines draws the queue of one process, and the segments that it owns.
func lines() *plot.Plot {
	granted, left, stopped := lineScenes()
	pic := picture.New("Processes own stretches of the bucket's time, waiters own positions in a line",
		"time (s); a permit is due at its right edge", "")
	pic.HideY()
	const height, apart = 1.0, 2.0
	for i, row := range []struct {
		title string
		owners
	}{
		{"A is stopped from 0.15 to 0.45 s: what is overdue by more than 0.1 s lapses, and a7 and a8 ask again", stopped},
		{"a2 gives up: those behind it move up, and the last permit is returned", left},
		{"A has eight waiters in one line, a1 to a8; B has taken three permits in between", granted},
	} {
		y := apart * float64(i)
		pic.Add(label(at(0, y+height), row.title, draw.XLeft, 2, 5))
		for j, owner := range row.owners {
			from, to := seconds(int64(j)*lineInterval), seconds(int64(j+1)*lineInterval)
			box := area(ownerColour(owner), at(from, y), at(from, y+height), at(to, y+height), at(to, y))
			box.LineStyle.Width, box.LineStyle.Color = vg.Points(1.5), color.White
			pic.Add(box, label(at((from+to)/2, y+height/2), owner, draw.XCenter, 0, -3.5))
		}
	}
	stop := bar(at(seconds(stopFrom), -0.15), at(seconds(stopUntil), -0.15))
	pic.Add(stop)
	pic.Legend.Add("owned by process A", area(paleBlue, at(0, 0)))
	pic.Legend.Add("owned by process B", area(paleOrange, at(0, 0)))
	pic.Legend.Add("lapsed, or returned to the bucket", area(paleGrey, at(0, 0)))
	pic.Legend.Add("A is stopped", stop)
	pic.X.Min, pic.X.Max = 0, seconds(int64(linePermits)*lineInterval)
	pic.Y.Min, pic.Y.Max = -0.3, 7.6
	return pic
}

func seconds(micros int64) float64 { return float64(micros) / 1e6 }

func ownerColour(owner string) color.Color {
	switch owner {
	case ofB:
		return paleOrange
	case returned, lapsed:
		return paleGrey
	}
	return paleBlue
}

func at(x, y float64) plotter.XY { return plotter.XY{X: x, Y: y} }

func bar(from, to plotter.XY) *plotter.Line {
	l, err := plotter.NewLine(plotter.XYs{from, to})
	if err != nil {
		panic(err) // only for numbers that are not finite
	}
	l.Color, l.Width = picture.Vermilion, vg.Points(2.5)
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
	picture.SetFont(&l.TextStyle[0], 10.5)
	l.TextStyle[0].XAlign = align
	l.Offset = vg.Point{X: vg.Points(dx), Y: vg.Points(dy)}
	return l
}
