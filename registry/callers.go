package registry

import (
	"hash/maphash"
	"log/slog"
	"sync"
	"time"
)

// callers bounds the number of keys of a row with a bucket of their own: at most `most` new keys in an hour, beside those of the hour before.
// Otherwise a client with invented keys could fill the store, and all limits would fail with it.
type callers struct {
	most int
	seed maphash.Seed
	log  *slog.Logger

	mu     sync.Mutex
	rows   map[string]*callersOfRow // "" has the names without a row
	shared int                      // number of calls beyond the bound
}

// callersOfRow has the hashes of a row's keys. Two keys with one hash count as one.
type callersOfRow struct {
	began    time.Time           // the beginning of the hour of new
	new, old map[uint64]struct{} // of this hour and the hour before, at most 2 × callers.most each
	fresh    int                 // the number of keys in new that are not in old
	logged   bool
}

// othersMark is part of the name of the bucket that all keys beyond the bound share. unique changes a key that contains it.
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
	if !of.logged {
		of.logged = true
		c.log.Warn("registry: too many keys in an hour; new ones share a bucket until it is over", "row", row, "most", c.most, "until", of.began.Add(time.Hour))
	}
	return false
}

// shares reports whether a key would share the bucket of the keys beyond the bound now. It counts nothing.
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

// room returns the number of new keys in an hour of a row. With those of the hour before they are at most 2 × c.most.
func (c *callers) room(of *callersOfRow) int { return min(c.most, 2*c.most-len(of.old)) }

// begin starts an hour of a row, and drops rows without calls. c.mu must be held.
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
