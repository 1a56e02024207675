package sqlsource

import (
	"database/sql"
	"encoding/hex"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// maxTime is the latest time of a modification, in microseconds since 1970.
const maxTime = 1 << 53

// inTable are the fields of a row that a table can have a column for, in the order of a query.
var inTable = slices.DeleteFunc(registry.Fields(), func(f registry.Field) bool { return f.Column == "" })

// raw is a row as texts; NULL is nil. They are valid until the next row is read.
type raw struct {
	id, micros, unread sql.RawBytes
	values             []sql.RawBytes // of inTable
}

func newRaw() *raw { return &raw{values: make([]sql.RawBytes, len(inTable))} }

// cells returns the destinations for scanning a row, in the order of options.selected.
func (r *raw) cells() []any {
	cells := []any{&r.id, &r.micros, &r.unread}
	for i := range r.values {
		cells = append(cells, &r.values[i])
	}
	return cells
}

// cellOf has the index in raw.values of each field, by its place in registry.Fields; -1 of those without a column.
var cellOf = func() []int {
	cells := slices.Repeat([]int{-1}, len(registry.Fields()))
	for i := range inTable {
		cells[inTable[i].Index()] = i
	}
	return cells
}()

// value returns the text of a field; nil if it is NULL.
func (r *raw) value(f *registry.Field) []byte {
	if i := cellOf[f.Index()]; i >= 0 {
		return r.values[i]
	}
	return nil
}

// parser makes limits of rows.
type parser struct {
	columns Columns
	quota   bool
	jitter  time.Duration
}

// limit returns the limit of a row, or the error with which the row is rejected.
func (p *parser) limit(r *raw) (registry.Limit, *registry.RowError) {
	l := registry.Limit{Row: rowName(r.id), WaitShare: registry.DefaultWaitShare, Quota: p.quota, Jitter: p.jitter}
	wrong, want := l.Read(registry.InTable, r.value)
	reject := func(column string, value []byte, want string) (registry.Limit, *registry.RowError) {
		return registry.Limit{}, &registry.RowError{Row: l.Row, Name: l.Name, Field: column, Value: registry.ShortValue(value), Want: want, Shadow: l.Shadow}
	}
	if wrong == nil || wrong.Key != "name" {
		var ok bool
		if l.Version, ok = version(r.micros); !ok {
			return reject(p.columns.Modified, r.micros, "a time from 1970 to 2255; this is in microseconds since 1970")
		}
		if r.micros == nil && r.unread != nil {
			return reject(p.columns.Modified, r.unread, "a time from 1970 to 2255, as 2024-12-31 23:59:59 in UTC if it is text, or NULL")
		}
	}
	if wrong != nil {
		return reject(p.columns.nameOf(wrong), r.value(wrong), want)
	}
	return l, nil
}

// version reads the time of the last modification; 0 if it is NULL.
func version(micros []byte) (v int64, ok bool) {
	if micros == nil {
		return 0, true
	}
	v, err := strconv.ParseInt(string(micros), 10, 64)
	return v, err == nil && v >= 0 && v <= maxTime
}

// Limit returns the limit of a row with these texts, by column, or the *[registry.RowError] with which Load rejects the row. A nil text and a
// missing column are NULL. The time of the last modification is in microseconds since 1970, as [Dialect.Micros] selects it. Limit does not
// query the database.
func (s *Source) Limit(values map[string]*string) (registry.Limit, error) {
	columns, r := &s.options.columns, newRaw()
	set := func(cell *sql.RawBytes, column string) {
		if v := values[column]; v != nil && column != "" {
			*cell = []byte(*v)
		}
	}
	set(&r.id, columns.ID)
	set(&r.micros, columns.Modified)
	if _, err := strconv.ParseInt(string(r.micros), 10, 64); err != nil {
		r.micros, r.unread = nil, r.micros
	}
	for i := range inTable {
		set(&r.values[i], *columns.Column(inTable[i].Column))
	}
	limit, bad := s.parser.limit(r)
	if bad != nil {
		return registry.Limit{}, bad
	}
	return limit, nil
}

// rowName returns a primary key as text, in hexadecimal if it is not UTF-8.
func rowName(id []byte) string {
	if !utf8.Valid(id) {
		return "0x" + hex.EncodeToString(id[:min(len(id), 64)])
	}
	return registry.ShortValue(id)
}

// table collects limits, one for each name.
type table struct {
	registry.Table
	places map[string]int // in Limits, by name
}

func (t *table) add(l registry.Limit, nameColumn string) {
	if t.places == nil {
		t.places = make(map[string]int)
	}
	i, twice := t.places[l.Name]
	if !twice {
		t.places[l.Name] = len(t.Limits)
		t.Limits = append(t.Limits, l)
		return
	}
	stays, goes := t.Limits[i], l
	if Newer(&goes, &stays) {
		stays, goes = goes, stays
	}
	t.Limits[i] = stays
	t.Rejected = append(t.Rejected, registry.RowError{Row: goes.Row, Name: goes.Name, Field: nameColumn, Value: registry.ShortValue([]byte(goes.Name)),
		Want: fmt.Sprintf("one row for each name: row %s is newer, or has a larger key", stays.Row)})
}

// Newer reports whether a rather than b is in force if both rows have one name. The order is the same in every process.
func Newer(a, b *registry.Limit) bool {
	if a.Version != b.Version {
		return a.Version > b.Version
	}
	return compareKeys(a.Row, b.Row) > 0
}

// compareKeys compares two keys as whole numbers if both are, and otherwise as texts. Texts come after all numbers.
func compareKeys(a, b string) int {
	x, aNumber := new(big.Int).SetString(a, 10)
	y, bNumber := new(big.Int).SetString(b, 10)
	switch {
	case aNumber && bNumber && x.Cmp(y) != 0:
		return x.Cmp(y)
	case aNumber == bNumber:
		return strings.Compare(a, b)
	case aNumber:
		return -1
	}
	return 1
}
