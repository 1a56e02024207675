package engine

import (
	"math"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Class is the priority of the callers of a coordinator. The zero value is the highest. The fleet need not agree on classes: they are not in
// the state of a bucket.
type Class uint8

// The classes, the highest first. Classes is their number.
const (
	Normal Class = iota
	Low
	Lowest
	Classes
)

// String returns normal, low or lowest.
func (c Class) String() string { return [...]string{"normal", "low", "lowest"}[c] }

// yielded is the share of the horizon by which the look-ahead of a class is shorter than that of the highest.
//
// The debt of the bucket also stays below the timeouts of the highest class, which are 500 ms by default. So a lower class must yield more
// than half. With 0.5 instead of 0.7, Low had 13 % of 20/s beside such callers, and 31 % of 5/s; with 0.7 it has 5 % and 7 %, which is its
// floor.
var yielded = [Classes]float64{Low: 0.7, Lowest: 0.9}

// reach returns the look-ahead of a class for a process that owns nothing, without the cost of the request, in microseconds. trip is the
// duration of a round trip. At full demand of a class the debt of the bucket settles below it, by half of the time that each process owns.
//
// A process far from the store looks ahead two round trips at least. A batch takes one, and the granted time must bridge it. Without that,
// Lowest alone used 68 % of 1000/s from 20 ms away, one way, and 41 % from 50 ms. With 1.5 round trips it used 74 % from 50 ms. With three
// or, for long intervals, two and an interval, it had about twice its part of 20/s from 20 ms away, beside processes of its class that are near.
func (c Class) reach(t *permit.Terms, trip int64) int64 {
	h := Horizon(t)
	longest := h - int64(t.Interval)
	return max(0, min(longest, max(h-int64(float64(yielded[c]*float64(h))), 2*trip)-int64(t.Interval)))
}

// Floor lets a class that higher ones hold back ask for a few permits with the look-ahead of the highest. So its callers never get nothing.
// The zero value has no credit. The coordinator's mu must be held for all methods.
//
// The obvious floor, one request in twenty, gave 0 to 66 % of the rate, because a process asks about as often whatever the rate and the
// number of processes are. Here a process earns credit by time, as a share of the part of the rate that one process of the higher class has.
// The debt of the bucket shows that part: at full demand it ends half of the time that each process owns before the end of the look-ahead.
//
// Invariant: 0 ≤ credit. What the class is granted in any way is taken from it, so a class that is not held back has none.
type Floor struct {
	credit float64 // permits
	at     int64   // when credit was last earned, in limiter microseconds
}

// Earn adds the credit of the time since the last call, when the store has refused requests of the class because of the bucket's debt, in
// microseconds. next is the size of the first request: the credit grows until it suffices for that, or to what a horizon earns.
func (f *Floor) Earn(t *permit.Terms, c Class, share float64, debt, next, now int64) {
	if c == Normal || share == 0 {
		return
	}
	passed := max(0, min(now-f.at, Horizon(t)))
	if f.at == 0 {
		passed = 0
	}
	f.at = now
	most := max(float64(next), float64(share*float64(Horizon(t)))/t.Interval)
	f.credit = min(most, f.credit+float64(share*part(t, c, debt))*float64(passed)/t.Interval)
}

// part returns the part of the rate that one process has of the class that holds back a lower class c: the time that it owns, as a share of
// the debt. A process owns one permit at least.
func part(t *permit.Terms, c Class, debt int64) float64 {
	for c--; c > Normal && c.reach(t, 0) < debt; {
		c--
	}
	owned := max(float64(2*(c.reach(t, 0)-debt)), t.Interval)
	return min(1, owned/math.Max(1, float64(debt)))
}

// Spend takes permits that callers of the class were granted without the queue from its credit.
func (c *Coordinator) Spend(n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue.floor.Spend(n)
}

// Spend takes the permits that the class was granted from the credit.
func (f *Floor) Spend(n int64) { f.credit = max(0, f.credit-float64(n)) }

// LookAhead returns the longest wait of a reservation of n permits for which a caller of a lower class asks at once. A reservation does not
// wait in the queue. If a higher class holds it back, the floor decides.
func (c *Coordinator) LookAhead(l *Limiter, n int64) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, f, now, class := l.Effective(), &c.queue.floor, c.Now(), c.Class
	if debt := c.View.free - now; debt > class.reach(t, c.View.offset.Trip()) {
		f.Earn(t, class, l.Floor, debt, n, now)
		credit := *f
		if class = credit.Next(class, n); class == Normal {
			*f = credit
		}
	} else {
		f.at = 0 // it is not held back
	}
	return LookAhead(t, class, n, 0, c.View.offset.Trip())
}

// Next returns with the look-ahead of which class the next request of a batch asks, and takes its permits from the credit. The batch has a
// copy of the floor. Once the credit does not suffice for a request, there is none for those behind it.
func (f *Floor) Next(c Class, permits int64) Class {
	if c == Normal || f.credit < float64(permits) {
		f.credit = 0
		return c
	}
	f.Spend(permits)
	return Normal
}
