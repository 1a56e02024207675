package slidingwindow

import (
	"strconv"
	"strings"
)

// The state in Redis is text, the oldest part first:
//
//	sw1 epoch=734561 seen=1763724915123456 1763724914000123:17 1763724915123456:3
//
// is a window in which 17 permits were admitted in one sub-interval, the last of them at 1763724914.000123 s since 1970, and
// three in a later one. seen is the time of the last decision. The epoch is a random number that a state keeps as long as it
// lives. Times rise, counts are positive. The resolution is not part of it: each reader finds its own sub-intervals.
const (
	maxText    = 1 << 16
	maxInteger = 1 << 53
)

// parse reads a state. It accepts what lua/apply.lua does.
func parse(text string) (epoch, seen int64, parts []part, ok bool) {
	if len(text) > maxText {
		return 0, 0, nil, false
	}
	head, text, _ := cut(text)
	e, rest, _ := cut(text)
	at, rest, more := cut(rest)
	e, ok1 := strings.CutPrefix(e, "epoch=")
	at, ok2 := strings.CutPrefix(at, "seen=")
	epoch, ok3 := integer(e, 1, maxInteger)
	seen, ok4 := integer(at, -maxInteger, maxInteger)
	if head != "sw1" || !ok1 || !ok2 || !ok3 || !ok4 {
		return 0, 0, nil, false
	}
	if parts, ok = parseParts(rest, more); !ok {
		return 0, 0, nil, false
	}
	before := int64(-maxInteger - 1)
	for _, p := range parts {
		if p.last <= before || p.last > seen {
			return 0, 0, nil, false
		}
		before = p.last
	}
	return epoch, seen, parts, len(parts) <= maxParts+1
}

func parseParts(rest string, more bool) (parts []part, ok bool) {
	if more {
		parts = make([]part, 0, strings.Count(rest, " ")+1)
	}
	for more {
		var word string
		word, rest, more = cut(rest)
		last, count, found := strings.Cut(word, ":")
		l, ok1 := integer(last, -maxInteger, maxInteger)
		c, ok2 := integer(count, 1, maxCount)
		if !found || !ok1 || !ok2 {
			return nil, false
		}
		parts = append(parts, part{l, c})
	}
	return parts, true
}

func cut(s string) (word, rest string, more bool) { return strings.Cut(s, " ") }

// integer reads a decimal number; Lua knows no plus sign and no underscores either.
func integer(s string, least, most int64) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && s[0] != '+' && n >= least && n <= most
}

func format(epoch, seen int64, parts []part) string {
	return "sw1 epoch=" + strconv.FormatInt(epoch, 10) + " seen=" + strconv.FormatInt(seen, 10) + formatParts(parts)
}

func formatParts(parts []part) string {
	b := make([]byte, 0, 24*len(parts))
	for _, p := range parts {
		b = append(b, ' ')
		b = strconv.AppendInt(b, p.last, 10)
		b = append(b, ':')
		b = strconv.AppendInt(b, p.count, 10)
	}
	return string(b)
}
