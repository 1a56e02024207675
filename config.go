package tokenbucket

import (
	"fmt"
	"math"
	"strconv"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

const (
	// maxExact is the largest time, version or number of permits.
	maxExact = permit.MaxExact

	microsPerSecond = 1e6

	// minRate and maxInterval leave room for a few permits between now and maxExact: the slowest is one permit in 32 years.
	minRate     = 1e-9
	maxInterval = 1e15
)

// kind is the kind of a limiter and its bucket. A bucket keeps its kind until a reset or the end of its state.
type kind uint8

// The kinds of bucket.
const (
	bursty kind = iota
	warmingUp
)

// String returns the name that the state uses.
func (k kind) String() string {
	if k == warmingUp {
		return "warmup"
	}
	return "bursty"
}

// Payment sets which caller waits for the permits of a request.
type Payment uint8

const (
	// PayNow makes a caller wait until its own permits are due. In any window of T seconds at most max(max permits, largest request) + rate
	// × (T + 1 µs) permits fall due (warm-up: put 0 for max permits).
	PayNow Payment = iota
	// PayLater is Guava's rule: a caller waits for the debt that it finds, and the next caller waits for its cost. In any window at most
	// max permits + largest request + rate × (T + 1 µs) permits fall due (warm-up: put 0 for max permits).
	PayLater
)

// String returns PayNow or PayLater.
func (p Payment) String() string {
	if p == PayLater {
		return "PayLater"
	}
	return "PayNow"
}

// word returns the name of p in a stored state: now or later.
func (p Payment) word() string {
	if p == PayLater {
		return "later"
	}
	return "now"
}

// config is the versioned part of a bucket's configuration, kept in its state so that a fleet agrees on it.
type config struct {
	Kind    kind
	Payment Payment
	// Rate is in permits per second, 1e-9 to 2^53.
	Rate float64
	// Size is the bucket size as configured (bursty). What counts is max(Floor, Size): SetRate scales Size, and
	// keeping it unclamped lets 5/s → 0.1/s → 5/s end where it began.
	Size float64
	// Floor is 1, or 0 when the user chose a size below 1 (bursty).
	Floor float64
	// WarmupMicros is the warm-up period in microseconds (warm-up; 0 for bursty).
	WarmupMicros int64
	// ColdFactor is the cold interval, at most 1e15 µs, divided by the interval (warm-up; 0 for bursty).
	ColdFactor float64
	// Version: the newest configuration wins for the whole fleet; 0 means unversioned.
	Version int64
}

// sameContent reports whether two configurations differ in nothing but their versions.
func (c *config) sameContent(o *config) bool {
	return c.Rate == o.Rate && c.Size == o.Size && c.Floor == o.Floor && c.WarmupMicros == o.WarmupMicros && c.ColdFactor == o.ColdFactor &&
		c.Kind == o.Kind && c.Payment == o.Payment
}

// setMaxPermits sets the size of a bursty bucket. Less than one permit is what the user chose, so nothing rounds it up.
func (c *config) setMaxPermits(n float64) {
	c.Size, c.Floor = unsigned(n), 1
	if n < 1 {
		c.Floor = 0
	}
}

// unsigned replaces negative zero by zero, because Lua and Go write it differently.
func unsigned(f float64) float64 {
	if f == 0 {
		return 0
	}
	return f
}

// curve holds the values that the arithmetic derives from a config.
type curve struct {
	interval  float64 // microseconds between two permits
	max       float64 // the most permits that can be stored
	threshold float64 // warm-up: stored permits above this are granted more slowly
	slope     float64 // warm-up: microseconds that each permit above the threshold adds to the interval
}

func (c *config) curve() curve {
	if c.Kind == warmingUp {
		return warmupCurve(c)
	}
	return burstyCurve(c)
}

// coolDown returns the time, in microseconds, in which an idle bucket stores one permit.
func (c *config) coolDown(interval, most float64) float64 {
	if c.Kind == warmingUp {
		return float64(c.WarmupMicros) / most
	}
	return interval
}

// validate returns an error that names the first field out of range, see wanted. internal/redisbucket/lua/bucket.lua repeats it for the
// configurations that it reads from Redis.
func (c *config) validate() error {
	k := c.curve()
	switch {
	case !(c.Rate >= minRate && c.Rate <= maxExact):
		return wanted("permits per second", c.Rate, "a number from 1e-9 to 2^53")
	case !(c.Size >= 0 && c.Size <= maxExact):
		return wanted("max permits", c.Size, "a finite number from 0 to 2^53")
	case c.Floor != 0 && c.Floor != 1:
		return wanted("floor", c.Floor, "0 or 1")
	case c.Version < 0 || c.Version > maxExact:
		return wanted("version", c.Version, "0 (unversioned) to 2^53")
	case c.Kind == bursty:
		if c.WarmupMicros != 0 || c.ColdFactor != 0 {
			return wanted("warm-up of a bursty bucket", c.WarmupMicros, "0")
		}
		return nil
	case c.WarmupMicros < 1 || c.WarmupMicros > maxExact:
		return wanted("warm-up period", fmt.Sprint(c.WarmupMicros, " µs"), "1 µs to 2^53 µs")
	case !(c.ColdFactor > 1 && c.ColdFactor <= maxExact && float64(c.ColdFactor*k.interval) <= maxInterval):
		return wanted("cold factor", c.ColdFactor, "a number above 1 whose cold interval is at most 1e15 µs")
	case !(k.max > 0 && k.max <= maxExact && k.max > k.threshold && k.slope <= math.MaxFloat64):
		return wanted("warm-up period", fmt.Sprint(c.WarmupMicros, " µs"), "one that fits the rate and the cold factor")
	case c.Size != 0 || c.Floor != 0:
		return wanted("max permits of a warm-up bucket", c.Size, "none: they follow from the warm-up period")
	}
	return nil
}

// setting is a configuration with its derived values. It is immutable, so limiters and buckets share it.
type setting struct {
	config
	curve
	terms permit.Terms // the same configuration for the engine and the stores
}

func newSetting(c config) *setting {
	s := &setting{config: c, curve: c.curve()}
	s.terms = permit.Terms{
		Arithmetic: s, Text: string(c.appendText(nil)), Version: c.Version, Interval: s.interval, Max: s.max,
		WarmsUp: c.Kind == warmingUp, PayLater: c.Payment == PayLater,
	}
	return s
}

// settingOf returns the setting of terms.
func settingOf(t *permit.Terms) *setting { return t.Arithmetic.(*setting) }

// After implements [permit.Arithmetic].
func (s *setting) After(b permit.Balance, n int64) (permit.Balance, bool) {
	return s.after(s.Kind, b, n)
}

// Resync implements [permit.Arithmetic].
func (s *setting) Resync(b permit.Balance, now int64) permit.Balance {
	b, _ = earn(b, now, s.coolDown(s.interval, s.max), s.max)
	return b
}

// appendText appends the canonical form of the configuration, which is its part of the stored state: kind, payment,
// rate, then size and floor or warm-up period and cold factor, and the version.
func (c *config) appendText(dst []byte) []byte {
	dst = append(append(dst, c.Kind.String()...), ' ')
	dst = append(append(dst, c.Payment.word()...), ' ')
	dst = append(permit.AppendFloat(dst, c.Rate), ' ')
	if c.Kind == warmingUp {
		dst = append(strconv.AppendInt(dst, c.WarmupMicros, 10), ' ')
		dst = append(permit.AppendFloat(dst, c.ColdFactor), ' ')
	} else {
		dst = append(permit.AppendFloat(dst, c.Size), ' ')
		dst = append(permit.AppendFloat(dst, c.Floor), ' ')
	}
	return strconv.AppendInt(dst, c.Version, 10)
}

// contentHash orders configurations of equal version the same way on every node. It is a polynomial hash modulo a prime so small that Lua's
// float64 computes it exactly, too.
func (c *config) contentHash() int64 {
	var h int64
	for _, char := range c.appendText(nil) {
		h = (h*131 + int64(char)) % (1<<31 - 1)
	}
	return h
}
