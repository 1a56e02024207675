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
	// InTable is a cell of a database: 1 and 0 for yes and no. Durations are numbers of seconds, or texts such as 500ms.
	InTable Notation = iota
	// InFile is a file, and Go: true and false. Durations are as in tables.
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

// Field is one setting of a row: its name and its texts for people, and how its values are read, checked and compared. [Fields] returns all of
// them.
type Field struct {
	// Key is the one name of the setting, in lower case with _ between words: the column of a created table, the key in a file, in a form, in
	// JSON and in the errors of [Limit.Check]. The field of Limit has it in camel case (max_wait is MaxWait), a flag with hyphens.
	Key string
	// Older are earlier names. They are still read, in tables and files, and never written.
	Older []string
	// Column decides which tables have a column of the setting.
	Column Presence

	// Label, Hint and Unit of the field in a form. The label is the Key, written for people.
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
	variants map[string]*Field // the field under those older names that give its values another meaning
}

// Presence is which tables have a column.
type Presence uint8

const (
	// Required: every table has the column.
	Required Presence = iota
	// Optional: a table of an earlier release may lack it.
	Optional
	// Named: it is read, and created, only if an option names it.
	Named
)

// String returns required, optional or named.
func (p Presence) String() string {
	if names := [...]string{"required", "optional", "named"}; int(p) < len(names) {
		return names[p]
	}
	return fmt.Sprintf("Presence(%d)", uint8(p))
}

// Names returns the names under which the field is read: its Key, and then the older ones.
func (f *Field) Names() []string { return append([]string{f.Key}, f.Older...) }

// name returns one of Names without making the list.
func (f *Field) name(i int) string {
	if i == 0 {
		return f.Key
	}
	return f.Older[i-1]
}

// As returns the field as one of its names has it. Its Key is that name. Under most names values mean the same; status is the opposite of
// disabled, and warmup_ms counts milliseconds.
func (f *Field) As(name string) Field {
	as := *f
	if v := f.variants[name]; v != nil {
		as.Label, as.Hint, as.Unit, as.Scale, as.value = v.Label, v.Hint, v.Unit, v.Scale, v.value
	}
	as.Key, as.Older, as.variants = name, nil, nil
	return as
}

// SameValues reports whether the values of two fields mean the same (As).
func (f *Field) SameValues(o Field) bool {
	return f.index == o.index && f.value.want(InTable) == o.value.want(InTable) && f.isInverted() == o.isInverted()
}

// isInverted reports whether the field is yes or no, and a yes means the opposite.
func (f *Field) isInverted() bool {
	v, ok := f.value.(flagValue)
	return ok && v.inverted
}

// valueOf returns what reads the values under one of Names.
func (f *Field) valueOf(i int) value {
	if i > 0 && f.variants != nil {
		if v := f.variants[f.Older[i-1]]; v != nil {
			return v.value
		}
	}
	return f.value
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

// DefaultMaxWait is the MaxWait of a row that has none.
const DefaultMaxWait = 500 * time.Millisecond

// fields has all fields of a row, in the order in which they are read and in which forms show them.
var fields = [...]Field{
	{Key: "name", Older: []string{"interfaceUrl"}, required: true, value: nameValue{}},
	{Key: "disabled", Older: []string{"status"}, Hint: "every call passes", required: true,
		value: flagValue{at: func(l *Limit) *bool { return &l.Disabled }},
		variants: map[string]*Field{"status": {Label: "Status", Hint: "in force; if not, every call passes",
			value: flagValue{at: func(l *Limit) *bool { return &l.Disabled }, inverted: true}}}},
	{Key: "shadow", Column: Optional, Hint: "count calls, refuse none",
		value: flagValue{at: func(l *Limit) *bool { return &l.Shadow }}},
	{Key: "rate", Older: []string{"rateLimit"}, Hint: "0 lets nothing pass", Unit: "/s", Empty: "none", required: true, value: rateValue{}},
	{Key: "max_wait", Older: []string{"cache"}, Hint: "how long a call waits for its permits; one that would wait longer is refused", Unit: "ms",
		Scale: 1000, Empty: "500 ms",
		value: durationValue{at: func(l *Limit) *time.Duration { return &l.MaxWait }, unit: time.Second, step: time.Microsecond, most: maxWait,
			example: "500ms"}},
	{Key: "burst", Column: Named, Hint: "unused permits that are saved up, and may be taken later", Unit: "permits",
		Empty: "one second's worth", value: sizeValue{}},
	{Key: "quota", Column: Named, Hint: "count calls in any sliding second, save nothing up",
		value: flagValue{at: func(l *Limit) *bool { return &l.Quota }}},
	{Key: "jitter", Column: Named, Hint: "how unevenly calls reach the upstream", Unit: "ms", Scale: 1000, Empty: "none",
		value: durationValue{at: func(l *Limit) *time.Duration { return &l.Jitter }, unit: time.Second, step: time.Microsecond, most: time.Second,
			example: "50ms"}},
	{Key: "warmup", Older: []string{"warmup_ms"}, Column: Named, Hint: "time until a cold upstream gets the whole rate", Unit: "ms", Scale: 1000,
		Empty: "none", ZeroIsEmpty: true, value: warmupIn(time.Second),
		variants: map[string]*Field{"warmup_ms": {Label: "Warmup", Hint: "time until a cold upstream gets the whole rate", Unit: "ms",
			value: warmupIn(time.Millisecond)}}},
	{Key: "cold_factor", Column: Named, Hint: "how many times slower a cold upstream is", Empty: "3", value: factorValue{}},
	{Key: "window_limit", Older: []string{"windowLimit"}, Column: Optional, Hint: "calls that may begin in any window", Unit: "calls",
		Empty: "any number", ZeroIsEmpty: true, value: callsValue{func(l *Limit) *int { return &l.WindowLimit }}},
	{Key: "window", Column: Optional, Hint: "its length", Unit: "s", Empty: "none", ZeroIsEmpty: true,
		value: durationValue{at: func(l *Limit) *time.Duration { return &l.Window }, unit: time.Second, least: time.Millisecond, step: time.Millisecond,
			most: maxWindow, example: "24h"}},
	{Key: "concurrent", Column: Optional, Hint: "calls that may run at the same time", Unit: "calls", Empty: "any number", ZeroIsEmpty: true,
		value: callsValue{func(l *Limit) *int { return &l.Concurrent }}},
	{Key: "concurrent_wait", Older: []string{"concurrentWait"}, Column: Optional, Hint: "how long a call waits for a place until fewer run",
		Unit: "ms", Scale: 1000, Empty: "none", ZeroIsEmpty: true,
		value: durationValue{at: func(l *Limit) *time.Duration { return &l.ConcurrentWait }, unit: time.Second, step: time.Microsecond, most: maxWait,
			example: "500ms"}},
	{Key: "penalty", Column: Optional,
		Hint:  "replies of the upstream with Retry-After that hold the limit back; by default 503, and 429 if each key has a bucket",
		Empty: "503, and 429 if each key has a bucket", Choices: penaltyChoices, value: penaltyValue{}},
	{Key: "per_key", Older: []string{"perKey"}, Column: Optional, Hint: "a bucket of its own for each key",
		value: flagValue{at: func(l *Limit) *bool { return &l.PerKey }}},
	{Key: "priority", Column: Optional, Hint: "calls of a higher one come first; a call may lower it, never raise it",
		Empty: "normal", Choices: priorityChoices, value: priorityValue{}},
}

// warmupIn returns Limit.Warmup, in numbers of a unit.
func warmupIn(unit time.Duration) durationValue {
	return durationValue{at: func(l *Limit) *time.Duration { return &l.Warmup }, unit: unit, step: time.Microsecond, most: maxWarmup, example: "4s"}
}

// Fields returns all fields of a row, in the order of a form.
func Fields() []Field { return slices.Clone(fields[:]) }

func init() {
	for i := range fields {
		f := &fields[i]
		f.index, f.Label = i, strings.ToUpper(f.Key[:1])+strings.ReplaceAll(f.Key[1:], "_", " ")
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

// Wrong is a value that a row must not have.
type Wrong struct {
	Field *Field
	// Name has the value: an index in [Field.Names].
	Name int
	// Other has another value of the same field, if that is what is wrong: an index in [Field.Names]. Otherwise it is Name.
	Other int
	// Want has the values that are accepted; it is empty if Other has another value.
	Want string
}

// Twice returns what to say about a field that has two values: the other name, and the value there.
func Twice(name, value string) string {
	return fmt.Sprintf("the same value as %s %s, or one of the two alone: both name one setting", name, value)
}

// Read sets the fields of l for which text returns a value, by field and index of the name (Field.Names); nil means that there is none. l has
// the defaults of the others; its Jitter is that of quotas. Read returns what is wrong first; nil if l is right. In a row that is disabled only
// the name can be wrong: if something else is, l keeps nothing but what identifies the row. Read keeps no part of a text.
func (l *Limit) Read(n Notation, text func(f *Field, name int) []byte) (wrong *Wrong) {
	var given [len(fields)]bool
	identity := Limit{Row: l.Row, Version: l.Version}
	for i := range fields {
		f := &fields[i]
		if n == InTable && i == coldnessAt && l.Warmup == 0 {
			continue // a table's column has it for every row
		}
		var bad *Wrong
		if given[i], bad = l.readField(f, n, text); bad != nil && wrong == nil {
			wrong = bad
		}
		if wrong != nil && i == nameAt {
			return wrong
		}
	}
	if !given[rateAt] {
		if l.NoRate = l.bounded(); !l.NoRate && wrong == nil {
			wrong = &Wrong{Field: &fields[rateAt], Want: fields[rateAt].Want(n)}
		}
	}
	if l.NoRate {
		l.Quota, l.MaxWait = l.Quota && given[quotaAt], 0
	}
	if !l.Quota && !given[jitterAt] {
		l.Jitter = 0
	}
	if wrong == nil {
		if f, want := l.conflict(); f != nil {
			name := max(0, slices.IndexFunc(f.Names(), func(name string) bool { return text(f, slices.Index(f.Names(), name)) != nil }))
			wrong = &Wrong{Field: f, Name: name, Other: name, Want: want}
		}
	}
	if wrong != nil && wrong.Field.index != nameAt && wrong.Field.index != disabledAt && l.Disabled {
		identity.Name, identity.Disabled, identity.Shadow, identity.PerKey = l.Name, true, l.Shadow, l.PerKey
		*l, wrong = identity, nil
	}
	return wrong
}

// readField sets a field of l from the texts under its names, and reports whether there is one.
func (l *Limit) readField(f *Field, n Notation, text func(f *Field, name int) []byte) (given bool, wrong *Wrong) {
	first := 0
	for i := range 1 + len(f.Older) {
		t := text(f, i)
		if t == nil {
			continue
		}
		into, v := l, f.valueOf(i)
		if given {
			other := *l
			into = &other
		}
		switch ok := v.read(into, t, n) && v.valid(into); {
		case !ok && wrong == nil:
			as := f.As(f.name(i))
			wrong = &Wrong{Field: f, Name: i, Other: i, Want: as.Want(n)}
		case given && wrong == nil && !v.same(into, l):
			wrong = &Wrong{Field: f, Name: first, Other: i}
		}
		if !given {
			given, first = true, i
		}
	}
	if !given && f.required && f.index != rateAt && !(f.index == disabledAt && n == InFile) {
		wrong = &Wrong{Field: f, Want: f.Want(n)}
	}
	return given, wrong
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
	{func(l *Limit) bool { return l.Quota && l.Burst != nil && !l.NoRate }, "burst", "no value: the row is a quota"},
	{func(l *Limit) bool { return l.Warmup != 0 && l.Burst != nil && !l.NoRate }, "burst",
		"no value: the row has a warm-up, which says what is saved up"},
	{func(l *Limit) bool { return l.Warmup == 0 && l.ColdFactor != 0 }, "cold_factor", "no value without a warm-up"},
	{func(l *Limit) bool { return !l.Quota && l.Jitter != 0 }, "jitter", "no value: the row is no quota"},
	{func(l *Limit) bool { return l.Window != 0 && l.WindowLimit == 0 }, "window_limit", "1 to 2147483647: the row has a window"},
	{func(l *Limit) bool { return l.Window == 0 && l.WindowLimit != 0 }, "window", "a length: the row has a limit for a window"},
	{func(l *Limit) bool { return l.Concurrent == 0 && l.ConcurrentWait != 0 }, "concurrent_wait", "no value: the row limits no calls in flight"},
	{func(l *Limit) bool { return l.NoRate && !l.bounded() }, "rate", "a rate, a window or a concurrency"},
	{func(l *Limit) bool { return l.NoRate && l.Rate != 0 }, "rate", "0: the row has no rate"},
	{func(l *Limit) bool { return l.NoRate && l.Burst != nil }, "burst", "no value: the row has no rate"},
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

// clone returns a copy that shares no memory with l that its owner may write.
func (l *Limit) clone() Limit {
	c := *l
	if l.Burst != nil {
		size := *l.Burst
		c.Burst = &size
	}
	return c
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

// ParseDuration reads a duration as tables and files have it: a number of seconds such as 0.5, or a text such as 500ms. It does not check
// bounds other than those of a time.Duration.
func ParseDuration(text string) (d time.Duration, ok bool) {
	if seconds, isNumber := ParseNumber(text); isNumber {
		d := math.Round(seconds * float64(time.Second))
		return time.Duration(d), math.Abs(d) < math.MaxInt64
	}
	d, err := time.ParseDuration(text)
	return d, err == nil
}

// ParseFlag reads 1 or 0 as databases write them: also as BOOLEAN of PostgreSQL, BIT(1) of MySQL, and 1.00 of a column DECIMAL or REAL.
func ParseFlag(text string) (on, ok bool) {
	switch text {
	case "1", "true", "\x01":
		return true, true
	case "0", "false", "\x00":
		return false, true
	}
	f, ok := ParseNumber(text)
	return f == 1, ok && (f == 0 || f == 1)
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

// flagValue is yes or no. A name may have the opposite of the Limit.
type flagValue struct {
	at       func(*Limit) *bool
	inverted bool
}

func (v flagValue) read(l *Limit, text []byte, n Notation) bool {
	on, ok := string(text) == "true", string(text) == "true" || string(text) == "false"
	if n == InTable {
		on, ok = ParseFlag(string(text))
	}
	*v.at(l) = ok && on != v.inverted
	return ok
}
func (flagValue) valid(*Limit) bool       { return true }
func (v flagValue) text(l *Limit) string  { return strconv.FormatBool(*v.at(l)) }
func (v flagValue) same(a, b *Limit) bool { return *v.at(a) == *v.at(b) }
func (flagValue) want(n Notation) string {
	return [...]string{InTable: "0 or 1", InFile: "true or false", InForm: "yes or no"}[n]
}

// rateValue is Limit.Rate, and in a file Limit.NoRate: "none" is the same as no rate at all.
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

// sizeValue is Limit.Burst.
type sizeValue struct{}

func (sizeValue) read(l *Limit, text []byte, _ Notation) bool {
	size, ok := ParseNumber(string(text))
	l.Burst = &size
	return ok
}
func (sizeValue) valid(l *Limit) bool {
	return l.Burst == nil || *l.Burst >= 0 && *l.Burst <= maxExact
}
func (sizeValue) text(l *Limit) string {
	if l.Burst == nil {
		return "nil"
	}
	return fmt.Sprint(*l.Burst)
}
func (sizeValue) same(a, b *Limit) bool {
	if a.Burst == nil || b.Burst == nil {
		return a.Burst == b.Burst
	}
	return *a.Burst == *b.Burst
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

// durationValue is a duration, as text such as 500ms or as a number of units, which is rounded to steps.
type durationValue struct {
	at          func(*Limit) *time.Duration
	unit        time.Duration // of a number
	step        time.Duration // if least is not 0, the duration is a multiple of it
	least, most time.Duration // bounds of the duration; 0 is valid, too
	example     string
}

func (v durationValue) read(l *Limit, text []byte, n Notation) bool {
	d := v.at(l)
	number, isNumber := ParseNumber(string(text))
	if !isNumber {
		var err error
		*d, err = time.ParseDuration(string(text))
		return err == nil && (*d >= v.least || n == InTable && *d == 0)
	}
	if !(number >= 0 && number <= float64(v.most)/float64(v.unit)) {
		return false
	}
	steps := number * float64(v.unit/v.step)
	*d = time.Duration(math.Round(steps)) * v.step
	return (v.least == 0 || math.Abs(steps-math.Round(steps)) <= 1e-6) && (n == InTable || *d >= v.least)
}
func (v durationValue) valid(l *Limit) bool {
	d := *v.at(l)
	return d == 0 || d >= v.least && d <= v.most && d > 0 && (v.least == 0 || d%v.step == 0)
}
func (v durationValue) text(l *Limit) string  { return v.at(l).String() }
func (v durationValue) same(a, b *Limit) bool { return *v.at(a) == *v.at(b) }
func (v durationValue) want(n Notation) string {
	in, unit := "seconds", time.Second
	if v.unit == time.Millisecond {
		in, unit = "milliseconds", time.Millisecond
	}
	switch most := v.most / unit; {
	case v.least > 0 && n == InForm:
		return fmt.Sprintf("seconds to the millisecond, %v to %d (%s)", v.least.Seconds(), most, length(v.most))
	case v.least > 0:
		return fmt.Sprintf("seconds to the millisecond, %v to %d (%s), or a duration such as %s", v.least.Seconds(), most, length(v.most), v.example)
	case n == InForm:
		return "0 to " + number(float64(v.most/time.Millisecond)) + " ms"
	default:
		return fmt.Sprintf("%s, 0 to %d, or a duration such as %s", in, most, v.example)
	}
}

// callsValue is a number of calls; 0 is none.
type callsValue struct{ at func(*Limit) *int }

func (v callsValue) read(l *Limit, text []byte, n Notation) bool {
	calls, err := strconv.ParseInt(string(text), 10, 32)
	if err == nil || n != InTable {
		*v.at(l) = int(calls)
		return err == nil && (calls > 0 || n == InTable)
	}
	f, ok := ParseNumber(string(text)) // 5.00 of a column DECIMAL or REAL
	if ok = ok && f >= 0 && f <= maxCalls && f == math.Trunc(f); ok {
		*v.at(l) = int(f)
	}
	return ok
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
