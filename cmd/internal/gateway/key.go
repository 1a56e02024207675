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

// KeyError reports an invalid part of a key.
type KeyError struct {
	// Setting names the setting that holds the key. Key is the whole key.
	Setting, Key string
	// Part is the invalid part, and Want describes valid ones. Nearest is the closest valid part, or "" if none is close.
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
	// mostOfPart bounds the bytes of a part that a key contains. It exceeds the length of any row's name.
	mostOfPart = 1024
)

// keyMaker derives keys from requests.
type keyMaker struct {
	parts  []httplimit.KeyFunc
	path   int // index of the path in parts, for which rows are looked up; -1 if the key has no path
	fields fields
}

// callers reports whether keys identify callers, not only paths.
func (k *keyMaker) callers() bool { return k.joined() || k.path < 0 }

// joined reports whether keys have several parts.
func (k *keyMaker) joined() bool { return len(k.parts) > 1 }

// parseKey parses --key. client derives the part "client".
func parseKey(key string, client httplimit.KeyFunc) (*keyMaker, *KeyError) {
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
			k.parts = append(k.parts, client)
		case name == "header" && isHeader && validHeader(header):
			same = "header:" + http.CanonicalHeaderKey(header)
			k.parts = append(k.parts, httplimit.ByHeader(header))
			k.fields.keys = append(k.fields.keys, http.CanonicalHeaderKey(header))
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

// clientKey returns the function that derives a client's key: its address, or its network if the prefix is shorter than the address.
func (c *config) clientKey() httplimit.KeyFunc {
	network := httplimit.ByClientField(c.clientHeader, c.clientIPv4, c.clientIPv6, c.proxies...)
	return func(r *http.Request) string {
		key := network(r)
		if prefix, err := netip.ParsePrefix(key); err == nil && prefix.IsSingleIP() {
			return prefix.Addr().String()
		}
		return key
	}
}

// matcher finds the row that decides about a name: see registry.Registry.Match.
type matcher func(name string) (row string, exact, ok bool)

// of returns the key of a request, whose URL must be canonical: a single part unchanged, several parts joined. The path in it is the name by
// which its row is found. of returns httplimit.NoKey if a part is httplimit.NoKey.
func (k *keyMaker) of(c *config, r *http.Request, match matcher) string {
	if !k.joined() {
		if k.path < 0 {
			key := k.parts[0](r)
			if key == httplimit.NoKey {
				return key
			}
			return fit(key)
		}
		return fit(c.rowOf(r.URL.Path, match))
	}
	values := make([]string, len(k.parts))
	for i, part := range k.parts {
		if i == k.path {
			continue
		}
		value := part(r)
		if value == httplimit.NoKey {
			return value
		}
		values[i] = keyPart(value)
	}
	if k.path < 0 {
		return strings.Join(values, "|")
	}
	path := c.rowOf(r.URL.Path, func(path string) (string, bool, bool) {
		values[k.path] = escaped(path[:min(len(path), mostOfPart+1)]) // no row has a longer name
		row, _, ok := match(strings.Join(values, "|"))
		name, all := partOf(row, k.path)
		return name, all, ok
	})
	values[k.path] = keyPart(path)
	return strings.Join(values, "|")
}

// partOf returns part i of a row's name, or "" if the row does not name that part. all reports whether it names the whole part; otherwise it
// is a prefix that ends with *.
func partOf(row string, i int) (name string, all bool) {
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

// keyPart escapes a part for a joined key, so that different parts never give the same key. It puts a "\" before each "|" and "\", and writes
// a byte that is not UTF-8 as \x and two digits. It cuts a part longer than mostOfPart, and appends \# and 128 bits of the SHA-256 of the
// whole part.
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
