package editor

import (
	"errors"
	"fmt"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// wrong converts an error of the database into the missing right or ErrLocked, if it is one of them.
func (e *Editor) wrong(right string, t sqlsource.TableName, err error) error {
	switch {
	case err == nil:
		return nil
	case sqlsource.FaultOf(err) == sqlsource.Denied:
		return &sqlsource.RightError{Right: right, Table: t.String(), Err: err}
	case sqlsource.FaultOf(err) == sqlsource.ReadOnly:
		return &sqlsource.RightError{Right: "WRITE", Table: t.String(), Err: err}
	case sqlsource.FaultOf(err) == sqlsource.Locked:
		return fmt.Errorf("%w: %w", ErrLocked, err)
	}
	return err
}

// failed adds the attempted operation to an error.
func (e *Editor) failed(what string, t sqlsource.TableName, err error) error {
	var right *sqlsource.RightError
	if err == nil || errors.As(err, &right) {
		return err
	}
	return fmt.Errorf("editor: %s table %s: %w", what, t, err)
}

// refused converts a database's error about a value into one that names the field, if the field can be identified.
func (e *Editor) refused(p *plan, was *Row, cells []cell, err error) error {
	if sqlsource.FaultOf(err) != sqlsource.BadValue {
		return e.failed("change", e.table, err)
	}
	bad := &registry.RowError{Row: was.id(), Name: p.name, Err: err}
	var named []cell
	for _, c := range cells {
		if len(cells) == 1 || strings.Contains(err.Error(), c.column.name) {
			named = append(named, c)
		}
	}
	if len(named) == 1 {
		bad.Err, bad.Field, bad.Value = nil, named[0].column.name, plainValue(named[0].value)
		bad.Want = "what the column can hold: " + err.Error()
	}
	return bad
}
