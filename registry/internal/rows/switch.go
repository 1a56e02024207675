package rows

import "time"

// Switch is the position of the switch of all limits.
type Switch uint8

// The positions.
const (
	On  Switch = iota // the rules are in force
	Off               // every call passes, whatever the rules
)

// recallEvery is the time between two Recalls. The first one comes with the first look after SwitchOff.
const recallEvery = 1600 * time.Millisecond

// off has since when the switch is off. The zero value is on.
type off struct {
	since, recall time.Time // recall: when calls that wait next pass
	origin        string
}

// Look returns the effect of a look that has found the switch in a position, and who turned it, if that is known.
func (m *Machine[C]) Look(now time.Time, s Switch, origin string) Kind {
	was := &m.off
	switch {
	case s == On && was.since.IsZero():
		return Nothing
	case s == On:
		*was = off{}
		return SwitchOn
	case was.since.IsZero():
		*was = off{now, now, origin}
		return SwitchOff
	}
	if was.origin = origin; now.Before(was.recall) {
		return Nothing
	}
	was.recall = now.Add(recallEvery)
	return Recall
}

// Off returns since when the switch is off, zero if it is on, and who turned it off.
func (m *Machine[C]) Off() (since time.Time, origin string) { return m.off.since, m.off.origin }
