package registry

import (
	"strings"
	"sync"
)

// cache keeps entries for names that no row names, at most so many: in two generations, of which the older is forgotten
// when the newer is full. What is in use moves up, and what is forgotten costs no more than to be made again.
type cache struct {
	most int
	name func(string) string // of the bucket

	mu       sync.RWMutex
	new, old map[string]*entry
}

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
		e = &entry{limit: *limit, version: limit.Version, wait: limit.wait(), strange: true}
		e.limit.Name = strings.Clone(name) // it may be part of a request
	}
	c.put(e)
	return e
}

// put makes an entry the newest of its name. The lock is held.
func (c *cache) put(e *entry) {
	delete(c.old, e.limit.Name)
	if c.new == nil || len(c.new) >= c.most/2 {
		c.new, c.old = map[string]*entry{}, c.new
	}
	c.new[e.limit.Name] = e
}

// bucketName makes a bucket's name of any string, so that nobody escapes the limit by sending what is no name.
func bucketName(s string) string {
	if len(s) > maxName {
		s = s[:maxName]
	}
	if s = strings.ToValidUTF8(s, "?"); s == "" {
		return "?"
	}
	return s
}

func (c *cache) len() int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.new) + len(c.old)
}
