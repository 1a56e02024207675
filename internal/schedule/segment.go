package schedule

import (
	"sort"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Terms are the conditions of a grant. Grants with different Terms, compared by ==, are separate segments.
type Terms interface {
	// After returns the balance after n permits are taken from b. Costs are additive: After(b, m+n) is After(After(b, m), n).
	// It returns false if n permits would exceed the range of exact numbers.
	After(b permit.Balance, n int64) (permit.Balance, bool)
	// PayLater reports whether a request is due at the balance before its first permit. Otherwise it is due at the balance after its last.
	PayLater() bool
}

// spacing returns how far apart permits fall due at least, unless they were stored for nothing.
func spacing(t Terms) float64 {
	after, _ := t.After(permit.Balance{}, 1)
	return float64(after.Next) - after.Carry
}

// Grant is a stretch of permits that the store granted for one request.
type Grant struct {
	Terms   Terms
	Before  permit.Balance // the bucket's balance before the request
	Permits int64
	// Epoch is the bucket's epoch, ID the grant's number, Tag the bucket's tail after the grant, and Prev its tail before.
	Epoch, ID, Tag, Prev int64
	Returned             float64 // see permit.Place
	// Offset is the caller's clock minus the store's, never too small.
	Offset int64
}

// due returns when the permits are due, by the local clock.
func (g *Grant) due() int64 {
	at := g.Before
	if !g.Terms.PayLater() {
		at, _ = g.Terms.After(at, g.Permits)
	}
	return at.Next + g.Offset
}

// segment is a contiguous stretch of a bucket's time that this process owns. No other process owns permits within it.
type segment struct {
	terms  Terms
	cursor permit.Balance // balance before the first permit that is left
	end    permit.Balance // balance after the last permit
	left   int64          // permits that are left
	from   int64          // permits due before this time of the store's clock are not used
	paused int64          // end of the bucket's last pause, by the store's clock
	moved  int64          // when the segment last moved up, by the store's clock: permits of an earlier time are due then
	offset int64          // local clock minus the store's
	widest int64          // the largest offset so far
	epoch  int64
	id     int64   // number of its last grant
	back   float64 // permits that had been given back when its last grant was made, and those by which this process's settlements have moved it since
	tag    int64   // the bucket's tail after the segment
	prev   int64   // the bucket's tail before the segment

	used      bool // some of its permits were used or have lapsed
	ending    ending
	unclaimed bool // its permits fell due while no waiter gathered them
}

// ending is what may become of the end of a segment.
type ending uint8

const (
	open    ending = iota // it is the bucket's tail as far as this process has learned: it may grow, and its permits may go back
	passed                // another process took permits behind it: its permits go back out of turn, see Yield
	settled               // it can neither grow nor be refunded
)

// known reports whether a bucket in an epoch has forgotten nothing of the segment, and reckons by the same clock.
func (g *segment) known(epoch, offset int64) bool {
	d := offset - g.offset
	return g.epoch == epoch || permit.Succeeds(epoch, g.epoch) && -Jitter <= d && d <= Jitter
}

// pass notes that the segment is not the bucket's tail any more.
func (g *segment) pass() {
	if g.ending = max(g.ending, passed); g.back == unknown {
		g.ending = settled
	}
}

// unknown is the back of a segment whose last grant was made under other terms, or in another epoch than a settlement that has moved it: it does
// not show what the bucket may have saved up since.
const unknown = -1

// due returns when the next n permits are due, by the local clock. None is due before the end of a penalty, or before the segment moved up.
func (g *segment) due(n int64) int64 {
	at := g.cursor
	if !g.terms.PayLater() {
		at, _ = g.terms.After(at, n)
	}
	return max(at.Next, g.paused, g.moved) + g.offset
}

// origin returns the origin of the permits.
func (g *segment) origin() permit.Origin { return permit.Origin{Epoch: g.epoch, ID: g.id} }

// take removes the next n permits.
func (g *segment) take(n int64) {
	g.cursor, _ = g.terms.After(g.cursor, n)
	g.left -= n
	g.used = true
}

// lapsing returns how many permits are due before a time of the store's clock.
func (g *segment) lapsing(before int64) int64 {
	if g.left == 0 || g.moved >= before || g.permit(1) >= before {
		return 0
	}
	return int64(sort.Search(int(g.left), func(i int) bool { return g.permit(int64(i)+1) >= before }))
}

// permit returns when the j-th permit that is left is due, by the store's clock.
func (g *segment) permit(j int64) int64 {
	if g.terms.PayLater() {
		j--
	}
	at, _ := g.terms.After(g.cursor, j)
	return at.Next
}

// shift delays the permits by micros, or advances them if micros is negative.
func (g *segment) shift(micros int64) {
	g.cursor.Next += micros
	g.end.Next += micros
	g.from += micros
}

// carry adds the part of a shift below a microsecond, so that the permits that are left end at the segment's end.
func (g *segment) carry(micros float64) {
	at := &g.cursor
	switch at.Carry += micros; {
	case at.Carry < 0:
		at.Next, at.Carry = at.Next+1, at.Carry+1
	case at.Carry >= 1:
		at.Next, at.Carry = at.Next-1, at.Carry-1
	}
}

// came converts the arrival of a waiter to the store's clock. The result is never too late: it uses the largest offset so far.
func (g *segment) came(at int64) int64 { return at - g.widest }

// reached returns the current time of the store's clock, or the end of the pause if that is later. Permits due before it may be used only
// by the waiter that gathered them.
func (g *segment) reached(now int64) int64 { return max(now-g.offset, g.paused) }

// ahead returns how much of the segment's time lies in the future.
func (g *segment) ahead(now int64) int64 {
	return max(0, g.end.Next-max(g.cursor.Next, now-g.offset))
}

// ends returns the end of the segment by the local clock.
func (g *segment) ends() int64 { return g.end.Next + g.offset }

// continues reports whether a grant begins where the segment ends, under the same terms.
func (g *segment) continues(grant *Grant) bool {
	return g.ending == open && g.terms == grant.Terms && g.epoch == grant.Epoch && g.tag == grant.Prev && g.end == grant.Before
}
