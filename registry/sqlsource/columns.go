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
	for i := range inTable {
		f := &inTable[i]
		name := *o.columns.Column(f.Column)
		if f.Later && name == *own.Column(f.Column) && !slices.Contains(o.named, name) {
			names = append(names, name)
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

// has finds the columns that the table does not have now: one that is added is read at the next load. That a column may not be read is a
// *RightError: the rows would lose what it says.
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

// CheckColumns returns an error if Load could not read the table through q because of its columns: one of them does not exist, or the
// user may not read it, which is a *[RightError]. MySQL does not even list a column that the user may not read, so that rows would seem to
// have no such column.
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

// hidden returns a *RightError if one of the columns that seem to be missing is there, and may not be read. MySQL does not show such columns,
// so each is asked for.
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

// readable asks for nothing of a column.
func (o *options) readable(ctx context.Context, q Querier, column string) error {
	rows, err := q.QueryContext(ctx, "SELECT "+o.dialect.Quote(column)+" FROM "+o.dialect.QuoteTable(o.table)+" WHERE 1 = 0")
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	return rows.Err()
}

// mayNotRead is an error of reading a column, as a *RightError if a right is missing.
func (o *options) mayNotRead(column string, err error) error {
	if FaultOf(err) != Denied {
		return err
	}
	return &RightError{Right: "SELECT", Table: o.table.String(), Column: column, Err: err}
}

// unreadable finds the column to which an error about a missing right is due, as databases name the table alone.
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
