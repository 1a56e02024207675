package sqlsource

import (
	"cmp"
	"database/sql"
	"encoding/hex"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
)

// maxTime is the latest time of a modification, in microseconds since 1970.
const maxTime = 1 << 53

// fields are the fields of a row, in the order of a query.
var fields = registry.Fields()

// place is a column that may hold a field, under one of the names of the field.
type place struct {
	field  *registry.Field
	name   int // of the field: an index in its Names
	column string
	named  bool // by WithColumns, so that it must exist
}

// places returns all columns that may hold a field. A field whose column WithColumns names has no other column. Otherwise the table may have
// the columns of all names of the field.
func (o *options) places() (all []place) {
	for i := range fields {
		f := &fields[i]
		first := len(all)
		for name, key := range f.Names() {
			if column := o.columns.own(key); column != nil && o.named[key] {
				all = append(all, place{f, name, *column, true})
			}
		}
		if len(all) > first || f.Column == registry.Named {
			continue
		}
		for name, column := range f.Names() {
			all = append(all, place{f, name, o.dialect.defaultName(column), false})
		}
	}
	return all
}

// raw is a row as texts; NULL is nil. They are valid until the next row is read.
type raw struct {
	id, micros, unread sql.RawBytes
	values             []sql.RawBytes // of the places
}

func newRaw(places []place) *raw { return &raw{values: make([]sql.RawBytes, len(places))} }

// cells returns the destinations for scanning a row, in the order of options.selected.
func (r *raw) cells() []any {
	cells := []any{&r.id, &r.micros, &r.unread}
	for i := range r.values {
		cells = append(cells, &r.values[i])
	}
	return cells
}

// parser makes limits of rows.
type parser struct {
	modified string // the column of the time of the last modification
	places   []place
	at       [][]int // indices of places, by Field.Index and the name of the field; -1: no such column
	quota    bool
	jitter   time.Duration
}

func newParser(o *options) parser {
	p := parser{modified: o.columns.Modified, places: o.places(), quota: o.quota, jitter: o.jitter}
	for i := range fields {
		p.at = append(p.at, slices.Repeat([]int{-1}, 1+len(fields[i].Older)))
	}
	for i := range p.places {
		at := &p.places[i]
		p.at[at.field.Index()][at.name] = i
	}
	return p
}

// value returns the text of a field under one of its names; nil if it is NULL, or there is no such column.
func (p *parser) value(r *raw, f *registry.Field, name int) []byte {
	if i := p.at[f.Index()][name]; i >= 0 {
		return r.values[i]
	}
	return nil
}

// column returns the column of a field's name. If the table has no such column, it is one that it has for the field, or should have.
func (p *parser) column(f *registry.Field, name int, there func(column string) bool) string {
	if i := p.at[f.Index()][name]; i >= 0 && there(p.places[i].column) {
		return p.places[i].column
	}
	wanted := ""
	for i := range p.places {
		switch at := &p.places[i]; {
		case at.field.Index() != f.Index():
		case there(at.column):
			return at.column
		case wanted == "":
			wanted = at.column
		}
	}
	return cmp.Or(wanted, f.Key)
}

// limit returns the limit of a row, or the error with which the row is rejected. there reports which columns the table has.
func (p *parser) limit(r *raw, there func(column string) bool) (registry.Limit, *registry.RowError) {
	l := registry.Limit{Row: rowName(r.id), MaxWait: registry.DefaultMaxWait, Quota: p.quota, Jitter: p.jitter}
	wrong := l.Read(registry.InTable, func(f *registry.Field, name int) []byte { return p.value(r, f, name) })
	reject := func(column string, value []byte, want string) (registry.Limit, *registry.RowError) {
		return registry.Limit{}, &registry.RowError{Row: l.Row, Name: l.Name, Field: column, Value: registry.ShortValue(value), Want: want, Shadow: l.Shadow}
	}
	if wrong == nil || wrong.Field.Key != "name" {
		var ok bool
		if l.Version, ok = version(r.micros); !ok {
			return reject(p.modified, r.micros, "a time from 1970 to 2255; this is in microseconds since 1970")
		}
		if r.micros == nil && r.unread != nil {
			return reject(p.modified, r.unread, "a time from 1970 to 2255, as 2024-12-31 23:59:59 in UTC if it is text, or NULL")
		}
	}
	if wrong == nil {
		return l, nil
	}
	_, bad := reject(p.column(wrong.Field, wrong.Name, there), p.value(r, wrong.Field, wrong.Name), wrong.Want)
	if wrong.Other != wrong.Name {
		bad.Other = p.column(wrong.Field, wrong.Other, there)
		bad.Want = registry.Twice(bad.Other, registry.ShortValue(p.value(r, wrong.Field, wrong.Other)))
	}
	return registry.Limit{}, bad
}

// version reads the time of the last modification; 0 if it is NULL.
func version(micros []byte) (v int64, ok bool) {
	if micros == nil {
		return 0, true
	}
	v, err := strconv.ParseInt(string(micros), 10, 64)
	return v, err == nil && v >= 0 && v <= maxTime
}

// Limit returns the limit of a row with these texts, by column, or the *[registry.RowError] with which Load rejects the row. A nil text and a
// missing column are NULL. The time of the last modification is in microseconds since 1970, as [Dialect.Micros] selects it. Limit does not
// query the database.
func (s *Source) Limit(values map[string]*string) (registry.Limit, error) {
	columns, r := &s.options.columns, newRaw(s.parser.places)
	set := func(cell *sql.RawBytes, column string) {
		if v := values[column]; v != nil {
			*cell = []byte(*v)
		}
	}
	set(&r.id, columns.ID)
	set(&r.micros, columns.Modified)
	if _, err := strconv.ParseInt(string(r.micros), 10, 64); err != nil {
		r.micros, r.unread = nil, r.micros
	}
	for i := range s.parser.places {
		set(&r.values[i], s.parser.places[i].column)
	}
	limit, bad := s.parser.limit(r, func(column string) bool { _, ok := values[column]; return ok })
	if bad != nil {
		return registry.Limit{}, bad
	}
	return limit, nil
}

// rowName returns a primary key as text, in hexadecimal if it is not UTF-8.
func rowName(id []byte) string {
	if !utf8.Valid(id) {
		return "0x" + hex.EncodeToString(id[:min(len(id), 64)])
	}
	return registry.ShortValue(id)
}

// Newer reports whether a rather than b is in force if both rows have one name: the one with the later Version, or the larger key if these are equal. Keys
// are compared as numbers if both are. The order is the same in every process.
func Newer(a, b *registry.Limit) bool { return rows.Newer(a.Version, a.Row, b.Version, b.Row) }
