// Package rows decides which limit is in force for each name of a table. Its Machine is a pure function of what it is given: the loads, the buckets that
// differ from their rows, the confirmations of a person, the position of the switch, and the time of each. It holds no lock and uses no clock, database,
// network or log.
//
// The rules:
//
//  1. The row that the last load gives for a name is in force, with the exceptions below. Of several, it is the newest (Newer), and the first of those that
//     have neither times nor keys. A load that fails changes nothing.
//  2. A row that turns bad keeps its last valid limit, also beside an older row of its name, and also if its name turns bad. Rows without a key are those of
//     their name, so a bad one of several keeps the last valid limit, too, and so does one that is missing while the name of any cannot be read. A row
//     that never was valid limits as its caller decides (NeverValid).
//  3. If more than half of the limits that were confirmed are gone or off, they stay in force until three loads in a row agree which. Confirmed are
//     the limits of the first load, those that came since, and what a person confirms. A limit that is gone for a day without a loss is forgotten. A
//     single row that is turned off is off at once: a person means that row.
//  4. A row that goes back to an earlier time, as a replica that lags behind gives it, does not take effect: not at all if this process has had exactly
//     that row, and otherwise once three loads in a row agree.
//  5. Versions that a process makes up are above the newest version that its table has given for the name, and below the next one that any table can
//     give. So they never beat a version that a table gave later. See Version.
//  6. While the switch is off every call passes, also each that waits. Loads, losses and confirmations go on as if it were on.
package rows

import (
	"math/big"
	"slices"
	"strings"
	"time"
)

// Content is the content of a row.
type Content[C any] interface {
	// Same reports whether both are equal.
	Same(C) bool
	// SameBucket reports whether both are equal in what buckets keep under a version.
	SameBucket(C) bool
	// Off reports whether every call passes.
	Off() bool
}

// Row is a valid row of a load.
type Row[C Content[C]] struct {
	Name string
	// ID identifies the row in other loads, also under another name. It is empty if only the name does.
	ID string
	// Version by the table, usually the time of the last modification; 0 if it is not known.
	Version int64
	Content C
}

// Bad is a rejected row of a load.
type Bad struct {
	// ID as in Row, and the Name; empty if it cannot be read, or matches no call.
	ID, Name string
	// Shadow reports whether the row refuses no call.
	Shadow bool
}

// Table is a load that has succeeded.
type Table[C Content[C]] struct {
	Rows []Row[C]
	Bad  []Bad
	// Differs has the version in force in the bucket of each row of the load before whose bucket has another content than the row.
	Differs map[string]int64
}

// State is why a limit is in force.
type State uint8

// The states of a limit.
const (
	InForce    State = iota // the last load gives it
	RowBad                  // its row is bad, and this is the last valid limit
	Held                    // its row is gone or off together with too many others
	Outdated                // the last load gives an earlier version of the row
	Overruled               // the bucket has a version that a table has given later, and it counts
	NeverValid              // its row never was valid
)

var states = [...]string{"in force", "row bad", "held", "outdated", "overruled", "never valid"}

func (s State) String() string { return states[s] }

// Rule is what is in force for a name. It does not change.
type Rule[C Content[C]] struct {
	// Row that is in force. If it never was valid, it has a Name and an ID only.
	Row[C]
	State State
	// Since is when the content came in force.
	Since time.Time
	// Bucket is the version of the content in its bucket.
	Bucket int64
	// Shadow reports whether a row that never was valid refuses no call.
	Shadow bool

	newest  int64    // the newest version that the table has given for the name, as a version of buckets
	differs int      // consecutive loads whose bucket had another content
	earlier []Row[C] // what was in force before, newest first
	back    Row[C]   // the row of an earlier time that the last load gave
	backFor int      // consecutive loads that gave it
}

// Valid reports whether the rule has a content.
func (r *Rule[C]) Valid() bool { return r != nil && r.State != NeverValid }

// limits reports whether the rule limits calls.
func (r *Rule[C]) limits() bool { return r != nil && (r.State == NeverValid || !r.Content.Off()) }

// in returns the rule in another state.
func (r *Rule[C]) in(s State) *Rule[C] {
	if r.State == s {
		return r
	}
	next := *r
	next.State = s
	return &next
}

// Kind is a kind of Event.
type Kind uint8

// The kinds of events.
const (
	Nothing  Kind = iota
	Began         // the name had no valid rule
	Changed       // the content, or the row
	Ended         // the name has no rule
	Put           // the content is put in force again in its bucket, by a higher version
	Turned        // the state is another one
	WasNever      // a row that never was valid begins

	// Of all names.

	LossHeld     // more than half of the limits are missing, and stay in force for now
	LossBelieved // more than half are missing, and no longer in force
	LossRestored // at most half are missing again
	SourceFails  // the rules stay as they are, since loads fail from now on
	SourceBack   // loads succeed again
	SwitchOff    // every call passes from now on, and those that wait
	SwitchOn     // calls are limited from now on
	Recall       // the switch stays off, and calls that wait pass: they may have found it on, and begun to wait since
)

var kinds = [...]string{"nothing", "began", "changed", "ended", "put", "turned", "was never valid", "loss held", "loss believed", "loss restored",
	"source fails", "source back", "switch off", "switch on", "waiting calls pass"}

func (k Kind) String() string { return kinds[k] }

// Event is a change of the rule of a name, or of all. Before or After is nil if there was none, or is none.
type Event[C Content[C]] struct {
	Kind          Kind
	Name          string
	Before, After *Rule[C]
}

// Fate is what becomes of a bad row.
type Fate uint8

// The fates of bad rows.
const (
	Nameless  Fate = iota // it limits nothing
	Renamed               // the last valid limit of the row stays in force for its former name, in Rule
	Other                 // another row is in force for the name, in Rule
	Kept                  // its last valid limit stays in force
	Undecided             // it never was valid
)

// Verdict is the decision about a bad row.
type Verdict[C Content[C]] struct {
	Fate Fate
	Rule *Rule[C]
}

// Twin is a valid row that does not count, because another of its name comes before it. Both are indices of Table.Rows.
type Twin struct{ Row, Before int }

// Step is the outcome of a load.
type Step[C Content[C]] struct {
	Rules    map[string]*Rule[C]
	Events   []Event[C]
	Verdicts []Verdict[C] // of Table.Bad, and then of Twins
	Twins    []Twin
	Held     int // limits that are in force since too many are gone
}

func (s *Step[C]) event(k Kind, name string, before, after *Rule[C]) {
	s.Events = append(s.Events, Event[C]{k, name, before, after})
}

// Machine has the rules in force. It is not safe for concurrent use.
type Machine[C Content[C]] struct {
	policy Policy
	rules  map[string]*Rule[C]
	count  map[string]int // of rows of each name that have no ID, of which one may have lost its name
	past   past
	losses losses
	stale  time.Time // since when loads fail; zero if the last one has succeeded
	off    off
}

// New returns a machine without rules.
func New[C Content[C]](p Policy) *Machine[C] { return &Machine[C]{policy: p} }

// Rule returns what is in force for a name; nil if nothing is.
func (m *Machine[C]) Rule(name string) *Rule[C] { return m.rules[name] }

// Recall gives the machine the version of a rule that has ended, if it has forgotten that.
func (m *Machine[C]) Recall(name string, bucket int64) {
	if _, ok := m.past.get(name); !ok && m.rules[name] == nil {
		m.past.put(name, ended{bucket, given(bucket)})
	}
}

// Load returns what is in force after a load.
func (m *Machine[C]) Load(now time.Time, t *Table[C]) Step[C] {
	s := Step[C]{Rules: make(map[string]*Rule[C], len(t.Rows)), Verdicts: make([]Verdict[C], len(t.Bad))}
	if !m.stale.IsZero() && m.rules != nil {
		s.event(SourceBack, "", nil, nil)
	}
	m.stale = time.Time{}
	m.rows(now, t, &s)
	m.bad(now, t, &s)
	for _, twin := range s.Twins {
		s.Verdicts = append(s.Verdicts, Verdict[C]{Other, s.Rules[t.Rows[twin.Row].Name]})
	}
	m.lose(now, &s)
	m.report(&s)
	m.rules = s.Rules
	return s
}

// Fail returns the effect of a load that has failed.
func (m *Machine[C]) Fail(now time.Time) Kind {
	if !m.stale.IsZero() {
		return Nothing
	}
	m.stale = now
	return SourceFails
}

// rows decides about the rows that a load gives.
func (m *Machine[C]) rows(now time.Time, t *Table[C], s *Step[C]) {
	turnedBad, count := map[identity]*Bad{}, map[string]int{}
	for i := range t.Bad {
		b := &t.Bad[i]
		if turnedBad[identify(b.ID, b.Name)] = b; b.ID == "" {
			count[b.Name]++
		}
	}
	nameless := count[""] > 0
	first := make(map[string]int, len(t.Rows))
	for i := range t.Rows {
		row := &t.Rows[i]
		if row.ID == "" {
			count[row.Name]++
		}
		if at, twice := first[row.Name]; !twice || Newer(row.Version, row.ID, t.Rows[at].Version, t.Rows[at].ID) {
			first[row.Name] = i
		}
	}
	for i := range t.Rows {
		row := &t.Rows[i]
		if at := first[row.Name]; at != i {
			s.Twins = append(s.Twins, Twin{i, at})
			continue
		}
		was, bad := m.rules[row.Name], false // bad: the row that is in force is, or may be
		if was.Valid() {
			b := turnedBad[identify(was.ID, was.Name)]
			bad = b != nil && (b.Name == "" || b.Name == row.Name) || nameless && was.ID == "" && count[row.Name] < m.count[row.Name]
		}
		if bad && !was.is(row) {
			s.Rules[row.Name] = was.in(RowBad) // the row is another one of the name
		} else {
			s.Rules[row.Name] = m.follow(now, was, row, t.Differs)
		}
	}
	for name, n := range m.count {
		if nameless { // it may be the one that is missing
			count[name] = max(count[name], n)
		}
	}
	m.count = count
}

// identity is what a row has in all loads: its ID, or its name if it has none.
type identity struct{ id, name string }

func identify(id, name string) identity {
	if id != "" {
		name = ""
	}
	return identity{id, name}
}

// is reports whether the rule is of that row: of its ID, or of its content if it has none.
func (r *Rule[C]) is(row *Row[C]) bool {
	return r.ID == row.ID && (r.ID != "" || row.Content.Same(r.Content))
}

// Newer reports whether a row comes before another of its name, by their versions and IDs. The order is the same in every process.
func Newer(version int64, id string, other int64, otherID string) bool {
	if version != other {
		return version > other
	}
	return compareIDs(id, otherID) > 0
}

// compareIDs compares two IDs as whole numbers if both are, and otherwise as texts. Texts come after all numbers.
func compareIDs(a, b string) int {
	x, aNumber := new(big.Int).SetString(a, 10)
	y, bNumber := new(big.Int).SetString(b, 10)
	switch {
	case aNumber && bNumber && x.Cmp(y) != 0:
		return x.Cmp(y)
	case aNumber == bNumber:
		return strings.Compare(a, b)
	case aNumber:
		return -1
	}
	return 1
}

// follow returns the rule of a row that a load gives.
func (m *Machine[C]) follow(now time.Time, was *Rule[C], row *Row[C], differs map[string]int64) *Rule[C] {
	if !was.Valid() {
		is := &Rule[C]{Row: *row, Since: now, newest: Version(row.Version), Bucket: Version(row.Version)}
		if past, ok := m.past.get(row.Name); ok {
			ended := past.bucket
			is.newest = max(is.newest, past.newest)
			is.Bucket = is.above(ended)
		}
		return is
	}
	same := row.Content.Same(was.Content)
	if !same && !row.Content.SameBucket(was.Content) {
		return was.change(now, row)
	}
	version, differ := differs[row.Name]
	differ = differ && version >= was.Bucket // else the bucket has not been asked since
	if same && row.Version <= was.Version && was.State == InForce && was.differs == 0 && !differ {
		return was
	}
	is := *was
	is.State, is.back, is.backFor = InForce, Row[C]{}, 0
	is.newest, is.Version = max(was.newest, Version(row.Version)), max(was.Version, row.Version)
	if !same {
		is.Content, is.ID = row.Content, row.ID
	}
	if differ {
		is.differs++
	} else {
		is.differs = 0
	}
	if is.differs >= 2 {
		if is.mayPut(version) {
			is.Bucket, is.differs = version+1, 0
		} else {
			is.State = Overruled
		}
	}
	return &is
}

// change returns the rule after its row has another content.
func (was *Rule[C]) change(now time.Time, row *Row[C]) *Rule[C] {
	if row.ID == was.ID && row.Version != 0 && row.Version < was.Version {
		held := *was
		held.State, held.differs = Outdated, 0
		if held.backFor++; was.backFor == 0 || was.back.Version != row.Version || !was.back.Content.Same(row.Content) {
			held.back, held.backFor = *row, 1
		}
		if held.backFor < agreeing || was.had(row) {
			return &held
		}
	}
	const most = 4
	is := &Rule[C]{Row: *row, Since: now, newest: max(was.newest, Version(row.Version))}
	is.earlier = append([]Row[C]{was.Row}, was.earlier[:min(len(was.earlier), most-1)]...)
	is.Bucket = is.above(was.Bucket)
	return is
}

// had reports whether the row was in force before.
func (r *Rule[C]) had(row *Row[C]) bool {
	return slices.ContainsFunc(r.earlier, func(e Row[C]) bool { return e.Version == row.Version && e.Content.Same(row.Content) })
}

// bad decides about the rejected rows of a load.
func (m *Machine[C]) bad(now time.Time, t *Table[C], s *Step[C]) {
	if len(t.Bad) == 0 {
		return
	}
	byID := map[string]*Rule[C]{} // rules that the load does not give; one that never was valid if the ID is of another, or of several
	for name, was := range m.rules {
		_, twice := byID[was.ID]
		if is := s.Rules[name]; twice || is != nil && is.State != RowBad {
			was = &Rule[C]{Row: Row[C]{ID: was.ID}, State: NeverValid}
		}
		byID[was.ID] = was
	}
	unknown := false
	for i := range t.Bad {
		b, v := &t.Bad[i], &s.Verdicts[i]
		was := m.rules[b.Name]
		if of := byID[b.ID]; !was.Valid() && of.Valid() && b.ID != "" { // the row had another name, or its name cannot be read now
			v.Fate, v.Rule = Renamed, of.in(RowBad)
			s.Rules[of.Name] = v.Rule
		}
		if b.Name == "" {
			unknown = unknown || b.ID == ""
			continue
		}
		switch is := s.Rules[b.Name]; {
		case is.Valid() && (is.State != RowBad || is.ID != b.ID):
			*v = Verdict[C]{Other, is}
		case was.Valid():
			if is == nil {
				is = was.in(RowBad)
				s.Rules[b.Name] = is
			}
			*v = Verdict[C]{Kept, is}
		default:
			if is == nil {
				if is = was; was == nil || was.Shadow != b.Shadow || was.ID != b.ID {
					is = &Rule[C]{Row: Row[C]{Name: b.Name, ID: b.ID}, State: NeverValid, Since: now, Shadow: b.Shadow}
				}
				s.Rules[b.Name] = is
			}
			*v = Verdict[C]{Undecided, is}
		}
	}
	for name, was := range m.rules {
		if unknown && was.ID == "" && was.Valid() && s.Rules[name] == nil {
			s.Rules[name] = was.in(RowBad)
		}
	}
}

// report lists what has changed, and remembers the versions of what has ended.
func (m *Machine[C]) report(s *Step[C]) {
	for name, is := range s.Rules {
		was := m.rules[name]
		switch {
		case is == was:
		case !is.Valid():
			if was.Valid() || was == nil {
				s.event(WasNever, name, was, is)
			}
		case !was.Valid():
			s.event(Began, name, was, is)
		case is.Content.Same(was.Content) && is.State != was.State:
			s.event(Turned, name, was, is)
		case !is.Content.Same(was.Content):
			s.event(Changed, name, was, is)
		case is.Bucket != was.Bucket:
			s.event(Put, name, was, is)
		}
	}
	for name, was := range m.rules {
		if s.Rules[name] == nil {
			s.event(Ended, name, was, nil)
			if was.Valid() {
				m.past.put(name, ended{was.Bucket, was.newest})
			}
		}
	}
	slices.SortStableFunc(s.Events, func(a, b Event[C]) int { return strings.Compare(a.Name, b.Name) })
}
