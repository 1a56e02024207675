package sqlsource

import (
	"errors"
	"fmt"
	"reflect"
)

// Fault is the kind of an error that a database returns for a statement.
type Fault uint8

// The faults.
const (
	Unknown  Fault = iota
	Denied         // the user lacks a right
	ReadOnly       // the database or the transaction is read-only
	NoTable        // the table does not exist
	NoColumn       // the table has no such column
	BadValue       // a column cannot hold the value, or a constraint forbids it
	Locked         // another transaction holds the row or the table
)

// String returns the fault's name.
func (f Fault) String() string {
	switch f {
	case Unknown:
		return "unknown"
	case Denied:
		return "denied"
	case ReadOnly:
		return "read-only"
	case NoTable:
		return "no table"
	case NoColumn:
		return "no column"
	case BadValue:
		return "bad value"
	case Locked:
		return "locked"
	}
	return fmt.Sprintf("Fault(%d)", uint8(f))
}

// mysqlFaults has error numbers of MySQL and MariaDB, sqliteFaults error codes of SQLite without their upper half.
var (
	mysqlFaults = map[uint64]Fault{
		1044: Denied, 1142: Denied, 1143: Denied, 1227: Denied, 1290: ReadOnly, 1792: ReadOnly, 1836: ReadOnly, 1146: NoTable, 1054: NoColumn, 1205: Locked, 1222: Locked,
		1048: BadValue, 1062: BadValue, 1264: BadValue, 1265: BadValue, 1292: BadValue, 1364: BadValue, 1366: BadValue, 1367: BadValue,
		1406: BadValue, 1441: BadValue, 1452: BadValue, 1451: BadValue, 3819: BadValue, 4025: BadValue,
	}
	sqliteFaults = map[int64]Fault{5: Locked, 6: Locked, 8: ReadOnly, 18: BadValue, 19: BadValue, 20: BadValue, 23: Denied}
)

// FaultOf returns the fault of a driver's error. It uses methods and fields that all drivers of a database have, so it imports no driver.
func FaultOf(err error) Fault {
	for ; err != nil; err = errors.Unwrap(err) {
		switch e := err.(type) {
		case interface{ SQLState() string }: // PostgreSQL
			return stateFault(e.SQLState())
		case interface{ Code() int }: // modernc.org/sqlite
			return sqliteFaults[int64(e.Code()&0xff)]
		}
		v := reflect.Indirect(reflect.ValueOf(err))
		if v.Kind() != reflect.Struct {
			continue
		}
		if n := v.FieldByName("Number"); n.IsValid() && n.CanUint() { // go-sql-driver/mysql
			return mysqlFaults[n.Uint()]
		}
		if n := v.FieldByName("Code"); n.IsValid() && n.CanInt() { // mattn/go-sqlite3
			return sqliteFaults[n.Int()&0xff]
		}
	}
	return Unknown
}

func stateFault(state string) Fault {
	switch state {
	case "42501":
		return Denied
	case "25006":
		return ReadOnly
	case "55P03":
		return Locked
	case "42P01", "3F000":
		return NoTable
	}
	if len(state) == 5 && (state[:2] == "22" || state[:2] == "23") {
		return BadValue
	}
	return Unknown
}

// RightError is the error for a right that the database's user lacks. Nothing was written.
type RightError struct {
	// Right is SELECT, INSERT, UPDATE or DELETE, or WRITE if the whole database may only be read.
	Right, Table string
	// Column is the column that lacks the right; it is empty if the right is missing for the table, or if the column is not known.
	Column string
	Err    error
}

func (e *RightError) Error() string {
	if e.Column != "" {
		return fmt.Sprintf("sqlsource: the user has no right to %s column %s of table %s: %v", e.Right, e.Column, e.Table, e.Err)
	}
	return fmt.Sprintf("sqlsource: the user has no right to %s in table %s: %v", e.Right, e.Table, e.Err)
}

// Unwrap returns Err, the driver's.
func (e *RightError) Unwrap() error { return e.Err }
