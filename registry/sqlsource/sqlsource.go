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
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

const defaultTable = "t_ratelimite_conf"

// Columns has the names of the table's columns. A created table has each setting under its one name, which is the field's tag here; in files,
// flags and Go it is the same. If a name is empty, the table may have the column under that name or under an older one, such as cache for
// max_wait, which PostgreSQL has in lower case. If it has both, both are read, and a row that has different values is rejected. Queries quote
// all names, so names that are given must be written as the database has them.
//
// Durations are numbers of seconds, or texts such as 500ms if the column can hold them.
type Columns struct {
	// ID is the primary key, of any type, "configId". It identifies the row in errors.
	ID string `column:"id"`
	// Name of the bucket; before, "interfaceUrl".
	Name string `column:"name"`
	// Rate in permits per second; for a quota, whole calls in any second. If it is 0, no call passes. Before, "rateLimit".
	Rate string `column:"rate"`
	// MaxWait is how long a call may wait for its permits (see registry.Limit). NULL: half a second. Before, "cache".
	MaxWait string `column:"max_wait"`
	// Disabled is 1 if every call passes and 0 if the limit applies. Before, Status.
	Disabled string `column:"disabled"`
	// Modified is the time of the last modification, "lastModifyTime". NULL: unknown.
	Modified string `column:"modified"`

	// The following columns are read only if they are named here. NULL means the default.

	// Burst is the permits that can be saved up. NULL: one second's worth, at least 1.
	Burst string `column:"burst"`
	// Warmup is the warm-up period. NULL or 0: none. Before, WarmupMillis.
	Warmup string `column:"warmup"`
	// ColdFactor is for rows with a warm-up, and ignored without; above 1. NULL: 3.
	ColdFactor string `column:"cold_factor"`
	// Quota is 1 if the row is a hard quota and 0 if it is a rate. NULL: what the source says (WithQuota).
	Quota string `column:"quota"`
	// Jitter is the variation of the time from a grant to the call's arrival, for quotas, up to a second. NULL: what the source says.
	Jitter string `column:"jitter"`

	// The following columns are read if the table has them. Tables of an earlier release may lack them.

	// Window is the length of a window, and WindowLimit the number of calls that may begin in any such window; before, "windowLimit". NULL or
	// 0 in both means no window.
	Window      string `column:"window"`
	WindowLimit string `column:"window_limit"`
	// Concurrent is the number of calls that may be in flight at once. NULL or 0 means any number.
	//
	// In a row with a window or a concurrency a NULL rate means no rate. With a rate of 0 no call passes there, either.
	Concurrent string `column:"concurrent"`
	// ConcurrentWait is how long a call waits for a place among the calls in flight. NULL or 0: not at all. Before, "concurrentWait".
	ConcurrentWait string `column:"concurrent_wait"`
	// Shadow is 1 if the row refuses no call and only counts (registry.Limit). NULL: 0.
	Shadow string `column:"shadow"`
	// PerKey is 1 if each key has a bucket of its own (registry.Limit). NULL: 0. Before, "perKey".
	PerKey string `column:"per_key"`
	// Penalty selects the replies of an upstream that hold the bucket back: none, 503, 429 or 429,503 (registry.Limit). NULL: the default.
	Penalty string `column:"penalty"`
	// Priority of the row's calls: normal, low or lowest (registry.Limit). NULL: normal.
	Priority string `column:"priority"`

	// The following are older names whose values mean something else. They are for tables that have such columns.

	// Status is the opposite of Disabled: 1 if the limit applies. It is read if the table has it.
	Status string `column:"status"`
	// WarmupMillis is Warmup with numbers of milliseconds. It is read only if it is named here.
	WarmupMillis string `column:"warmup_ms"`
}

// columns returns the names that the dialect's created table has.
func (d Dialect) columns() Columns {
	c := Columns{ID: d.defaultName("configId"), Modified: d.defaultName("lastModifyTime")}
	for i := range fields {
		if f := &fields[i]; f.Column != registry.Named {
			*c.own(f.Key) = f.Key
		}
	}
	return c
}

// defaultName returns a name as a table has it whose creation did not quote it.
func (d Dialect) defaultName(name string) string {
	if d == PostgreSQL {
		return strings.ToLower(name)
	}
	return name
}

// ColumnKeys returns the keys of all columns: id, modified, and the Key of each registry.Field. Each is the tag of a field of [Columns].
func ColumnKeys() []string {
	keys := []string{"id", "modified"}
	for i := range fields {
		keys = append(keys, fields[i].Key)
	}
	return keys
}

// columnFields has the index in Columns of each column's field, by the field's tag.
var columnFields = func() map[string]int {
	fields := map[string]int{}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Columns]()) {
		fields[f.Tag.Get("column")] = f.Index[0]
	}
	return fields
}()

// allKeys are the tags of all fields of Columns, with the older ones at the end.
var allKeys = func() (keys []string) {
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Columns]()) {
		keys = append(keys, f.Tag.Get("column"))
	}
	return keys
}()

// own returns where c has the name of the column with that tag; nil for other keys.
func (c *Columns) own(key string) *string {
	i, ok := columnFields[key]
	if !ok {
		return nil
	}
	return reflect.ValueOf(c).Elem().Field(i).Addr().Interface().(*string)
}

// Column returns where c has the name of the column with a key (see [ColumnKeys]), or with an older name of a key, such as cache; nil for
// other keys.
func (c *Columns) Column(key string) *string {
	if own := c.own(key); own != nil {
		return own
	}
	for i := range fields {
		if slices.Contains(fields[i].Older, key) {
			return c.own(fields[i].Key)
		}
	}
	return nil
}

// NamedField is a field of a row, as the name of its column has it (registry.Field.As).
type NamedField struct {
	registry.Field
	// Setting is the Key of the field, and Name the name of its column.
	Setting, Name string
}

// Fields returns the fields that have a column here, in the order of a form.
func (c *Columns) Fields() (all []NamedField) {
	for i := range fields {
		f := &fields[i]
		for _, key := range f.Names() {
			if column := c.own(key); column != nil && *column != "" {
				all = append(all, NamedField{f.As(key), f.Key, *column})
			}
		}
	}
	return all
}

// Field returns the field of a column. Besides the columns that c names, these are the columns with older names of the same fields, unless
// the field's column has a name of its own.
func (c *Columns) Field(column string) (f NamedField, ok bool) {
	for i := range fields {
		f := &fields[i]
		for _, key := range f.Names() {
			if own := c.own(key); own != nil && *own != "" && *own == column {
				return NamedField{f.As(key), f.Key, column}, true
			}
		}
	}
	for i := range fields {
		f := &fields[i]
		is := func(name string) bool { return strings.EqualFold(name, column) }
		one := func(name string) bool {
			return slices.ContainsFunc(f.Names(), func(n string) bool { return strings.EqualFold(n, name) })
		}
		if at := slices.IndexFunc(f.Names(), is); at >= 0 && f.Column != registry.Named && (one(*c.own(f.Key)) || *c.own(f.Key) == "") {
			return NamedField{f.As(f.Names()[at]), f.Key, column}, true
		}
	}
	return NamedField{}, false
}

// Names returns the names that are not empty.
func (c *Columns) Names() []string {
	var names []string
	for _, key := range allKeys {
		if name := *c.own(key); name != "" {
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
	named   map[string]bool // the keys of columns that were named
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
	o := &options{dialect: d, table: TableName{Name: defaultTable}, columns: d.columns(), named: map[string]bool{}}
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

// WithColumns sets the names of columns; empty ones stay as they are. A column that is named must exist, and no other one is read for its field.
// What names may be: see [WithTable].
func WithColumns(c Columns) Option {
	return func(o *options) {
		for _, key := range allKeys {
			name := *c.own(key)
			if name == "" {
				continue
			}
			if err := o.dialect.CheckIdentifier("column "+key, name); err != nil {
				o.fail(err)
			}
			*o.columns.own(key) = name
			o.named[key] = true
		}
		if o.named["status"] && !o.named["disabled"] {
			o.columns.Disabled = ""
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
	turn       chan struct{} // of the one query at a time
	found      atomic.Pointer[Columns]
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
	s.parser = newParser(o)
	return s, nil
}

// Dialect returns the dialect of the database.
func (s *Source) Dialect() Dialect { return s.options.dialect }

// Table returns the name of the table.
func (s *Source) Table() TableName { return s.options.table }

// Columns returns the names of the table's columns as they were when the table was read last; before, those of a created table. If the table
// has two columns for one field, it is the one with the newer name. Those that were neither given nor have a default are empty.
func (s *Source) Columns() Columns {
	if found := s.found.Load(); found != nil {
		return *found
	}
	return s.options.columns
}

// MayRead returns all columns that the source reads if the table has them, with the older names.
func (s *Source) MayRead() (names []string) {
	for i := range s.parser.places {
		names = append(names, s.parser.places[i].column)
	}
	return append(names, s.options.columns.ID, s.options.columns.Modified)
}

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
	for _, at := range o.places() {
		switch {
		case slices.Contains(missing, at.column):
			all = append(all, "NULL")
		case at.field.Key == "name":
			all = append(all, d.Text(at.column))
		default:
			all = append(all, d.cast(at.column))
		}
	}
	return all
}

// Load implements registry.Source. It runs one SELECT for the columns that the table has, and one for all rows, which is one state of the
// table. An empty table is no error. A missing table, an incomplete result, and a column that the user may not read (a *RightError) are.
// Load returns when ctx ends, even if the driver ignores ctx; the next query then begins when the driver has returned.
//
// Of several valid rows with one name, a Registry puts one in force ([Newer]). In a row that is disabled only name and time must be valid.
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
		return registry.Table{}, s.failed(ctx, s.unreadable(ctx, s.db, err))
	}
	defer func() { _ = rows.Close() }()
	var t registry.Table
	r := newRaw(s.parser.places)
	there := func(column string) bool { return !slices.Contains(missing, column) }
	cells := r.cells()
	for rows.Next() {
		if err := rows.Scan(cells...); err != nil {
			return registry.Table{}, s.failed(ctx, err)
		}
		limit, bad := s.parser.limit(r, there)
		if bad != nil {
			t.Rejected = append(t.Rejected, *bad)
			continue
		}
		t.Limits = append(t.Limits, limit)
	}
	if err := rows.Err(); err != nil {
		return registry.Table{}, s.failed(ctx, err)
	}
	return t, nil
}

// failed wraps an error with the table and its columns. If ctx has ended, it also wraps ctx's error, since drivers return errors of their own.
func (s *Source) failed(ctx context.Context, err error) error {
	var names []string
	columns := s.Columns()
	for _, key := range allKeys {
		at := slices.IndexFunc(fields, func(f registry.Field) bool { return f.Key == key && f.Column == registry.Optional })
		if name := *columns.own(key); name != "" && (at < 0 || s.options.named[key]) {
			names = append(names, name)
		}
	}
	err = fmt.Errorf("sqlsource: read table %s with columns %s: %w", s.table, strings.Join(names, ", "), err)
	if end := ctx.Err(); end != nil && !errors.Is(err, end) {
		err = fmt.Errorf("%w: %w", err, end)
	}
	return err
}
