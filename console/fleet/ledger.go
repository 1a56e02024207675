package fleet

import (
	"encoding/json"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// ledger is what an instance has said, as far as it knows what Redis has heard, and so what it has to say now. It knows no time
// and no network.
type ledger struct {
	first  bool // what is said next begins anew
	round  uint64
	limits map[string]*entry
	fields texts
	rows   texts
	events []told

	queue    []*entry
	changed  uint64 // counts changes of rows
	tooMany  int    // limits
	overflow int64  // events that were dropped
}

// entry is a limit.
type entry struct {
	said   Limit // what Redis was told last. Its counters are in the history
	known  bool  // that Redis has that
	now    Limit
	row    string // of its configuration
	record string // of now
	round  uint64
	rated  float64 // the rate that was written into the history, of that hour
	hour   int64
	gone   bool
}

// told is an event that was not told yet.
type told struct {
	at   time.Time // zero: when it is told
	text string
}

// Bounds of a write.
const (
	mostInWrite   = 200
	mostTexts     = 50
	mostPending   = 200 // events
	mostText      = 200 // bytes of what is wrong, and the like
	mostName      = 512 // bytes of the name of a limit or a key
	refusedRounds = 5   // how often refused keys are told
)

func newLedger() ledger {
	return ledger{first: true, limits: map[string]*entry{}, fields: newTexts(), rows: newTexts()}
}

// forget has everything told again. What is in the history stays as it was.
func (l *ledger) forget() {
	l.first = true
	l.changed++
	for _, e := range l.limits {
		e.known, e.hour = false, 0
	}
	l.fields.forget()
	l.rows.forget()
}

// skip leaves out of the history what has been counted by now.
func (l *ledger) skip() {
	for _, e := range l.limits {
		e.said.Counters, e.known = e.now.Counters, false
	}
}

// note takes in what is to be said now.
func (l *ledger) note(r *Report, k clock) {
	l.round++
	l.queue = l.queue[:0]
	l.tooMany = 0
	l.fields.begin()
	l.rows.begin()
	for i := range r.Limits {
		l.limit(&r.Limits[i], k)
	}
	for name, e := range l.limits {
		switch {
		case e.round == l.round || e.gone:
		case e.counted(): // its record stays until the answer is there: by it a write that was carried out is not counted again
			l.queue = append(l.queue, e)
		default:
			e.gone, e.known = true, false
			l.fields.set(recordPrefix+name, "")
		}
	}
	own := r.Info
	own.MoreLimits += l.tooMany
	own.Missed.Events += l.overflow
	l.info(own, k)
	for i := range r.Events {
		l.event(&r.Events[i])
	}
	r.Events = r.Events[:0]
	l.fields.end()
	if l.rows.end() {
		l.changed++
	}
}

func (l *ledger) limit(now *Limit, k clock) {
	e := l.limits[now.Name]
	if e == nil {
		if len(l.limits) >= 4*MostLimits || !named(now.Name) {
			l.tooMany++
			return
		}
		name := strings.Clone(now.Name)
		e = &entry{said: Limit{Name: name}}
		l.limits[name] = e
	}
	if l.rows.count >= MostLimits {
		l.tooMany++
		return
	}
	if e.gone {
		l.fields.drop(recordPrefix + now.Name)
	}
	e.round, e.gone = l.round, false
	if e.row == "" || e.now.Config != now.Config {
		e.row = rowText(now.Config)
	}
	l.rows.set(now.Name, e.row)
	if e.known && e.said == *now {
		return
	}
	e.now = *now
	e.record = string(appendRecord(nil, now, k))
	if e.record == "" && e.said.Counters == (Counters{}) && !e.known && e.said.Decider == "" {
		return // nothing to tell, and nothing was told
	}
	l.queue = append(l.queue, e)
}

// rowText is never empty.
func rowText(c Config) string {
	c.Row = shortened(c.Row, mostText)
	for _, f := range []*float64{&c.Rate, &c.MaxPermits, &c.ColdFactor} {
		*f = finite(*f)
	}
	b, err := json.Marshal(&c)
	if err != nil {
		return "{}"
	}
	return string(b)
}

func (r *Rejected) shorten() {
	for _, s := range []*string{&r.Row, &r.Field, &r.Value, &r.Want, &r.Err, &r.Consequence} {
		*s = shortened(*s, mostText)
	}
	r.Name = shortened(r.Name, mostName)
}

func (f *Fault) shorten() {
	f.Limit, f.Bucket = shortened(f.Limit, mostName), shortened(f.Bucket, mostName)
	f.By, f.Err = shortened(f.By, mostText), shortened(f.Err, mostText)
}

func named(name string) bool { return name != "" && len(name) <= mostName && utf8.ValidString(name) }

// base is what of the counters need not go into the history: what is there already. While Redis knows that, it need not be told.
func (e *entry) base() string {
	switch {
	case e.known:
		return ""
	case e.said.Counters == e.now.Counters:
		return "="
	}
	return string(appendCounters(nil, &e.said.Counters))
}

// rate is that in force if it is to go into the history.
func (e *entry) rate(hour int64) string {
	if e.counted() && (e.now.Bucket.Rate != e.rated || hour != e.hour) && e.now.Bucket.Rate > 0 {
		return number(e.now.Bucket.Rate)
	}
	return ""
}

func (e *entry) counted() bool { return e.said.Counters != e.now.Counters }

// info says how the instance is.
func (l *ledger) info(i Info, k clock) {
	own := i
	own.Refused, own.Refusals, own.Faults, own.Rejected, own.Semaphores, own.Windows = nil, nil, nil, nil, nil, nil
	own.MoreRejected += max(0, len(i.Rejected)-MostRejected)
	for _, s := range []*string{&own.Host, &own.Version, &own.Loads.Err, &own.Loads.Names, &own.Switch.Err, &own.Switch.Origin, &own.Store.Err, &own.Missed.Err} {
		*s = shortened(*s, mostText)
	}
	l.fields.json(infoField, infoText{own, k.began.UnixMilli()})
	rejected := slices.Clone(cut(i.Rejected, MostRejected))
	for n := range rejected {
		rejected[n].shorten()
	}
	l.fields.json(rejectedField, rejected)
	if keys := cut(i.Refused, MostKeys); l.round%refusedRounds == 1 || l.first {
		l.fields.json(refusedField, keys)
	} else {
		l.fields.keep(refusedField)
	}
	l.fields.json(refusalsField, cut(i.Refusals, MostRefusals))
	faults := slices.Clone(cut(i.Faults, MostFaults))
	for n := range faults {
		faults[n].shorten()
	}
	l.fields.json(faultsField, faults)
	for _, s := range cut(i.Semaphores, MostSemaphores) {
		if named(s.Name) {
			s.MoreHolders += max(0, len(s.Holders)-MostHolders)
			s.Holders = cut(s.Holders, MostHolders)
			l.fields.json(semaphorePrefix+s.Name, s)
		}
	}
	for _, w := range cut(i.Windows, MostWindows) {
		if named(w.Name) {
			l.fields.json(windowPrefix+w.Name, w)
		}
	}
}

// infoText is an Info as it is written, with the instance's clock when it started, in milliseconds since 1970: times in it are by that.
type infoText struct {
	Info
	Clock int64 `json:"clock"`
}

func (l *ledger) event(e *Event) {
	if len(l.events) >= mostPending {
		l.overflow++
		return
	}
	e.shorten()
	text, err := json.Marshal(e)
	if err != nil {
		return
	}
	l.events = append(l.events, told{e.At, string(text)})
}

func (e *Event) shorten() {
	for _, s := range []*string{&e.From, &e.To, &e.Err, &e.Host, &e.Who, &e.Why} {
		*s = shortened(*s, mostText)
	}
	e.Limit = shortened(e.Limit, mostName)
}

// write is what one script does.
type write struct {
	first        bool
	limits       []*entry
	fields, rows []pair
	events       []told
}

// next is what is to be written next, and whether there is more after it. A reader that sees another number of changes finds all rows
// written: so that comes last.
func (l *ledger) next() (w *write, more bool) {
	w = &write{first: l.first}
	w.limits, l.queue = split(l.queue, mostInWrite)
	w.rows, l.rows.open = split(l.rows.open, mostInWrite)
	w.fields, l.fields.open = split(l.fields.open, mostTexts)
	w.events, _ = split(l.events, mostTexts)
	more = len(l.queue)+len(l.rows.open)+len(l.fields.open) > 0 || len(w.events) < len(l.events)
	if !more {
		w.fields = append(w.fields, pair{rowsField, number(float64(l.changed))})
	}
	return w, more
}

// done notes that Redis has written that.
func (l *ledger) done(w *write, hour int64) {
	l.first = false
	for _, e := range w.limits {
		if e.counted() && e.now.Bucket.Rate > 0 {
			e.rated, e.hour = e.now.Bucket.Rate, hour
		}
		e.said, e.known = e.now, true
	}
	l.fields.done(w.fields)
	l.rows.done(w.rows)
	l.events = l.events[len(w.events):]
}

// doubt notes that nobody knows whether Redis has written that.
func (l *ledger) doubt(w *write) {
	for _, e := range w.limits {
		e.known, e.hour = false, 0
	}
	l.fields.doubt(w.fields)
	l.rows.doubt(w.rows)
}
