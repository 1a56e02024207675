// Package permit has the values that the arithmetic of buckets, the engine and the stores share. Their methods use no other state.
package permit

import "strings"

// Balance is a point on a bucket's account: the stored permits, and the time up to which the bucket is sold. Its exact time is
// Next − Carry.
type Balance struct {
	Stored float64 // permits
	Next   int64   // microseconds of the store's clock
	Carry  float64 // microseconds, below 1
}

// Before reports whether m is before o by their exact times.
func (m Balance) Before(o Balance) bool {
	return m.Next < o.Next || m.Next == o.Next && m.Carry > o.Carry
}

// Arithmetic computes balances of a bucket under one configuration.
type Arithmetic interface {
	// After returns the balance once n permits were taken. It reports false if that would leave the range of exact numbers.
	After(b Balance, n int64) (Balance, bool)
	// Resync returns the balance at a time: the time since the debt ended has become stored permits.
	Resync(b Balance, now int64) Balance
}

// Terms are a configuration of a bucket for the engine and the stores. They are immutable, so they are shared.
type Terms struct {
	Arithmetic
	// Text is the canonical form of the configuration: equal configurations have equal texts. It ends with a space and the version.
	Text string
	// Version of the configuration; 0 if it has none.
	Version int64
	// Interval is the time between two permits, in microseconds.
	Interval float64
	// Max is the most permits that can be stored.
	Max float64
	// WarmsUp reports that stored permits are granted more slowly while the bucket is cold.
	WarmsUp bool
	// PayLater reports that a caller waits for the debt that it finds, and the next caller for its cost.
	PayLater bool
}

// Same reports whether two terms belong to equal configurations.
func (t *Terms) Same(o *Terms) bool { return t == o || t.Text == o.Text }

// SameContent reports whether two terms belong to configurations that differ at most in their versions.
func (t *Terms) SameContent(o *Terms) bool { return t.content() == o.content() }

// content returns the text without the version.
func (t *Terms) content() string { return t.Text[:strings.LastIndexByte(t.Text, ' ')+1] }

// Place is the part of the account that one granted request occupies: the balance before and after it. A later refund needs all of it.
type Place struct {
	// Epoch is the bucket's epoch at the time of the grant.
	Epoch int64
	// Tag names the place; Prev is the bucket's tail before it. A tag never repeats, not even if the store falls back to an older state, as
	// in a failover to a stale replica: it is the place's number plus the random nonce of its batch. So a refund cannot take another
	// process's place for its own.
	Tag, Prev int64
	// ID is the place's number, which rises within the epoch.
	ID int64
	// Version of the configuration in force.
	Version int64
	// Returned is the number of permits that had been given back to the bucket out of turn before.
	Returned float64

	Before, After Balance
}

// Origin names the grant that permits are from. The zero value names none.
type Origin struct {
	Epoch int64 // of the bucket at the time of the grant
	ID    int64 // number of the grant, see [Place]
}

// Origin returns the origin of the place's permits.
func (p *Place) Origin() Origin { return Origin{p.Epoch, p.ID} }

// lineage is how many epochs have the same lineage, in which a bucket has forgotten nothing: see [Succeed].
const lineage = 1 << 26

// Succeed returns the epoch that follows another in its lineage. The random name fresh makes it different.
func Succeed(epoch, fresh int64) int64 {
	return epoch - (epoch-1)%lineage + (fresh-1)%lineage
}

// Succeeds reports whether two epochs are of one lineage.
func Succeeds(epoch, earlier int64) bool { return (epoch-1)/lineage == (earlier-1)/lineage }

// Refund asks for the return of places: if Tag is still the bucket's tail, the account goes back to a balance.
type Refund struct {
	// Epoch of the places. A bucket in another epoch accepts no refund of them.
	Epoch int64
	// Tag must still be the bucket's tail for time to go back; Tail is the tail afterwards. A Tag of 0 is never the tail: see [OutOfTurn].
	Tag, Tail int64
	// Version of the configuration that the places were granted under; stored permits of another are not comparable.
	Version int64
	// ID is the place's number, under which its stored permits come back at most once.
	ID int64

	To    Balance // the balance to restore
	End   int64   // the end of the places' time
	Spent float64 // stored permits in the places
	Level float64 // stored permits left after the places were granted, less those that had been given back out of turn before

	// Permits is the number of permits in the places, for Grant.Permits; 0 if the sender does not count those that are missing. Stores do not need it.
	Permits int64
}

// OutOfTurn returns a refund of n permits that end at a balance, for a store that has refused to take their time back, because other permits were
// taken behind them. They become stored permits, all of them or none. id is the number of their grant, and returned is Place.Returned of it. Of one
// grant permits come back out of turn once.
func OutOfTurn(epoch, version, id, n int64, end Balance, returned float64) Refund {
	return Refund{Epoch: epoch, Version: version, ID: id, Spent: float64(n), Level: end.Stored - returned, End: end.Next, Permits: n}
}

// Refund returns a refund of the place, except for the first used permits.
func (p *Place) Refund(a Arithmetic, used int64) Refund {
	to, tail := p.Before, p.Prev
	if used > 0 {
		to, _ = a.After(to, used)
		tail = p.Tag
	}
	return Refund{
		Epoch: p.Epoch, Tag: p.Tag, Tail: tail, Version: p.Version, ID: p.ID, To: to, End: p.After.Next,
		Spent: to.Stored - p.After.Stored, Level: p.After.Stored - p.Returned,
	}
}
