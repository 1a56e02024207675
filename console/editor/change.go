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

// Version identifies the content of a row: a hash of all of its columns. It differs after every change, even of two within
// one second, and is the same in every process. The empty Version stands for a row that does not exist.
type Version string

// Values are the values of columns, by column, as texts of the database; nil stands for NULL. New values are texts, too, also
// for numbers: see Text.
type Values map[string]*string

// Text converts a value to an element of Values: 5, "0.25", true.
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
	// Version of the row, for Change.From.
	Version Version
	// Values of all columns.
	Values Values
	// Editable are the columns that Change.To may name, in the order of the table.
	Editable []string
	// Limit is the limit of the row, unless the row is Bad.
	Limit registry.Limit
	Bad   *registry.RowError
}

// read sets Limit, Bad and the names from Values, with the given time of modification.
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
	// From is the Version of the row that was read; empty to add a row.
	From Version
	// To has the new values; other columns keep theirs. Nil removes the row.
	To Values
	// Who changes it, 1 to 256 bytes, and Why, 1 to 2000 bytes.
	Who, Why string
}

// AuditEntry is one row of the audit table.
type AuditEntry struct {
	ID int64
	// At is the time of the change, by the database's clock.
	At       time.Time
	Who, Why string
	// Table is the changed table, and Name the name of the bucket or the switch.
	Table, Name string
	// From and To have all columns of the row before and after. From is nil for an added row, To for a removed one.
	From, To Values
	// Action describes an action that changed no row (Act); empty for a change.
	Action string
	// UndoneBy is the ID of the entry that undid this one, or 0.
	UndoneBy int64
	// Left is set by a removal if the table has another row of the name: the one that is now in force. Change and Undo set
	// it; the audit table does not contain it.
	Left *Row
}

// Changed returns the columns in which From and To differ, in alphabetical order.
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
	// ErrConflict: the row has changed since it was read. Errors of this kind are a *ConflictError.
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
	// ErrNoAudit: there is no audit table, and without it nothing is changed. CreateAuditTable creates it.
	ErrNoAudit = errors.New("editor: no audit table: it must be created")
)

// ConflictError is returned if the row was changed meanwhile. Nothing was written. It matches [ErrConflict].
type ConflictError struct {
	Name string
	// Now is the present row; nil if there is none.
	Now *Row
}

func (e *ConflictError) Error() string {
	if e.Now == nil {
		return fmt.Sprintf("%v: %.80q: the row is gone", ErrConflict, e.Name)
	}
	return fmt.Sprintf("%v: %.80q: row %.80s has other values now", ErrConflict, e.Name, e.Now.ID)
}

// Unwrap returns [ErrConflict].
func (e *ConflictError) Unwrap() error { return ErrConflict }

// ColumnError is returned for a column that cannot be changed. Nothing was written.
type ColumnError struct {
	Table, Column string
	// There reports whether the table has the column. If it does, the editor may not change it without WithEditable.
	There bool
}

func (e *ColumnError) Error() string {
	if e.There {
		return fmt.Sprintf("editor: table %s: column %.80q is not one that the editor changes", e.Table, e.Column)
	}
	return fmt.Sprintf("editor: table %s has no column %.80q", e.Table, e.Column)
}
