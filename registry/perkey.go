package registry

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// maxPerKeyName is the longest name of a row with a bucket for each key: the bucket's name is the row's name and the key.
const maxPerKeyName = 256

// rest returns the part of a matching name that the row leaves open: the further parts, or the text that its * matches. It is false if the
// row has the whole name.
func (c *Limit) rest(name string, parts bool) (rest string, ok bool) {
	text, star := strings.CutSuffix(c.Name, "*")
	if !star {
		if len(name) <= len(text) {
			return "", false
		}
		return name[len(text)+1:], true
	}
	rest = name[len(text):]
	if parts {
		if i := nextPart(rest); i >= 0 {
			return rest[i+1:], true
		}
	}
	return rest, true
}

// nextPart returns the index of the first separator that is not escaped; -1 if there is none.
func nextPart(s string) int {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case separator:
			return i
		}
	}
	return -1
}

// ofKey returns the entry that decides about a name with a row: the row's own, or that of the key.
func (r *Registry) ofKey(e *entry, name string) *entry {
	if !e.limit.PerKey || e.bad || e.limit.Disabled || e.limit.Rate == 0 {
		return e
	}
	rest, ok := e.limit.rest(name, r.parts)
	if !ok {
		return e
	}
	bucket := unique(e.limit.Name + string(separator) + rest)
	if !r.callers.own(e.limit.Name, bucket, time.Now()) {
		bucket = e.limit.Name + string(separator) + othersMark
	}
	key, was := r.keys.of(e, bucket)
	if was != nil { // a load takes effect meanwhile
		go r.supersedeEntry(r.ctx, was, key)
	}
	return key
}

// of returns the entry of a row's key, by the name of its bucket. After a change of the row it makes a new entry. That of a row which is no longer in
// force is not kept. was is the entry of another row in whose place it is, by which calls may wait; nil if there is none.
func (c *cache) of(row *entry, bucket string) (e, was *entry) {
	c.mu.RLock()
	e = c.new[bucket]
	c.mu.RUnlock()
	if e != nil && e.of == row {
		return e, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e = c.new[bucket]; e == nil {
		e = c.old[bucket]
	}
	if e == nil || e.of != row {
		was, e = e, &entry{limit: row.limit, version: row.version, wait: row.wait, of: row}
		e.limit.Name = strings.Clone(bucket)
		if row.over.Load() {
			return e, nil
		}
	}
	c.put(e)
	return e, was
}

// each calls f with the entries of a row's keys.
func (c *cache) each(row *entry, f func(*entry)) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, generation := range []map[string]*entry{c.new, c.old} {
		for _, e := range generation {
			if e.of == row {
				f(e)
			}
		}
	}
}

// hashMark is part of every name that unique has changed, and of no other name that it returns.
const hashMark = `\#`

// unique returns a valid bucket's name for any string, and different names for different strings. It changes strings that are too long or
// not UTF-8, and appends 128 bits of their SHA-256.
func unique(s string) string {
	if s != "" && len(s) <= maxName && !strings.Contains(s, hashMark) && utf8.ValidString(s) {
		return s
	}
	h := sha256.New()
	_, _ = io.WriteString(h, s)
	tail := hashMark + hex.EncodeToString(h.Sum(nil)[:16])
	return strings.ToValidUTF8(s[:min(len(s), maxName-len(tail))], "") + tail
}
