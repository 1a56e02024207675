package sqlsource

import (
	"context"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// optional returns the columns that the table may lack: those that [WithColumns] does not name. They are read if the table has them.
func (o *options) optional() (names []string) {
	for _, at := range o.places() {
		if !at.named {
			names = append(names, at.column)
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
	missing = s.options.optional()
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
	if err := s.options.hidden(ctx, q, missing); err != nil {
		return nil, err
	}
	missing = s.options.wanted(missing)
	found := s.options.found(missing)
	s.found.Store(&found)
	return missing, nil
}

// without returns the first column of each field of which all columns are missing.
func (o *options) without(missing []string) (first []string) {
	places := o.places()
	for i := 0; i < len(places); {
		at, none := places[i], true
		for ; i < len(places) && places[i].field == at.field; i++ {
			none = none && !places[i].named && slices.Contains(missing, places[i].column)
		}
		if none {
			first = append(first, at.column)
		}
	}
	return first
}

// wanted returns missing without the columns that every table has, if the table has them under no name: a query then fails, and names them.
func (o *options) wanted(missing []string) []string {
	without := o.without(missing)
	for _, at := range o.places() {
		if at.field.Column == registry.Required && slices.Contains(without, at.column) {
			missing = slices.DeleteFunc(missing, func(m string) bool { return m == at.column })
		}
	}
	return missing
}

// found returns the names of the columns of a table that lacks the missing ones: of each field, the column that it has.
func (o *options) found(missing []string) Columns {
	c := o.columns
	places := o.places()
	for i := len(places) - 1; i >= 0; i-- {
		at := &places[i]
		if at.named || slices.Contains(missing, at.column) {
			continue
		}
		key := at.field.Names()[at.name]
		if c.own(key) == nil { // an older name whose values mean the same
			*c.own(at.field.Key) = at.column
			continue
		}
		*c.own(key) = at.column
	}
	for i := range places { // an older name with a meaning of its own takes the place of the field's
		if at := &places[i]; at.name == 0 && !at.named && slices.Contains(missing, at.column) && *c.own(at.field.Key) == at.column {
			for _, older := range at.field.Older {
				if column := c.own(older); column != nil && *column != "" {
					*c.own(at.field.Key) = ""
				}
			}
		}
	}
	return c
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
		return s.unreadable(ctx, q, err)
	}
	defer func() { _ = rows.Close() }()
	return rows.Err()
}

// hidden returns a *RightError if one of the columns that seem to be missing exists and may not be read. MySQL does not list such columns. If
// the user may read all columns there are none. Otherwise, of each field without any column, the one with its name is selected once. A user with
// rights to single columns gets the same error for one that does not exist, so the other names of a field that has a column are not tried.
func (o *options) hidden(ctx context.Context, q Querier, missing []string) error {
	if o.dialect != MySQL || len(missing) == 0 {
		return nil
	}
	all, err := q.QueryContext(ctx, "SELECT * FROM "+o.dialect.QuoteTable(o.table)+" WHERE 1 = 0")
	if err == nil {
		return all.Close()
	}
	if FaultOf(err) == NoTable {
		return nil // the query of the rows fails, too
	}
	for _, column := range o.without(missing) {
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
func (s *Source) unreadable(ctx context.Context, q Querier, err error) error {
	o := s.options
	if FaultOf(err) != Denied {
		return err
	}
	columns := s.Columns()
	for _, column := range columns.Names() {
		if why := o.readable(ctx, q, column); FaultOf(why) == Denied {
			return o.mayNotRead(column, err)
		}
	}
	return o.mayNotRead("", err)
}
