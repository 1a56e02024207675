package preview

import (
	"fmt"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
)

// effect describes what happens to the traffic.
func effect(l *limit, r *Result, name string) string {
	if r.Calls == 0 {
		return "there was no call in " + name
	}
	demand := name + " of " + figure.Number(r.Demand) + "/s"
	would := "would be refused"
	if l.Shadow {
		would = "would be refused if it were not in shadow"
	}
	least, most := figure.Share(r.Least), figure.Share(r.Most)
	if r.Unknown {
		return unknown(r, demand, would)
	}
	switch {
	case r.Most == 0:
		return "none of " + demand + " " + would
	case r.Least == 1:
		return "all of " + demand + " " + would
	case least == most && (r.Simulated || r.Most-r.Least < 0.005):
		return demand + " " + would + " to " + least
	case r.Least == 0 && r.Most < 0.005:
		return most + " of " + demand + " " + would
	case r.Least == 0:
		return "up to " + most + " of " + demand + " " + would + ", perhaps nothing"
	case r.Least < 0.005:
		return "some of " + demand + " " + would + ", up to " + most
	case r.Least >= 0.995:
		return demand + " " + would + " to " + least
	case r.Simulated:
		return demand + " " + would + " to between " + least + " and " + most
	}
	return demand + " " + would + " to at least " + least
}

// unknown describes the effect of a limit with a concurrency that the history cannot show.
func unknown(r *Result, demand, would string) string {
	const why = "the history does not show how many calls ran at once"
	if r.Least == 0 {
		return "how many of " + demand + " " + would + " is not known: " + why
	}
	return "at least " + figure.Share(r.Least) + " of " + demand + " " + would + ", how many more is not known: " + why
}

// before describes what the limit before the change refused.
func before(in *Input) string {
	l := in.Before
	calls := total(in.BeforeMinutes)
	switch {
	case l == nil:
		return ""
	case l.Disabled:
		return sentence(l.String())
	case len(in.BeforeMinutes) == 0:
		return sentence(l.String() + "; it has not been in force for a whole minute yet")
	case calls == 0:
		return sentence(l.String() + "; there was no call in " + traffic(time.Duration(len(in.BeforeMinutes))*time.Minute))
	}
	name := traffic(time.Duration(len(in.BeforeMinutes)) * time.Minute)
	rate := float64(calls) / (time.Duration(len(in.BeforeMinutes)) * time.Minute).Seconds()
	was := " was refused"
	if l.Shadow {
		was = " would have been refused if it were not in shadow"
	}
	return sentence(l.String() + "; " + figure.Share(float64(refused(in.BeforeMinutes))/float64(calls)) + " of " + name + " of " + figure.Number(rate) + "/s" + was)
}

// notes returns what the figures cannot show.
func notes(in *Input, r *Result, points []Point, step time.Duration) (notes []string) {
	l := (*limit)(&in.Limit)
	if r.Calls == 0 {
		return nil
	}
	if !l.Disabled && !r.Unknown && !r.Simulated && r.Most > r.Least {
		notes = append(notes, fmt.Sprintf("The times of the calls within each %s are not known: in bursts, up to %s would be refused.", unit(step), figure.Share(r.Most)))
	}
	if !l.Disabled && !r.Unknown && r.Simulated && r.Most > r.Least {
		notes = append(notes, "The times of the calls within each second are not known: one figure is for calls spread evenly, the other for all at once.")
	}
	if most := busiest(points); float64(most)/step.Seconds() > r.Demand*1.05 {
		notes = append(notes, fmt.Sprintf("The busiest %s had %s/s.", unit(step), figure.Number(float64(most)/step.Seconds())))
	}
	if l.spread() {
		notes = append(notes, "How many keys the calls had is not known: each has a bucket of its own, so the more keys, the fewer are refused.")
	}
	if len(in.Seconds) > 0 && len(in.Minutes) > 0 && total(in.Minutes) > 0 {
		minutes := Of(Input{Limit: in.Limit, Minutes: in.Minutes, Period: in.Period})
		notes = append(notes, sentence(minutes.Effect))
	}
	if !l.Disabled && r.Most > 0 && !l.Shadow {
		notes = append(notes, "Refused callers may try again: that would add calls.")
	}
	return notes
}

func refused(points []Point) (n int64) {
	for i := range points {
		n += max(points[i].Refused, 0)
	}
	return n
}

func busiest(points []Point) (most int64) {
	for i := range points {
		most = max(most, points[i].calls())
	}
	return most
}

func unit(step time.Duration) string {
	if step == time.Second {
		return "second"
	}
	return "minute"
}

// traffic names the traffic of a length of time: the last 24 hours' traffic.
func traffic(d time.Duration) string {
	n, name := int(d/time.Second), "second"
	switch {
	case d >= time.Hour && d%time.Hour == 0, d > 3*time.Hour: // of a long time, about
		n, name = int(d.Round(time.Hour)/time.Hour), "hour"
	case d >= time.Minute && d%time.Minute == 0:
		n, name = int(d/time.Minute), "minute"
	}
	if n == 1 {
		return "the last " + name + "'s traffic"
	}
	return fmt.Sprintf("the last %d %ss' traffic", n, name)
}

func sentence(text string) string { return strings.ToUpper(text[:1]) + text[1:] + "." }
