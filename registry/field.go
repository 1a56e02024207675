package registry

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// Notation is a way to write the values of a row as texts.
type Notation uint8

const (
	// InTable is a cell of a database: 1 and 0 for yes and no, durations as numbers of milliseconds or seconds.
	InTable Notation = iota
	// InFile is a file, and Go: true and false, durations such as 4s.
	InFile
	// InForm is a form for people: numbers in the unit of the field (Field.Unit).
	InForm
)

// String returns table, file or form.
func (n Notation) String() string {
	if names := [...]string{"table", "file", "form"}; int(n) < len(names) {
		return names[n]
	}
	return fmt.Sprintf("Notation(%d)", uint8(n))
}

// Field is one field of a row. It has the names of the field in tables, files and forms, and reads, checks and compares its values.
// [Fields] returns all of them.
type Field struct {
	// Key of the field in a file, and in the errors of [Limit.Check].
	Key string
	// Column is the key of its column: a field of sqlsource.Columns. It is empty if tables have no such column.
	Column string
	// Default is the name of the column in a created table. It is empty if a table has the column only under a name that is given.
	Default string
	// Later reports whether the column came with a later release, so that a table may lack it.
	Later bool

	// Label, Hint and Unit of the field in a form.
	Label, Hint, Unit string
	// Scale is the number in the form divided by the number in the table; 0 means 1.
	Scale float64
	// Empty is what a missing value means. ZeroIsEmpty reports whether 0 means the same.
	Empty       string
	ZeroIsEmpty bool
	// Choices are the values of a field that has only a few.
	Choices []Choice

	index    int  // in Fields
	required bool // a cell may not be NULL
	value    value
}

// Choice is one of the few values of a field, and its text for people.
type Choice struct{ Value, Text string }

// value reads, checks and compares the values of one field.
type value interface {
	// read sets the field of l from a text, and reports whether the text is of the notation. It keeps no part of text, which is bytes because
	// a table has hundreds of thousands of cells: a string for each would be most of the time of a load.
	read(l *Limit, text []byte, n Notation) bool
	// valid reports whether the field's value is within its bounds.
	valid(l *Limit) bool
	// want returns which values are accepted.
	want(n Notation) string
	// text returns the value, as Go writes it.
	text(l *Limit) string
	// same reports whether two rows have the same value.
	same(a, b *Limit) bool
}

const (
	maxExact  = 1 << 53 // beyond it a float64 does not hold every whole number
	maxWarmup = 100 * 365 * 24 * time.Hour
	maxWindow = 100 * 365 * 24 * time.Hour  // see slidingwindow.New
	maxWait   = maxExact * time.Microsecond // 285 years: longer times are not exact
	maxCalls  = math.MaxInt32
)

// DefaultWaitShare is the WaitShare of a row that has none.
const DefaultWaitShare = 0.5

// fields has all fields of a row, in the order in which they are read and in which forms show them.
var fields = [...]Field{
	{Key: "name", Column: "name", Default: "interfaceUrl", Label: "Name", required: true, value: nameValue{}},
	{Key: "disabled", Column: "status", Default: "status", Label: "In force", Hint: "if not, every call passes", required: true,
		value: flagValue{at: func(l *Limit) *bool { return &l.Disabled }, inverted: true}},
	{Key: "shadow", Column: "shadow", Default: "shadow", Later: true, Label: "Shadow", Hint: "count calls, refuse none",
		value: flagValue{at: func(l *Limit) *bool { return &l.Shadow }}},
	{Key: "rate", Column: "rate", Default: "rateLimit", Label: "Rate", Hint: "0 lets nothing pass", Unit: "/s", Empty: "none", required: true,
		value: rateValue{}},
	{Key: "cache", Column: "cache", Default: "cache", Label: "Longest wait", Hint: "a call that would wait longer is refused", Unit: "ms",
		Scale: 1000, Empty: "500 ms", value: waitValue{}},
	{Key: "burst", Column: "burst", Label: "Saves up", Hint: "unused permits that may be taken later", Unit: "permits",
		Empty: "one second's worth", value: sizeValue{}},
	{Key: "quota", Column: "quota", Label: "Quota", Hint: "count calls in any sliding second, save nothing up",
		value: flagValue{at: func(l *Limit) *bool { return &l.Quota }}},
	{Key: "jitter", Label: "Jitter", Hint: "how unevenly calls reach the upstream", Empty: "none",
		value: durationValue{at: func(l *Limit) *time.Duration { return &l.Jitter }, most: time.Second, example: "50ms"}},
	{Key: "warmup", Column: "warmup_ms", Label: "Warm-up", Hint: "time until a cold upstream gets the whole rate", Unit: "ms",
		Empty: "none", ZeroIsEmpty: true,
		value: durationValue{at: func(l *Limit) *time.Duration { return &l.Warmup }, unit: time.Millisecond, step: time.Microsecond, most: maxWarmup, example: "4s"}},
	{Key: "cold_factor", Column: "cold_factor", Label: "Cold factor", Hint: "how many times slower a cold upstream is", Empty: "3",
		value: factorValue{}},
	{Key: "window_limit", Column: "window_limit", Default: "windowLimit", Later: true, Label: "Calls in a window",
		Hint: "that may begin in any such window", Unit: "calls", Empty: "any number", ZeroIsEmpty: true,
		value: callsValue{func(l *Limit) *int { return &l.WindowLimit }}},
	{Key: "window", Column: "window", Default: "window", Later: true, Label: "Window", Hint: "its length", Unit: "s", Empty: "none", ZeroIsEmpty: true,
		value: durationValue{at: func(l *Limit) *time.Duration { return &l.Window }, unit: time.Second, least: time.Millisecond, step: time.Millisecond,
			most: maxWindow, example: "24h"}},
	{Key: "concurrent", Column: "concurrent", Default: "concurrent", Later: true, Label: "At once", Hint: "calls that may run at the same time",
		Unit: "calls", Empty: "any number", ZeroIsEmpty: true, value: callsValue{func(l *Limit) *int { return &l.Concurrent }}},
	{Key: "concurrent_wait", Column: "concurrent_wait", Default: "concurrentWait", Later: true, Label: "Longest wait for a place",
		Hint: "a call waits so long until fewer run", Unit: "ms", Scale: 1000, Empty: "none", ZeroIsEmpty: true,
		value: durationValue{at: func(l *Limit) *time.Duration { return &l.ConcurrentWait }, unit: time.Second, step: time.Microsecond, most: maxWait,
			example: "500ms"}},
	{Key: "penalty", Column: "penalty", Default: "penalty", Later: true, Label: "Held back by",
		Hint:  "replies of the upstream with Retry-After; by default 503, and 429 if each key has a bucket",
		Empty: "503, and 429 if each key has a bucket", Choices: penaltyChoices, value: penaltyValue{}},
	{Key: "per_key", Column: "per_key", Default: "perKey", Later: true, Label: "Per key", Hint: "a bucket of its own for each key",
		value: flagValue{at: func(l *Limit) *bool { return &l.PerKey }}},
	{Key: "priority", Column: "priority", Default: "priority", Later: true, Label: "Priority",
		Hint:  "calls of a higher one come first; a call may lower it, never raise it",
		Empty: "normal", Choices: priorityChoices, value: priorityValue{}},
}

// Fields returns all fields of a row, in the order of a form.
func Fields() []Field { return slices.Clone(fields[:]) }

func init() {
	for i := range fields {
		fields[i].index = i
	}
}

// Index returns the place of the field in [Fields].
func (f *Field) Index() int { return f.index }

// The places of the fields that Read treats apart.
var (
	nameAt, rateAt, disabledAt    = index("name"), index("rate"), index("disabled")
	quotaAt, jitterAt, coldnessAt = index("quota"), index("jitter"), index("cold_factor")
)

// fieldOf returns the field with a key, which must exist.
func fieldOf(key string) *Field { return &fields[index(key)] }

// index returns the place of the field with a key, which must exist.
func index(key string) int {
	for i := range fields {
		if fields[i].Key == key {
			return i
		}
	}
	panic("registry: no field " + key)
}

// Want returns which texts the field accepts, for messages.
func (f *Field) Want(n Notation) string {
	want := f.value.want(n)
	switch {
	case f.required || n == InFile:
	case n == InTable:
		want += ", or NULL"
	default:
		want += ", or empty"
	}
	return want
}

// Flag returns the meaning of a yes-or-no field in l. ok is false for other fields.
func (f *Field) Flag(l *Limit) (yes, ok bool) {
	v, ok := f.value.(flagValue)
	return ok && *v.at(l) != v.inverted, ok
}

// IsFlag reports whether the field is yes or no.
func (f *Field) IsFlag() bool {
	_, ok := f.value.(flagValue)
	return ok
}

// Read sets the fields of l for which text returns a value; nil means that there is none. l has the defaults of the others; its Jitter is that
// of quotas. Read returns the first field that is wrong and which values it accepts; nil if l is right. In a disabled row only the name can
// be wrong: if another field is, l keeps nothing but what identifies the row. Read keeps no part of a text.
func (l *Limit) Read(n Notation, text func(*Field) []byte) (wrong *Field, want string) {
	var given [len(fields)]bool
	identity := Limit{Row: l.Row, Version: l.Version}
	for i := range fields {
		f := &fields[i]
		value := text(f)
		if n == InTable && i == coldnessAt && l.Warmup == 0 {
			continue // a table's column has it for every row
		}
		given[i] = value != nil
		ok := !f.required || i == rateAt && n == InTable || i == disabledAt && n == InFile
		if value != nil {
			ok = f.value.read(l, value, n) && f.value.valid(l)
		}
		if !ok && wrong == nil {
			wrong, want = f, f.Want(n)
		}
		if wrong != nil && i == nameAt {
			return wrong, want
		}
	}
	if n == InTable && !given[rateAt] {
		if l.NoRate = l.bounded(); !l.NoRate && wrong == nil {
			wrong, want = &fields[rateAt], fields[rateAt].Want(n)
		}
	}
	if l.NoRate {
		l.Quota, l.WaitShare = l.Quota && given[quotaAt], 0
	}
	if !l.Quota && !given[jitterAt] {
		l.Jitter = 0
	}
	if wrong == nil {
		wrong, want = l.conflict()
	}
	if wrong != nil && wrong.index != nameAt && l.Disabled {
		identity.Name, identity.Disabled, identity.Shadow, identity.PerKey = l.Name, true, l.Shadow, l.PerKey
		*l, wrong, want = identity, nil, ""
	}
	return wrong, want
}

// rules are the values that must not stand in one row, in the order of their messages.
var rules = [...]struct {
	broken    func(l *Limit) bool
	key, want string
}{
	{func(l *Limit) bool { return l.PerKey && len(l.Name) > maxPerKeyName }, "name", "at most 256 bytes, for a limit per key"},
	{func(l *Limit) bool { return l.PerKey && l.bounded() }, "per_key", "no value beside a window or a concurrency: give single keys rows of their own"},
	{func(l *Limit) bool { return l.Quota && (l.Rate != math.Trunc(l.Rate) || l.Rate > maxCalls) }, "rate",
		"a whole number of calls in any second, 0 to 2147483647: the row is a quota"},
	{func(l *Limit) bool { return l.Quota && l.Warmup != 0 }, "warmup", "no value: the row is a quota"},
	{func(l *Limit) bool { return l.Quota && l.MaxPermits != nil && !l.NoRate }, "burst", "no value: the row is a quota"},
	{func(l *Limit) bool { return l.Warmup != 0 && l.MaxPermits != nil && !l.NoRate }, "burst",
		"no value: the row has a warm-up, which says what is saved up"},
	{func(l *Limit) bool { return l.Warmup == 0 && l.ColdFactor != 0 }, "cold_factor", "no value without a warm-up"},
	{func(l *Limit) bool { return !l.Quota && l.Jitter != 0 }, "jitter", "no value: the row is no quota"},
	{func(l *Limit) bool { return l.Window != 0 && l.WindowLimit == 0 }, "window_limit", "1 to 2147483647: the row has a window"},
	{func(l *Limit) bool { return l.Window == 0 && l.WindowLimit != 0 }, "window", "a length: the row has a limit for a window"},
	{func(l *Limit) bool { return l.Concurrent == 0 && l.ConcurrentWait != 0 }, "concurrent_wait", "no value: the row limits no calls in flight"},
	{func(l *Limit) bool { return l.NoRate && !l.bounded() }, "rate", "a rate, a window or a concurrency"},
	{func(l *Limit) bool { return l.NoRate && l.Rate != 0 }, "rate", "0: the row has no rate"},
	{func(l *Limit) bool { return l.NoRate && l.MaxPermits != nil }, "burst", "no value: the row has no rate"},
	{func(l *Limit) bool { return l.NoRate && l.Warmup != 0 }, "warmup", "no value: the row has no rate"},
	{func(l *Limit) bool { return l.NoRate && l.Quota }, "quota", "no value: the row has no rate"},
	{func(l *Limit) bool { return l.NoRate && l.Priority != tokenbucket.Normal }, "priority", "no value: the row has no rate"},
}

// conflict returns a field of l whose value does not fit the others, and what it should be; nil if all fit. In a disabled row only the
// name counts.
func (l *Limit) conflict() (f *Field, want string) {
	if strings.Contains(strings.TrimSuffix(l.Name, "*"), "*") {
		return fieldOf("name"), "a * at its end only, for all names that begin so"
	}
	if l.Disabled {
		return nil, ""
	}
	for i := range rules {
		if r := &rules[i]; r.broken(l) {
			return fieldOf(r.key), r.want
		}
	}
	return nil, ""
}

// check returns the error of the first wrong field of a limit; nil if all are right.
func (l *Limit) check() *RowError {
	reject := func(f *Field, want string) *RowError {
		return &RowError{Row: l.Row, Name: l.Name, Field: f.Key, Value: f.value.text(l), Want: want}
	}
	for i := range fields {
		if f := &fields[i]; !f.value.valid(l) && (f.Key == "name" || !l.Disabled) {
			return reject(f, f.Want(InFile))
		}
	}
	if f, want := l.conflict(); f != nil {
		return reject(f, want)
	}
	return nil
}

// same reports whether two rows have the same values, except in the fields with the given keys.
func (l *Limit) same(o *Limit, but ...string) bool {
	for i := range fields {
		f := &fields[i]
		if !slices.Contains(but, f.Key) && !f.value.same(l, o) {
			return false
		}
	}
	return true
}

// ParseNumber reads a decimal number. Infinities, NaN and the notations of Go are not ok.
func ParseNumber(text string) (f float64, ok bool) {
	for _, c := range []byte(text) {
		if (c < '0' || c > '9') && c != '.' && c != '-' && c != '+' && c != 'e' && c != 'E' {
			return 0, false
		}
	}
	f, err := strconv.ParseFloat(text, 64)
	return f, err == nil
}

// ParseFlag reads 1 or 0 as databases write them: also as BOOLEAN of PostgreSQL and BIT(1) of MySQL.
func ParseFlag(text string) (on, ok bool) {
	switch text {
	case "1", "true", "\x01":
		return true, true
	case "0", "false", "\x00":
		return false, true
	}
	return false, false
}

// most returns 2^53 for a message.
func most(n Notation) string {
	if n == InForm {
		return "9 × 10^15"
	}
	return "2^53"
}

// nameValue is Limit.Name.
type nameValue struct{}

func (nameValue) read(l *Limit, text []byte, _ Notation) bool { l.Name = string(text); return true }
func (nameValue) want(Notation) string                        { return "a name, 1 to 512 bytes of UTF-8" }
func (nameValue) same(a, b *Limit) bool                       { return a.Name == b.Name }
func (nameValue) valid(l *Limit) bool {
	return len(l.Name) >= 1 && len(l.Name) <= maxName && utf8.ValidString(l.Name)
}
func (nameValue) text(l *Limit) string {
	if len(l.Name) <= 80 {
		return strconv.Quote(l.Name)
	}
	return fmt.Sprintf("%.40q of %d bytes", l.Name, len(l.Name))
}

// flagValue is yes or no. A table's column may have the opposite of the Limit.
type flagValue struct {
	at       func(*Limit) *bool
	inverted bool
}

func (v flagValue) read(l *Limit, text []byte, n Notation) bool {
	on, ok := string(text) == "true", string(text) == "true" || string(text) == "false"
	if n == InTable {
		on, ok = ParseFlag(string(text))
		on = ok && on != v.inverted
	}
	*v.at(l) = on
	return ok
}
func (flagValue) valid(*Limit) bool       { return true }
func (v flagValue) text(l *Limit) string  { return strconv.FormatBool(*v.at(l)) }
func (v flagValue) same(a, b *Limit) bool { return *v.at(a) == *v.at(b) }
func (flagValue) want(n Notation) string {
	return [...]string{InTable: "0 or 1", InFile: "true or false", InForm: "yes or no"}[n]
}

// rateValue is Limit.Rate, and in a file Limit.NoRate.
type rateValue struct{}

func (rateValue) read(l *Limit, text []byte, n Notation) (ok bool) {
	if l.NoRate = n == InFile && string(text) == "none"; l.NoRate {
		return true
	}
	l.Rate, ok = ParseNumber(string(text))
	return ok
}
func (rateValue) valid(l *Limit) bool { return l.Rate == 0 || l.Rate >= 1e-9 && l.Rate <= maxExact }
func (rateValue) text(l *Limit) string {
	if l.NoRate && l.Rate == 0 {
		return "none"
	}
	return fmt.Sprint(l.Rate)
}
func (rateValue) same(a, b *Limit) bool { return a.Rate == b.Rate && a.NoRate == b.NoRate }
func (rateValue) want(n Notation) string {
	least := "1e-9"
	if n == InForm {
		least = "0.000000001"
	}
	return "a number of permits per second from " + least + " to " + most(n) + ", or 0: nothing passes"
}

// waitValue is Limit.WaitShare.
type waitValue struct{}

func (waitValue) read(l *Limit, text []byte, _ Notation) (ok bool) {
	l.WaitShare, ok = ParseNumber(string(text))
	return ok
}
func (waitValue) valid(l *Limit) bool   { return l.WaitShare >= 0 && l.WaitShare <= maxWait.Seconds() }
func (waitValue) text(l *Limit) string  { return fmt.Sprint(l.WaitShare) }
func (waitValue) same(a, b *Limit) bool { return a.WaitShare == b.WaitShare }
func (waitValue) want(n Notation) string {
	if n == InForm {
		return "0 to 9,007,199,254,740 ms"
	}
	return "seconds, 0 to 9007199254"
}

// sizeValue is Limit.MaxPermits.
type sizeValue struct{}

func (sizeValue) read(l *Limit, text []byte, _ Notation) bool {
	size, ok := ParseNumber(string(text))
	l.MaxPermits = &size
	return ok
}
func (sizeValue) valid(l *Limit) bool {
	return l.MaxPermits == nil || *l.MaxPermits >= 0 && *l.MaxPermits <= maxExact
}
func (sizeValue) text(l *Limit) string {
	if l.MaxPermits == nil {
		return "nil"
	}
	return fmt.Sprint(*l.MaxPermits)
}
func (sizeValue) same(a, b *Limit) bool {
	if a.MaxPermits == nil || b.MaxPermits == nil {
		return a.MaxPermits == b.MaxPermits
	}
	return *a.MaxPermits == *b.MaxPermits
}
func (sizeValue) want(n Notation) string { return "a number of permits from 0 to " + most(n) }

// factorValue is Limit.ColdFactor.
type factorValue struct{}

func (factorValue) read(l *Limit, text []byte, _ Notation) (ok bool) {
	l.ColdFactor, ok = ParseNumber(string(text))
	return ok && l.ColdFactor != 0
}
func (factorValue) valid(l *Limit) bool {
	return l.ColdFactor == 0 || l.ColdFactor > 1 && l.ColdFactor <= maxExact
}
func (factorValue) text(l *Limit) string   { return fmt.Sprint(l.ColdFactor) }
func (factorValue) same(a, b *Limit) bool  { return a.ColdFactor == b.ColdFactor }
func (factorValue) want(n Notation) string { return "a number above 1, at most " + most(n) }

// durationValue is a duration: in a table a number of units, rounded to steps.
type durationValue struct {
	at          func(*Limit) *time.Duration
	unit        time.Duration // of a table's number
	step        time.Duration // the duration is a multiple of it; 0 if any duration is valid
	least, most time.Duration // bounds of the duration; 0 is valid, too
	example     string
}

func (v durationValue) read(l *Limit, text []byte, n Notation) bool {
	d := v.at(l)
	if n == InTable {
		number, ok := ParseNumber(string(text))
		if !ok || !(number >= 0 && number <= float64(v.most/v.unit)) {
			return false
		}
		steps := number * float64(v.unit/v.step)
		*d = time.Duration(math.Round(steps)) * v.step
		return v.least == 0 || math.Abs(steps-math.Round(steps)) <= 1e-6
	}
	var err error
	*d, err = time.ParseDuration(string(text))
	return err == nil && *d >= v.least
}
func (v durationValue) valid(l *Limit) bool {
	d := *v.at(l)
	return d == 0 || d >= v.least && d <= v.most && d > 0 && (v.least == 0 || d%v.step == 0)
}
func (v durationValue) text(l *Limit) string  { return v.at(l).String() }
func (v durationValue) same(a, b *Limit) bool { return *v.at(a) == *v.at(b) }
func (v durationValue) want(n Notation) string {
	switch {
	case n == InFile && v.least > 0:
		return fmt.Sprintf("a duration in whole milliseconds such as %s, %v to %.0fh", v.example, v.least, v.most.Hours())
	case n == InFile && v.most >= time.Hour:
		return fmt.Sprintf("a duration such as %s, 0s to %.0fh", v.example, v.most.Hours())
	case n == InFile || v.unit == 0: // tables have no such column
		return fmt.Sprintf("a duration such as %s, 0s to %v", v.example, v.most)
	case v.unit == time.Millisecond:
		return "milliseconds, 0 to " + number(float64(v.most/v.unit))
	case v.least == 0 && n == InForm:
		return "0 to " + number(float64(v.most/time.Millisecond)) + " ms"
	case v.least == 0:
		return fmt.Sprintf("seconds, 0 to %d", v.most/v.unit)
	}
	return fmt.Sprintf("seconds to the millisecond, %v to %d (%s)", v.least.Seconds(), v.most/v.unit, length(v.most))
}

// callsValue is a number of calls; 0 is none.
type callsValue struct{ at func(*Limit) *int }

func (v callsValue) read(l *Limit, text []byte, n Notation) bool {
	calls, err := strconv.ParseInt(string(text), 10, 32)
	*v.at(l) = int(calls)
	return err == nil && (calls > 0 || n == InTable)
}
func (v callsValue) valid(l *Limit) bool   { n := *v.at(l); return n >= 0 && n <= maxCalls }
func (v callsValue) text(l *Limit) string  { return strconv.Itoa(*v.at(l)) }
func (v callsValue) same(a, b *Limit) bool { return *v.at(a) == *v.at(b) }
func (callsValue) want(Notation) string    { return "a whole number of calls, 1 to 2147483647" }

// penaltyValue is Limit.Penalty.
type penaltyValue struct{}

func (penaltyValue) read(l *Limit, text []byte, _ Notation) (ok bool) {
	l.Penalty, ok = ParsePenalty(string(text))
	return ok
}
func (penaltyValue) valid(l *Limit) bool   { return int(l.Penalty) < len(penalties) }
func (penaltyValue) text(l *Limit) string  { return l.Penalty.String() }
func (penaltyValue) same(a, b *Limit) bool { return a.Penalty == b.Penalty }
func (penaltyValue) want(Notation) string  { return "none, 503, 429 or 429,503" }

// penaltyChoices are the values of the column penalty.
var penaltyChoices = []Choice{{"none", "no reply"}, {"503", "503 Service Unavailable"}, {"429", "429 Too Many Requests"}, {"429,503", "429 and 503"}}
