package registry

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// String returns the limit in words: 5/s, saves up 5, at most 3 at once, waits up to 500 ms.
func (c *Limit) String() string {
	var parts []string
	switch {
	case c.Disabled:
		return "off: every call passes"
	case c.NoRate && !c.bounded():
		return "no limit: every call passes"
	case c.NoRate:
	case c.Rate <= 0:
		return c.shadowed("nothing passes")
	case c.Quota && c.Jitter != 0:
		parts = append(parts, "at most "+number(c.Rate)+" in any second, jitter "+length(c.Jitter))
	case c.Quota:
		parts = append(parts, "at most "+number(c.Rate)+" in any second")
	case c.Warmup > 0:
		parts = append(parts, number(c.Rate)+"/s", "warms up from "+number(rounded(c.Rate/c.coldFactor()))+"/s in "+length(c.Warmup))
	default:
		parts = append(parts, number(c.Rate)+"/s", "saves up "+number(max(c.size(), 1)))
	}
	if c.PerKey && !c.NoRate {
		parts[0] += " for each key"
	}
	if text := c.boundsText(); text != "" {
		parts = append(parts, text)
	}
	switch {
	case c.NoRate:
	case c.MaxWait > 0:
		parts = append(parts, "waits up to "+length(c.MaxWait))
	default:
		parts = append(parts, "does not wait")
	}
	if c.Penalty != PenaltyDefault {
		parts = append(parts, "held back by "+c.Penalty.String())
	}
	if c.Priority != tokenbucket.Normal {
		parts = append(parts, c.Priority.String()+" priority")
	}
	return c.shadowed(strings.Join(parts, ", "))
}

func (c *Limit) shadowed(text string) string {
	if c.Shadow {
		return "in shadow: " + text
	}
	return text
}

// boundsText returns the window and the concurrency in words; empty if there are none.
func (c *Limit) boundsText() string {
	var parts []string
	if c.Window > 0 && c.WindowLimit > 0 {
		parts = append(parts, fmt.Sprintf("at most %s in any %s", number(float64(c.WindowLimit)), length(c.Window)))
	}
	if c.Concurrent > 0 {
		text := fmt.Sprintf("at most %s at once", number(float64(c.Concurrent)))
		if c.ConcurrentWait > 0 {
			text += " (waits up to " + length(c.ConcurrentWait) + ")"
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}

// size returns how many permits the bucket of a row without a warm-up saves up. That of a row with a concurrency saves up at least one: else
// each call would have its place for an interval of the rate before it begins, although no call has begun in the interval before. Permits
// fall due one at a time all the same, an interval apart, so the bound is that of a bucket that saves up nothing.
func (c *Limit) size() float64 {
	switch {
	case c.Quota:
		return 1
	case c.Burst != nil && c.Concurrent > 0:
		return max(*c.Burst, 1)
	case c.Burst != nil:
		return *c.Burst
	}
	return max(c.Rate, 1)
}

// coldFactor returns ColdFactor, or its default.
func (c *Limit) coldFactor() float64 {
	if c.ColdFactor > 1 {
		return c.ColdFactor
	}
	return 3
}

// length returns a duration in words, in full: 500 ms, 90 s, 5 min, 1 d.
func length(d time.Duration) string {
	for _, u := range []struct {
		of   time.Duration
		name string
	}{{24 * time.Hour, " d"}, {time.Hour, " h"}, {time.Minute, " min"}} {
		if d >= u.of && d%u.of == 0 {
			return number(float64(d/u.of)) + u.name
		}
	}
	if d >= time.Second {
		return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + " s"
	}
	return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', -1, 64) + " ms"
}

// rounded returns f with three significant digits.
func rounded(f float64) float64 {
	f, _ = strconv.ParseFloat(strconv.FormatFloat(f, 'e', 2, 64), 64)
	return f
}
