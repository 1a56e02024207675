// Package editor changes the rows of a table of limits, and records who changed what and why.
//
// The table is the one that a [sqlsource.Source] reads. Each change is one transaction that also adds a row to an audit table of the same
// database, so that both are written or neither. A change names the version of the row that it was made from, and fails if the row has
// changed since. Undo reverses an entry of the audit table. Actions without a row, such as a reset of a bucket, are recorded by Act.
package editor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// Editor changes the rows of one table. It is safe for concurrent use by many goroutines and processes. There is nothing to close; the
// database belongs to the caller.
//
// A change fails with
//
//   - a *[ConflictError] if the row has changed since it was read,
//   - a *[registry.RowError] if the registry would reject the row, or its columns cannot hold it,
//   - a *[ColumnError] if it names a column that cannot be changed,
//   - a *[sqlsource.RightError] if the database's user lacks a right,
//   - [ErrLocked] if another transaction holds the row for two seconds.
//
// Then nothing was written. If the commit fails otherwise, the outcome is unknown: see [Editor.History].
//
// An editor changes one row at a time. It holds at most one connection while it waits for a lock, and one more for an action
// ([Editor.Act]), so that loads and the switch find the others free.
//
// Every change gives its row a later time of modification, even in a column of whole seconds, because the fleet takes the
// later one of two configurations as the newer. Columns that a change does not name keep their values.
type Editor struct {
	db      *sql.DB
	source  *sqlsource.Source
	dialect sqlsource.Dialect
	table   sqlsource.TableName
	audit   sqlsource.TableName
	further []string // may be changed although the source does not read them
	changes turn     // serialises transactions that change rows
	notes   turn     // serialises transactions that record actions
}

// New returns an editor of the table that source reads. db may be another connection pool to the same database. New does not
// use it yet.
func New(db *sql.DB, source *sqlsource.Source, opts ...Option) (*Editor, error) {
	if db == nil {
		return nil, errNilDB
	}
	if source == nil {
		return nil, invalid("source", "nil", "a source")
	}
	o, err := newOptions(source.Dialect(), opts)
	if err != nil {
		return nil, err
	}
	return &Editor{
		db: db, source: source, dialect: o.dialect, table: source.Table(), audit: o.audit, further: o.further,
		changes: make(turn, 1), notes: make(turn, 1),
	}, nil
}

// Option configures an Editor. An option with a bad value makes New fail.
type Option func(*options)

type options struct {
	dialect sqlsource.Dialect
	audit   sqlsource.TableName
	further []string
	err     error
}

func (o *options) fail(err error) {
	if o.err == nil {
		o.err = err
	}
}

func newOptions(d sqlsource.Dialect, opts []Option) (*options, error) {
	o := &options{dialect: d, audit: sqlsource.TableName{Name: defaultAuditTable}}
	if d < sqlsource.MySQL || d > sqlsource.SQLite {
		return nil, invalid("dialect", d, "MySQL, PostgreSQL or SQLite")
	}
	for _, opt := range opts {
		if opt == nil {
			o.fail(invalid("option", "nil", "no nil options"))
			break
		}
		opt(o)
	}
	return o, o.err
}

var errNilDB = invalid("db", "nil", "a database")

func invalid(field string, value any, want string) error {
	return fmt.Errorf("editor: %w: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
}

// WithAuditTable sets the name of the audit table. The default is "t_ratelimite_audit". For valid names see
// [sqlsource.WithTable].
func WithAuditTable(name string) Option {
	return func(o *options) {
		t, err := o.dialect.ParseTable(name)
		if err != nil {
			o.fail(err)
		}
		o.audit = t
	}
}

// WithEditable names further columns that an Editor may change and the source does not read. All other columns keep their values.
func WithEditable(columns ...string) Option {
	return func(o *options) {
		for _, c := range columns {
			if err := o.dialect.CheckIdentifier("editable column", c); err != nil {
				o.fail(err)
			}
		}
		o.further = append(o.further, columns...)
	}
}

// Columns returns the names of the table's columns, as they were when the table was used last (sqlsource.Source.Columns).
func (e *Editor) Columns() sqlsource.Columns { return e.source.Columns() }

// Get returns the row of a name; if there are several, the one in force. It fails with [ErrNoRow] if there is none.
func (e *Editor) Get(ctx context.Context, name string) (Row, error) {
	s := &session{Editor: e, q: e.db}
	if err := s.prepare(ctx); err != nil {
		return Row{}, err
	}
	row, err := s.rowOf(ctx, name, nil)
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

// SetShadow turns a row's shadow on or off. A limit in shadow is evaluated and refuses no call. The table needs a column for
// it.
func (e *Editor) SetShadow(ctx context.Context, name string, from Version, on bool, who, why string) (AuditEntry, error) {
	return e.Change(ctx, Change{Name: name, From: from, To: Values{e.Columns().Shadow: Text(on)}, Who: who, Why: why})
}

// plan describes a change of one row.
type plan struct {
	name, who, why string
	id             *string // the key of the row; nil for the row of the name that is in force
	to             Values
	remove         bool
	fresh          func(now *Row) bool // reports whether the row is as expected; now is nil if there is none
	restore        bool                // to is a removed row, including columns that are not editable
	undoes         int64               // the entry that it reverses, or 0
}

// apply makes a change in one transaction.
func (e *Editor) apply(ctx context.Context, p *plan) (entry AuditEntry, err error) {
	if err := reasons(p.name, p.who, p.why); err != nil {
		return entry, err
	}
	var clash bool
	err = e.transact(ctx, func(s *session) error {
		entry, clash, err = s.apply(ctx, p)
		return err
	})
	if clash { // a unique key of a writer without an editor
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
	was, err := s.rowOf(ctx, p.name, p.id)
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
		if err = s.add(ctx, p.name, cells); err != nil && sqlsource.FaultOf(err) == sqlsource.BadValue {
			clash = true
		}
	default:
		err = s.update(ctx, was, cells)
	}
	if err != nil {
		return entry, clash, s.refused(p, was, cells, err)
	}
	entry = AuditEntry{Who: p.who, Why: p.why, Table: s.table.String(), Name: p.name}
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
	if entry, err = s.record(ctx, &entry, p.undoes); err == nil && p.remove {
		entry.Left, err = s.rowOf(ctx, p.name, nil)
	}
	return entry, false, err
}

// cell is a column and its new value.
type cell struct {
	column column
	value  *string
}

// cells returns the values to write, in the order of the table's columns, validated.
func (s *session) cells(p *plan, was *Row) ([]cell, error) {
	if p.remove {
		return nil, nil
	}
	var cells []cell
	names := s.Columns()
	for name, value := range p.to {
		c, there := s.column(name)
		may := c.writable && (p.restore && c.name != names.Modified || s.editable(c.name) || was == nil && c.name == names.ID)
		switch {
		case p.restore && there && (!may || c.name == names.Name):
			continue // set by the database, or written in any case
		case !may:
			return nil, &ColumnError{Table: s.table.String(), Column: name, There: there}
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
	d, c := e.dialect, e.Columns()
	f, isField := c.Field(name)
	if name == c.ID || name == c.Modified || f.Setting == "name" {
		return false
	}
	is := func(other string) bool {
		return other == name || d != sqlsource.PostgreSQL && strings.EqualFold(other, name)
	}
	return isField || slices.ContainsFunc(e.further, is)
}

// rowError is an error about a name.
type rowError struct {
	name string
	err  error
}

func (e *rowError) Error() string { return e.err.Error() + ": " + registry.ShortValue([]byte(e.name)) }
func (e *rowError) Unwrap() error { return e.err }

// errLate is returned if the column cannot hold a later time of modification.
var errLate = errors.New("editor: the column of the modification time cannot hold a later time")
