package registry

import (
	"cmp"
	"strings"
	"sync"
)

// cache keeps entries for names that callers choose, at most `most` of them. It has two generations: the older is dropped when the newer is
// full, and an entry in use moves to the newer. A dropped entry is made again by the next call.
type cache struct {
	most int
	name func(string) string // returns the name by which a caller's name is counted

	dropped func(map[string]*entry) // is called in a goroutine of its own: calls may wait by them

	mu       sync.RWMutex
	new, old map[string]*entry
}

// get returns the entry of a name, and makes it by limit if there is none.
func (c *cache) get(name string, limit *Limit) *entry {
	c.mu.RLock()
	e := c.new[name]
	c.mu.RUnlock()
	if e != nil {
		return e
	}
	name = c.name(name)
	c.mu.Lock()
	defer c.mu.Unlock()
	if e = c.new[name]; e != nil {
		return e
	}
	if e = c.old[name]; e == nil {
		e = &entry{limit: *limit, version: limit.Version, wait: limit.MaxWait, unnamed: true}
		e.name = strings.Clone(name) // it may be part of a request
		e.limit.Name = unique(unnamedPrefix + name)
	}
	c.put(e)
	return e
}

// put adds an entry to the newer generation. c.mu must be held.
func (c *cache) put(e *entry) {
	name := cmp.Or(e.name, e.limit.Name)
	delete(c.old, name)
	if c.new == nil || len(c.new) >= c.most/2 {
		if len(c.old) != 0 {
			go c.dropped(c.old)
		}
		c.new, c.old = map[string]*entry{}, c.new
	}
	c.new[name] = e
}

// bucketName returns a valid bucket's name for any string, so that no client can avoid the limit by an invalid name.
func bucketName(s string) string {
	if len(s) > maxName {
		s = s[:maxName]
	}
	if s = strings.ToValidUTF8(s, "?"); s == "" {
		return "?"
	}
	return s
}

// Prefixes of the buckets of names without a row, and with a row that never was valid (Default). A bucket of the name itself may have the version of a
// row that has ended, or that another process has loaded.
const unnamedPrefix, badPrefix = "%unknown:", "%bad:"

// all calls f with all entries, without the lock.
func (c *cache) all(f func(*entry)) {
	c.mu.RLock()
	entries := make([]*entry, 0, len(c.new)+len(c.old))
	for _, generation := range []map[string]*entry{c.new, c.old} {
		for _, e := range generation {
			entries = append(entries, e)
		}
	}
	c.mu.RUnlock()
	for _, e := range entries {
		f(e)
	}
}

func (c *cache) len() int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.new) + len(c.old)
}
