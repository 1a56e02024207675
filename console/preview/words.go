package preview

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// words are the limit for a person: 5/s, at most 5 at once, waits up to 500 ms.
func (l *Limit) words() string {
	var parts []string
	switch {
	case l.Off:
		return "off: every call passes"
	case l.NoRate:
		if !l.windowed() && l.Concurrent <= 0 {
			return "no limit: every call passes"
		}
	case l.Rate <= 0:
		return l.shadowed("nothing passes")
	case l.Quota:
		parts = append(parts, "at most "+figure(l.Rate)+" in any second")
	case l.Warmup > 0:
		parts = append(parts, figure(l.Rate)+"/s", "warms up from "+figure(l.Rate/l.cold())+"/s in "+duration(l.Warmup))
	default:
		parts = append(parts, figure(l.Rate)+"/s", "at most "+figure(max(l.size(), 1))+" at once")
	}
	if l.spread() {
		parts[0] += " for each key"
	}
	if l.windowed() {
		parts = append(parts, fmt.Sprintf("at most %d in any %s", l.WindowLimit, duration(l.Window)))
	}
	if l.Concurrent > 0 {
		parts = append(parts, fmt.Sprintf("at most %d under way at the same time", l.Concurrent))
	}
	if l.MaxWait > 0 {
		parts = append(parts, "waits up to "+duration(l.MaxWait))
	} else {
		parts = append(parts, "does not wait")
	}
	return l.shadowed(strings.Join(parts, ", "))
}

func (l *Limit) shadowed(text string) string {
	if l.Shadow {
		return "in shadow: " + text
	}
	return text
}

// effect says what becomes of the traffic.
func effect(l *Limit, r *Result, name string) string {
	if r.Calls == 0 {
		return "there was no call in " + name
	}
	demand := name + " of " + figure(r.Demand) + "/s"
	would := "would be refused"
	if l.Shadow {
		would = "would be refused if it were not in shadow"
	}
	least, most := share(r.Least), share(r.Most)
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

// notes are what the figures cannot show.
func notes(in *Input, r *Result, points []Point, step time.Duration) (notes []string) {
	l := &in.Limit
	if r.Calls == 0 {
		return nil
	}
	if now := float64(refused(points)) / float64(r.Calls); in.Before != nil && !in.Before.Off {
		notes = append(notes, fmt.Sprintf("With the limit before, %s, %s of it was refused.", in.Before.words(), share(now)))
	}
	if !l.Off && !r.Simulated && r.Most > r.Least {
		notes = append(notes, fmt.Sprintf("What came within each %s is not known: if it came in bursts, up to %s would be refused.", unit(step), share(r.Most)))
	}
	if !l.Off && r.Simulated && r.Most > r.Least {
		notes = append(notes, "What came within each second is not known: the one figure is for calls spread evenly, the other for all at once.")
	}
	if most := busiest(points); float64(most)/step.Seconds() > r.Demand*1.05 {
		notes = append(notes, fmt.Sprintf("The busiest %s had %s/s.", unit(step), figure(float64(most)/step.Seconds())))
	}
	if l.spread() {
		notes = append(notes, "How many keys the calls had is not known: each has a bucket of its own, so the more keys, the fewer are refused.")
	}
	if l.Concurrent > 0 && !l.Off {
		notes = append(notes, "How many calls were under way at the same time is not known: that bound may refuse more.")
	}
	if len(in.Seconds) > 0 && len(in.Minutes) > 0 && total(in.Minutes) > 0 {
		minutes := Of(Input{Limit: in.Limit, Minutes: in.Minutes, Period: in.Period})
		notes = append(notes, sentence(minutes.Effect))
	}
	if !l.Off && r.Most > 0 && !l.Shadow {
		notes = append(notes, "Callers that are refused may come again: then there are more calls than there were.")
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

// share is a part of all in percent. What is not nothing is never told as nothing, nor what is not all as all.
func share(f float64) string {
	percent := math.Round(f * 100)
	switch {
	case f > 0 && percent == 0:
		return "less than 1 %"
	case f < 1 && percent == 100:
		return "more than 99 %"
	}
	return strconv.Itoa(int(percent)) + " %"
}

// figure is a number with three digits, or more if it is whole.
func figure(f float64) string {
	if f == math.Trunc(f) && math.Abs(f) < 1e15 {
		return strconv.FormatFloat(f, 'f', -1, 64)
	}
	if f >= 100 {
		return strconv.FormatFloat(math.Round(f), 'f', -1, 64)
	}
	text := strconv.FormatFloat(f, 'g', 3, 64)
	if !strings.Contains(text, "e") {
		return text
	}
	return strconv.FormatFloat(f, 'f', -1, 64)
}

// duration is a time in its largest unit: 500 ms, 1.5 s, 2 min.
func duration(d time.Duration) string {
	for _, u := range []struct {
		size time.Duration
		name string
	}{{24 * time.Hour, " d"}, {time.Hour, " h"}, {time.Minute, " min"}} {
		if d >= u.size && d%u.size == 0 {
			return strconv.Itoa(int(d/u.size)) + u.name
		}
	}
	if d >= time.Second {
		return figure(d.Seconds()) + " s"
	}
	return figure(float64(d)/float64(time.Millisecond)) + " ms"
}

// traffic is what that of a length of time is called: the last 24 hours' traffic.
func traffic(d time.Duration) string {
	n, name := int(d/time.Second), "second"
	switch {
	case d >= time.Hour && d%time.Hour == 0:
		n, name = int(d/time.Hour), "hour"
	case d >= time.Minute && d%time.Minute == 0:
		n, name = int(d/time.Minute), "minute"
	}
	if n == 1 {
		return "the last " + name + "'s traffic"
	}
	return fmt.Sprintf("the last %d %ss' traffic", n, name)
}

func sentence(text string) string { return strings.ToUpper(text[:1]) + text[1:] + "." }
