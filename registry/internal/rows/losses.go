package rows

import (
	"maps"
	"slices"
	"time"
)

// Policy decides when a table is accepted that has lost more than half of its limits.
type Policy uint8

// The policies.
const (
	AfterLoads    Policy = iota // after three loads in a row that agree
	AtOnce                      // at once, and it is no loss
	OnceConfirmed               // once a person has confirmed it
)

const (
	// agreeing is the number of loads in a row that must agree before a doubtful one is accepted.
	agreeing = 3
	// remembered is for how long a limit that is gone or off counts, unless a person has confirmed it.
	remembered = 24 * time.Hour
)

// Loss describes the limits that are gone, or off, without a confirmation, once they are more than half.
type Loss struct {
	// Since is when the loss was found; zero if there is none.
	Since time.Time
	// Before is the number of limits before the loss. Names are those that are missing, sorted, of which Off have a row that is off.
	Before, Off int
	Names       []string
	// Held reports whether the limits that the last load lacks are still in force. Loads in a row agreed which these are.
	Held  bool
	Loads int
}

// LoadsLeft is the number of further loads that must agree before the loss is accepted.
func (l *Loss) LoadsLeft() int { return agreeing - l.Loads }

// losses has the limits that are missing. The zero value has none.
type losses struct {
	missing map[string]time.Time // limits that are gone or off with the load at that time, and no longer in force
	accept  bool                 // the next load is accepted, because a person has confirmed it
	last    string               // the last confirmation that has counted

	loss  Loss                // Names and Off are not set
	base  map[string]struct{} // the limits before the loss
	newly []string            // the limits in force that the last load lacks
	off   map[string]struct{} // those of all missing ones whose rows are off
}

// Loss returns the present loss; the zero Loss if there is none.
func (m *Machine[C]) Loss() Loss {
	l := m.losses.loss
	if l.Since.IsZero() {
		return Loss{}
	}
	l.Names = append(slices.Collect(maps.Keys(m.losses.missing)), m.losses.newly...)
	slices.Sort(l.Names)
	l.Off = len(m.losses.off)
	return l
}

// Confirm accepts the present loss, and returns it. If its limits are still in force, they end with the next load.
func (m *Machine[C]) Confirm() Loss {
	was := m.Loss()
	if m.losses.accept = was.Held; !was.Held {
		m.losses.end()
		m.losses.missing = nil
	}
	return was
}

// Covers reports whether a confirmation of that age is for the present loss: it has not counted yet, and is at most grace older than the loss. It then
// has counted.
func (m *Machine[C]) Covers(now time.Time, id string, age, grace time.Duration) bool {
	l := &m.losses
	if l.base == nil || id == "" || id == l.last || age > now.Sub(l.loss.Since)+grace {
		return false
	}
	l.last = id
	return true
}

// end ends the loss.
func (l *losses) end() { l.loss, l.base, l.newly, l.off = Loss{}, nil, nil, nil }

// lose decides whether the limits that a load lacks, or that it turns off, are still in force.
func (m *Machine[C]) lose(now time.Time, s *Step[C]) {
	l := &m.losses
	if m.policy == AtOnce {
		return
	}
	present := func(name string) bool { return s.Rules[name].limits() }
	for name, since := range l.missing {
		if present(name) || l.base == nil && now.Sub(since) >= remembered {
			delete(l.missing, name)
		}
	}
	var newly []string
	before, gone := len(l.missing), 0
	for name, was := range m.rules {
		if !was.limits() {
			continue
		}
		if before++; !present(name) {
			if newly = append(newly, name); s.Rules[name] == nil {
				gone++
			}
		}
	}
	slices.Sort(newly)
	lost := l.base != nil
	doubt := len(newly) > 0 && (lost || 2*(len(newly)+len(l.missing)) > before)
	if doubt && !lost {
		m.begin(now, before)
	}
	if l.base == nil {
		l.add(now, newly)
		return
	}
	l.loss.Loads = l.agree(newly)
	few, ofBase := l.few(present, newly)
	hold := doubt && !l.accept && (gone > 0 || len(newly) > 1) && (ofBase || !few) &&
		(l.loss.Loads < agreeing || m.policy == OnceConfirmed && !few)
	if hold {
		s.event(LossHeld, "", nil, nil)
		l.loss.Held, s.Held = true, len(newly)
		l.countOff(newly, func(name string) bool { return s.Rules[name] != nil })
		for _, name := range newly {
			if s.Rules[name] = m.rules[name]; m.rules[name].Valid() {
				s.Rules[name] = m.rules[name].in(Held)
			}
		}
		return
	}
	switch {
	case l.accept:
		l.end()
		l.missing, l.accept = nil, false
	case few:
		base := l.base
		l.end()
		maps.DeleteFunc(l.missing, func(name string, _ time.Time) bool { _, is := base[name]; return !is })
		l.add(now, slices.DeleteFunc(newly, func(name string) bool { _, is := base[name]; return !is }))
		s.event(LossRestored, "", nil, nil)
	default:
		l.add(now, newly)
		l.loss.Held, l.loss.Loads, l.newly = false, 0, nil
		l.countOff(nil, func(name string) bool { return s.Rules[name] != nil })
		if doubt {
			s.event(LossBelieved, "", nil, nil)
		}
	}
}

// begin begins a loss of limits, of which there were so many.
func (m *Machine[C]) begin(now time.Time, before int) {
	l := &m.losses
	l.loss, l.base = Loss{Since: now, Before: before}, make(map[string]struct{}, before)
	for name := range l.missing {
		l.base[name] = struct{}{}
	}
	for name, was := range m.rules {
		if was.limits() {
			l.base[name] = struct{}{}
		}
	}
}

// add adds limits that are no longer in force.
func (l *losses) add(now time.Time, names []string) {
	if l.missing == nil {
		l.missing = map[string]time.Time{}
	}
	for _, name := range names {
		l.missing[name] = now
	}
}

// agree returns how many loads in a row lacked the same limits in force.
func (l *losses) agree(newly []string) int {
	agreed := len(newly) > 0 && slices.Equal(newly, l.newly)
	if l.newly = newly; agreed {
		return l.loss.Loads + 1
	}
	return min(1, len(newly))
}

// few reports whether at most half of the limits before the loss are missing, and whether some in force are that the load lacks.
func (l *losses) few(present func(string) bool, newly []string) (few, ofBase bool) {
	absent := 0
	for name := range l.base {
		if !present(name) {
			absent++
		}
	}
	for _, name := range newly {
		_, is := l.base[name]
		ofBase = ofBase || is
	}
	return 2*absent <= len(l.base), ofBase
}

// countOff notes which of the missing limits have a row, which is off.
func (l *losses) countOff(newly []string, hasRow func(string) bool) {
	l.off = map[string]struct{}{}
	for _, name := range slices.AppendSeq(slices.Clone(newly), maps.Keys(l.missing)) {
		if hasRow(name) {
			l.off[name] = struct{}{}
		}
	}
}
