package gateway

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"unicode/utf8"

	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// KeyError tells which part of a key is none.
type KeyError struct {
	// Setting names where the key is from, and Key is all of it.
	Setting, Key string
	// Part is what is wrong, Want what would be right, and Nearest what was probably meant; "": nothing is near.
	Part, Want, Nearest string
}

func (e *KeyError) Error() string {
	text := fmt.Sprintf("%s %.200q: ", e.Setting, e.Key)
	if e.Part != e.Key {
		text += fmt.Sprintf("part %.200q: ", e.Part)
	}
	text += "want " + e.Want
	if e.Nearest != "" {
		text += ": did you mean " + e.Nearest + "?"
	}
	return text
}

const (
	wantKey = "path, client or header:NAME, or several of them with + between"
	// mostParts bounds the parts of a key.
	mostParts = 8
	// mostOfPart is how much of a part of a key stands in it. It is more than a row's name can have.
	mostOfPart = 1024
)

// keyMaker makes the keys of requests.
type keyMaker struct {
	parts []httplimit.KeyFunc
	path  int // which of them is the path, for which rows are looked up; -1: none
}

// joined tells whether keys have several parts.
func (k *keyMaker) joined() bool { return len(k.parts) > 1 }

func parseKey(key string, proxies []netip.Prefix) (*keyMaker, *KeyError) {
	k := &keyMaker{path: -1}
	seen := map[string]bool{}
	texts := strings.Split(key, "+")
	if len(texts) > mostParts {
		return nil, &KeyError{Key: key, Part: key, Want: fmt.Sprintf("at most %d parts", mostParts)}
	}
	for i, text := range texts {
		name, header, isHeader := strings.Cut(text, ":")
		same := text
		switch {
		case text == "path":
			k.path = i
			k.parts = append(k.parts, httplimit.ByPath)
		case text == "client":
			k.parts = append(k.parts, httplimit.ByClient(proxies...))
		case name == "header" && isHeader && validHeader(header):
			same = "header:" + http.CanonicalHeaderKey(header)
			k.parts = append(k.parts, httplimit.ByHeader(header))
		default:
			e := &KeyError{Key: key, Part: text, Want: wantKey, Nearest: strings.TrimSuffix(nearest("", name, []string{"path", "client", "header"}), "?")}
			if e.Nearest == "header" || name == "header" {
				if e.Nearest = ""; validHeader(header) {
					e.Nearest = "header:" + header
				}
			}
			return nil, e
		}
		if seen[same] {
			return nil, &KeyError{Key: key, Part: text, Want: "each part once"}
		}
		seen[same] = true
	}
	return k, nil
}

// matcher tells which row decides about a name: see registry.Registry.Match.
type matcher func(name string) (row string, exact, ok bool)

// of is the key of a request: one part as it is, several joined. What the path stands for in it follows from the rows.
func (k *keyMaker) of(c *config, r *http.Request, match matcher) string {
	if !k.joined() {
		if k.path < 0 {
			return fit(k.parts[0](r))
		}
		return fit(c.rowOf(r.URL.Path, match))
	}
	values := make([]string, len(k.parts))
	for i, part := range k.parts {
		if i != k.path {
			values[i] = keyPart(part(r))
		}
	}
	if k.path < 0 {
		return strings.Join(values, "|")
	}
	path := c.rowOf(r.URL.Path, func(path string) (string, bool, bool) {
		values[k.path] = escaped(path[:min(len(path), mostOfPart+1)]) // no row has a longer name
		row, _, ok := match(strings.Join(values, "|"))
		says, all := partOf(row, k.path)
		return says, all, ok
	})
	values[k.path] = keyPart(path)
	return strings.Join(values, "|")
}

// partOf is what a row says of a part of a key; with a * at its end, only how the part begins; "": nothing. all: it names the whole part.
func partOf(row string, i int) (says string, all bool) {
	for ; i > 0; i-- {
		end := endOfPart(row)
		if end == len(row) {
			return "", false
		}
		row = row[end+1:]
	}
	end := endOfPart(row)
	return unescaped(row[:end], true), end < len(row) || !strings.HasSuffix(row, "*")
}

// keyPart is a part as it stands in a joined key, of which it can be read back: a "|" or a "\" has a "\" before it, and a byte that is
// no UTF-8 is \x and two digits. A part that is longer than mostOfPart is cut to that, and ends with \# and 128 bits of the SHA-256 of all
// of it.
func keyPart(s string) string {
	if len(s) <= mostOfPart {
		return escaped(s)
	}
	h := sha256.New()
	_, _ = io.WriteString(h, s)
	return escaped(s[:mostOfPart]) + `\#` + hex.EncodeToString(h.Sum(nil)[:16])
}

func escaped(s string) string {
	if !strings.ContainsAny(s, `\|`) && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\\' || r == '|':
			b.WriteByte('\\')
			fallthrough
		default:
			b.WriteString(s[i : i+size])
		}
		i += size
	}
	return b.String()
}
