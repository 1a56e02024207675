// Package sqlsource reads the limits of a gateway from a table of a SQL database, as a registry.Source, and the fleet's
// switch from another. It works with any driver of database/sql for MySQL, MariaDB, PostgreSQL or SQLite, and brings none.
//
// A row configures one bucket: its name, the permits per second, the longest wait of a call, and whether the limit applies. CreateTable makes
// the table, and Schema returns its statements. A bad row does not affect the others. It is rejected with a registry.RowError, and its last
// valid limit stays in force; if there is none, its calls are refused (registry.WithBadRows).
//
// # The time of the last modification
//
// The time is the version of a limit: if two processes have loaded different versions, the newer one is in force in the whole fleet. It is
// read to the microsecond (SQLite: millisecond), as the same number in every session, whatever the time zones of server, session and driver.
// Two properties depend on the column's type:
//
//   - A DATETIME of MySQL without fraction counts seconds, so two changes within one second have one version. DATETIME(6) avoids that.
//   - A DATETIME holds the wall clock of the session that wrote it. If sessions write in different zones, or in a zone with summer time, an
//     older change may seem newer. TIMESTAMP(6) holds the instant.
package sqlsource

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

const defaultTable = "t_ratelimite_conf"

// Columns has the names of the table's columns. Empty fields keep the defaults given here; the defaults of PostgreSQL are in lower case, as it
// stores unquoted names. Queries quote all names, so they must be written as the database has them. A field's tag is the key of its column
// (Column).
type Columns struct {
	// ID is the primary key, of any type, "configId". It identifies the row in errors.
	ID string `column:"id"`
	// Name of the bucket, "interfaceUrl".
	Name string `column:"name"`
	// Rate in permits per second, "rateLimit"; for a quota, whole calls in any second. If it is 0, no call passes.
	Rate string `column:"rate"`
	// Cache is how many seconds a call may wait for its permits, "cache": 0.5 is half a second (see registry.Limit). NULL: 0.5.
	Cache string `column:"cache"`
	// Status is 1 if the limit applies and 0 if every call passes, "status".
	Status string `column:"status"`
	// Modified is the time of the last modification, "lastModifyTime". NULL: unknown.
	Modified string `column:"modified"`

	// The following columns are read only if they are named here. NULL means the default.

	// Burst is the permits that can be saved up. NULL: one second's worth, at least 1.
	Burst string `column:"burst"`
	// WarmupMillis is the warm-up period in milliseconds. NULL or 0: none.
	WarmupMillis string `column:"warmup_ms"`
	// ColdFactor is for rows with a warm-up, and ignored without; above 1. NULL: 3.
	ColdFactor string `column:"cold_factor"`
	// Quota is 1 if the row is a hard quota and 0 if it is a rate. NULL: what the source says (WithQuota).
	Quota string `column:"quota"`

	// The following columns are read if the table has them. Tables of an earlier release may lack them.

	// Window is the length of a window in seconds, "window", and WindowLimit the number of calls that may begin in any such window,
	// "windowLimit". NULL or 0 in both means no window.
	Window      string `column:"window"`
	WindowLimit string `column:"window_limit"`
	// Concurrent is the number of calls that may be in flight at once, "concurrent". NULL or 0 means any number.
	//
	// In a row with a window or a concurrency a NULL rate means no rate. With a rate of 0 no call passes there, either.
	Concurrent string `column:"concurrent"`
	// ConcurrentWait is how long a call waits for a place among the calls in flight, in seconds, "concurrentWait". NULL or 0: not at all.
	ConcurrentWait string `column:"concurrent_wait"`
	// Shadow is 1 if the row refuses no call and only counts (registry.Limit), "shadow". NULL: 0.
	Shadow string `column:"shadow"`
	// PerKey is 1 if each key has a bucket of its own (registry.Limit), "perKey". NULL: 0.
	PerKey string `column:"per_key"`
	// Penalty selects the replies of an upstream that hold the bucket back, "penalty": none, 503, 429 or 429,503 (registry.Limit). NULL: the
	// default.
	Penalty string `column:"penalty"`
	// Priority of the row's calls, "priority": normal, low or lowest (registry.Limit). NULL: normal.
	Priority string `column:"priority"`
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

// columnFields has the index in Columns of each column's field, by the column's key, which is the field's tag.
var columnFields = func() map[string]int {
	fields := map[string]int{}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Columns]()) {
		fields[f.Tag.Get("column")] = f.Index[0]
	}
	return fields
}()

// Column returns where c has the name of the column with a key (see [ColumnKeys]); nil for other keys.
func (c *Columns) Column(key string) *string {
	i, ok := columnFields[key]
	if !ok {
		return nil
	}
	return reflect.ValueOf(c).Elem().Field(i).Addr().Interface().(*string)
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

// WithQuota makes rows hard quotas, for an upstream that counts calls in any sliding second, unless a row has another value
// (Columns.Quota). jitter is the variation of the time from a grant to the call's arrival at the upstream, 0 to 1 s.
func WithQuota(jitter time.Duration) Option {
	return func(o *options) {
		o.quota = true
		WithJitter(jitter)(o)
	}
}

// WithJitter sets the jitter of rows that are quotas by their own column, without making the others quotas: see [WithQuota]. Default 0.
func WithJitter(jitter time.Duration) Option {
	return func(o *options) {
		if jitter < 0 || jitter > time.Second {
			o.fail(invalid("quota jitter", jitter, "0 to 1s"))
		}
		o.jitter = jitter
	}
}

// Source is a registry.Source that reads a table. It needs no Close; the database belongs to the caller. It is safe for concurrent use, one
// query at a time.
type Source struct {
	db         *sql.DB
	options    *options
	wholeRates string
	parser     parser
	table      string
	columns    string        // for messages
	turn       chan struct{} // of the one query at a time
}

// New returns a source that reads the table through db. New does not query the database.
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
	// A key without its table would refer to the selected text of the key.
	return "SELECT " + strings.Join(o.selected(missing...), ", ") + " FROM " + from + " ORDER BY " + from + "." + d.Quote(o.columns.ID)
}

// selected returns the expressions for raw.cells, as texts; NULL for the missing columns.
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

// Load implements registry.Source. It runs one SELECT for the columns that the table has, and one for all rows, which is one state of the
// table. An empty table is no error. A missing table, an incomplete result, and a column that the user may not read (a *RightError) are.
// Load returns when ctx ends, even if the driver ignores ctx; the next query then begins when the driver has returned.
//
// Of several valid rows with one name, the one with the latest time of modification is in force; if times are equal, the one with the larger
// primary key. The others are rejected. In a row with a status of 0 only name and time must be valid.
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

// failed wraps an error with the table and its columns. If ctx has ended, it also wraps ctx's error, since drivers return errors of their own.
func (s *Source) failed(ctx context.Context, err error) error {
	err = fmt.Errorf("sqlsource: read table %s with columns %s: %w", s.table, s.columns, err)
	if end := ctx.Err(); end != nil && !errors.Is(err, end) {
		err = fmt.Errorf("%w: %w", err, end)
	}
	return err
}
