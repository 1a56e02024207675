package console

import (
	"fmt"
	"math"
	"strconv"
	"time"
)

const (
	// overdue is how long an instance may be silent before it is named: it has then missed a beat, which come 2.2 s apart at most.
	// With a console's own beat of 2 s, somebody who looks knows within 5 s that an instance was killed.
	overdue = 2900 * time.Millisecond
	// mostNamed bounds a list of what is wrong.
	mostNamed = 5
)

// problems are what is wrong, in words.
func (v *view) problems() []string {
	all := []string{}
	if v.sw != nil && v.sw.Off {
		text := "The switch is off: every call passes"
		if v.sw.Origin != "" {
			text += " (" + v.sw.Origin + ")"
		}
		all = append(all, text+".")
	}
	living, named := 0, 0
	for i := range v.instances {
		one := &v.instances[i]
		if !one.Silent(v.at) {
			living++
		}
		text := one.trouble(v.at)
		if text == "" {
			continue
		}
		if named++; named <= mostNamed {
			all = append(all, fmt.Sprintf("Instance %s: %s.", one.title(), text))
		}
	}
	if named > mostNamed {
		all = append(all, fmt.Sprintf("%d further instances have problems: see Health.", named-mostNamed))
	}
	switch {
	case len(v.instances) == 0:
		all = append(all, "No instance has reported yet. Gateways report every two seconds to the Redis that they share.")
	case living == 0:
		all = append(all, "No instance reports any more: figures are those of the last ten minutes.")
	}
	if n := len(v.rejected); n > 0 {
		all = append(all, fmt.Sprintf("%s rejected: see Health.", count(n, "row is", "rows are")))
	}
	if n := len(v.skipped); n > 0 {
		all = append(all, fmt.Sprintf("%s in Redis cannot be read: see Health.", count(n, "entry", "entries")))
	}
	return all
}

// trouble is what is wrong with an instance; empty: nothing.
func (i *instance) trouble(now time.Time) string {
	switch {
	case i.Ended:
		return ""
	case now.Sub(i.Beat) > overdue:
		return "nothing heard for " + span(now.Sub(i.Beat).Truncate(time.Second))
	case i.Store.Down:
		text := "the store does not answer"
		if !i.Store.Since.IsZero() {
			text += " since " + span(now.Sub(i.Store.Since).Truncate(time.Second))
		}
		if i.Store.Policy != "" {
			text += ", calls get what the policy says (" + i.Store.Policy + ")"
		}
		return text
	case i.Loads.Err != "":
		return fmt.Sprintf("its limits are %s old, since loads fail: %s", span(now.Sub(i.Loads.Last).Truncate(time.Second)), i.Loads.Err)
	case i.Switch.Err != "":
		return "the switch cannot be read: " + i.Switch.Err
	case i.MoreLimits > 0 || i.Crowded:
		return "it does not tell of all its limits: see Health"
	}
	return ""
}

// span is a duration as people say it: 4 s, 3 min, 2 h, 5 d.
func span(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < 10*time.Second && d != d.Truncate(time.Second):
		return number(d.Seconds()) + " s"
	case d < 2*time.Minute:
		return strconv.Itoa(int(d.Seconds())) + " s"
	case d < 2*time.Hour:
		return strconv.Itoa(int(d.Minutes())) + " min"
	case d < 48*time.Hour:
		return strconv.Itoa(int(d.Hours())) + " h"
	}
	return strconv.Itoa(int(d.Hours()/24)) + " d"
}

// exact is a duration of which nothing may be left out: 90 s, 5 min, 1 d.
func exact(d time.Duration) string {
	for _, u := range []struct {
		of   time.Duration
		name string
	}{{24 * time.Hour, " d"}, {time.Hour, " h"}, {time.Minute, " min"}} {
		if d >= u.of && d%u.of == 0 {
			return strconv.FormatInt(int64(d/u.of), 10) + u.name
		}
	}
	return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + " s"
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}

// number has three digits that mean something, and no exponent where people read it.
func number(v float64) string {
	return strconv.FormatFloat(round(v), 'f', -1, 64)
}

// round keeps three digits; whole numbers stay whole.
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

// must is for what only a mistake in this package can make fail.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
