package registry

import (
	"hash/maphash"
	"log/slog"
	"sync"
	"time"
)

// callers bounds how many keys of a row get buckets of their own: most new ones in an hour, and those of the hour before. A client that
// makes up keys would otherwise fill the store, whose failure would be that of all limits.
type callers struct {
	most int
	seed maphash.Seed
	log  *slog.Logger

	mu     sync.Mutex
	rows   map[string]*callersOfRow // "" has the names without a row
	shared int                      // calls beyond the bound
}

// callersOfRow are hashes of keys. Two keys with one hash are counted as one.
type callersOfRow struct {
	began    time.Time           // the hour of new
	new, old map[uint64]struct{} // at most two times callers.most each: all of old may come again
	fresh    int                 // how many of new were not in old when they came
	told     bool
}

// othersMark is what a bucket's name has for all keys beyond the bound. unique changes a key that has it.
const othersMark = hashMark + "others"

// own reports whether a key may have a bucket of its own.
func (c *callers) own(row, key string, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := c.rows[row]
	if of == nil || now.Sub(of.began) >= time.Hour {
		of = c.begin(row, of, now)
	}
	h := maphash.String(c.seed, key)
	if _, is := of.new[h]; is {
		return true
	}
	_, was := of.old[h]
	if was || of.fresh < c.room(of) {
		if !was {
			of.fresh++
		}
		of.new[h] = struct{}{}
		return true
	}
	c.shared++
	if !of.told {
		of.told = true
		c.log.Warn("registry: too many keys in an hour; new ones share a bucket until it is over", "row", row, "most", c.most, "until", of.began.Add(time.Hour))
	}
	return false
}

// shares reports whether a key shares the bucket of those beyond the bound, as things are. It counts nothing.
func (c *callers) shares(row, key string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := c.rows[row]
	if of == nil {
		return false
	}
	h := maphash.String(c.seed, key)
	_, is := of.new[h]
	_, was := of.old[h]
	return !is && !was && of.fresh >= c.room(of)
}

// room is how many new keys an hour of a row admits: with all those of the hour before they are at most twice c.most.
func (c *callers) room(of *callersOfRow) int { return min(c.most, 2*c.most-len(of.old)) }

// begin begins an hour of a row, and forgets rows without calls. c.mu must be held.
func (c *callers) begin(row string, before *callersOfRow, now time.Time) *callersOfRow {
	for name, of := range c.rows {
		if now.Sub(of.began) >= 2*time.Hour {
			delete(c.rows, name)
		}
	}
	of := &callersOfRow{began: now, new: map[uint64]struct{}{}}
	if before != nil && now.Sub(before.began) < 2*time.Hour {
		of.old = before.new
	}
	if c.rows == nil {
		c.rows = map[string]*callersOfRow{}
	}
	c.rows[row] = of
	return of
}

func (c *callers) sharedCalls() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shared
}
