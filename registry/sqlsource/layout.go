package sqlsource

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// layout is what columns a table has, in their order.
type layout []column

type column struct {
	name, kind string
	exact      string // PostgreSQL: the kind with its precision
	digits     int    // of the fraction of a second that a time has
	writable   bool
}

// querier is a database, or a transaction.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func readLayout(ctx context.Context, q querier, d Dialect, t tableName) (layout, error) {
	rows, err := q.QueryContext(ctx, d.layout(t))
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var l layout
	for rows.Next() {
		var c column
		var writable int
		if err := rows.Scan(&c.name, &c.kind, &c.exact, &c.digits, &writable); err != nil {
			return nil, err
		}
		c.writable = writable == 1
		l = append(l, c)
	}
	return l, rows.Err()
}

// layout is the query for it. Names were checked, and can be in quotes.
func (d Dialect) layout(t tableName) string {
	switch d {
	case MySQL:
		schema := "DATABASE()"
		if t.schema != "" {
			schema = "'" + t.schema + "'"
		}
		return "SELECT COLUMN_NAME, LOWER(DATA_TYPE), '', COALESCE(DATETIME_PRECISION, 0), EXTRA NOT LIKE '% GENERATED%'" +
			" FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = " + schema + " AND TABLE_NAME = '" + t.name + "' ORDER BY ORDINAL_POSITION"
	case PostgreSQL:
		return "SELECT attname::text, format_type(atttypid, NULL), format_type(atttypid, atttypmod), CASE WHEN atttypmod < 0 THEN 6 ELSE atttypmod END," +
			" CASE WHEN attgenerated = '' AND attidentity <> 'a' THEN 1 ELSE 0 END" +
			" FROM pg_attribute WHERE attrelid = to_regclass('" + d.quoteTable(t) + "') AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
	}
	schema := ""
	if t.schema != "" {
		schema = ", '" + t.schema + "'"
	}
	return "SELECT name, lower(type), '', 3, 1 FROM pragma_table_info('" + t.name + "'" + schema + ") ORDER BY cid"
}

// find returns the column that a name means. Only PostgreSQL tells A from a.
func (l layout) find(d Dialect, name string) (column, bool) {
	i := slices.IndexFunc(l, func(c column) bool {
		return c.name == name || d != PostgreSQL && strings.EqualFold(c.name, name)
	})
	if i < 0 {
		return column{}, false
	}
	return l[i], true
}

// read is the expression for what a column says.
func (d Dialect) read(c column) string {
	if d == MySQL && c.kind == "bit" {
		return "CAST(" + d.quote(d.escape(c.name)) + " + 0 AS CHAR)"
	}
	return d.name(d.escape(c.name))
}

// escape makes the name of a column that is in the table, whatever it is, fit for quote.
func (d Dialect) escape(name string) string {
	q := d.quote("")[:1]
	return strings.ReplaceAll(name, q, q+q)
}

// params collects the parameters of a statement.
type params struct {
	d      Dialect
	values []any
}

func (p *params) mark(v any) string {
	p.values = append(p.values, v)
	if p.d == PostgreSQL {
		return fmt.Sprintf("$%d", len(p.values))
	}
	return "?"
}

// text is the expression for a text parameter, the same in every session whatever its character set.
func (p *params) text(v string) string {
	switch m := p.mark(v); p.d {
	case MySQL:
		return "CONVERT(CAST(" + m + " AS BINARY) USING utf8mb4)"
	case PostgreSQL:
		return m + "::text"
	default:
		return m
	}
}

// value is the expression for what a column shall say.
func (p *params) value(c column, v *string) string {
	switch {
	case v == nil:
		return "NULL"
	case p.d == MySQL && c.kind == "bit":
		return "(" + p.mark(*v) + " + 0)"
	case p.d == MySQL && !utf8.ValidString(*v):
		return "CAST(" + p.mark(*v) + " AS BINARY)"
	case p.d == PostgreSQL:
		return p.text(*v) + "::" + c.kind // a driver may give a parameter a type of its own
	}
	return p.text(*v)
}

// equals is the condition that a column says exactly that.
func (p *params) equals(c column, v string) string {
	if p.d == MySQL {
		return p.d.read(c) + " = CAST(" + p.mark(v) + " AS BINARY)"
	}
	return p.d.read(c) + " = " + p.text(v)
}

// later is the expression for the time of a modification: now, but always after what the column of q says; empty if the column is no time.
func (d Dialect) later(c column) string {
	q, step := d.quote(c.name), 1
	for range 6 - min(c.digits, 6) {
		step *= 10
	}
	switch {
	case d == SQLite:
		const now = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
		return "max(" + now + ", coalesce(CASE WHEN typeof(" + q + ") = 'text' THEN strftime('%Y-%m-%d %H:%M:%f', " + q + ", '+0.001 seconds') END, ''))"
	case d == MySQL && (c.kind == "datetime" || c.kind == "timestamp"):
		now := fmt.Sprintf("CURRENT_TIMESTAMP(%d)", c.digits)
		return fmt.Sprintf("GREATEST(%s, COALESCE(%s + INTERVAL %d MICROSECOND, %s))", now, q, step, now)
	case d == PostgreSQL && strings.HasPrefix(c.kind, "timestamp"):
		return fmt.Sprintf("GREATEST(clock_timestamp()::%s, %s + interval '%d microseconds')", c.kind, q, step)
	}
	return ""
}

// now is later for a row that is new.
func (d Dialect) now(c column) string {
	switch {
	case d.later(c) == "":
		return ""
	case d == SQLite:
		return "strftime('%Y-%m-%d %H:%M:%f', 'now')"
	case d == PostgreSQL:
		return "clock_timestamp()::" + c.kind
	}
	return fmt.Sprintf("CURRENT_TIMESTAMP(%d)", c.digits)
}
