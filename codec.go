package tokenbucket

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// The state as text: "tb1", then name=value in this order, one space between them, and the configuration:
//
//	tb1 epoch=8239 seq=12 tail=12 stored=4.5 next=1700000000000000 carry=0 debt=0 back=0: bursty now 5 5 1 0
//
// It is readable in redis-cli, and internal/redisbucket/lua/bucket.lua writes the same bytes. 17 digits represent every float64 exactly. The text
// is short because Redis may keep a million of them: debt is next − seen, and back is the returned permits and the numbers of their places,
// with those of the latest settlements (PermitBucket.returned).
// A bucket that was ever paused has " hold=<until>:<paused>" before the configuration.
const stateFormat = "tb1"

// appendText appends the state in its stored form.
func (b *PermitBucket) appendText(dst []byte) []byte {
	dst = strconv.AppendInt(append(dst, stateFormat+" epoch="...), b.Epoch, 10)
	dst = strconv.AppendInt(append(dst, " seq="...), b.Seq, 10)
	dst = strconv.AppendInt(append(dst, " tail="...), b.Tail, 10)
	dst = permit.AppendFloat(append(dst, " stored="...), b.StoredPermits)
	dst = strconv.AppendInt(append(dst, " next="...), b.NextFreeTicketMicros, 10)
	dst = permit.AppendFloat(append(dst, " carry="...), b.CarryMicros)
	dst = strconv.AppendInt(append(dst, " debt="...), b.NextFreeTicketMicros-b.SeenMicros, 10)
	dst = append(permit.AppendFloat(append(dst, " back="...), b.ReturnedPermits), ':')
	for i, tag := range b.returned {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, tag, 10)
	}
	if b.PausedMicros > 0 {
		dst = strconv.AppendInt(append(dst, " hold="...), b.HeldUntilMicros, 10)
		dst = strconv.AppendInt(append(dst, ':'), b.PausedMicros, 10)
	}
	return append(append(dst, ' '), b.setting.terms.Text...)
}

// UnmarshalText reads a bucket in its stored form, for tools that inspect a store. The form does not include the Name. Errors match
// [ErrCorruptState].
func (b *PermitBucket) UnmarshalText(text []byte) error { return b.unmarshal(string(text)) }

// unmarshal reads a stored state. A state that it does not fully understand is [ErrCorruptState], and the bucket stays unchanged. Empty
// text is a bucket that does not exist yet.
func (b *PermitBucket) unmarshal(text string) error {
	if err := b.parse(text, nil); err != nil {
		return fmt.Errorf("%w: %w", ErrCorruptState, err)
	}
	return nil
}

// corrupt returns an ErrCorruptState that names the place of the state.
func corrupt(where string, err error) error {
	return fmt.Errorf("%w: %s: %w", ErrCorruptState, where, err)
}

// corruptBucket returns an ErrCorruptState that names the bucket.
func corruptBucket(name string, err error) error {
	return corrupt(fmt.Sprintf("bucket %q", label(name)), err)
}

// parse reads a stored state. If the configuration equals the expected one, it is not parsed again. The error names the corrupt field.
func (b *PermitBucket) parse(text string, expected *permit.Terms) error {
	if text == "" {
		*b = PermitBucket{}
		return nil
	}
	if rest, ok := strings.CutPrefix(text[:min(len(text), 16)], "tb"); ok && !strings.HasPrefix(rest, "1 ") {
		if n, _, ok := strings.Cut(rest, " "); ok && isDigits(n) {
			return fmt.Errorf("format tb%s was written by another release of this library; this one reads %s", n, stateFormat)
		}
	}
	s := scanner{rest: text}
	var n PermitBucket
	s.account(&n)
	if expected != nil && s.err == nil && s.rest == expected.Text {
		n.adopt(settingOf(expected))
	} else {
		c := s.config()
		if s.rest != "" {
			s.fail("version", s.rest, "the end of the text")
		}
		if s.err != nil {
			return s.err
		}
		if err := c.validate(); err != nil {
			return err
		}
		n.adopt(newSetting(c))
	}
	n.Name = b.Name
	*b = n
	return nil
}

// account reads the fields before the configuration.
func (s *scanner) account(n *PermitBucket) {
	s.literal(stateFormat)
	n.Epoch = s.integer(" epoch=", 1)
	n.Seq = s.integer(" seq=", 1)
	if n.Seq > maxSeq {
		s.fail("seq", strconv.FormatInt(n.Seq, 10), "at most 2^52")
	}
	n.Tail = s.integer(" tail=", 0)
	n.StoredPermits = s.number(" stored=", 0, maxExact)
	n.NextFreeTicketMicros = s.integer(" next=", -maxExact)
	n.CarryMicros = s.number(" carry=", -maxExact*shortfall, 1)
	n.SeenMicros = n.NextFreeTicketMicros - s.integer(" debt=", -maxExact)
	if n.SeenMicros < -maxExact || n.SeenMicros > maxExact {
		s.fail("debt", strconv.FormatInt(n.NextFreeTicketMicros-n.SeenMicros, 10), "a time seen from -2^53 to 2^53 µs")
	}
	returned, list, ok := strings.Cut(s.field(" back="), ":")
	n.ReturnedPermits = s.parse("back", returned, 0, maxExact)
	if !ok || strings.HasSuffix(list, ",") {
		s.fail("back", list, "a number and a list of places")
	}
	n.returned = s.places(list)
	if strings.HasPrefix(s.rest, " hold=") {
		until, paused, _ := strings.Cut(s.field(" hold="), ":")
		n.HeldUntilMicros = s.whole("hold", until, -maxExact)
		n.PausedMicros = s.whole("hold", paused, 1)
	}
	s.literal(" ")
}

// places reads the numbers of the places whose permits were returned.
func (s *scanner) places(list string) (returned []int64) {
	for whole := list; s.err == nil && list != ""; {
		var tag string
		tag, list, _ = strings.Cut(list, ",")
		v, err := strconv.ParseInt(tag, 10, 64)
		if err != nil || !isDigits(tag) || tag[0] == '0' || v > maxSeq || len(returned) == maxReturned {
			s.fail("back", whole, fmt.Sprintf("at most %d places, whole numbers from 1 to 2^52", maxReturned))
		}
		returned = append(returned, v)
	}
	return returned
}

func isDigits(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// scanner reads the state's fields and keeps the first error.
type scanner struct {
	rest string
	err  error
}

func (s *scanner) fail(field, value, want string) {
	if s.err == nil {
		if len(value) > 40 {
			value = value[:40] + "…"
		}
		s.err = wanted(cmp.Or(strings.Trim(field, " ="), "configuration"), strconv.Quote(value), want)
	}
}

func (s *scanner) literal(l string) {
	rest, ok := strings.CutPrefix(s.rest, l)
	if !ok {
		s.fail("text", s.rest, strconv.Quote(l))
	}
	s.rest = rest
}

// config reads a configuration. It may be out of range.
func (s *scanner) config() (c config) {
	switch kind := s.field(""); kind {
	case "warmup":
		c.Kind = warmingUp
	case "bursty":
	default:
		s.fail("kind", kind, "bursty or warmup")
	}
	switch pay := s.field(" "); pay {
	case "later":
		c.Payment = PayLater
	case "now":
	default:
		s.fail("payment", pay, "now or later")
	}
	c.Rate = s.number(" ", 0, maxExact)
	if c.Kind == warmingUp {
		c.WarmupMicros = s.integer(" ", 0)
		c.ColdFactor = s.number(" ", 0, maxExact)
	} else {
		c.Size = s.number(" ", 0, maxExact)
		c.Floor = s.number(" ", 0, 1)
	}
	c.Version = s.integer(" ", 0)
	return c
}

func (s *scanner) field(name string) string {
	s.literal(name)
	n := strings.IndexByte(s.rest, ' ')
	if n < 0 {
		n = len(s.rest)
	}
	value := s.rest[:n]
	s.rest = s.rest[n:]
	return value
}

// number accepts the same texts of these characters as Lua's tonumber, so that both languages reject the same states.
func (s *scanner) number(name string, lo, hi float64) float64 {
	return s.parse(name, s.field(name), lo, hi)
}

func (s *scanner) parse(name, value string, lo, hi float64) float64 {
	f, err := strconv.ParseFloat(value, 64)
	if err != nil || !isNumeric(value) || !(f >= lo && f <= hi) {
		s.fail(name, value, fmt.Sprintf("a number from %g to %g", lo, hi))
		return 0
	}
	return f
}

func isNumeric(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && c != '.' && c != 'e' && c != '+' && c != '-' {
			return false
		}
	}
	return true
}

func (s *scanner) integer(name string, lo float64) int64 { return s.whole(name, s.field(name), lo) }

func (s *scanner) whole(name, value string, lo float64) int64 {
	f := s.parse(name, value, lo, maxExact)
	if f != math.Trunc(f) {
		s.fail(name, value, "a whole number")
	}
	return int64(f)
}
