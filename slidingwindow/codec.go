package slidingwindow

import (
	"strconv"
	"strings"
)

// The state in Redis is text, the oldest part first:
//
//	sw1 epoch=734561 seen=1763724915123456 1763724914000123:17 1763724915123456:3
//
// is a window in which 17 permits were admitted in one sub-interval, the last of them at 1763724914.000123 s since 1970, and three in a
// later one. seen is the time of the last decision. The epoch is a random number that a state keeps as long as it lives. Times rise, counts
// are positive. The resolution is not part of it: each reader has its own sub-intervals.
//
// Two fields are optional, in this order: back=B, by how many microseconds the clock was set back so far, and limit=L version=V, a limit
// that has a version.
const (
	maxText    = 1 << 16
	maxInteger = 1 << 53
)

// state is the stored state of a window.
type state struct {
	epoch, seen    int64
	back           int64
	limit, version int64 // 0 if there is none
	parts          []part
}

// parse decodes a state. It accepts the same texts as lua/apply.lua.
func parse(text string) (s state, ok bool) {
	if len(text) > maxText {
		return s, false
	}
	f := fields{rest: text, more: true}
	if f.word("sw1") != "" {
		return s, false
	}
	s.epoch = f.number("epoch=", 1, maxInteger)
	s.seen = f.number("seen=", -maxInteger, maxInteger)
	if f.has("back=") {
		s.back = f.number("back=", 1, maxInteger)
	}
	if f.has("limit=") {
		s.limit = f.number("limit=", 1, maxLimit)
		s.version = f.number("version=", 1, maxInteger)
	}
	if f.bad {
		return state{}, false
	}
	if s.parts, ok = parseParts(f.rest, f.more); !ok || len(s.parts) > maxParts+1 {
		return state{}, false
	}
	before := int64(-maxInteger - 1)
	for _, p := range s.parts {
		if p.last <= before || p.last > s.seen {
			return state{}, false
		}
		before = p.last
	}
	return s, true
}

// fields reads words one after the other. bad is set after a word that does not parse.
type fields struct {
	rest      string
	more, bad bool
}

// word reads a word and returns it without the prefix.
func (f *fields) word(prefix string) (rest string) {
	word, after, more := cut(f.rest)
	rest, ok := strings.CutPrefix(word, prefix)
	f.bad = f.bad || !ok || !f.more
	f.rest, f.more = after, more
	return rest
}

// has reports whether the next word has a prefix.
func (f *fields) has(prefix string) bool { return f.more && strings.HasPrefix(f.rest, prefix) }

// number reads a word of a prefix and an integer.
func (f *fields) number(prefix string, least, most int64) int64 {
	n, ok := integer(f.word(prefix), least, most)
	f.bad = f.bad || !ok
	return n
}

// parseParts parses words of the form last:count.
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

// integer parses a decimal number without a plus sign or underscores, as Lua does.
func integer(s string, least, most int64) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && s[0] != '+' && n >= least && n <= most
}

func (s *state) String() string {
	text := "sw1 epoch=" + decimal(s.epoch) + " seen=" + decimal(s.seen)
	if s.back > 0 {
		text += " back=" + decimal(s.back)
	}
	if s.version > 0 {
		text += " limit=" + decimal(s.limit) + " version=" + decimal(s.version)
	}
	return text + formatParts(s.parts)
}

// formatParts formats parts, each with a leading space.
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

func decimal(n int64) string { return strconv.FormatInt(n, 10) }
