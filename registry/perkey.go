package registry

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// maxPerKeyName bounds the name of a row for each key: the bucket's name is the row's and the key.
const maxPerKeyName = 256

// rest returns what a row leaves open of a name that it holds for: the parts that it does not name, or else what its * stands for.
// It is false if the row names all of it.
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

// nextPart is where the first separator is that is not escaped; -1 if there is none.
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

// ofKey returns what decides about a name by its row: the row's own bucket, or that of the key.
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
	return r.keys.of(e, bucket)
}

// of returns the entry of a row's key by the name of its bucket. One that was made by an earlier content of the row is made anew.
func (c *cache) of(row *entry, bucket string) *entry {
	c.mu.RLock()
	e := c.new[bucket]
	c.mu.RUnlock()
	if e != nil && e.of == row {
		return e
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e = c.new[bucket]; e == nil {
		e = c.old[bucket]
	}
	if e == nil || e.of != row {
		e = &entry{limit: row.limit, version: row.version, wait: row.wait, of: row}
		e.limit.Name = strings.Clone(bucket)
	}
	c.put(e)
	return e
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

// hashMark is in every name that unique has changed, and in no other that it returns.
const hashMark = `\#`

// unique makes a bucket's name of any string, a different one of each: what is too long or no UTF-8 is changed, and ends with 128 bits of
// its SHA-256.
func unique(s string) string {
	if s != "" && len(s) <= maxName && !strings.Contains(s, hashMark) && utf8.ValidString(s) {
		return s
	}
	h := sha256.New()
	_, _ = io.WriteString(h, s)
	tail := hashMark + hex.EncodeToString(h.Sum(nil)[:16])
	return strings.ToValidUTF8(s[:min(len(s), maxName-len(tail))], "") + tail
}

// disputeKeys returns the version that a row for each key should have, as dispute does of others: the highest that any key needs.
func (r *Registry) disputeKeys(row *entry) int64 {
	version := row.version
	r.keys.each(row, func(e *entry) {
		if e.limiter.Load() != nil {
			version = max(version, r.dispute(e))
		}
	})
	return version
}
