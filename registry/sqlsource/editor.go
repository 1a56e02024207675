package sqlsource

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Editor changes rows of the table, one at a time, and writes down who did it and why, in an audit table of the same database: both
// or neither. There is nothing to close; the database is the caller's. It may be used by many goroutines and processes at once.
//
// A change fails with a *ConflictError if the row is not what it was when it was read, with a *registry.RowError if the registry
// would reject what it says or the columns cannot hold it, with a *ColumnError if it names a column that cannot be changed, and
// with a *RightError if the database's user may not. Then nothing is written. After another error of the commit it is unknown
// whether it was: see History.
//
// Every change gives its row a later time of modification, also in a column that counts whole seconds: by that the fleet knows which
// is newer. Columns that a change does not name stay as they are.
type Editor struct {
	db      *sql.DB
	options *options
	parser  parser
}

// NewEditor returns an editor of the table that New reads with these options. It does not ask the database anything yet.
func NewEditor(db *sql.DB, dialect Dialect, opts ...Option) (*Editor, error) {
	if db == nil {
		return nil, errNilDB
	}
	o, err := newOptions(dialect, opts)
	if err != nil {
		return nil, err
	}
	return &Editor{db: db, options: o, parser: parser{columns: o.columns, quota: o.quota, jitter: o.jitter}}, nil
}

// WithEditable names further columns that an Editor may change, which the source does not know. Others stay as they are, but that
// those of the package are known wherever a table has them: shadow, window, window_limit, concurrent.
func WithEditable(columns ...string) Option {
	return func(o *options) {
		for _, c := range columns {
			if err := o.dialect.identifier("editable column", c); err != nil {
				o.fail(err)
			}
		}
		o.further = append(o.further, columns...)
	}
}

// shadowColumn has 1 if the row's limit is only tried.
const shadowColumn = "shadow"

// furtherColumns may be changed wherever a table has them.
var furtherColumns = []string{shadowColumn, "window", "window_limit", "concurrent"}

// Columns are the names of the table's columns.
func (e *Editor) Columns() Columns { return e.options.columns }

// Get returns the row of a name; of several the one that is in force. [ErrNoRow] if there is none.
func (e *Editor) Get(ctx context.Context, name string) (Row, error) {
	s := &session{Editor: e, q: e.db}
	if err := s.prepare(ctx); err != nil {
		return Row{}, err
	}
	row, err := s.row(ctx, name)
	if err != nil {
		return Row{}, err
	}
	if row == nil {
		return Row{}, &rowError{name, ErrNoRow}
	}
	return *row, nil
}

// Change changes, adds or removes a row.
func (e *Editor) Change(ctx context.Context, c Change) (AuditEntry, error) {
	p := plan{name: c.Name, who: c.Who, why: c.Why, to: c.To, remove: c.From != "" && c.To == nil}
	if c.From == "" && c.To == nil {
		return AuditEntry{}, &registry.RowError{Name: c.Name, Field: "change", Value: "nothing", Want: "a version to change from, or what a new row shall say"}
	}
	p.fresh = func(now *Row) bool {
		if now == nil {
			return c.From == ""
		}
		return now.Version == c.From
	}
	return e.apply(ctx, &p)
}

// SetShadow turns the shadow of a row on or off: its limit is only tried, and refuses nobody. The table must have a column for it.
func (e *Editor) SetShadow(ctx context.Context, name string, from Version, on bool, who, why string) (AuditEntry, error) {
	return e.Change(ctx, Change{Name: name, From: from, To: Values{e.shadowColumn(): Text(on)}, Who: who, Why: why})
}

func (e *Editor) shadowColumn() string {
	for _, f := range e.options.columns.fields() {
		if f.field == "Shadow" && *f.name != "" {
			return *f.name
		}
	}
	return shadowColumn
}

// plan is what shall become of one row.
type plan struct {
	name, who, why string
	to             Values
	remove         bool
	fresh          func(now *Row) bool // whether the row is what it should be before; nil: there is none
	restore        bool                // to is a row that was removed, with columns that are not editable
	undoes         int64               // an entry, or 0
}

// apply does it, in one transaction.
func (e *Editor) apply(ctx context.Context, p *plan) (entry AuditEntry, err error) {
	if err := reasons(p.name, p.who, p.why); err != nil {
		return entry, err
	}
	var clash bool
	err = e.transact(ctx, func(s *session) error {
		entry, clash, err = s.apply(ctx, p)
		return err
	})
	if clash { // a unique key, of somebody who is no editor
		if now, gone := e.Get(ctx, p.name); gone == nil {
			return AuditEntry{}, &ConflictError{Name: p.name, Now: &now}
		}
	}
	if err != nil {
		return AuditEntry{}, err
	}
	return entry, nil
}

func (s *session) apply(ctx context.Context, p *plan) (entry AuditEntry, clash bool, err error) {
	was, err := s.row(ctx, p.name)
	if err != nil {
		return entry, false, err
	}
	if !p.fresh(was) {
		return entry, false, &ConflictError{Name: p.name, Now: was}
	}
	cells, err := s.cells(p, was)
	if err == nil {
		err = s.fit(ctx, p, was, cells)
	}
	if err != nil {
		return entry, false, err
	}
	switch {
	case p.remove:
		err = s.remove(ctx, was)
	case was == nil:
		if err = s.add(ctx, p.name, cells); err != nil && kindOf(err) == badValue {
			clash = true
		}
	default:
		err = s.update(ctx, was, cells)
	}
	if err != nil {
		return entry, clash, s.refused(p, was, cells, err)
	}
	entry = AuditEntry{Who: p.who, Why: p.why, Table: s.options.table.String(), Name: p.name}
	if was != nil {
		entry.From = was.Values
	}
	if !p.remove {
		is, err := s.written(ctx, p, was, cells)
		if err != nil {
			return AuditEntry{}, false, err
		}
		entry.To = is.Values
	}
	entry, err = s.record(ctx, &entry, p.undoes)
	return entry, false, err
}

// cell is what a column shall say.
type cell struct {
	column column
	value  *string
}

// cells are what shall be written, in the order of the table, and validated.
func (s *session) cells(p *plan, was *Row) ([]cell, error) {
	if p.remove {
		return nil, nil
	}
	var cells []cell
	for name, value := range p.to {
		c, there := s.columns.find(s.options.dialect, name)
		names := &s.options.columns
		may := c.writable && (p.restore && c.name != names.Modified || s.editable(c.name) || was == nil && c.name == names.ID)
		switch {
		case p.restore && there && (!may || c.name == names.Name):
			continue // the database's, or written anyway
		case !may:
			return nil, &ColumnError{Table: s.options.table.String(), Column: name, There: there}
		}
		cells = append(cells, cell{c, value})
	}
	place := func(c cell) int { return slices.Index(s.columns, c.column) }
	slices.SortFunc(cells, func(a, b cell) int { return place(a) - place(b) })
	for i := 1; i < len(cells); i++ {
		if cells[i].column == cells[i-1].column {
			return nil, &registry.RowError{Name: p.name, Field: cells[i].column.name, Value: "two values", Want: "one"}
		}
	}
	if was != nil && len(cells) == 0 {
		return nil, &registry.RowError{Row: was.ID, Name: p.name, Field: "change", Value: "nothing", Want: "a column"}
	}
	return cells, s.check(p.name, was, cells)
}

func (e *Editor) editable(name string) bool {
	d, c := e.options.dialect, &e.options.columns
	if name == c.ID || name == c.Name || name == c.Modified {
		return false
	}
	is := func(other string) bool { return other == name || d != PostgreSQL && strings.EqualFold(other, name) }
	return slices.ContainsFunc(c.fields(), func(f columnField) bool { return *f.name == name }) ||
		slices.ContainsFunc(furtherColumns, is) || slices.ContainsFunc(e.options.further, is)
}

// rowError is an error about a name.
type rowError struct {
	name string
	err  error
}

func (e *rowError) Error() string { return e.err.Error() + ": " + shorten([]byte(e.name)) }
func (e *rowError) Unwrap() error { return e.err }

// errLate is for a column that cannot hold a later time than it does.
var errLate = errors.New("sqlsource: the time of the last modification does not rise")
