package sqlsource

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// kind is what a database says is wrong.
type kind uint8

const (
	other    kind = iota
	denied        // the user may not
	readOnly      // nobody may write
	noTable       // there is no such table
	badValue      // a column cannot hold it, or a constraint forbids it
)

// Numbers of errors of MySQL and MariaDB; codes of SQLite, without their upper half.
var (
	mysqlKinds = map[uint64]kind{
		1044: denied, 1142: denied, 1143: denied, 1227: denied, 1290: readOnly, 1792: readOnly, 1836: readOnly, 1146: noTable,
		1048: badValue, 1062: badValue, 1264: badValue, 1265: badValue, 1292: badValue, 1364: badValue, 1366: badValue, 1367: badValue,
		1406: badValue, 1441: badValue, 1452: badValue, 1451: badValue, 3819: badValue, 4025: badValue,
	}
	sqliteKinds = map[int64]kind{8: readOnly, 18: badValue, 19: badValue, 20: badValue, 23: denied}
)

// kindOf asks an error of a driver by what all drivers of a database have in common: no driver is imported here.
func kindOf(err error) kind {
	for ; err != nil; err = errors.Unwrap(err) {
		switch e := err.(type) {
		case interface{ SQLState() string }: // PostgreSQL
			return stateKind(e.SQLState())
		case interface{ Code() int }: // modernc.org/sqlite
			return sqliteKinds[int64(e.Code()&0xff)]
		}
		v := reflect.Indirect(reflect.ValueOf(err))
		if v.Kind() != reflect.Struct {
			continue
		}
		if n := v.FieldByName("Number"); n.IsValid() && n.CanUint() { // go-sql-driver/mysql
			return mysqlKinds[n.Uint()]
		}
		if n := v.FieldByName("Code"); n.IsValid() && n.CanInt() { // mattn/go-sqlite3
			return sqliteKinds[n.Int()&0xff]
		}
	}
	return other
}

func stateKind(state string) kind {
	switch state {
	case "42501":
		return denied
	case "25006":
		return readOnly
	case "42P01", "3F000":
		return noTable
	}
	if len(state) == 5 && (state[:2] == "22" || state[:2] == "23") {
		return badValue
	}
	return other
}

// wrong says which right is missing, if one is.
func (e *Editor) wrong(right string, t tableName, err error) error {
	switch {
	case err == nil:
		return nil
	case kindOf(err) == denied:
		return &RightError{Right: right, Table: t.String(), Err: err}
	case kindOf(err) == readOnly:
		return &RightError{Right: "WRITE", Table: t.String(), Err: err}
	}
	return err
}

// failed says what was tried.
func (e *Editor) failed(what string, t tableName, err error) error {
	var right *RightError
	if err == nil || errors.As(err, &right) {
		return err
	}
	return fmt.Errorf("sqlsource: %s table %s: %w", what, t, err)
}

// refused makes an error of the database about a value one that names the field, as far as that is known.
func (e *Editor) refused(p *plan, was *Row, cells []cell, err error) error {
	if kindOf(err) != badValue {
		return e.failed("change", e.options.table, err)
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
