package sqlsource

import (
	"context"
	"strings"
)

// update writes cells into a row, and a later time of modification.
func (s *session) update(ctx context.Context, was *Row, cells []cell) error {
	d, p := s.options.dialect, params{d: s.options.dialect}
	var sets []string
	for _, c := range cells {
		sets = append(sets, d.quote(d.escape(c.column.name))+" = "+p.value(c.column, c.value))
	}
	if c, ok := s.columns.find(d, s.options.columns.Modified); ok {
		if later := d.later(c); later != "" {
			sets = append(sets, d.quote(c.name)+" = "+later)
		}
	}
	if len(sets) == 0 {
		return nil
	}
	where, err := s.key(was, &p)
	if err != nil {
		return err
	}
	_, err = s.exec(ctx, "UPDATE", s.options.table, "UPDATE "+d.quoteTable(s.options.table)+" SET "+strings.Join(sets, ", ")+" WHERE "+where, p.values...)
	return err
}

// add inserts a row.
func (s *session) add(ctx context.Context, name string, cells []cell) error {
	d, p := s.options.dialect, params{d: s.options.dialect}
	c, _ := s.columns.find(d, s.options.columns.Name)
	columns, values := []string{d.quote(c.name)}, []string{p.value(c, &name)}
	for _, c := range cells {
		columns = append(columns, d.quote(d.escape(c.column.name)))
		values = append(values, p.value(c.column, c.value))
	}
	if c, ok := s.columns.find(d, s.options.columns.Modified); ok && d.now(c) != "" {
		columns = append(columns, d.quote(c.name))
		values = append(values, d.now(c))
	}
	_, err := s.exec(ctx, "INSERT", s.options.table, "INSERT INTO "+d.quoteTable(s.options.table)+
		" ("+strings.Join(columns, ", ")+") VALUES ("+strings.Join(values, ", ")+")", p.values...)
	return err
}

// remove deletes a row.
func (s *session) remove(ctx context.Context, was *Row) error {
	p := params{d: s.options.dialect}
	where, err := s.key(was, &p)
	if err != nil {
		return err
	}
	_, err = s.exec(ctx, "DELETE", s.options.table, "DELETE FROM "+s.options.dialect.quoteTable(s.options.table)+" WHERE "+where, p.values...)
	return err
}
