package sqlsource

import (
	"context"
	"database/sql"
	"errors"
)

// Editor changes rows of the table, one at a time, and writes down who did it and why, in an audit table of the same database: both
// or neither. There is nothing to close; the database is the caller's. It may be used by many goroutines and processes at once.
//
// A change fails with a *ConflictError if the row is not what it was when it was read, with a *registry.RowError if the registry
// would reject what it says or the columns cannot hold it, with a *ColumnError if it names a column that cannot be changed, and with a *RightError if
// the database's user may not. Then nothing is written.
type Editor struct {
	db *sql.DB
}

// NewEditor returns an editor of the table that New reads with these options. It does not ask the database anything yet.
func NewEditor(db *sql.DB, dialect Dialect, opts ...Option) (*Editor, error) {
	return nil, errors.ErrUnsupported
}

// Columns are the names of the table's columns.
func (e *Editor) Columns() Columns { return Columns{} }

// Get returns the row of a name; of several the one that is in force. ErrNoRow if there is none.
func (e *Editor) Get(ctx context.Context, name string) (Row, error) {
	return Row{}, errors.ErrUnsupported
}

// Change changes, adds or removes a row.
func (e *Editor) Change(ctx context.Context, c Change) (AuditEntry, error) {
	return AuditEntry{}, errors.ErrUnsupported
}

// SetShadow turns the shadow of a row on or off: its calls are counted, and none is refused. The table must have the column.
func (e *Editor) SetShadow(ctx context.Context, name string, from Version, on bool, who, why string) (AuditEntry, error) {
	return AuditEntry{}, errors.ErrUnsupported
}

// SetSwitch turns the switch of NewSwitch with these options.
func (e *Editor) SetSwitch(ctx context.Context, on bool, who, why string, opts ...SwitchOption) (AuditEntry, error) {
	return AuditEntry{}, errors.ErrUnsupported
}

// History returns what was changed of a row, the newest first, at most limit entries. With an empty name it is that of all rows, and of
// the switch.
func (e *Editor) History(ctx context.Context, name string, limit int) ([]AuditEntry, error) {
	return nil, errors.ErrUnsupported
}

// Undo changes back what an entry changed, and is an entry of its own. It fails with a *ConflictError if one of the columns was changed
// since, and with ErrUndone if the entry was undone before.
func (e *Editor) Undo(ctx context.Context, id int64, who, why string) (AuditEntry, error) {
	return AuditEntry{}, errors.ErrUnsupported
}

// WithAuditTable sets the name of the audit table. Default "t_ratelimite_audit". What names may be: see WithTable.
func WithAuditTable(name string) Option {
	return func(o *options) {}
}

// WithEditable names further columns that an Editor may change, that the source does not know.
func WithEditable(columns ...string) Option {
	return func(o *options) {}
}

// AuditSchema returns the statements that make the audit table.
func AuditSchema(dialect Dialect, opts ...Option) (string, error) { return "", errors.ErrUnsupported }

// CreateAuditTable makes the audit table where there is none. It may be called by many processes at once.
func CreateAuditTable(ctx context.Context, db *sql.DB, dialect Dialect, opts ...Option) error {
	return errors.ErrUnsupported
}

// same tells whether two values are the same text, number or flag.
func same(a, b *string) bool { return a == b || a != nil && b != nil && *a == *b }
