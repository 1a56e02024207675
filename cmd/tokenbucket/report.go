package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/cmd/internal/bound"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// report prints the results. It returns errBroken unless the bound was kept and no call failed.
func (d *demo) report(f *fleet, up *upstream, ended time.Duration) error {
	if ended < d.duration {
		fmt.Fprintf(d.out, "Ended early, after %v.\n", round(ended))
	}
	seconds := int((ended + time.Second - 1) / time.Second)
	printTable(d.out, rows(f.calls.calls, up.arrivals, seconds), f.calls)
	permits, back := f.permits()
	v := judge(d.rate, d.bound(), up.arrivals, permits, f.calls)
	v.back = back
	if !v.kept() {
		v.print(d.out)
		return errBroken
	}
	d.conclude()
	v.print(d.out)
	return nil
}

// printTable prints the table, one line for each second.
func printTable(out io.Writer, lines []row, t *tally) {
	n := len(lines) - 2
	w := table.NewWriter()
	w.SetOutputMirror(out)
	w.SetStyle(table.StyleLight)
	w.Style().Format.Header = text.FormatDefault
	w.Style().Format.Footer = text.FormatDefault
	header := table.Row{"second", "offered", "passed", "waited p50", "waited p99", "refused", "seen by upstream"}
	if t.counts[failed] > 0 {
		header = append(header, "errors")
	}
	w.AppendHeader(header)
	w.SetColumnConfigs(alignRight(len(header)))
	for i, r := range lines[:n] {
		w.AppendRow(r.cells(strconv.Itoa(i+1), len(header)))
	}
	if rest := lines[n]; rest.offered+rest.seen+rest.counts[passed]+rest.counts[refused]+rest.counts[failed] > 0 {
		w.AppendRow(rest.cells("after", len(header)))
	}
	w.AppendFooter(lines[n+1].cells("total", len(header)))
	w.Render()
	fmt.Fprint(out, "A call is offered in one second and may pass in the next.\n\n")
}

func alignRight(columns int) []table.ColumnConfig {
	configs := make([]table.ColumnConfig, columns)
	for i := range configs {
		right := text.AlignRight
		configs[i] = table.ColumnConfig{Number: i + 1, Align: right, AlignHeader: right, AlignFooter: right}
	}
	return configs
}

// cells returns one cell for each column; the last one is the errors.
func (r *row) cells(second string, columns int) table.Row {
	p50, p99 := "-", "-"
	if len(r.waits) > 0 {
		p50, p99 = milliseconds(quantile(r.waits, 0.5)), milliseconds(quantile(r.waits, 0.99))
	}
	all := table.Row{second, r.offered, r.counts[passed], p50, p99, r.counts[refused], r.seen, r.counts[failed]}
	return all[:columns]
}

// verdict compares the calls that reached the upstream with the library's guarantee.
type verdict struct {
	rate, most float64 // the bound: most + rate × T
	seen       int
	permits    int
	second     bound.Window  // the busiest second at the upstream
	arrived    bound.Window  // the fullest window at the upstream
	due        bound.Window  // the fullest window by the store's clock
	back       int           // number of refunds; if there are any, the ledger's due times may differ from those used
	late       time.Duration // longest delay from a permit's due time to the upstream
	errors     int
	err        error
}

func judge(rate, most float64, arrivals []time.Duration, permits []permit, t *tally) verdict {
	arrivals = bound.Sorted(arrivals, func(at time.Duration) time.Duration { return at })
	return verdict{
		rate: rate, most: most, seen: len(arrivals), permits: len(permits),
		second:  bound.Busiest(arrivals, time.Second),
		arrived: bound.Fullest(arrivals, rate),
		due:     bound.Fullest(bound.Sorted(permits, func(p permit) time.Duration { return p.store }), rate),
		late:    bound.Lateness(arrivals, bound.Sorted(permits, func(p permit) time.Duration { return p.here })),
		errors:  t.counts[failed] + t.lost, err: t.err,
	}
}

// allowed returns how many calls a window of this length may hold if none is late. Due times are in whole microseconds.
func (v *verdict) allowed(w bound.Window) float64 {
	return v.most + float64(v.rate*(w.Length()+time.Microsecond).Seconds())
}

func (v *verdict) lateShare() float64    { return v.rate * v.late.Seconds() }
func (v *verdict) arrivalsKept() bool    { return v.holds(v.arrived, v.lateShare()) }
func (v *verdict) dueKept() bool         { return v.back > 0 || v.holds(v.due, 0) }
func (v *verdict) everyCallAsked() bool  { return v.seen <= v.permits }
func (v *verdict) somethingPassed() bool { return v.seen > 0 }

func (v *verdict) holds(w bound.Window, more float64) bool {
	return float64(w.Events) <= v.allowed(w)+more+bound.Noise
}

func (v *verdict) kept() bool {
	return v.somethingPassed() && v.everyCallAsked() && v.arrivalsKept() && v.dueKept() && v.errors == 0
}

func (v *verdict) print(out io.Writer) {
	share := number(roundUp(v.lateShare()))
	fmt.Fprintf(out, "Bound: in any window of T seconds at most %s + %s × T calls.\n", number(v.most), number(v.rate))
	fmt.Fprintf(out, "  busiest second        %s, from %.3f s to %.3f s; bound %s + %s\n",
		plural(v.second.Events, "call", "calls"), v.second.From.Seconds(), v.second.To.Seconds(), number(v.most+v.rate), share)
	fmt.Fprintf(out, "  fullest window        %s in %.3f s; bound %s + %s for %s of lateness (timers and network, measured): %s\n",
		plural(v.arrived.Events, "call", "calls"), v.arrived.Length().Seconds(), number(v.allowed(v.arrived)),
		share, milliseconds(v.late), keptOrBroken(v.arrivalsKept()))
	if v.back == 0 {
		fmt.Fprintf(out, "  by the store's clock  %s due in %.3f s; bound %s, where nothing is late: %s\n",
			plural(v.due.Events, "permit", "permits"), v.due.Length().Seconds(), number(v.allowed(v.due)), keptOrBroken(v.dueKept()))
	}
	if !v.everyCallAsked() {
		fmt.Fprintf(out, "  The upstream saw %d calls, but only %d permits were taken.\n", v.seen, v.permits)
	}
	if v.errors > 0 {
		fmt.Fprintf(out, "  %s, the first: %v\n", plural(v.errors, "call failed", "calls failed"), v.err)
	}
	fmt.Fprintf(out, "Verdict: %s.\n", v.sentence())
}

func (v *verdict) sentence() string {
	switch {
	case !v.somethingPassed():
		return "none, for nothing reached the upstream"
	case !v.everyCallAsked() || !v.arrivalsKept() || !v.dueKept():
		return "the bound was BROKEN"
	case v.errors > 0:
		return "the bound was kept, but calls failed"
	default:
		return "the bound was kept"
	}
}

func keptOrBroken(ok bool) string {
	if ok {
		return "kept"
	}
	return "BROKEN"
}

// number formats f with at most three decimals.
func number(f float64) string {
	return strconv.FormatFloat(math.Round(f*1000)/1000, 'f', -1, 64)
}

// roundUp rounds up to hundredths, so that a small allowance is visible.
func roundUp(f float64) float64 { return math.Ceil(f*100) / 100 }

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }
