package editor

import (
	"context"
	"errors"
	"maps"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// newRow is the ID of a new row in errors.
const newRow = "new"

func (r *Row) id() string {
	if r == nil {
		return newRow
	}
	return r.ID
}

// check validates the new values of a row by the rules of the registry, before they are written. Columns without a value yet
// are assumed to be valid.
func (s *session) check(name string, was *Row, cells []cell) error {
	row, values := was.id(), Values{}
	if was != nil {
		maps.Copy(values, was.Values)
	} else {
		values[s.Columns().Rate] = Text(1)
		s.enable(values, false)
	}
	asked := map[string]*string{}
	for _, c := range cells {
		asked[c.column.name] = c.value
		if c.value != nil && strings.Contains(*c.value, "\x00") {
			return &registry.RowError{Row: row, Name: name, Field: c.column.name, Value: registry.ShortValue([]byte(*c.value)), Want: "a text without NUL"}
		}
	}
	maps.Copy(values, asked)
	delete(values, s.Columns().Modified)
	values[s.Columns().ID], values[s.Columns().Name] = &row, &name
	limit, err := s.source.Limit(values)
	if err == nil && limit.Disabled { // the row is not in force, but must be valid when it is enabled
		s.enable(values, true)
		_, hidden := s.source.Limit(values)
		var bad *registry.RowError
		if errors.As(hidden, &bad) {
			if _, ok := asked[bad.Field]; ok {
				err = hidden
			}
		}
	}
	if err != nil {
		return err
	}
	return limit.Check()
}

// enable sets the columns by which a row is enabled. Without always it does so only if values has none of them.
func (e *Editor) enable(values Values, always bool) {
	names := e.Columns()
	for column := range values {
		f, ok := names.Field(column)
		if ok && f.Setting == "disabled" && !always {
			return
		}
		if ok && f.Setting == "disabled" {
			values[column] = Text(f.Key != "disabled")
		}
	}
	for _, f := range names.Fields() {
		if f.Setting == "disabled" {
			values[f.Name] = Text(f.Key != "disabled")
		}
	}
}

// Limit returns the limit of a row with these values, or a *registry.RowError if the registry would reject the row. A missing
// column is NULL; without a column for that the row is enabled. Limit does not use the database.
func (e *Editor) Limit(name string, values Values) (registry.Limit, error) {
	row, names := maps.Clone(values), e.Columns()
	if row == nil {
		row = Values{}
	}
	e.enable(row, false)
	for column := range row {
		if f, ok := names.Field(column); ok && f.Setting == "name" {
			delete(row, column)
		}
	}
	delete(row, names.Modified)
	row[names.ID], row[names.Name] = Text(newRow), &name
	limit, err := e.source.Limit(row)
	if err != nil {
		return registry.Limit{}, err
	}
	return limit, limit.Check()
}

// fit returns an error if a column of PostgreSQL cannot hold its new value. PostgreSQL's own error for the row would not name
// the column.
func (s *session) fit(ctx context.Context, p *plan, was *Row, cells []cell) error {
	if s.dialect != sqlsource.PostgreSQL {
		return nil
	}
	for _, c := range cells {
		if c.value == nil {
			continue
		}
		held, err := s.query(ctx, "SELECT", s.table, "SELECT ($1::text::"+c.column.exact+")::text", *c.value)
		switch {
		case err != nil:
			return s.refused(p, was, []cell{c}, err)
		case !same(c.value, held[0][0]) && s.editable(c.column.name):
			return s.cannotHold(p, was, c, held[0][0])
		}
	}
	return nil
}

func (s *session) cannotHold(p *plan, was *Row, c cell, held *string) error {
	return &registry.RowError{Row: was.id(), Name: p.name, Field: c.column.name, Value: plainValue(c.value),
		Want: "what the column can hold: it would hold " + plainValue(held)}
}

// written reads a row after writing it, and returns an error if a column does not hold its new value.
func (s *session) written(ctx context.Context, p *plan, was *Row, cells []cell) (*Row, error) {
	var is *Row
	var err error
	if was == nil {
		is, err = s.rowOf(ctx, p.name, nil)
	} else {
		is, err = s.locked(ctx, was)
	}
	switch {
	case err != nil:
		return nil, err
	case is == nil:
		return nil, s.failed("change", s.table, errors.New("the row is not there after it was written"))
	}
	for _, c := range cells {
		if got := is.Values[c.column.name]; !same(c.value, got) && s.editable(c.column.name) {
			return nil, s.cannotHold(p, was, c, got)
		}
	}
	if is.Bad != nil {
		return nil, is.Bad
	}
	if err := is.Limit.Check(); err != nil {
		return nil, err
	}
	modified, _ := s.columns.find(s.dialect, s.Columns().Modified)
	if was != nil && is.Limit.Version <= was.Limit.Version && later(s.dialect, modified) != "" {
		return nil, s.failed("change", s.table, errLate)
	}
	return is, nil
}

func plainValue(v *string) string {
	if v == nil {
		return "NULL"
	}
	return registry.ShortValue([]byte(*v))
}

// same reports whether two values are the same text, number or flag.
func same(a, b *string) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, xNumber := registry.ParseNumber(*a)
	y, yNumber := registry.ParseNumber(*b)
	on, onFlag := registry.ParseFlag(*a)
	other, otherFlag := registry.ParseFlag(*b)
	return *a == *b || xNumber && yNumber && x == y || onFlag && otherFlag && on == other
}
