package slidingwindow

import (
	"slices"
	"time"
)

const (
	// maxLimit is the most permits of a window, maxCount those of a sub-interval.
	maxLimit = 1 << 31
	maxCount = 1 << 37
	// maxParts bounds the sub-intervals of a window, and so the size of the state and the cost of a script.
	maxParts = 1440
	// standstill is how far a clock may step back, in µs, before the counts move with it. Up to that, time stands still.
	standstill = 2_000_000
)

// rule is the shape of a window. Times are in microseconds.
type rule struct {
	window     int64
	resolution int64
	parts      int64 // window / resolution
}

// index returns the number of the sub-interval of a time.
func (r *rule) index(t int64) int64 {
	i := t / r.resolution
	if t%r.resolution < 0 {
		i--
	}
	return i
}

// part is the permits admitted in one sub-interval: the time of the last one, and their number.
type part struct{ last, count int64 }

// counts are the permits that were admitted recently: a ring of the sub-intervals in which any were, the oldest first, which may be the one
// that the window's edge cuts. Sub-intervals begin at multiples of the resolution of the clock that decides, so they are the same for all
// processes. At most rule.parts + 1 are kept, however many requests there are. counts has no lock of its own.
//
// Why no window exceeds the limit. Let a permit be admitted at the time t, in the sub-interval k, and let r be the resolution and B the number of parts,
// so that the window is B × r. All other permits in [t − B×r, t] were admitted in the sub-intervals k − B to k, for t − B×r lies in k − B.
// All of these count, except k − B when its last permit is older than t − B×r, and then the whole of it is older. So the limit is not
// exceeded in any window that ends with an admission, and hence in none. Permits that count although they are out of the window lie in k −
// B, before the last permit of that sub-interval: they count for less than r longer than they must. A burst at one instant counts for
// exactly the window.
type counts struct {
	started bool  // seen is set
	seen    int64 // the latest time of a decision
	ring    []part
	head    int
	size    int
	sum     int64 // of all parts

	shifted int64 // by how much everything was moved in time in total
	moved   int64 // seen less shifted, when everything was last moved
}

// at returns the i-th part, from the oldest.
func (c *counts) at(i int) *part {
	if i += c.head; i >= len(c.ring) {
		i -= len(c.ring)
	}
	return &c.ring[i]
}

// advance moves on to a time of the clock and drops the parts that are out of the window. It returns the time of the decision. A clock up
// to 2 s behind the latest time seen makes time stand still; if it is further behind, the counts move back with it.
func (c *counts) advance(r *rule, clock int64) (now int64) {
	if behind := c.seen - clock; c.started && behind > standstill {
		c.shift(r, -behind)
	} else if !c.started || clock > c.seen {
		c.started, c.seen = true, clock
	}
	for first := r.index(c.seen) - r.parts; c.size > 0 && r.index(c.at(0).last) < first; {
		c.drop()
	}
	return c.seen
}

// shift moves everything in time.
func (c *counts) shift(r *rule, by int64) {
	if !c.started || by == 0 {
		return
	}
	c.moved = c.seen - c.shifted
	c.shifted += by
	parts := c.list()
	for i := range parts {
		parts[i].last += by
	}
	c.load(r, c.seen+by, parts)
}

// drop removes the oldest part.
func (c *counts) drop() {
	c.sum -= c.at(0).count
	c.size--
	if c.head++; c.head == len(c.ring) {
		c.head = 0
	}
}

// load replaces the counts by parts that were counted with any resolution, oldest first. Each belongs to the sub-interval of its last
// permit, so all of it counts for as long as it must.
func (c *counts) load(r *rule, seen int64, parts []part) {
	c.started, c.seen, c.head, c.size, c.sum = true, seen, 0, 0, 0
	first := r.index(seen) - r.parts
	for _, p := range parts {
		if r.index(p.last) >= first {
			c.push(r, p)
		}
	}
}

// list returns a copy of the parts.
func (c *counts) list() []part {
	parts := make([]part, c.size)
	for i := range parts {
		parts[i] = *c.at(i)
	}
	return parts
}

// push adds permits that were admitted after all others, or that count as if they were.
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

// add counts permits admitted at the latest time seen. If they are too many to count, it returns false and has no effect.
func (c *counts) add(r *rule, n int64) bool { return c.addAt(r, c.seen, n) }

// addAt counts permits that may have been admitted as late as the given time.
func (c *counts) addAt(r *rule, at, n int64) bool {
	if c.size > 0 && n > maxCount-c.at(c.size-1).count {
		return false
	}
	c.push(r, part{max(at, c.seen), n})
	return true
}

// remove removes up to n of the permits that were admitted in the sub-interval of a time, and returns how many. Permits of another
// sub-interval are never removed instead, because they count for another time. When everything is moved in time, permits move to other
// sub-intervals. So a time before that, which is out of the window, may lie in the sub-interval of permits that were admitted later.
func (c *counts) remove(r *rule, at, n int64) int64 {
	if at-c.shifted < c.moved && at < c.seen-r.window {
		return 0
	}
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

// used returns the permits that count against the limit at a time, which must not be before the latest seen. As long as no permit is added,
// it never rises with time.
func (c *counts) used(r *rule, now int64) int64 {
	first, sum := r.index(now)-r.parts, c.sum
	for i := range c.size {
		p := c.at(i)
		if at := r.index(p.last); at > first || at == first && p.last >= now-r.window {
			break
		}
		sum -= p.count
	}
	return sum
}

// until returns the first time, not before from, at which at most room permits are used if none are added.
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

// wait returns the time from at until n permits more are within a limit, if none are added.
func (c *counts) wait(r *rule, at, limit, n int64) time.Duration {
	if n < 1 || c.used(r, at)+n <= limit {
		return 0
	}
	return time.Duration(c.until(r, at, limit-n)-at) * time.Microsecond
}
