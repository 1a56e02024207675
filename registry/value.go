package registry

import (
	"fmt"
	"strconv"
	"unicode/utf8"
)

// ShortValue returns a value for [RowError].Value: on one line, quoted where a reader could mistake it, and at most 40 bytes of it. nil is
// NULL.
func ShortValue(b []byte) string {
	const most = 40
	if b == nil {
		return "NULL"
	}
	plain := len(b) > 0 && len(b) <= most
	for _, c := range b[:min(len(b), most)] {
		plain = plain && c > ' ' && c < 0x7f
	}
	if plain {
		return string(b)
	}
	if len(b) <= most {
		return strconv.Quote(string(b))
	}
	cut := most
	for cut > most-utf8.UTFMax && !utf8.RuneStart(b[cut]) { // not within a character
		cut--
	}
	return fmt.Sprintf("%s… (%d bytes)", strconv.Quote(string(b[:cut])), len(b))
}
