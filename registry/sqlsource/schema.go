package sqlsource

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

//go:embed schema/*.sql
var schemas embed.FS

// Schema returns the statements by which CreateTable makes the table. With the default names they are the package's file for the dialect.
// Optional columns are added if [WithColumns] names them. Blank lines separate the statements.
func Schema(dialect Dialect, opts ...Option) (string, error) {
	o, err := newOptions(dialect, opts)
	if err != nil {
		return "", err
	}
	return o.schema()
}

// CreateTable makes the table if it does not exist. In PostgreSQL and SQLite it also makes a trigger that keeps the time of the last
// modification, so that the time rises with every change. Many processes may call CreateTable at once.
func CreateTable(ctx context.Context, db *sql.DB, dialect Dialect, opts ...Option) error {
	o, err := newOptions(dialect, opts)
	if err != nil {
		return err
	}
	text, err := o.schema()
	if err != nil {
		return err
	}
	return create(ctx, db, dialect, o.table, text)
}

func (o *options) schema() (string, error) {
	text, err := schemas.ReadFile("schema/" + strings.ToLower(o.dialect.String()) + ".sql")
	if err != nil {
		return "", fmt.Errorf("sqlsource: schema of %v: %w", o.dialect, err)
	}
	d, defaults := o.dialect, o.dialect.columns()
	renamed := renameTable(d, defaultTable, o.table)
	if name := o.columns.Status; name != "" && o.columns.Disabled == "" { // the opposite, also by default
		for _, kind := range []string{"TINYINT(1)", "TINYINT", "smallint"} {
			renamed = append(renamed, d.Quote("disabled")+" "+kind+" DEFAULT 0", d.Quote(name)+" "+kind+" DEFAULT 1")
		}
	}
	var added strings.Builder
	for _, key := range allKeys {
		standard, name := *defaults.own(key), *o.columns.own(key)
		switch {
		case key == "status" || standard != "" && name == "":
		case standard != "":
			renamed = append(renamed, d.Quote(standard), d.Quote(name))
		case name != "":
			fmt.Fprintf(&added, "%s %s NULL,\n  ", d.Quote(name), d.optionalType(key))
		}
	}
	renamed = append(renamed, "PRIMARY KEY (", added.String()+"PRIMARY KEY (")
	return strings.NewReplacer(renamed...).Replace(string(text)), nil
}

// WholeRates reports whether the column of the rate has an integer type, in which 2.5 would become 3, and 0.4 would become 0. SQLite keeps
// fractions in any column.
func (s *Source) WholeRates(ctx context.Context) (bool, error) {
	if s.wholeRates == "" {
		return false, nil
	}
	var columns int
	if err := s.db.QueryRowContext(ctx, s.wholeRates).Scan(&columns); err != nil {
		return false, s.failed(ctx, err)
	}
	return columns > 0, nil
}

// wholeRates returns the query of WholeRates. Names were checked, so they can be quoted.
func (o *options) wholeRates() string {
	schema := "'" + o.table.Schema + "'"
	switch {
	case o.dialect == SQLite:
		return ""
	case o.table.Schema == "" && o.dialect == MySQL:
		schema = "DATABASE()"
	case o.table.Schema == "":
		schema = "ANY (current_schemas(false))"
	}
	var rates []string
	for _, at := range o.places() {
		if at.field.Key == "rate" {
			rates = append(rates, at.column)
		}
	}
	return "SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = " + schema + " AND table_name = '" + o.table.Name +
		"' AND column_name IN ('" + strings.Join(rates, "', '") + "') AND numeric_scale = 0"
}

// optionalType returns the type of a column that only [WithColumns] adds to the created table.
func (d Dialect) optionalType(key string) string {
	isFlag := slices.ContainsFunc(fields, func(f registry.Field) bool { return f.Key == key && f.IsFlag() })
	switch {
	case isFlag && d == PostgreSQL:
		return "smallint"
	case isFlag:
		return "TINYINT(1)"
	case key == "warmup_ms":
		return "INT"
	case d == PostgreSQL:
		return "double precision"
	}
	return "DOUBLE"
}

// renameTable returns pairs of old and new text, for every form in which a schema has the table's name.
func renameTable(d Dialect, old string, t TableName) []string {
	trigger := t
	trigger.Name = t.Name[:min(len(t.Name), 54)] + "_modified" // 63 in all
	pairs := []string{d.Quote(old+"_modified") + "()", d.QuoteTable(trigger) + "()"}
	switch d {
	case PostgreSQL: // a trigger is in its table's schema anyway, and may not say so
		pairs = append(pairs, d.Quote(old+"_modified"), d.Quote(trigger.Name))
	case SQLite: // there it is the table that may not say so
		pairs = append(pairs, d.Quote(old+"_modified"), d.QuoteTable(trigger),
			"ON "+d.Quote(old), "ON "+d.Quote(t.Name), "UPDATE "+d.Quote(old), "UPDATE "+d.Quote(t.Name))
	}
	return append(pairs, d.Quote(old), d.QuoteTable(t))
}

// createLock is the key of an advisory lock. In PostgreSQL, CREATE ... IF NOT EXISTS fails if two processes run it at once.
const createLock = 0x746f6b656e62 // "tokenb"

func create(ctx context.Context, db *sql.DB, d Dialect, t TableName, text string) error {
	if db == nil {
		return errNilDB
	}
	failed := func(err error) error {
		return fmt.Errorf("sqlsource: create table %s: %w", strings.TrimPrefix(t.Schema+"."+t.Name, "."), err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return failed(err)
	}
	defer func() { _ = tx.Rollback() }() // nothing, after Commit
	statements := strings.Split(strings.TrimSpace(text), "\n\n")
	if d == PostgreSQL {
		statements = append([]string{fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", int64(createLock))}, statements...)
	}
	for _, statement := range statements {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return failed(err)
		}
	}
	if err := tx.Commit(); err != nil {
		return failed(err)
	}
	return nil
}
