// Package sqlsource reads the limits of a gateway from a table of a SQL database, as a registry.Source, and the fleet's
// switch from another. It works with any driver of database/sql for MySQL, MariaDB, PostgreSQL or SQLite, and brings none.
//
// A row is a bucket: its name, permits per second, the share of a second that a call may wait, and whether it is limited at
// all. CreateTable makes the table, Schema shows it. One bad row never hides the others: it is rejected, with a
// registry.RowError that names it; what its bucket had before stays in force, and without that its calls are refused
// (registry.WithBadRows).
//
// # The time of the last modification
//
// It is the version of a limit: of two processes that read the table at different times, the one with the newer row wins in
// the whole fleet. It is read to the microsecond (SQLite: millisecond), and as the same number in every session, whatever
// the time zones of server, session and driver. Two things are up to the table:
//
//   - A DATETIME of MySQL without fraction counts seconds: of two edits within one second it cannot tell the newer.
//     DATETIME(6) can.
//   - A DATETIME holds the wall clock of the session that wrote it. If sessions write in different zones, or in one with
//     summer time, an older edit may seem newer; TIMESTAMP(6) holds the instant.
package sqlsource

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

const defaultTable = "t_ratelimite_conf"

// Columns names the columns of the table. Empty fields keep the default, given here; PostgreSQL's defaults are in lower
// case, as it stores names that are not quoted. Names are quoted in every query: they are written as the database has them.
type Columns struct {
	// ID is the primary key, of any type, "configId". It names the row in errors.
	ID string
	// Name of the bucket, "interfaceUrl".
	Name string
	// Rate in permits per second, "rateLimit"; of a quota, whole calls in any second. 0: nothing passes.
	Rate string
	// Cache is the share of a second that a call may wait for its permit, 0 to 9.99, "cache": 0.5 is half a second (see
	// registry.Limit). NULL: 0.5.
	Cache string
	// Status is 1 if the limit applies and 0 if every call passes, "status".
	Status string
	// Modified is the time of the last modification, "lastModifyTime". NULL: unknown.
	Modified string

	// The others are optional: there is no such column unless it is named here. NULL means the default of each.

	// Burst is the permits that can be saved up. NULL: one second's worth, at least 1.
	Burst string
	// WarmupMillis is the warm-up period in milliseconds. NULL or 0: none.
	WarmupMillis string
	// ColdFactor is for rows with a warm-up, and ignored without; above 1. NULL: 3.
	ColdFactor string
	// Quota is 1 if the row is a hard quota and 0 if it is a rate. NULL: what the source says (WithQuota).
	Quota string

	// These are read where the table has them: the created one has, one of an earlier release may have not.

	// Window is the length of a window in seconds, "window", and WindowLimit how many calls may begin in any such window, "windowLimit".
	// NULL or 0 in both: none.
	Window, WindowLimit string
	// Concurrent is how many calls may be under way at once, "concurrent". NULL or 0: any number.
	//
	// In a row with a window or a concurrency a NULL rate means that there is none. A rate of 0 lets nothing pass there, too.
	Concurrent string
	// Shadow is 1 if the row only counts, and refuses nothing (registry.Limit), "shadow". NULL: 0.
	Shadow string
	// PerKey is 1 if each key has a bucket of its own (registry.Limit), "perKey". NULL: 0.
	PerKey string
	// Penalty is which answers of an upstream hold the row back, "penalty": none, 503, 429 or 429,503 (registry.Limit). NULL: the default.
	Penalty string
}

// columns returns the names that the dialect's created table has.
func (d Dialect) columns() Columns {
	c := Columns{ID: "configId", Modified: "lastModifyTime"}
	for i := range inTable {
		*c.Column(inTable[i].Column) = inTable[i].Default
	}
	if d == PostgreSQL {
		for _, key := range ColumnKeys() {
			*c.Column(key) = strings.ToLower(*c.Column(key))
		}
	}
	return c
}

// ColumnKeys returns the keys of all columns: id, modified, and the Column of each registry.Field.
func ColumnKeys() []string {
	keys := []string{"id", "modified"}
	for i := range inTable {
		keys = append(keys, inTable[i].Column)
	}
	return keys
}

// Column returns where c has the name of the column with a key (see [ColumnKeys]); nil for other keys.
func (c *Columns) Column(key string) *string {
	switch key {
	case "id":
		return &c.ID
	case "modified":
		return &c.Modified
	case "name":
		return &c.Name
	case "rate":
		return &c.Rate
	case "cache":
		return &c.Cache
	case "status":
		return &c.Status
	case "burst":
		return &c.Burst
	case "warmup_ms":
		return &c.WarmupMillis
	case "cold_factor":
		return &c.ColdFactor
	case "quota":
		return &c.Quota
	case "window":
		return &c.Window
	case "window_limit":
		return &c.WindowLimit
	case "concurrent":
		return &c.Concurrent
	case "shadow":
		return &c.Shadow
	case "per_key":
		return &c.PerKey
	case "penalty":
		return &c.Penalty
	}
	return nil
}

// nameOf returns the name of a field's column, or the field's key if it has none.
func (c *Columns) nameOf(f *registry.Field) string {
	if name := c.Column(f.Column); name != nil && *name != "" {
		return *name
	}
	return f.Key
}

// Names returns the names that are not empty.
func (c *Columns) Names() []string {
	var names []string
	for _, key := range ColumnKeys() {
		if name := *c.Column(key); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// Option configures a Source. An option with a bad value makes New fail.
type Option func(*options)

type options struct {
	dialect Dialect
	table   TableName
	columns Columns
	quota   bool
	jitter  time.Duration
	named   []string // columns that were named
	err     error
}

func (o *options) fail(err error) {
	if o.err == nil {
		o.err = err
	}
}

func newOptions(d Dialect, opts []Option) (*options, error) {
	if err := d.known(); err != nil {
		return nil, err
	}
	o := &options{dialect: d, table: TableName{Name: defaultTable}, columns: d.columns()}
	for _, opt := range opts {
		if opt == nil {
			o.fail(invalid("option", "nil", "no nil options"))
			break
		}
		opt(o)
	}
	return o, o.err
}

// WithTable sets the table's name, with its schema (MySQL: database) or without. Default "t_ratelimite_conf". Names are of
// letters, digits, _ and $, at most 64 bytes (PostgreSQL: 63).
func WithTable(name string) Option {
	return func(o *options) {
		t, err := o.dialect.ParseTable(name)
		if err != nil {
			o.fail(err)
		}
		o.table = t
	}
}

// WithColumns sets the names of columns; empty ones stay as they are. What names may be: see [WithTable].
func WithColumns(c Columns) Option {
	return func(o *options) {
		for _, key := range ColumnKeys() {
			name := *c.Column(key)
			if name == "" {
				continue
			}
			if err := o.dialect.CheckIdentifier("column "+key, name); err != nil {
				o.fail(err)
			}
			*o.columns.Column(key) = name
			o.named = append(o.named, name)
		}
	}
}

// WithQuota says that the rows are hard quotas, of an upstream that counts calls in any sliding second, unless a row says
// otherwise (Columns.Quota): nothing is saved up. jitter is how much later a call may arrive than it was let go, 0 to 1 s.
func WithQuota(jitter time.Duration) Option {
	return func(o *options) {
		o.quota = true
		WithJitter(jitter)(o)
	}
}

// WithJitter sets the jitter of rows that say themselves that they are quotas, where the others are not: see [WithQuota].
// Default 0.
func WithJitter(jitter time.Duration) Option {
	return func(o *options) {
		if jitter < 0 || jitter > time.Second {
			o.fail(invalid("quota jitter", jitter, "0 to 1s"))
		}
		o.jitter = jitter
	}
}

// Source is a registry.Source that is a table. There is nothing to close; the database is the caller's. It may be used by
// many goroutines at once, which then take turns.
type Source struct {
	db         *sql.DB
	options    *options
	wholeRates string
	parser     parser
	table      string
	columns    string        // for messages
	turn       chan struct{} // of the one query at a time
}

// New returns a source that reads the table through db. It does not ask the database anything yet.
func New(db *sql.DB, dialect Dialect, opts ...Option) (*Source, error) {
	if db == nil {
		return nil, errNilDB
	}
	o, err := newOptions(dialect, opts)
	if err != nil {
		return nil, err
	}
	s := &Source{db: db, options: o, wholeRates: o.wholeRates(), turn: make(chan struct{}, 1), table: strings.TrimPrefix(o.table.Schema+"."+o.table.Name, ".")}
	s.parser = parser{columns: o.columns, quota: o.quota, jitter: o.jitter}
	later := o.byDefault()
	s.columns = strings.Join(slices.DeleteFunc(o.columns.Names(), func(name string) bool { return slices.Contains(later, name) }), ", ")
	return s, nil
}

// Dialect returns the dialect of the database.
func (s *Source) Dialect() Dialect { return s.options.dialect }

// Table returns the name of the table.
func (s *Source) Table() TableName { return s.options.table }

// Columns returns the names of the table's columns. Those that were neither given nor have a default are empty.
func (s *Source) Columns() Columns { return s.options.columns }

// Querier is a *sql.DB, a *sql.Conn or a *sql.Tx.
type Querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

var errNilDB = invalid("db", "nil", "a database")

func invalid(field string, value any, want string) error {
	return fmt.Errorf("sqlsource: %w: %s %v: want %s", tokenbucket.ErrInvalidConfig, field, value, want)
}

// query selects all rows; NULL for the columns that are missing.
func (o *options) query(missing ...string) string {
	d, from := o.dialect, o.dialect.QuoteTable(o.table)
	// A key without its table would be the one that was selected, as a text.
	return "SELECT " + strings.Join(o.selected(missing...), ", ") + " FROM " + from + " ORDER BY " + from + "." + d.Quote(o.columns.ID)
}

// selected returns the expressions for what raw.cells scans, as texts; NULL for the columns that are missing.
func (o *options) selected(missing ...string) []string {
	d, c := o.dialect, &o.columns
	all := []string{d.Text(c.ID), d.Micros(o.table, c.Modified), d.Unread(o.table, c.Modified)}
	for i := range inTable {
		switch column := *c.Column(inTable[i].Column); {
		case column == "" || slices.Contains(missing, column):
			all = append(all, "NULL")
		case column == c.Name:
			all = append(all, d.Text(column))
		default:
			all = append(all, d.cast(column))
		}
	}
	return all
}

// Load implements registry.Source: one SELECT, and so one state of the table, in the order of the primary key; before it one that
// asks which columns there are. An empty
// table is no error, but a missing one is, and a result that breaks off. So is a column that the table has and the user may not read, a
// *RightError. It returns when ctx ends, even if the driver does
// not heed that; the next query then begins when the driver has given up this one.
//
// If rows have one name, the one with the newest time of modification stays; if times are equal, the one with the larger primary
// key. The others are rejected. A row that is rejected for what it says does not take part in that. If the status of a row is 0,
// nothing matters but name and time.
func (s *Source) Load(ctx context.Context) (registry.Table, error) {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return registry.Table{}, s.failed(ctx, ctx.Err())
	}
	var t registry.Table
	var err error
	done := make(chan struct{})
	go func() {
		defer func() { <-s.turn }()
		defer close(done)
		t, err = s.load(ctx)
	}()
	select {
	case <-done:
		return t, err
	case <-ctx.Done():
		return registry.Table{}, s.failed(ctx, ctx.Err())
	}
}

func (s *Source) load(ctx context.Context) (registry.Table, error) {
	missing, err := s.has(ctx, s.db)
	if err != nil {
		return registry.Table{}, s.failed(ctx, err)
	}
	rows, err := s.db.QueryContext(ctx, s.options.query(missing...))
	if err != nil {
		return registry.Table{}, s.failed(ctx, s.options.unreadable(ctx, s.db, err))
	}
	defer func() { _ = rows.Close() }()
	var t table
	r := newRaw()
	cells := r.cells()
	for rows.Next() {
		if err := rows.Scan(cells...); err != nil {
			return registry.Table{}, s.failed(ctx, err)
		}
		limit, bad := s.parser.limit(r)
		if bad != nil {
			t.Rejected = append(t.Rejected, *bad)
			continue
		}
		t.add(limit, s.parser.columns.Name)
	}
	if err := rows.Err(); err != nil {
		return registry.Table{}, s.failed(ctx, err)
	}
	return t.Table, nil
}

// failed says what was tried. Drivers have errors of their own for a context that ended; it is one of its kind all the same.
func (s *Source) failed(ctx context.Context, err error) error {
	err = fmt.Errorf("sqlsource: read table %s with columns %s: %w", s.table, s.columns, err)
	if end := ctx.Err(); end != nil && !errors.Is(err, end) {
		err = fmt.Errorf("%w: %w", err, end)
	}
	return err
}
