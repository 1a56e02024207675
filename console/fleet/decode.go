package fleet

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// decoder reads the fields of a hash. Their content is not trusted.
type decoder struct {
	key     string
	fields  map[string]string
	rows    map[string]*Limit // without counters
	before  *cached           // the previous reading; may be nil
	skipped []*DataError
}

// mostSkipped bounds the errors reported for a key.
const mostSkipped = 10

func (d *decoder) skip(field string, why error) {
	if len(d.skipped) < mostSkipped {
		d.skipped = append(d.skipped, &DataError{shortened(d.key, mostName), shortened(field, mostName), shortened(why.Error(), mostText)})
	}
}

// limits returns the limits of the rows, without counters.
func (d *decoder) limits() map[string]*Limit {
	all := make(map[string]*Limit, len(d.fields))
	for name, text := range d.fields {
		var c Config
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			d.skip(name, err)
		} else if named(name) {
			c.Row = shortened(c.Row, mostText)
			all[name] = &Limit{Name: name, Decider: deciders[0], Config: c}
		}
	}
	return all
}

// instance returns the instance that the fields describe; nil if they do not describe one.
func (d *decoder) instance(id string) *Instance {
	i := &Instance{ID: id, Limits: maps.Clone(d.rows), Ended: d.fields["ended"] == "1"}
	beats, err := strconv.ParseUint(d.fields["beat"], 10, 53)
	started, err2 := d.millis("started")
	seen, err3 := d.millis("seen")
	if err := errors.Join(err, err2, err3); err != nil {
		d.skip("", err)
		return nil
	}
	i.Beats, i.Beat = int64(beats), seen
	d.info(&i.Info, started)
	i.Started = started
	if d.before != nil && !d.before.started.Equal(started) { // its times have another base
		d.before = nil
	}
	for _, field := range slices.Sorted(maps.Keys(d.fields)) {
		d.field(i, field)
	}
	return i
}

// millis returns a time in milliseconds since 1970, before 2109.
func (d *decoder) millis(field string) (time.Time, error) {
	n, err := strconv.ParseUint(d.fields[field], 10, 42)
	return time.UnixMilli(int64(n)), err
}

// field reads the record of a limit, a semaphore or a window.
func (d *decoder) field(i *Instance, field string) {
	text := d.fields[field]
	if name, ok := strings.CutPrefix(field, recordPrefix); ok && named(name) {
		l := i.Limits[name]
		if l == nil {
			return // its row is gone
		}
		if d.before != nil && d.before.fields[field] == text && d.before.limits[name] != nil && d.before.limits[name].Config == l.Config {
			i.Limits[name] = d.before.limits[name]
			return
		}
		read := Limit{Name: name, Config: l.Config}
		if err := parseRecord(text, &read, clock{i.Started}); err != nil {
			d.skip(field, err)
			return
		}
		i.Limits[name] = &read
	}
	if strings.HasPrefix(field, semaphorePrefix) && len(i.Semaphores) < MostSemaphores {
		var s Semaphore
		if d.json(field, &s) && named(s.Name) {
			s.Holders = cut(s.Holders, MostHolders)
			for n := range s.Holders {
				s.Holders[n].Label = shortened(s.Holders[n].Label, mostText)
			}
			i.Semaphores = append(i.Semaphores, s)
		}
	}
	if strings.HasPrefix(field, windowPrefix) && len(i.Windows) < MostWindows {
		var w Window
		if d.json(field, &w) && named(w.Name) {
			i.Windows = append(i.Windows, w)
		}
	}
}

// json decodes a field, and reports whether it succeeded.
func (d *decoder) json(field string, into any) bool {
	text := d.fields[field]
	if text == "" {
		return false
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		d.skip(field, err)
		return false
	}
	return true
}

// info reads the Info of an instance. Its clock may be wrong, so its times are converted to Redis' clock.
func (d *decoder) info(i *Info, started time.Time) {
	var own infoText
	wrong := time.Duration(0)
	if d.json(infoField, &own) {
		*i = own.Info
		i.Semaphores, i.Windows = nil, nil
		wrong = started.Sub(time.UnixMilli(min(max(own.Clock, 0), math.MaxUint32*1000)))
		for _, t := range []*time.Time{&i.Loads.Last, &i.Loads.Lost, &i.Switch.Since, &i.Switch.Read, &i.Store.Since} {
			if !t.IsZero() {
				*t = t.Add(wrong)
			}
		}
	}
	i.Rejected, i.Refused, i.Refusals, i.Priorities, i.Faults = nil, nil, nil, nil, nil
	d.json(rejectedField, &i.Rejected)
	d.json(refusedField, &i.Refused)
	d.json(refusalsField, &i.Refusals)
	i.Refusals = cut(i.Refusals, MostRefusals)
	for n := range i.Refusals {
		r := &i.Refusals[n]
		r.Limit, r.By, r.Count = shortened(r.Limit, mostName), shortened(r.By, mostText), max(0, r.Count)
	}
	d.json(lowerField, &i.Priorities)
	i.Priorities = cut(i.Priorities, MostPriorities)
	for n := range i.Priorities {
		p := &i.Priorities[n]
		p.Limit, p.Name, p.Waiting = shortened(p.Limit, mostName), shortened(p.Name, mostText), max(0, p.Waiting)
		p.Counters = p.Counters.Minus(&Counters{}) // none is negative
	}
	d.json(faultsField, &i.Faults)
	i.Faults = cut(i.Faults, MostFaults)
	for n := range i.Faults {
		f := &i.Faults[n]
		f.shorten()
		if f.Calls = max(0, f.Calls); !f.Since.IsZero() {
			f.Since = f.Since.Add(wrong)
		}
	}
	i.Rejected, i.Refused = cut(i.Rejected, MostRejected), cut(i.Refused, MostKeys)
	for n := range i.Rejected {
		i.Rejected[n].shorten()
	}
	for n := range i.Refused {
		k := &i.Refused[n]
		k.Limit, k.Key = shortened(k.Limit, mostName), shortened(k.Key, mostName)
	}
	for _, s := range []*string{&i.Host, &i.Version, &i.Loads.Err, &i.Loads.Names, &i.Switch.Err, &i.Switch.Origin, &i.Store.Err, &i.Missed.Err, &i.Store.Kind, &i.Store.Policy} {
		*s = shortened(*s, mostText)
	}
}
