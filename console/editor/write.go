package editor

import (
	"context"
	"strings"
)

// update writes cells into a row, with a later time of modification.
func (s *session) update(ctx context.Context, was *Row, cells []cell) error {
	d, p := s.dialect, params{d: s.dialect}
	var sets []string
	for _, c := range cells {
		sets = append(sets, d.Quote(escape(d, c.column.name))+" = "+p.value(c.column, c.value))
	}
	if c, ok := s.columns.find(d, s.Columns().Modified); ok {
		if later := later(d, c); later != "" {
			sets = append(sets, d.Quote(c.name)+" = "+later)
		}
	}
	if len(sets) == 0 {
		return nil
	}
	where, err := s.key(was, &p)
	if err != nil {
		return err
	}
	_, err = s.exec(ctx, "UPDATE", s.table, "UPDATE "+d.QuoteTable(s.table)+" SET "+strings.Join(sets, ", ")+" WHERE "+where, p.values...)
	return err
}

// add inserts a row.
func (s *session) add(ctx context.Context, name string, cells []cell) error {
	d, p := s.dialect, params{d: s.dialect}
	c, _ := s.columns.find(d, s.Columns().Name)
	columns, values := []string{d.Quote(c.name)}, []string{p.value(c, &name)}
	for _, c := range cells {
		columns = append(columns, d.Quote(escape(d, c.column.name)))
		values = append(values, p.value(c.column, c.value))
	}
	if c, ok := s.columns.find(d, s.Columns().Modified); ok && now(d, c) != "" {
		columns = append(columns, d.Quote(c.name))
		values = append(values, now(d, c))
	}
	_, err := s.exec(ctx, "INSERT", s.table, "INSERT INTO "+d.QuoteTable(s.table)+
		" ("+strings.Join(columns, ", ")+") VALUES ("+strings.Join(values, ", ")+")", p.values...)
	return err
}

// remove deletes a row.
func (s *session) remove(ctx context.Context, was *Row) error {
	p := params{d: s.dialect}
	where, err := s.key(was, &p)
	if err != nil {
		return err
	}
	_, err = s.exec(ctx, "DELETE", s.table, "DELETE FROM "+s.dialect.QuoteTable(s.table)+" WHERE "+where, p.values...)
	return err
}
