package editor

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// Version is what a row said when it was read: a hash of all of its columns. It differs after every change, also of two within one
// second, and is the same in every process. The empty Version is that of no row.
type Version string

// Values are what columns say, by column, as the database writes it; nil is NULL. What is written is text too, also of numbers:
// Text makes one.
type Values map[string]*string

// Text is a value of Values: 5, "0.25", true.
func Text(v any) *string {
	text := fmt.Sprint(v)
	switch v {
	case true:
		text = "1"
	case false:
		text = "0"
	}
	return &text
}

// Row is one row of the table.
type Row struct {
	// Name of the bucket, and the primary key.
	Name, ID string
	// Version of what the row says, for Change.From.
	Version Version
	// Values of all columns.
	Values Values
	// Editable are the columns that Change.To may name, in the order of the table.
	Editable []string
	// Limit is what the row means, unless it is Bad.
	Limit registry.Limit
	Bad   *registry.RowError
}

// read fills in what the row means to the source, of which the time of the last modification is given.
func (r *Row) read(source *sqlsource.Source, modified *string) {
	names, values := source.Columns(), maps.Clone(r.Values)
	values[names.Modified] = modified
	limit, err := source.Limit(values)
	r.Limit, r.ID = limit, limit.Row
	if errors.As(err, &r.Bad) {
		r.ID = r.Bad.Row
	}
	if name := values[names.Name]; name != nil {
		r.Name = *name
	}
}

// Change changes, adds or removes one row.
type Change struct {
	// Name of the bucket.
	Name string
	// From is the Version of the row that was read. Empty: there is no row, and one is added.
	From Version
	// To is what columns shall say; others stay as they are. Nil: the row is removed.
	To Values
	// Who changes it, 1 to 256 bytes, and Why, 1 to 2000 bytes.
	Who, Why string
}

// AuditEntry is one row of the audit table.
type AuditEntry struct {
	ID int64
	// At is when, by the database's clock.
	At       time.Time
	Who, Why string
	// Table that was changed, and the Name of the bucket, or of the switch.
	Table, Name string
	// From and To are all columns of the row before and after. Nil: there was none, there is none.
	From, To Values
	// Action is what was done without a change of a row (Act); empty: it is a change.
	Action string
	// UndoneBy is the ID of the entry that undid this one; 0: none.
	UndoneBy int64
	// Left is of a removal the row that is in force for the name now, since the table had several of it; nil if there is none. Change and
	// Undo set it; the audit table does not keep it.
	Left *Row
}

// Changed are the columns in which From and To differ, in alphabetical order.
func (a *AuditEntry) Changed() []string {
	var changed []string
	for column, from := range a.From {
		if to, ok := a.To[column]; !ok || !same(from, to) {
			changed = append(changed, column)
		}
	}
	for column := range a.To {
		if _, ok := a.From[column]; !ok {
			changed = append(changed, column)
		}
	}
	slices.Sort(changed)
	return changed
}

var (
	// ErrConflict: the row is not what it was when it was read. Errors of this kind are a *ConflictError.
	ErrConflict = errors.New("editor: changed meanwhile")
	// ErrNoRow: the table has no row of that name.
	ErrNoRow = errors.New("editor: no such row")
	// ErrNoEntry: the audit table has no such entry.
	ErrNoEntry = errors.New("editor: no such audit entry")
	// ErrUndone: the change was undone already.
	ErrUndone = errors.New("editor: undone already")
	// ErrAction: the entry is of an action, which cannot be undone.
	ErrAction = errors.New("editor: an action cannot be undone")
	// ErrLocked: another transaction or another editor holds the row for longer than an editor waits. Nothing was written.
	ErrLocked = errors.New("editor: locked by another transaction")
	// ErrNoAudit: there is no audit table, and nothing is changed without. CreateAuditTable makes it.
	ErrNoAudit = errors.New("editor: no audit table: it must be created")
)

// ConflictError tells that somebody else was faster. Nothing was written. It matches [ErrConflict].
type ConflictError struct {
	Name string
	// Now is what is there now; nil: nothing.
	Now *Row
}

func (e *ConflictError) Error() string {
	if e.Now == nil {
		return fmt.Sprintf("%v: %.80q: the row is gone", ErrConflict, e.Name)
	}
	return fmt.Sprintf("%v: %.80q: row %.80s says something else now", ErrConflict, e.Name, e.Now.ID)
}

// Unwrap returns [ErrConflict].
func (e *ConflictError) Unwrap() error { return ErrConflict }

// ColumnError tells that a column cannot be changed. Nothing was written.
type ColumnError struct {
	Table, Column string
	// There tells whether the table has the column; if so the editor does not know what it means (WithEditable).
	There bool
}

func (e *ColumnError) Error() string {
	if e.There {
		return fmt.Sprintf("editor: table %s: column %.80q is not one that the editor changes", e.Table, e.Column)
	}
	return fmt.Sprintf("editor: table %s has no column %.80q", e.Table, e.Column)
}
