package sqlsource

import (
	"database/sql"
	"encoding/hex"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

const (
	defaultCache = 0.5
	maxCache     = 9.99
	maxName      = 512
	maxExact     = 1 << 53 // beyond it a double does not hold every whole number
	maxQuota     = math.MaxInt32
)

// raw is a row as texts; NULL is nil. They are valid until the next row is read.
type raw struct {
	id, name, rate, cache, status, micros, unread, burst, warmup, cold, quota, shadow, perKey, window, windowLimit, concurrent, penalty sql.RawBytes
}

func (r *raw) cells() []any {
	return []any{&r.id, &r.name, &r.rate, &r.cache, &r.status, &r.micros, &r.unread, &r.burst, &r.warmup, &r.cold, &r.quota, &r.shadow, &r.perKey,
		&r.window, &r.windowLimit, &r.concurrent, &r.penalty}
}

// parser makes limits of rows.
type parser struct {
	columns Columns
	quota   bool
	jitter  time.Duration
}

// limit returns the limit, or why the row is rejected.
func (p *parser) limit(r *raw) (registry.Limit, *registry.RowError) {
	l := registry.Limit{Row: rowName(r.id), Shadow: flag(r.shadow) == yes, PerKey: flag(r.perKey) == yes}
	reject := func(field string, value []byte, want string) (registry.Limit, *registry.RowError) {
		return registry.Limit{}, &registry.RowError{Row: l.Row, Name: l.Name, Field: field, Value: registry.ShortValue(value), Want: want, Shadow: l.Shadow}
	}
	if len(r.name) < 1 || len(r.name) > maxName || !utf8.Valid(r.name) {
		return reject(p.columns.Name, r.name, "a name, 1 to 512 bytes of UTF-8")
	}
	l.Name = string(r.name)
	if r.micros != nil {
		v, err := strconv.ParseInt(string(r.micros), 10, 64)
		if err != nil || v < 0 || v > maxExact {
			return reject(p.columns.Modified, r.micros, "a time from 1970 to 2255; this is in microseconds since 1970")
		}
		l.Version = v
	} else if r.unread != nil {
		return reject(p.columns.Modified, r.unread, "a time from 1970 to 2255, as 2024-12-31 23:59:59 in UTC if it is text, or NULL")
	}
	switch flag(r.status) {
	case yes:
	case no:
		l.Disabled = true
	default:
		return reject(p.columns.Status, r.status, "0 or 1")
	}
	off := l
	field, value, want := p.numbers(r, &l)
	if want == "" {
		field, value, want = p.flags(r, &l)
	}
	if want == "" {
		return l, nil
	}
	if l.Disabled {
		return off, nil // what it would limit to does not matter
	}
	return reject(field, value, want)
}

// numbers reads what an enabled row limits to. want is empty if all is well.
func (p *parser) numbers(r *raw, l *registry.Limit) (field string, value []byte, want string) {
	c := &p.columns
	var ok bool
	if field, value, want = p.bounds(r, l); want != "" || l.NoRate {
		return field, value, want
	}
	if l.Rate, ok = number(r.rate); !ok || l.Rate != 0 && l.Rate < 1e-9 || l.Rate > maxExact {
		return c.Rate, r.rate, "a number of permits per second from 1e-9 to 2^53, or 0: nothing passes"
	}
	l.WaitShare = defaultCache
	if r.cache != nil {
		if l.WaitShare, ok = number(r.cache); !ok || l.WaitShare < 0 || l.WaitShare > maxCache {
			return c.Cache, r.cache, "a share of a second from 0 to 9.99, or NULL"
		}
	}
	if r.warmup != nil {
		ms, ok := number(r.warmup)
		if !ok || ms < 0 || ms > maxExact/1000 {
			return c.WarmupMillis, r.warmup, "milliseconds, 0 to 2^53 / 1000, or NULL"
		}
		l.Warmup = time.Duration(math.Round(ms*1000)) * time.Microsecond
	}
	if r.cold != nil && l.Warmup > 0 {
		if l.ColdFactor, ok = number(r.cold); !ok || l.ColdFactor <= 1 || l.ColdFactor > maxExact {
			return c.ColdFactor, r.cold, "a number above 1, at most 2^53, or NULL"
		}
	}
	return p.shape(r, l)
}

// shape reads whether a row is a quota, and what it saves up. want is empty if all is well.
func (p *parser) shape(r *raw, l *registry.Limit) (field string, value []byte, want string) {
	c := &p.columns
	switch f := flag(r.quota); {
	case r.quota == nil:
		l.Quota = p.quota
	case f == neither:
		return c.Quota, r.quota, "0, 1 or NULL"
	default:
		l.Quota = f == yes
	}
	if l.Quota {
		l.Jitter = p.jitter
		switch {
		case l.Rate != math.Trunc(l.Rate) || l.Rate > maxQuota:
			return c.Rate, r.rate, "a whole number of calls in any second, 0 to 2147483647: the row is a quota"
		case l.Warmup > 0:
			return c.WarmupMillis, r.warmup, "0 or NULL: the row is a quota"
		}
	}
	if r.burst != nil {
		size, ok := number(r.burst)
		switch {
		case !ok || size < 0 || size > maxExact:
			return c.Burst, r.burst, "a number of permits from 0 to 2^53, or NULL"
		case l.Quota:
			return c.Burst, r.burst, "NULL: the row is a quota"
		case l.Warmup > 0:
			return c.Burst, r.burst, "NULL: the row has a warm-up, which says what is saved up"
		}
		l.MaxPermits = &size
	}
	return "", nil, ""
}

// Limit returns the limit that a row is whose columns have these texts, or the *[registry.RowError] with which Load rejects it. A nil text
// is NULL, and so is a column that is missing. The time of the last modification is in microseconds since 1970, as [Dialect.Micros] selects
// it. It does not query the database.
func (s *Source) Limit(values map[string]*string) (registry.Limit, error) {
	var r raw
	cells := r.cells()
	for i, f := range s.options.columns.fields() {
		v := values[*f.name]
		if i > modifiedCell {
			i++ // the cell after it is the text of what is no time
		}
		if v == nil || *f.name == "" {
			continue
		}
		if i == modifiedCell {
			if _, err := strconv.ParseInt(*v, 10, 64); err != nil {
				i++
			}
		}
		*cells[i].(*sql.RawBytes) = []byte(*v)
	}
	limit, bad := s.parser.limit(&r)
	if bad != nil {
		return registry.Limit{}, bad
	}
	return limit, nil
}

// modifiedCell is the index of Columns.Modified among the fields, and of raw.micros among the cells; raw.unread is the next.
const modifiedCell = 5

// number reads a decimal number. Infinite ones, those that are not numbers, and Go's notations of its own are not ok.
func number(b []byte) (f float64, ok bool) {
	for _, c := range b {
		if (c < '0' || c > '9') && c != '.' && c != '-' && c != '+' && c != 'e' && c != 'E' {
			return 0, false
		}
	}
	f, err := strconv.ParseFloat(string(b), 64)
	return f, err == nil
}

// ParseNumber returns the number that a text is for Load: a decimal number, or not ok.
func ParseNumber(text string) (f float64, ok bool) { return number([]byte(text)) }

// ParseFlag returns what a text is for Load: on or off, as 1 and 0 of any database, or not ok.
func ParseFlag(text string) (on, ok bool) {
	f := flag([]byte(text))
	return f == yes, f != neither
}

type truth uint8

const (
	neither truth = iota
	no
	yes
)

// flag reads 0 and 1: also as BOOLEAN of PostgreSQL and BIT(1) of MySQL write them.
func flag(b []byte) truth {
	switch string(b) {
	case "0", "false", "\x00":
		return no
	case "1", "true", "\x01":
		return yes
	}
	return neither
}

// rowName is a primary key as text; what is not UTF-8 is in hexadecimal.
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

// Newer reports whether a, and not b, is in force if the rows of both have one name: the order is the same in every process.
func Newer(a, b *registry.Limit) bool {
	if a.Version != b.Version {
		return a.Version > b.Version
	}
	return compareKeys(a.Row, b.Row) > 0
}

// compareKeys compares as whole numbers if both are, else as text, which is after every number. So it is an order.
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
