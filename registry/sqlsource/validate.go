package sqlsource

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// unfit tells what a column of furtherColumns should say, if it shall say something else. What Columns name, the parser checks.
func (e *Editor) unfit(c cell) (want string) {
	named := slices.ContainsFunc(e.options.columns.fields(), func(f columnField) bool { return *f.name == c.column.name })
	if named || c.value == nil || !slices.Contains(furtherColumns, strings.ToLower(c.column.name)) {
		return ""
	}
	if strings.EqualFold(c.column.name, shadowColumn) {
		if truthOf(*c.value) == neither {
			return "0, 1 or NULL"
		}
	} else if n, ok := number([]byte(*c.value)); !ok || n < 0 {
		return "a number, at least 0, or NULL"
	}
	return ""
}

// newRow is how errors call a row that is not there yet.
const newRow = "new"

func (r *Row) id() string {
	if r == nil {
		return newRow
	}
	return r.ID
}

// check tells what is wrong with what a row shall say, by the rules of the registry, before it is written. What is not known yet is
// taken to be right.
func (s *session) check(name string, was *Row, cells []cell) error {
	values, row := Values{}, was.id()
	if was != nil {
		values = was.Values
	}
	asked := map[string]*string{}
	for _, c := range cells {
		asked[c.column.name] = c.value
		if want := s.unfit(c); want != "" {
			return &registry.RowError{Row: row, Name: name, Field: c.column.name, Value: plainValue(c.value), Want: want}
		}
		if c.value != nil && strings.Contains(*c.value, "\x00") {
			return &registry.RowError{Row: row, Name: name, Field: c.column.name, Value: shorten([]byte(*c.value)), Want: "a text without NUL"}
		}
	}
	var r raw
	places := r.cells()
	for i, f := range s.options.columns.fields() {
		if i > modifiedCells {
			i++
		} else if f.field == "Modified" {
			continue
		}
		value, ok := asked[*f.name]
		if !ok {
			value, ok = values[*f.name]
		}
		if !ok && was == nil && (f.field == "Rate" || f.field == "Status") {
			value = Text(1)
		}
		if value != nil && *f.name != "" {
			*places[i].(*sql.RawBytes) = []byte(*value)
		}
	}
	r.id, r.name = []byte(row), []byte(name)
	limit, bad := s.parser.limit(&r)
	if bad == nil && limit.Disabled { // what it says is not in force, but must be right when it is
		r.status = []byte("1")
		if _, hidden := s.parser.limit(&r); hidden != nil {
			if _, ok := asked[hidden.Field]; ok {
				bad = hidden
			}
		}
	}
	if bad != nil {
		return bad
	}
	return limit.Check()
}

// fit tells which column of PostgreSQL cannot hold what it shall say, which its error for the row would not.
func (s *session) fit(ctx context.Context, p *plan, was *Row, cells []cell) error {
	if s.options.dialect != PostgreSQL {
		return nil
	}
	for _, c := range cells {
		if c.value == nil {
			continue
		}
		held, err := s.query(ctx, "SELECT", s.options.table, "SELECT ($1::text::"+c.column.exact+")::text", *c.value)
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

// written reads a row that was just written, and tells if the columns do not hold what they should.
func (s *session) written(ctx context.Context, p *plan, was *Row, cells []cell) (*Row, error) {
	var is *Row
	var err error
	if was == nil {
		is, err = s.row(ctx, p.name)
	} else {
		is, err = s.locked(ctx, was)
	}
	switch {
	case err != nil:
		return nil, err
	case is == nil:
		return nil, s.failed("change", s.options.table, errors.New("the row is not there after it was written"))
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
	modified, _ := s.columns.find(s.options.dialect, s.options.columns.Modified)
	if was != nil && is.Limit.Version <= was.Limit.Version && s.options.dialect.later(modified) != "" {
		return nil, s.failed("change", s.options.table, errLate)
	}
	return is, nil
}

func plainValue(v *string) string {
	if v == nil {
		return "NULL"
	}
	return shorten([]byte(*v))
}

func truthOf(s string) truth { return flag([]byte(s)) }

// same tells whether two values are the same text, number or flag.
func same(a, b *string) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, xNumber := number([]byte(*a))
	y, yNumber := number([]byte(*b))
	return *a == *b || xNumber && yNumber && x == y || truthOf(*a) != neither && truthOf(*a) == truthOf(*b)
}
