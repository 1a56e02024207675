package fleet

import (
	"encoding/json"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// ledger compares what an instance has to publish with what Redis has according to its replies, and so decides what to write.
// It uses neither clock nor network.
type ledger struct {
	first  bool // the next write begins the instance
	round  uint64
	limits map[string]*entry
	fields texts
	rows   texts
	events []pendingEvent

	queue    []*entry
	changed  uint64 // counts changes of rows
	tooMany  int    // limits beyond MostLimits
	overflow int64  // events that were dropped
}

// entry is the state of one limit.
type entry struct {
	written Limit // last written to Redis. Its counters are in the history
	stored  bool  // whether Redis has published
	now     Limit
	row     string // of its configuration
	record  string // of now
	round   uint64
	rated   float64 // the rate last written to the history, in that hour
	hour    int64
	gone    bool
}

// pendingEvent is an event that is not yet published.
type pendingEvent struct {
	at   time.Time // zero for the time of the write
	text string
}

// Bounds of a write.
const (
	mostInWrite   = 200
	mostTexts     = 50
	mostPending   = 200 // events
	mostText      = 200 // bytes of a message
	mostName      = 512 // bytes of the name of a limit or a key
	refusedRounds = 5   // how often refused keys are published
)

func newLedger() ledger {
	return ledger{first: true, limits: map[string]*entry{}, fields: newTexts(), rows: newTexts()}
}

// forget makes the next writes publish everything again. The history is not written twice.
func (l *ledger) forget() {
	l.first = true
	l.changed++
	for _, e := range l.limits {
		e.stored, e.hour = false, 0
	}
	l.fields.forget()
	l.rows.forget()
}

// skip leaves the calls counted so far out of the history.
func (l *ledger) skip() {
	for _, e := range l.limits {
		e.written.Counters, e.stored = e.now.Counters, false
	}
}

// note compares a report with what Redis has, and queues the differences.
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
		case e.counted(): // Its record stays until the reply arrives: with it, a write that was applied is not counted again
			l.queue = append(l.queue, e)
		default:
			e.gone, e.stored = true, false
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
		e = &entry{written: Limit{Name: name}}
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
	if e.stored && e.written == *now {
		return
	}
	e.now = *now
	e.record = string(appendRecord(nil, now, k))
	if e.record == "" && e.written.Counters == (Counters{}) && !e.stored && e.written.Decider == "" {
		return // nothing to publish, and nothing was
	}
	l.queue = append(l.queue, e)
}

// rowText encodes a row. It never returns "".
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

// base returns the counters that are in the history already, for the script to subtract; empty if Redis has them.
func (e *entry) base() string {
	switch {
	case e.stored:
		return ""
	case e.written.Counters == e.now.Counters:
		return "="
	}
	return string(appendCounters(nil, &e.written.Counters))
}

// rate returns the rate in force if it must be written to the history; otherwise empty.
func (e *entry) rate(hour int64) string {
	if e.counted() && (e.now.Bucket.Rate != e.rated || hour != e.hour) && e.now.Bucket.Rate > 0 {
		return number(e.now.Bucket.Rate)
	}
	return ""
}

func (e *entry) counted() bool { return e.written.Counters != e.now.Counters }

// info queues the fields about the instance.
func (l *ledger) info(i Info, k clock) {
	own := i
	own.Refused, own.Refusals, own.Priorities, own.Faults, own.Rejected, own.Semaphores, own.Windows = nil, nil, nil, nil, nil, nil, nil
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
	l.fields.json(lowerField, cut(i.Priorities, MostPriorities))
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

// infoText is an Info as it is written. Clock is the instance's clock when it started, in milliseconds since 1970; the times
// in Info are by that clock.
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
	l.events = append(l.events, pendingEvent{e.At, string(text)})
}

func (e *Event) shorten() {
	for _, s := range []*string{&e.From, &e.To, &e.Err, &e.Host, &e.Who, &e.Why} {
		*s = shortened(*s, mostText)
	}
	e.Limit = shortened(e.Limit, mostName)
}

// write is the content of one call of beat.lua.
type write struct {
	first        bool
	limits       []*entry
	fields, rows []pair
	events       []pendingEvent
}

// next returns the next write, and whether there is more after it. The number of changes is written last, so that a reader
// that sees a new one finds all rows.
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

// done marks a write as applied.
func (l *ledger) done(w *write, hour int64) {
	l.first = false
	for _, e := range w.limits {
		if e.counted() && e.now.Bucket.Rate > 0 {
			e.rated, e.hour = e.now.Bucket.Rate, hour
		}
		e.written, e.stored = e.now, true
	}
	l.fields.done(w.fields)
	l.rows.done(w.rows)
	l.events = l.events[len(w.events):]
}

// doubt marks a write whose outcome is unknown.
func (l *ledger) doubt(w *write) {
	for _, e := range w.limits {
		e.stored, e.hour = false, 0
	}
	l.fields.doubt(w.fields)
	l.rows.doubt(w.rows)
}
