package schedule

import "sort"

// Balance is a point on a bucket's account: what is stored, and until when the time is sold. Its exact time is
// Next − Carry.
type Balance struct {
	Stored float64 // permits
	Next   int64   // microseconds of the store's clock
	Carry  float64 // microseconds, below 1
}

// Before orders balances by their exact time.
func (b Balance) Before(o Balance) bool {
	return b.Next < o.Next || b.Next == o.Next && b.Carry > o.Carry
}

// Terms are what a segment was granted under. Two segments can be one only under the same Terms, compared by ==.
type Terms interface {
	// After is the balance once n permits were taken. Costs are additive: After(b, m+n) is After(After(b, m), n).
	// It is false when n permits would leave the range of exact numbers.
	After(b Balance, n int64) (Balance, bool)
	// PayLater: permits are due at the balance before the first of them, not after the last.
	PayLater() bool
}

// Grant is what the store has granted for one request.
type Grant struct {
	Terms   Terms
	Before  Balance // the bucket's balance before the request
	Permits int64
	// Epoch, Tag and Prev name the place on the bucket's account: its epoch, the place itself, and the one before it.
	Epoch, Tag, Prev int64
	// Offset is the caller's clock less the store's, never too small.
	Offset int64
}

// due is when the permits are due, by this process's clock.
func (g *Grant) due() int64 {
	at := g.Before
	if !g.Terms.PayLater() {
		at, _ = g.Terms.After(at, g.Permits)
	}
	return at.Next + g.Offset
}

// segment is a contiguous stretch of a bucket's account that this process owns. Nobody else's permits lie within.
type segment struct {
	terms  Terms
	cursor Balance // before the first permit that is left
	end    Balance // after the last
	left   int64
	from   int64 // permits due before it, by the store's clock, are not used
	paused int64 // until when the bucket was held back, by the store's clock
	offset int64
	widest int64 // the largest offset that it had
	epoch  int64
	tag    int64 // what the bucket calls the end
	prev   int64 // what it calls the start

	used    bool // a part of it was used, or has lapsed
	settled bool // it can neither grow nor be given back: others took behind it, or the bucket was paused
	passed  bool // its permits went by, and nobody was there to gather them
}

// due is when the next n permits are due, by this process's clock.
func (g *segment) due(n int64) int64 {
	at := g.cursor
	if !g.terms.PayLater() {
		at, _ = g.terms.After(at, n)
	}
	return at.Next + g.offset
}

// take uses the next n permits.
func (g *segment) take(n int64) {
	g.cursor, _ = g.terms.After(g.cursor, n)
	g.left -= n
	g.used = true
}

// lapsing is how many permits are due before a time of the store's clock.
func (g *segment) lapsing(before int64) int64 {
	if g.left == 0 || g.permit(1) >= before {
		return 0
	}
	return int64(sort.Search(int(g.left), func(i int) bool { return g.permit(int64(i)+1) >= before }))
}

// permit is when the j-th permit that is left is due, by the store's clock.
func (g *segment) permit(j int64) int64 {
	if g.terms.PayLater() {
		j--
	}
	at, _ := g.terms.After(g.cursor, j)
	return at.Next
}

// came is the store's time when somebody came, or sooner: the offset may have been larger then.
func (g *segment) came(at int64) int64 { return at - g.widest }

// reached is the time, by the store's clock, before which permits are only for who has gathered them.
func (g *segment) reached(now int64) int64 { return max(now-g.offset, g.paused) }

// ahead is how much of the account's time lies ahead.
func (g *segment) ahead(now int64) int64 {
	return max(0, g.end.Next-max(g.cursor.Next, now-g.offset))
}

// ends is when the last permit falls due, or is paid for, by this process's clock.
func (g *segment) ends() int64 { return g.end.Next + g.offset }

// continues tells whether a grant is the rest of the segment.
func (g *segment) continues(grant *Grant) bool {
	return !g.settled && g.terms == grant.Terms && g.epoch == grant.Epoch && g.tag == grant.Prev && g.end == grant.Before
}
