package console

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
)

const (
	// overdue is how long an instance may be silent before it is reported. Beats come at most 2.2 s apart, so it has then
	// missed one. With a beat of 2 s, the pages report a killed instance within 5 s.
	overdue = 2900 * time.Millisecond
	// mostNamed bounds a list of problems.
	mostNamed = 5
)

// problem is a problem in words, with the name of an action that can solve it; Act is empty if there is none.
type problem struct {
	Text string `json:"text"`
	Act  string `json:"act,omitempty"`
}

// problems returns the problems of the fleet, in words.
func (v *view) problems() []problem {
	all := append([]problem{}, v.here.problems()...)
	add := func(text string) { all = append(all, problem{Text: text}) }
	if v.sw != nil && v.sw.Off {
		add("The switch is off: every call passes" + v.switchedOffBy() + ".")
	}
	if text := v.lossText(); text != "" {
		all = append(all, problem{text, "confirm"})
	}
	if text := v.empty(); text != "" && v.living() > 0 {
		add(text)
	}
	living, named := v.living(), 0
	for i := range v.instances {
		one := &v.instances[i]
		text := v.trouble(one)
		if text == "" {
			continue
		}
		if named++; named <= mostNamed {
			add(fmt.Sprintf("Instance %s: %s.", one.title(), text))
		}
	}
	if named > mostNamed {
		add(fmt.Sprintf("%d further instances have problems: see Health.", named-mostNamed))
	}
	switch {
	case len(v.instances) == 0:
		add("No instance has reported yet. Gateways report every two seconds to the Redis that they share: check that one runs, and that it uses the Redis and the key prefix of this console.")
	case living == 0:
		add("No instance reports any more: figures are those of the last ten minutes.")
	}
	faults := v.faulty()
	for i := range faults[:min(len(faults), mostNamed)] {
		f := &faults[i]
		add(fmt.Sprintf("%s, and %s: %s.", v.faultText(f), count(int(f.Calls), "call has failed", "calls have failed"), f.Err))
	}
	if n := len(faults) - mostNamed; n > 0 {
		add(count(n, "further bucket, window or concurrency", "further buckets, windows or concurrencies") + " cannot be used.")
	}
	if n := len(v.rejected); n > 0 {
		add(fmt.Sprintf("%s rejected: see Health.", count(n, "row is", "rows are")))
	}
	if n := len(v.skipped); n > 0 {
		add(fmt.Sprintf("%s in Redis cannot be read: see Health.", count(n, "entry", "entries")))
	}
	return all
}

// switchedOffBy returns who turned the switch off, when and why, as far as the table or an event has it.
func (v *view) switchedOffBy() string {
	text := v.sw.Origin
	if v.switchedOff != nil && !strings.Contains(text, v.switchedOff.Who) {
		text = strings.TrimPrefix(text+", "+author(v.switchedOff), ", ")
	}
	if text == "" {
		return ""
	}
	return " (" + text + ")"
}

// loss returns the largest unconfirmed loss of the table, and the number of instances that report one; nil if there is none.
func (v *view) loss() (worst *fleet.Loads, reporting int) {
	for i := range v.instances {
		if l := &v.instances[i].Loads; l.Gone > 0 && !v.instances[i].Silent(v.at) {
			if reporting++; worst == nil || l.Gone > worst.Gone {
				worst = l
			}
		}
	}
	return worst, reporting
}

// lossText describes an unconfirmed loss; empty if there is none.
func (v *view) lossText() string {
	worst, reporting := v.loss()
	if worst == nil {
		return ""
	}
	state := "They are no longer in force"
	if worst.Held > 0 {
		state = "They are still in force"
	}
	return fmt.Sprintf("%s since %s (%s), as %s. %s. Restore the rows, or confirm that this is meant.",
		lostOf(worst), figure.Span(v.at.Sub(worst.Lost).Truncate(time.Second)), figure.Name(worst.Names), count(reporting, "instance reports", "instances report"), state)
}

// trouble describes an instance's problem; empty if it has none.
func (v *view) trouble(i *instance) string {
	now := v.at
	switch {
	case i.Ended || v.replaced[i.ID]:
		return ""
	case now.Sub(i.Beat) > overdue:
		return "no report for " + figure.Span(now.Sub(i.Beat).Truncate(time.Second))
	case i.Store.Down:
		text := "the store does not reply"
		if !i.Store.Since.IsZero() {
			text = "the store has not replied for " + figure.Span(now.Sub(i.Store.Since).Truncate(time.Second))
		}
		if i.Store.Policy != "" {
			text += ", the failure policy decides (" + i.Store.Policy + ")"
		}
		return text
	case i.Loads.Err != "":
		return fmt.Sprintf("loads fail, the limits loaded %s ago stay in force: %s", figure.Span(now.Sub(i.Loads.Last).Truncate(time.Second)), i.Loads.Err)
	case i.Switch.Err != "":
		return "the switch cannot be read: " + i.Switch.Err
	case i.MoreLimits > 0 || i.Crowded:
		return "it does not report all of its limits: see Health"
	}
	return ""
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return figure.Count(n) + " " + many
}

// round keeps three significant digits; whole numbers stay whole.
func round(v float64) float64 {
	if math.Abs(v) < 1e-300 || math.IsNaN(v) || math.IsInf(v, 0) { // below that the scale would be infinite
		return 0
	}
	if math.Abs(v) >= 100 {
		return math.Round(v)
	}
	scale := math.Pow(10, 2-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

func itoa(i int) string { return strconv.Itoa(i) }

// must panics on an error that only a mistake in this package can cause.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
