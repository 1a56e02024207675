package sqlsource

import (
	"fmt"
	"strings"
)

// Dialect is the kind of SQL that a database speaks. The zero value is none, and refused.
type Dialect uint8

// The dialects: MySQL 5.7 or MariaDB 10.2 or later, PostgreSQL 14 or later, SQLite 3.25 or later.
const (
	MySQL Dialect = iota + 1
	PostgreSQL
	SQLite
)

func (d Dialect) String() string {
	switch d {
	case MySQL:
		return "MySQL"
	case PostgreSQL:
		return "PostgreSQL"
	case SQLite:
		return "SQLite"
	}
	return fmt.Sprintf("Dialect(%d)", uint8(d))
}

func (d Dialect) known() error {
	if d < MySQL || d > SQLite {
		return invalid("dialect", d, "MySQL, PostgreSQL or SQLite")
	}
	return nil
}

// identifier tells what is wrong with the name of a column or table. None that passes could be anything but a name, even
// unquoted; they are quoted so that reserved words are names too.
func (d Dialect) identifier(field, name string) error {
	most := 64
	if d == PostgreSQL {
		most = 63 // it would cut off the rest
	}
	ok := len(name) >= 1 && len(name) <= most
	for _, c := range []byte(name) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '$')
	}
	if !ok {
		return invalid(field, fmt.Sprintf("%.80q", name), fmt.Sprintf("1 to %d letters, digits, _ or $", most))
	}
	return nil
}

// quote quotes an identifier. SQLite takes a name in double quotes that it does not find for a text; not so in back quotes.
func (d Dialect) quote(name string) string {
	if d == PostgreSQL {
		return `"` + name + `"`
	}
	return "`" + name + "`"
}

// tableName is the name of a table, in a schema (MySQL: database; SQLite: attached database) or not.
type tableName struct{ schema, name string }

func (t tableName) String() string { return strings.TrimPrefix(t.schema+"."+t.name, ".") }

func (d Dialect) parseTable(s string) (tableName, error) {
	var t tableName
	schema, name, qualified := strings.Cut(s, ".")
	if !qualified {
		t.name = s
		return t, d.identifier("table", s)
	}
	t.schema, t.name = schema, name
	if err := d.identifier("schema of table", schema); err != nil {
		return t, err
	}
	return t, d.identifier("table", name)
}

func (d Dialect) quoteTable(t tableName) string {
	if t.schema == "" {
		return d.quote(t.name)
	}
	return d.quote(t.schema) + "." + d.quote(t.name)
}

// text is the expression for a column as text, as the database writes it: numbers in decimal, with no more digits than they
// mean, whatever the driver would make of them.
func (d Dialect) text(column string) string {
	switch q := d.quote(column); d {
	case MySQL:
		return "CAST(" + q + " AS CHAR)"
	case PostgreSQL:
		return q + "::text"
	default:
		return "CAST(" + q + " AS TEXT)"
	}
}

// name is the expression for a text that may hold anything: in UTF-8, whatever the session's character set.
func (d Dialect) name(column string) string {
	if d != MySQL {
		return d.text(column)
	}
	q := d.quote(column)
	return "CASE CHARSET(" + q + ") WHEN 'binary' THEN CAST(" + q + " AS BINARY) ELSE CAST(CONVERT(" + q + " USING utf8mb4) AS BINARY) END"
}

// micros is the expression for a time as microseconds since 1970, the same in every session whatever its time zone; NULL
// if it is not a time. What has no zone of its own is taken for UTC.
func (d Dialect) micros(t tableName, column string) string {
	q := d.quote(column)
	switch d {
	case MySQL:
		// A DATETIME is digits, the same for all. A TIMESTAMP is an instant that each session sees in its own zone, but for
		// UNIX_TIMESTAMP; which one a column is, the schema knows.
		schema := "DATABASE()"
		if t.schema != "" {
			schema = "'" + t.schema + "'"
		}
		return "CASE (SELECT MAX(DATA_TYPE) FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = " + schema +
			" AND TABLE_NAME = '" + t.name + "' AND COLUMN_NAME = '" + column + "')" +
			" WHEN 'timestamp' THEN CAST(UNIX_TIMESTAMP(" + q + ") * 1000000 AS SIGNED)" +
			" ELSE TIMESTAMPDIFF(MICROSECOND, '1970-01-01', " + q + ") END"
	case PostgreSQL:
		// Beyond these years, infinity among them, the cast would fail, and the whole query with it.
		return "CASE WHEN " + q + " > '0001-01-01' AND " + q + " < '10000-01-01' THEN (extract(epoch FROM " + q + ") * 1000000)::bigint END"
	default:
		// Days since noon of -4713-11-24 as a double: exact to the millisecond, to which SQLite reads times. The pattern keeps
		// out 'now' and day numbers.
		return "CASE WHEN typeof(" + q + ") = 'text' AND " + q + " GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]*'" +
			" THEN CAST(round((julianday(" + q + ") - 2440587.5) * 86400000) AS INTEGER) * 1000 END"
	}
}

// unread is the expression for the text of what should be a time and is none; NULL if all is well. What MySQL cannot read, a
// zero date, is as good as NULL.
func (d Dialect) unread(t tableName, column string) string {
	if d == MySQL {
		return "NULL"
	}
	return "CASE WHEN " + d.micros(t, column) + " IS NULL THEN " + d.text(column) + " END"
}
