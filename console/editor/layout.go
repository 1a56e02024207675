package editor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// layout has the columns of a table in their order.
type layout []column

type column struct {
	name, kind string
	exact      string // in PostgreSQL the type with its precision
	digits     int    // of a time's fraction of a second
	writable   bool
}

func readLayout(ctx context.Context, q sqlsource.Querier, d sqlsource.Dialect, t sqlsource.TableName) (layout, error) {
	rows, err := q.QueryContext(ctx, layoutQuery(d, t))
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

// layoutQuery returns the query for a layout. The names are validated, so they can be quoted.
func layoutQuery(d sqlsource.Dialect, t sqlsource.TableName) string {
	switch d {
	case sqlsource.MySQL:
		schema := "DATABASE()"
		if t.Schema != "" {
			schema = "'" + t.Schema + "'"
		}
		return "SELECT COLUMN_NAME, LOWER(DATA_TYPE), '', COALESCE(DATETIME_PRECISION, 0), EXTRA NOT LIKE '% GENERATED%'" +
			" FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = " + schema + " AND TABLE_NAME = '" + t.Name + "' ORDER BY ORDINAL_POSITION"
	case sqlsource.PostgreSQL:
		return "SELECT attname::text, format_type(atttypid, NULL), format_type(atttypid, atttypmod), CASE WHEN atttypmod < 0 THEN 6 ELSE atttypmod END," +
			" CASE WHEN attgenerated = '' AND attidentity <> 'a' THEN 1 ELSE 0 END" +
			" FROM pg_attribute WHERE attrelid = to_regclass('" + d.QuoteTable(t) + "') AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
	}
	schema := ""
	if t.Schema != "" {
		schema = ", '" + t.Schema + "'"
	}
	return "SELECT name, lower(type), '', 3, 1 FROM pragma_table_info('" + t.Name + "'" + schema + ") ORDER BY cid"
}

// find returns the column of that name. Names are case-sensitive in PostgreSQL only.
func (l layout) find(d sqlsource.Dialect, name string) (column, bool) {
	i := slices.IndexFunc(l, func(c column) bool {
		return c.name == name || d != sqlsource.PostgreSQL && strings.EqualFold(c.name, name)
	})
	if i < 0 {
		return column{}, false
	}
	return l[i], true
}

// read returns the expression for a column's value as a text.
func read(d sqlsource.Dialect, c column) string {
	if d == sqlsource.MySQL && c.kind == "bit" {
		return "CAST(" + d.Quote(escape(d, c.name)) + " + 0 AS CHAR)"
	}
	return d.Text(escape(d, c.name))
}

// escape escapes the name of an existing column for Quote.
func escape(d sqlsource.Dialect, name string) string {
	q := d.Quote("")[:1]
	return strings.ReplaceAll(name, q, q+q)
}

// params collects the parameters of a statement.
type params struct {
	d      sqlsource.Dialect
	values []any
}

func (p *params) mark(v any) string {
	p.values = append(p.values, v)
	if p.d == sqlsource.PostgreSQL {
		return fmt.Sprintf("$%d", len(p.values))
	}
	return "?"
}

// text returns the expression for a text parameter that does not depend on the session's character set.
func (p *params) text(v string) string {
	switch m := p.mark(v); p.d {
	case sqlsource.MySQL:
		return "CONVERT(CAST(" + m + " AS BINARY) USING utf8mb4)"
	case sqlsource.PostgreSQL:
		return m + "::text"
	default:
		return m
	}
}

// value returns the expression for the new value of a column.
func (p *params) value(c column, v *string) string {
	switch {
	case v == nil:
		return "NULL"
	case p.d == sqlsource.MySQL && c.kind == "bit":
		return "(" + p.mark(*v) + " + 0)"
	case p.d == sqlsource.MySQL && !utf8.ValidString(*v):
		return "CAST(" + p.mark(*v) + " AS BINARY)"
	case p.d == sqlsource.PostgreSQL:
		return p.text(*v) + "::" + c.kind // a driver may give the parameter another type
	}
	return p.text(*v)
}

// equals returns the condition that a column has exactly this value.
func (p *params) equals(c column, v string) string {
	if p.d == sqlsource.MySQL {
		return read(p.d, c) + " = CAST(" + p.mark(v) + " AS BINARY)"
	}
	return read(p.d, c) + " = " + p.text(v)
}

// later returns the expression for the time of a modification: now, but later than the value in the column; empty if the
// column has no time.
func later(d sqlsource.Dialect, c column) string {
	q, step := d.Quote(c.name), 1
	for range 6 - min(c.digits, 6) {
		step *= 10
	}
	switch {
	case d == sqlsource.SQLite:
		const now = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
		return "max(" + now + ", coalesce(CASE WHEN typeof(" + q + ") = 'text' THEN strftime('%Y-%m-%d %H:%M:%f', " + q + ", '+0.001 seconds') END, ''))"
	case d == sqlsource.MySQL && (c.kind == "datetime" || c.kind == "timestamp"):
		now := fmt.Sprintf("CURRENT_TIMESTAMP(%d)", c.digits)
		return fmt.Sprintf("GREATEST(%s, COALESCE(%s + INTERVAL %d MICROSECOND, %s))", now, q, step, now)
	case d == sqlsource.PostgreSQL && strings.HasPrefix(c.kind, "timestamp"):
		return fmt.Sprintf("GREATEST(clock_timestamp()::%s, %s + interval '%d microseconds')", c.kind, q, step)
	}
	return ""
}

// now returns the expression of later for a new row.
func now(d sqlsource.Dialect, c column) string {
	switch {
	case later(d, c) == "":
		return ""
	case d == sqlsource.SQLite:
		return "strftime('%Y-%m-%d %H:%M:%f', 'now')"
	case d == sqlsource.PostgreSQL:
		return "clock_timestamp()::" + c.kind
	}
	return fmt.Sprintf("CURRENT_TIMESTAMP(%d)", c.digits)
}
