package rows

import "time"

// Switch is the position of the switch of all limits.
type Switch uint8

// The positions.
const (
	On  Switch = iota // the rules are in force
	Off               // every call passes, whatever the rules
)

// Turn is the effect of a look at the switch.
type Turn uint8

// The effects.
const (
	Unturned  Turn = iota
	TurnedOn       // calls are limited from now on
	TurnedOff      // every call passes from now on, and those that wait
	Recall         // the switch stays off, and calls that wait pass: they may have found it on, and begun to wait since
)

// recallEvery is the time between two Recalls. The first one comes with the first look after TurnedOff.
const recallEvery = 1600 * time.Millisecond

// off has since when the switch is off. The zero value is on.
type off struct {
	since, recall time.Time // recall: when calls that wait next pass
	origin        string
}

// Look returns the effect of a look that has found the switch in a position, and who turned it, if that is known.
func (m *Machine[C]) Look(now time.Time, s Switch, origin string) Turn {
	was := &m.off
	switch {
	case s == On && was.since.IsZero():
		return Unturned
	case s == On:
		*was = off{}
		return TurnedOn
	case was.since.IsZero():
		*was = off{now, now, origin}
		return TurnedOff
	}
	if was.origin = origin; now.Before(was.recall) {
		return Unturned
	}
	was.recall = now.Add(recallEvery)
	return Recall
}

// Off returns since when the switch is off, zero if it is on, and who turned it off.
func (m *Machine[C]) Off() (since time.Time, origin string) { return m.off.since, m.off.origin }
