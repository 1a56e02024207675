// Package figure formats numbers, durations, shares and names for people: on pages, in messages and on terminals.
//
// The console's pages format the same things in a browser. Both must agree with testdata/figures.json: one test checks this
// package, another one console/assets/js/format.js.
package figure

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	least  = 1e-9 // smaller numbers are shown as 0
	spoken = 1e15 // larger numbers are shown as a power of ten
)

// Number returns f with three significant digits, or all digits of its whole part: 0.05, 4.9, 1,234, 10,000,000,000. It uses no
// exponent below 10^15. Ties are rounded up, as JavaScript does.
func Number(f float64) string {
	size := math.Abs(f)
	switch {
	case math.IsNaN(f) || math.IsInf(f, 0):
		return "–"
	case size < least:
		return "0"
	case size >= spoken:
		digits, power, _ := strings.Cut(strconv.FormatFloat(f, 'e', 2, 64), "e+")
		return trimmed(digits) + " × 10^" + power
	case size >= 100:
		return grouped(strconv.FormatFloat(math.Round(f), 'f', 0, 64))
	}
	return strconv.FormatFloat(rounded(f), 'f', -1, 64)
}

// rounded returns f with three significant digits.
func rounded(f float64) float64 {
	const digits, more = len("1.23"), 40
	if text := strconv.FormatFloat(math.Abs(f), 'e', more, 64); strings.HasPrefix(text[digits:], "5"+strings.Repeat("0", more-3)) { // strconv would round to even
		f = math.Nextafter(f, math.Copysign(math.Inf(1), f))
	}
	f, _ = strconv.ParseFloat(strconv.FormatFloat(f, 'e', 2, 64), 64)
	return f
}

// Count returns a whole number: 10,000.
func Count[T int | int32 | int64](n T) string { return grouped(strconv.FormatInt(int64(n), 10)) }

// Decimal removes the zeros at the end of a decimal number: 50.000000 becomes 50. Other texts are returned as they are.
func Decimal(text string) string {
	whole, fraction, ok := strings.Cut(text, ".")
	if !ok || whole == "" || strings.Trim(strings.TrimPrefix(whole, "-")+fraction, "0123456789") != "" {
		return text
	}
	return trimmed(text)
}

// trimmed removes the zeros at the end of a decimal fraction.
func trimmed(text string) string {
	if !strings.Contains(text, ".") {
		return text
	}
	return strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
}

// grouped separates thousands.
func grouped(digits string) string {
	sign := ""
	if strings.HasPrefix(digits, "-") {
		sign, digits = "-", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return sign + digits
}

// Span returns d roughly, in its largest unit: 497 ms, 2.5 s, 90 s, 3 min, 5 h, 12 d.
func Span(d time.Duration) string {
	ms := float64(d) / float64(time.Millisecond)
	in := func(unit float64, name string) string { return Number(math.Round(ms/unit)) + name }
	switch {
	case ms <= 0:
		return "0 s"
	case ms < 999.5:
		return Number(ms) + " ms"
	case ms < 10_000:
		return Number(math.Round(ms/100)/10) + " s"
	case ms < 120_000:
		return in(1000, " s")
	case ms < 120*60_000:
		return in(60_000, " min")
	case ms < 48*3_600_000:
		return in(3_600_000, " h")
	}
	return in(24*3_600_000, " d")
}

// Exact returns d without rounding: 500 ms, 90 s, 5 min, 1 d.
func Exact(d time.Duration) string {
	for _, u := range []struct {
		of   time.Duration
		name string
	}{{24 * time.Hour, " d"}, {time.Hour, " h"}, {time.Minute, " min"}} {
		if d >= u.of && d%u.of == 0 {
			return Count(int64(d/u.of)) + u.name
		}
	}
	if d >= time.Second {
		return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + " s"
	}
	return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', -1, 64) + " ms"
}

// Share returns a share from 0 to 1 in percent. It returns 0 % only for 0, and 100 % only for 1.
func Share(f float64) string {
	percent := math.Round(f * 100)
	switch {
	case f > 0 && percent == 0:
		return "less than 1 %"
	case f < 1 && percent == 100:
		return "more than 99 %"
	}
	return strconv.Itoa(int(percent)) + " %"
}

// Clock returns a time in UTC, for pages without scripts, where the reader's zone is not known.
func Clock(t time.Time) string { return t.UTC().Format("2 Jan 15:04:05 UTC") }

// Name returns a name that is safe in a line of text or on a terminal, as [Line] does. It also escapes blanks that a page would not show: at an end,
// after another blank, and those that are not U+0020.
func Name(s string) string {
	return escape(s, func(i int, r rune) bool {
		return hidden(r) || r == ' ' && (i == 0 || i == len(s)-1 || s[i-1] == ' ') || r != ' ' && unicode.Is(unicode.Zs, r)
	})
}

// Line returns a line of text that is safe on a terminal: characters that move the cursor, end the line or change the direction of the text are
// escaped as in Go. All others are kept, quotes and blanks included.
func Line(s string) string {
	return escape(s, func(_ int, r rune) bool { return hidden(r) })
}

// escape escapes bytes that are not UTF-8, and the characters for which hides returns true; it gets their index.
func escape(s string, hides func(i int, r rune) bool) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case !hides(i, r):
			b.WriteRune(r)
		case r == ' ':
			b.WriteString(`\x20`)
		default:
			quoted := strconv.QuoteToASCII(string(r))
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		i += size
	}
	return b.String()
}

func hidden(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) }
