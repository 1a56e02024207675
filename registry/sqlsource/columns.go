package sqlsource

import (
	"context"
	"slices"
	"strings"
)

// byDefault are the columns that a created table has, and one of an earlier release perhaps has not: they are read where they are.
// Those that WithColumns names must be there.
func (o *options) byDefault() []string {
	own := o.dialect.columns()
	var names []string
	for _, c := range [][2]string{
		{own.Window, o.columns.Window}, {own.WindowLimit, o.columns.WindowLimit}, {own.Concurrent, o.columns.Concurrent},
		{own.Shadow, o.columns.Shadow}, {own.PerKey, o.columns.PerKey},
	} {
		if c[0] == c[1] && !slices.Contains(o.named, c[1]) {
			names = append(names, c[1])
		}
	}
	return names
}

// there is the query for those of some columns that the table has. Names were checked, and can be in quotes.
func (o *options) there(columns []string) string {
	in := " IN ('" + strings.Join(columns, "', '") + "')"
	switch o.dialect {
	case MySQL:
		schema := "DATABASE()"
		if o.table.schema != "" {
			schema = "'" + o.table.schema + "'"
		}
		return "SELECT COLUMN_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = " + schema + " AND TABLE_NAME = '" + o.table.name +
			"' AND COLUMN_NAME" + in
	case PostgreSQL:
		return "SELECT attname FROM pg_catalog.pg_attribute WHERE attrelid = to_regclass('" + o.dialect.quoteTable(o.table) +
			"') AND attnum > 0 AND NOT attisdropped AND attname" + in
	}
	table := "'" + o.table.name + "'"
	if o.table.schema != "" {
		table += ", '" + o.table.schema + "'"
	}
	return "SELECT name FROM pragma_table_info(" + table + ") WHERE name COLLATE NOCASE" + in
}

// has finds the columns that the table has now: one that is added is read at the next load.
func (s *Source) has(ctx context.Context) (missing []string, err error) {
	missing = s.options.byDefault()
	if len(missing) == 0 {
		return nil, nil
	}
	rows, err := s.db.QueryContext(ctx, s.options.there(missing))
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		missing = slices.DeleteFunc(missing, func(m string) bool { return strings.EqualFold(m, name) })
	}
	return missing, rows.Err()
}

// flags reads what else a row says of itself. want is empty if all is well.
func (p *parser) flags(r *raw) (field string, value []byte, want string) {
	const flags = "0, 1 or NULL"
	switch {
	case r.shadow != nil && flag(r.shadow) == neither:
		return p.columns.Shadow, r.shadow, flags
	case r.perKey != nil && flag(r.perKey) == neither:
		return p.columns.PerKey, r.perKey, flags
	}
	return "", nil, ""
}
