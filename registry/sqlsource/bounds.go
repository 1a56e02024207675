package sqlsource

import (
	"math"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// maxWindow is the longest window in seconds, 90 days.
const maxWindow = 90 * 24 * 60 * 60

// bounds reads what a row names besides its rate. Without a rate (NULL) that limits alone. want is empty if all is well.
func (p *parser) bounds(r *raw, l *registry.Limit) (field string, value []byte, want string) {
	c := &p.columns
	if r.window != nil {
		seconds, ok := number(r.window)
		millis := math.Round(seconds * 1000)
		if !ok || seconds < 0 || seconds > maxWindow || math.Abs(seconds*1000-millis) > 1e-6 {
			return c.Window, r.window, "seconds to the millisecond, 0.001 to 7776000 (90 days), or NULL"
		}
		l.Window = time.Duration(millis) * time.Millisecond
	}
	for _, n := range []struct {
		to     *int
		column string
		value  []byte
	}{{&l.WindowLimit, c.WindowLimit, r.windowLimit}, {&l.Concurrent, c.Concurrent, r.concurrent}} {
		if n.value == nil {
			continue
		}
		calls, err := strconv.ParseInt(string(n.value), 10, 32)
		if err != nil || calls < 0 {
			return n.column, n.value, "a whole number of calls, 1 to 2147483647, or NULL"
		}
		*n.to = int(calls)
	}
	switch {
	case l.Window != 0 && l.WindowLimit == 0:
		return orElse(c.WindowLimit, "window limit"), r.windowLimit, "1 to 2147483647: the row has a window"
	case l.Window == 0 && l.WindowLimit != 0:
		return orElse(c.Window, "window"), r.window, "seconds: the row has a limit for a window"
	case r.rate != nil || l.Window == 0 && l.Concurrent == 0:
		return "", nil, ""
	}
	l.NoRate = true
	for _, n := range []struct {
		column string
		value  []byte
	}{{c.Burst, r.burst}, {c.WarmupMillis, r.warmup}, {c.ColdFactor, r.cold}} {
		if n.value != nil {
			return n.column, n.value, "NULL: the row has no rate"
		}
	}
	if flag(r.quota) == yes {
		return c.Quota, r.quota, "0 or NULL: the row has no rate"
	}
	return "", nil, ""
}

func orElse(column, other string) string {
	if column == "" {
		return other
	}
	return column
}
