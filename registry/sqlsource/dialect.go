package sqlsource

import (
	"fmt"
	"strings"
)

// Dialect is the SQL dialect of a database. The zero value is invalid.
type Dialect uint8

// The dialects: MySQL 5.7 or MariaDB 10.2 or later, PostgreSQL 14 or later, SQLite 3.25 or later.
const (
	MySQL Dialect = iota + 1
	PostgreSQL
	SQLite
)

// String returns the dialect's name.
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

// CheckIdentifier returns an error if name cannot name a column or a table: it must be letters, digits, _ and $, so that it cannot be
// anything but a name even without quotes. field is what it names, for the error.
func (d Dialect) CheckIdentifier(field, name string) error {
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

// Quote quotes an identifier, so that it may be a reserved word. (SQLite takes a name in double quotes that it does not find for a text;
// hence back quotes.)
func (d Dialect) Quote(name string) string {
	if d == PostgreSQL {
		return `"` + name + `"`
	}
	return "`" + name + "`"
}

// literal returns a text in ASCII as it stands in a statement, whatever the session's settings for quotes, backslashes and character sets.
// Beside a column it has the column's collation.
func (d Dialect) literal(text string) string {
	switch d {
	case MySQL:
		return fmt.Sprintf("_ascii X'%x'", text)
	case PostgreSQL:
		return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `''`).Replace(text) + "'"
	default:
		return "'" + strings.ReplaceAll(text, "'", "''") + "'"
	}
}

// TableName is the name of a table, and of its schema (MySQL: database; SQLite: attached database), which may be empty.
type TableName struct{ Schema, Name string }

// String returns schema.name, or the name alone.
func (t TableName) String() string { return strings.TrimPrefix(t.Schema+"."+t.Name, ".") }

// ParseTable returns the table that schema.name or name means, or an error if the database could not have it.
func (d Dialect) ParseTable(s string) (TableName, error) {
	var t TableName
	schema, name, qualified := strings.Cut(s, ".")
	if !qualified {
		t.Name = s
		return t, d.CheckIdentifier("table", s)
	}
	t.Schema, t.Name = schema, name
	if err := d.CheckIdentifier("schema of table", schema); err != nil {
		return t, err
	}
	return t, d.CheckIdentifier("table", name)
}

// QuoteTable returns the table's name as it stands in a statement.
func (d Dialect) QuoteTable(t TableName) string {
	if t.Schema == "" {
		return d.Quote(t.Name)
	}
	return d.Quote(t.Schema) + "." + d.Quote(t.Name)
}

// cast returns the expression that selects a column as text, as the database writes it: numbers in decimal, with the digits of their type,
// whatever the driver would return.
func (d Dialect) cast(column string) string {
	switch q := d.Quote(column); d {
	case MySQL:
		return "CAST(" + q + " AS CHAR)"
	case PostgreSQL:
		return q + "::text"
	default:
		return "CAST(" + q + " AS TEXT)"
	}
}

// Text returns the expression that selects a column as text in UTF-8, whatever its type and the session's character set.
func (d Dialect) Text(column string) string {
	if d != MySQL {
		return d.cast(column)
	}
	q := d.Quote(column)
	return "CASE CHARSET(" + q + ") WHEN 'binary' THEN CAST(" + q + " AS BINARY) ELSE CAST(CONVERT(" + q + " USING utf8mb4) AS BINARY) END"
}

// Micros returns the expression that selects a time as microseconds since 1970, the same in every session whatever its time zone. A
// column type without a zone is read as UTC. Values that are not a time are NULL.
func (d Dialect) Micros(t TableName, column string) string {
	q := d.Quote(column)
	switch d {
	case MySQL:
		// A DATETIME has the same digits in every session. A TIMESTAMP is an instant that each session reads in its own zone, except by
		// UNIX_TIMESTAMP. The schema has the type of the column.
		schema := "DATABASE()"
		if t.Schema != "" {
			schema = "'" + t.Schema + "'"
		}
		return "CASE (SELECT MAX(DATA_TYPE) FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = " + schema +
			" AND TABLE_NAME = '" + t.Name + "' AND COLUMN_NAME = '" + column + "')" +
			" WHEN 'timestamp' THEN CAST(UNIX_TIMESTAMP(" + q + ") * 1000000 AS SIGNED)" +
			" ELSE TIMESTAMPDIFF(MICROSECOND, '1970-01-01', " + q + ") END"
	case PostgreSQL:
		// Beyond these years, and for infinity, the cast would fail, and with it the whole query.
		return "CASE WHEN " + q + " > '0001-01-01' AND " + q + " < '10000-01-01' THEN (extract(epoch FROM " + q + ") * 1000000)::bigint END"
	default:
		// Days since noon of -4713-11-24 as a double: exact to the millisecond, to which SQLite reads times. The pattern keeps
		// out 'now' and day numbers.
		return "CASE WHEN typeof(" + q + ") = 'text' AND " + q + " GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]*'" +
			" THEN CAST(round((julianday(" + q + ") - 2440587.5) * 86400000) AS INTEGER) * 1000 END"
	}
}

// Unread returns the expression that selects the text of a value that should be a time and is not; NULL otherwise. A zero date of MySQL
// counts as NULL.
func (d Dialect) Unread(t TableName, column string) string {
	if d == MySQL {
		return "NULL"
	}
	return "CASE WHEN " + d.Micros(t, column) + " IS NULL THEN " + d.cast(column) + " END"
}
