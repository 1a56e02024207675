package tokenbucket

import (
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
)

// ForPriority returns the group of the same members for callers of another priority: each member is [RateLimiter.ForPriority] of p, or of its own
// priority if that is lower. It is for programs whose callers differ in priority call by call. A second call returns the same group. A priority above
// [Lowest] counts as Lowest. [Group.Lost] and [Group.Close] of g cover it.
func (g *Group) ForPriority(p Priority) *Group {
	return g.lower.of(g, p, func(p Priority) *Group {
		other := new(Group)
		other.copyFor(&g.several, p)
		return other
	})
}

// ForPriority returns the choice of the same members for callers of another priority. See [Group.ForPriority].
func (c *Choice) ForPriority(p Priority) *Choice {
	return c.lower.of(c, p, func(p Priority) *Choice {
		other := new(Choice)
		other.copyFor(&c.several, p)
		return other
	})
}

// lower are the groups or choices for the priorities below Normal, as ForPriority has made them. Any of them may be nil.
type lower[G any] [engine.Classes]atomic.Pointer[G]

// of returns the one of a priority, and makes it if there is none. That of Normal is g.
func (k *lower[G]) of(g *G, p Priority, make func(Priority) *G) *G {
	if p = min(p, Lowest); p == Normal {
		return g
	}
	if k[p].Load() == nil {
		k[p].CompareAndSwap(nil, make(p))
	}
	return k[p].Load()
}

// each calls f for those that were made.
func (k *lower[G]) each(f func(*G)) {
	for i := range k {
		if other := k[i].Load(); other != nil {
			f(other)
		}
	}
}

// copyFor sets what from has, with its members for a priority.
func (g *several) copyFor(from *several, p Priority) {
	g.choice, g.maxWait, g.observed, g.counted = from.choice, from.maxWait, from.observed, map[uint64]*counted{}
	g.lost = new(atomic.Int64)
	g.live.on = from.live.on
	for _, w := range from.members {
		w.limiter = w.limiter.ForPriority(max(w.limiter.Priority(), p))
		g.members = append(g.members, w)
	}
}
