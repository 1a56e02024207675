package engine

import (
	"math"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// granted are the terms under which the store granted permits, for schedule.Terms, and the limiter that asked.
type granted struct {
	*permit.Terms
	limiter *Limiter
}

// PayLater implements schedule.Terms.
func (g *granted) PayLater() bool { return g.Terms.PayLater }

// span returns the time of n permits at the rate, in microseconds.
func span(t *permit.Terms, n int64) int64 {
	return int64(min(float64(n)*t.Interval, permit.MaxExact))
}

// CostFromCold returns how long n permits take from a bucket that is as cold as it can be, in microseconds. A bursty bucket is then empty.
func CostFromCold(t *permit.Terms, n int64) int64 {
	b := permit.Balance{}
	if t.WarmsUp {
		b.Stored = t.Max
	}
	b, ok := t.After(b, n)
	if !ok {
		return permit.MaxExact
	}
	return b.Next
}

// Horizon returns how far ahead a process may own a bucket's time, in microseconds: a second, or the time of four permits if that is
// longer. It is the same for all processes of a fleet, since a process with a longer horizon would starve the others.
func Horizon(t *permit.Terms) int64 {
	return max(1_000_000, int64(min(math.Ceil(4*t.Interval), permit.MaxExact)))
}

// LookAhead returns the longest wait with which a process may ask for n permits for callers of a class, while it owns ahead microseconds of
// the bucket's future time for that class, and a round trip takes trip microseconds. That is the horizon, less the time of one permit, less
// the share of the horizon that the class yields, less half of the owned time. Under PayNow the request's own cost is added. See reach for a
// process far from the store.
//
// The look-ahead is the same for large and small requests. So processes own equal time, and equal time is equal rate, whatever their
// distance from the store. At full demand the debt of the bucket settles where the look-ahead of the highest class ends. That of a lower
// class is shorter, so it finds no time of the bucket within it, and gets what the higher class leaves.
func LookAhead(t *permit.Terms, c Class, n, ahead, trip int64) int64 {
	most := c.reach(t, trip) - ahead/2
	if !t.PayLater {
		most += CostFromCold(t, n)
	}
	return max(0, min(most, permit.MaxExact))
}

// Wait returns how long a request for n permits waits at a time. It reports false if the request is out of range.
func Wait(t *permit.Terms, b permit.Balance, now, n int64) (wait int64, ok bool) {
	if now > b.Next || b.Stored > t.Max { // a bucket in debt stays as it is
		b = t.Resync(b, now)
	}
	after, ok := t.After(b, n)
	if t.PayLater {
		return b.Next - now, ok
	}
	return after.Next - now, ok
}
