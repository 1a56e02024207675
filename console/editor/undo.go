package editor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// Undo reverses the change of an entry, and records that as an entry of its own. It changes the row with the entry's key, never
// another row of the same name. It fails with a *ConflictError if that row is gone or one of the columns has changed since, and
// with [ErrUndone] if the entry was undone before. A removed row is added again, with all of its columns. An undo can be undone.
func (e *Editor) Undo(ctx context.Context, id int64, who, why string) (AuditEntry, error) {
	if err := reasons("undo", who, why); err != nil {
		return AuditEntry{}, err
	}
	var entry AuditEntry
	err := e.transact(ctx, func(s *session) error {
		a, err := s.entry(ctx, id, true)
		switch {
		case err != nil:
			return err
		case a.UndoneBy != 0:
			return fmt.Errorf("%w: %d, by %d", ErrUndone, id, a.UndoneBy)
		case a.Action != "":
			return fmt.Errorf("%w: %d, %s", ErrAction, id, a.Action)
		case a.Table == e.table.String():
			entry, _, err = s.apply(ctx, s.back(&a, who, why))
		default:
			entry, err = s.switchBack(ctx, &a, who, why)
		}
		return err
	})
	if err != nil {
		return AuditEntry{}, err
	}
	return entry, nil
}

// back returns the plan that reverses an entry.
func (s *session) back(a *AuditEntry, who, why string) *plan {
	p := &plan{name: a.Name, who: who, why: why, undoes: a.ID, remove: a.From == nil}
	touched := a.Changed()
	if a.To != nil { // a removed row is added only if no other row has its name now
		p.id = a.To[s.Columns().ID]
	}
	if a.To != nil && a.From != nil {
		p.to = Values{}
		touched = slices.DeleteFunc(touched, func(column string) bool { return !s.editable(column) }) // without the columns that a trigger writes
		for _, column := range touched {
			if value, ok := a.From[column]; ok {
				p.to[column] = value
			}
		}
	}
	if a.To == nil {
		p.to, p.restore = a.From, true
	}
	p.fresh = func(now *Row) bool {
		if a.To == nil || now == nil {
			return a.To == nil && now == nil
		}
		for _, column := range touched {
			is, ok := now.Values[column]
			if column != s.Columns().Modified && (!ok || !same(is, a.To[column])) {
				return false
			}
		}
		return true
	}
	return p
}

// SetSwitch turns the switch of [NewSwitch] with these options, for the whole fleet. It writes who into the column changedBy
// if the table has one.
func (e *Editor) SetSwitch(ctx context.Context, on bool, who, why string, opts ...sqlsource.SwitchOption) (AuditEntry, error) {
	table, name, err := sqlsource.SwitchRow(e.dialect, opts...)
	if err != nil {
		return AuditEntry{}, err
	}
	if err := reasons(name, who, why); err != nil {
		return AuditEntry{}, err
	}
	var entry AuditEntry
	err = e.transact(ctx, func(s *session) (err error) {
		entry, err = s.turnSwitch(ctx, &turning{table: table, name: name, on: on, who: who, why: why})
		return err
	})
	if err != nil {
		return AuditEntry{}, err
	}
	return entry, nil
}

// turning describes a change of a switch.
type turning struct {
	table          sqlsource.TableName
	name, who, why string
	on             bool
	undoes         int64
	fresh          func(now Values) bool // reports whether the switch is as expected
}

// switchBack reverses a change of a switch. A missing row means on.
func (s *session) switchBack(ctx context.Context, a *AuditEntry, who, why string) (AuditEntry, error) {
	to, ok := a.To.enabled()
	t, err := s.dialect.ParseTable(a.Table)
	_, limit := a.To[s.Columns().Rate] // another table of limits, whose editor writes into the same audit table
	if err != nil || !ok || limit {
		return AuditEntry{}, fmt.Errorf("%w: entry %d is of table %.130s", ErrNoEntry, a.ID, a.Table)
	}
	was, ok := a.From.enabled()
	return s.turnSwitch(ctx, &turning{table: t, name: a.Name, who: who, why: why, on: was || !ok, undoes: a.ID,
		fresh: func(now Values) bool {
			is, ok := now.enabled()
			return ok && is == to
		}})
}

// enabled returns the state of a switch's row.
func (v Values) enabled() (on, ok bool) {
	if value := v["enabled"]; value != nil {
		return registry.ParseFlag(*value)
	}
	return false, false
}

func (s *session) turnSwitch(ctx context.Context, to *turning) (AuditEntry, error) {
	d := s.dialect
	l, err := s.layoutOf(ctx, to.table)
	if err != nil {
		return AuditEntry{}, err
	}
	for i := range l { // as sqlsource.NewSwitch spells them
		for _, known := range []string{"name", "enabled"} {
			if d != sqlsource.PostgreSQL && strings.EqualFold(l[i].name, known) {
				l[i].name = known
			}
		}
	}
	was, err := s.switchRow(ctx, to, l, d != sqlsource.SQLite)
	if err != nil {
		return AuditEntry{}, err
	}
	if to.fresh != nil && !to.fresh(was) {
		return AuditEntry{}, &ConflictError{Name: to.name, Now: &Row{Name: to.name, ID: to.name, Values: was}}
	}
	if err := s.writeSwitch(ctx, to, l, was != nil); err != nil {
		return AuditEntry{}, err
	}
	is, err := s.switchRow(ctx, to, l, false)
	if err != nil {
		return AuditEntry{}, err
	}
	return s.record(ctx, &AuditEntry{Who: to.who, Why: to.why, Table: to.table.String(), Name: to.name, From: was, To: is}, to.undoes)
}

// switchRow reads the row of a switch; nil if there is none.
func (s *session) switchRow(ctx context.Context, of *turning, l layout, lock bool) (Values, error) {
	d, p := s.dialect, params{d: s.dialect}
	var selected []string
	for _, c := range l {
		selected = append(selected, read(d, c))
	}
	query := "SELECT " + strings.Join(selected, ", ") + " FROM " + d.QuoteTable(of.table) + " WHERE " + p.equals(column{name: "name"}, of.name)
	right := "SELECT"
	if lock {
		if _, err := s.switchRow(ctx, of, l, false); err != nil { // it shows which of two rights is missing
			return nil, err
		}
		query += " FOR UPDATE"
		right = "UPDATE" // PostgreSQL requires it for the lock
	}
	rows, err := s.query(ctx, right, of.table, query, p.values...)
	if err != nil || len(rows) == 0 {
		return nil, s.failed("read", of.table, err)
	}
	v := Values{}
	for i, c := range l {
		v[c.name] = rows[0][i]
	}
	return v, nil
}

func (s *session) writeSwitch(ctx context.Context, to *turning, l layout, there bool) error {
	d, p := s.dialect, params{d: s.dialect}
	enabled, ok := l.find(d, "enabled")
	if !ok {
		return &ColumnError{Table: to.table.String(), Column: "enabled"}
	}
	cells := []cell{{enabled, Text(to.on)}}
	for _, c := range l {
		if strings.EqualFold(c.name, "changedBy") && c.writable {
			cells = append(cells, cell{c, &to.who})
		}
	}
	var err error
	if there {
		var sets []string
		for _, c := range cells {
			sets = append(sets, d.Quote(escape(d, c.column.name))+" = "+p.value(c.column, c.value))
		}
		_, err = s.exec(ctx, "UPDATE", to.table, "UPDATE "+d.QuoteTable(to.table)+" SET "+strings.Join(sets, ", ")+
			" WHERE "+p.equals(column{name: "name"}, to.name), p.values...)
	} else {
		columns, values := []string{d.Quote("name")}, []string{p.text(to.name)}
		for _, c := range cells {
			columns = append(columns, d.Quote(escape(d, c.column.name)))
			values = append(values, p.value(c.column, c.value))
		}
		_, err = s.exec(ctx, "INSERT", to.table, "INSERT INTO "+d.QuoteTable(to.table)+
			" ("+strings.Join(columns, ", ")+") VALUES ("+strings.Join(values, ", ")+")", p.values...)
	}
	if sqlsource.FaultOf(err) == sqlsource.BadValue {
		return &registry.RowError{Row: to.name, Name: to.name, Err: err}
	}
	return s.failed("change", to.table, err)
}
