package sqlsource

import (
	"context"
	"slices"
	"strings"
)

// byDefault returns the columns that a table of an earlier release may lack. They are read if the table has them. Columns that WithColumns
// names are not among them, since they must exist.
func (o *options) byDefault() []string {
	own := o.dialect.columns()
	var names []string
	for i := range inTable {
		f := &inTable[i]
		name := *o.columns.Column(f.Column)
		if f.Later && name == *own.Column(f.Column) && !slices.Contains(o.named, name) {
			names = append(names, name)
		}
	}
	return names
}

// there returns the query for those of the columns that the table has. Names were checked, so they can be quoted.
func (o *options) there(columns []string) string {
	in := " IN ('" + strings.Join(columns, "', '") + "')"
	switch o.dialect {
	case MySQL:
		schema := "DATABASE()"
		if o.table.Schema != "" {
			schema = "'" + o.table.Schema + "'"
		}
		return "SELECT COLUMN_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = " + schema + " AND TABLE_NAME = '" + o.table.Name +
			"' AND COLUMN_NAME" + in
	case PostgreSQL:
		return "SELECT attname FROM pg_catalog.pg_attribute WHERE attrelid = to_regclass('" + o.dialect.QuoteTable(o.table) +
			"') AND attnum > 0 AND NOT attisdropped AND attname" + in
	}
	table := "'" + o.table.Name + "'"
	if o.table.Schema != "" {
		table += ", '" + o.table.Schema + "'"
	}
	return "SELECT name FROM pragma_table_info(" + table + ") WHERE name COLLATE NOCASE" + in
}

// has returns those of the optional columns that the table lacks now. A column that is added is read by the next load. If the table has a
// column that the user may not read, has returns a *RightError, since rows would silently lose its values.
func (s *Source) has(ctx context.Context, q Querier) (missing []string, err error) {
	missing = s.options.byDefault()
	if len(missing) == 0 {
		return nil, nil
	}
	rows, err := q.QueryContext(ctx, s.options.there(missing))
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
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return missing, s.options.hidden(ctx, q, missing)
}

// CheckColumns returns an error if Load could not read the table through q because a column does not exist, or because the user may not read
// it (a *[RightError]). MySQL does not list a column that the user may not read, so it would look like a missing one.
func (s *Source) CheckColumns(ctx context.Context, q Querier) error {
	missing, err := s.has(ctx, q)
	if err != nil {
		return err
	}
	d, t := s.options.dialect, s.options.table
	rows, err := q.QueryContext(ctx, "SELECT "+strings.Join(s.options.selected(missing...), ", ")+" FROM "+d.QuoteTable(t)+" WHERE 1 = 0")
	if err != nil {
		return s.options.unreadable(ctx, q, err)
	}
	defer func() { _ = rows.Close() }()
	return rows.Err()
}

// hidden returns a *RightError if one of the columns that seem to be missing exists and may not be read. MySQL does not list such columns, so
// each is selected once.
func (o *options) hidden(ctx context.Context, q Querier, missing []string) error {
	if o.dialect != MySQL {
		return nil
	}
	for _, column := range missing {
		err := o.readable(ctx, q, column)
		if err != nil && FaultOf(err) != NoColumn {
			return o.mayNotRead(column, err)
		}
	}
	return nil
}

// readable selects no row of a column, and returns the database's error.
func (o *options) readable(ctx context.Context, q Querier, column string) error {
	rows, err := q.QueryContext(ctx, "SELECT "+o.dialect.Quote(column)+" FROM "+o.dialect.QuoteTable(o.table)+" WHERE 1 = 0")
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	return rows.Err()
}

// mayNotRead returns an error of reading a column, as a *RightError if a right is missing.
func (o *options) mayNotRead(column string, err error) error {
	if FaultOf(err) != Denied {
		return err
	}
	return &RightError{Right: "SELECT", Table: o.table.String(), Column: column, Err: err}
}

// unreadable returns an error about a missing right with the column that lacks it, since databases name only the table.
func (o *options) unreadable(ctx context.Context, q Querier, err error) error {
	if FaultOf(err) != Denied {
		return err
	}
	for _, column := range o.columns.Names() {
		if why := o.readable(ctx, q, column); FaultOf(why) == Denied {
			return o.mayNotRead(column, err)
		}
	}
	return o.mayNotRead("", err)
}
