package slidingwindow

import (
	"fmt"
	"slices"
)

// Mode is how a limiter counts what the edge of the window cuts. See Exact and Approximate.
type Mode uint8

const (
	// Exact never admits more than the limit in any window, by the clock that decides: the Redis server's, or the process'
	// own. A sub-interval counts in full until the last that was admitted in it is out of the window, so one that was admitted
	// earlier in it counts for up to one resolution too long; that is the price.
	Exact Mode = iota
	// Approximate assumes that what was admitted in a sub-interval was spread evenly over it, and decides by what the process
	// knows of the others: it may admit more than the limit, as much as the package's documentation says.
	Approximate
)

func (m Mode) String() string {
	switch m {
	case Exact:
		return "exact"
	case Approximate:
		return "approximate"
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

const (
	// maxLimit, maxCount: of a window, and of what is counted in one sub-interval. maxCount × shares is 2^53.
	maxLimit = 1 << 31
	maxCount = 1 << 37
	// shares: the part of the trailing sub-interval that the window still covers is rounded up to so many shares of it.
	shares = 1 << 16
	// maxParts bounds the sub-intervals of a window, and with them the state and what a script costs.
	maxParts = 1440
	// standstill is how far back in µs a clock may step, and time just stands still until it is there again.
	standstill = 2_000_000
)

// rule is what a window is like. Times are in microseconds.
type rule struct {
	mode       Mode
	window     int64
	resolution int64
	parts      int64 // window / resolution
}

// exact is the rule that a share goes by.
func (r *rule) exact() *rule {
	e := *r
	e.mode = Exact
	return &e
}

// index is the number of the sub-interval that a time is in.
func (r *rule) index(t int64) int64 {
	i := t / r.resolution
	if t%r.resolution < 0 {
		i--
	}
	return i
}

// part is what was admitted in one sub-interval: how much, and when the last of it.
type part struct{ last, count int64 }

// counts is what was admitted of late: a ring of the sub-intervals in which anything was, the oldest first, which may be the
// one that the window's edge cuts. Its sub-intervals begin at multiples of the resolution of the clock that decides, so all
// processes have the same. At most rule.parts + 1 are kept, however many requests there are.
//
// Why Exact is exact. Let something be admitted at the time t, in the sub-interval k, and let r be the resolution and B the
// number of parts, so that the window is B × r. What else lies in [t − B×r, t] was admitted in the sub-intervals k − B to k:
// t − B×r lies in k − B. Of these all count, but for k − B when its last is older than t − B×r, and then all of it is. So the
// limit is not exceeded in any window that ends with something admitted, and hence in none. What is counted though it is out
// of the window lies in k − B, before the last of that sub-interval: it counts for less than r longer than it must. A burst
// at one instant counts for exactly the window.
type counts struct {
	known bool  // seen is a time
	seen  int64 // the latest time of a decision
	ring  []part
	head  int
	size  int
	sum   int64 // of all counts

	shifted int64 // by how much everything was moved in time so far
}

func (c *counts) at(i int) *part {
	if i += c.head; i >= len(c.ring) {
		i -= len(c.ring)
	}
	return &c.ring[i]
}

// advance moves on to a time of the clock and forgets what is out of the window. A clock up to 2 s behind the latest time
// seen makes time stand still; further behind, what is counted goes back along with it.
func (c *counts) advance(r *rule, clock int64) (now int64) {
	if behind := c.seen - clock; c.known && behind > standstill {
		c.shift(r, -behind)
	} else if !c.known || clock > c.seen {
		c.known, c.seen = true, clock
	}
	for first := r.index(c.seen) - r.parts; c.size > 0 && r.index(c.at(0).last) < first; {
		c.drop()
	}
	return c.seen
}

// shift moves everything in time.
func (c *counts) shift(r *rule, by int64) {
	if !c.known {
		return
	}
	c.shifted += by
	parts := c.list()
	for i := range parts {
		parts[i].last += by
	}
	c.load(r, c.seen+by, parts)
}

func (c *counts) drop() {
	c.sum -= c.at(0).count
	c.size--
	if c.head++; c.head == len(c.ring) {
		c.head = 0
	}
}

// load takes over parts that were counted with any resolution, oldest first. Each belongs to where its last is: so all of it
// counts for as long as it must.
func (c *counts) load(r *rule, seen int64, parts []part) {
	c.known, c.seen, c.head, c.size, c.sum = true, seen, 0, 0, 0
	first := r.index(seen) - r.parts
	for _, p := range parts {
		if r.index(p.last) >= first {
			c.push(r, p)
		}
	}
}

// list is a copy of the parts.
func (c *counts) list() []part {
	parts := make([]part, c.size)
	for i := range parts {
		parts[i] = *c.at(i)
	}
	return parts
}

// push counts what was admitted after everything else, or as if it were.
func (c *counts) push(r *rule, p part) {
	c.sum += p.count
	if c.size > 0 {
		if newest := c.at(c.size - 1); r.index(newest.last) >= r.index(p.last) {
			newest.last, newest.count = max(newest.last, p.last), newest.count+p.count
			return
		}
	}
	if c.size == len(c.ring) {
		ring := make([]part, max(c.size+1, min(2*c.size, int(r.parts)+1)))
		copy(ring, c.list())
		c.ring, c.head = ring, 0
	}
	c.size++
	*c.at(c.size - 1) = p
}

// add counts what was admitted at the latest time seen. It reports false, and does nothing, if that is too much to count.
func (c *counts) add(r *rule, n int64) bool { return c.addAt(r, c.seen, n) }

// addAt counts what may have been admitted as late as that.
func (c *counts) addAt(r *rule, at, n int64) bool {
	if c.size > 0 && n > maxCount-c.at(c.size-1).count {
		return false
	}
	c.push(r, part{max(at, c.seen), n})
	return true
}

// remove takes back up to n of what was admitted in the sub-interval of a time. It returns how much. What was admitted in another one is
// never taken instead: it counts for another time.
func (c *counts) remove(r *rule, at, n int64) int64 {
	for i := range c.size {
		p := c.at(i)
		if r.index(p.last) != r.index(at) {
			continue
		}
		n = min(n, p.count)
		p.count -= n
		c.sum -= n
		if p.count == 0 {
			c.load(r, c.seen, slices.Delete(c.list(), i, i+1))
		}
		return n
	}
	return 0
}

// used is what counts against the limit at a time that is not before the latest seen. As long as nothing is added it never
// rises with time.
func (c *counts) used(r *rule, now int64) int64 {
	here := r.index(now)
	first, sum := here-r.parts, c.sum
	for i := range c.size {
		p := c.at(i)
		switch at := r.index(p.last); {
		case at < first || at == first && r.mode == Exact && p.last < now-r.window:
			sum -= p.count
			continue
		case at == first && r.mode == Approximate:
			share := ((here+1)*r.resolution - now) * shares
			share = (share + r.resolution - 1) / r.resolution
			sum += (p.count*share+shares-1)/shares - p.count
		}
		break
	}
	return sum
}

// until is the first time, not before from, at which at most so much is used if nothing is added.
func (c *counts) until(r *rule, from, room int64) int64 {
	if c.size == 0 {
		return from
	}
	low, high := from, max(from, (r.index(c.at(c.size-1).last)+r.parts+1)*r.resolution)
	for low < high {
		if mid := low + (high-low)/2; c.used(r, mid) <= room {
			high = mid
		} else {
			low = mid + 1
		}
	}
	return low
}
