package console

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// field is a column of the table of limits as people know it.
type field struct {
	column, label, hint string
	unit                string  // of a number, as it is shown and entered
	scale               float64 // a number that is shown, by what the column has; 0: the same
	empty               string  // what NULL means
	flag                bool    // yes or no
	none                bool    // 0 means the same as NULL
	choices             []choice
	want                string // what is accepted, in the unit of the form; empty: as the row's error has it
}

// choice is one of the values that a column may have, in words.
type choice struct{ Value, Text string }

// penalties are the values of the column penalty (registry.ParsePenalty).
var penalties = []choice{{"none", "no reply"}, {"503", "503 Service Unavailable"}, {"429", "429 Too Many Requests"}, {"429,503", "429 and 503"}}

// fields are the columns that people know, in the order of a form.
func fields(c sqlsource.Columns) []field {
	all := []field{
		{column: c.Status, label: "In force", hint: "if not, every call passes", flag: true},
		{column: c.Shadow, label: "Shadow", hint: "count calls, refuse none", flag: true},
		{column: c.Rate, label: "Rate", hint: "0 lets nothing pass", unit: "/s", empty: "none"},
		{column: c.Cache, label: "Longest wait", hint: "a call that would wait longer is refused", unit: "ms", scale: 1000, empty: "500 ms", want: "0 to 9,990 ms, or empty"},
		{column: c.Burst, label: "Saves up", hint: "unused permits that may be taken later", unit: "permits", empty: "one second's worth"},
		{column: c.Quota, label: "Quota", hint: "count calls in any sliding second, save nothing up", flag: true},
		{column: c.WarmupMillis, label: "Warm-up", hint: "time until a cold upstream gets the whole rate", unit: "ms", empty: "none", none: true},
		{column: c.ColdFactor, label: "Cold factor", hint: "how many times slower a cold upstream is", empty: "3"},
		{column: c.WindowLimit, label: "Calls in a window", hint: "that may begin in any such window", unit: "calls", empty: "any number", none: true},
		{column: c.Window, label: "Window", hint: "its length", unit: "s", empty: "none", none: true},
		{column: c.Concurrent, label: "At once", hint: "calls that may run at the same time", unit: "calls", empty: "any number", none: true},
		{column: c.Penalty, label: "Held back by", hint: "replies of the upstream with Retry-After; by default 503, and 429 if each key has a bucket", empty: "503, and 429 if each key has a bucket", choices: penalties},
		{column: c.PerKey, label: "Per key", hint: "a bucket of its own for each key", flag: true},
	}
	return slices.DeleteFunc(all, func(f field) bool { return f.column == "" })
}

// fieldOf returns the field of a column; of one that is not known, its name is the label.
func (c *Console) fieldOf(column string) field {
	if c.config.Editor == nil {
		return field{column: column, label: column}
	}
	all := fields(c.config.Editor.Columns())
	if i := slices.IndexFunc(all, func(f field) bool { return f.column == column }); i >= 0 {
		return all[i]
	}
	return field{column: column, label: column}
}

// entered returns a value as it stands in the form.
func (f *field) entered(v *string) string {
	switch {
	case v == nil:
		return ""
	case f.scale == 0:
		return figure.Decimal(*v)
	}
	n, err := strconv.ParseFloat(*v, 64)
	if err != nil {
		return *v
	}
	return figure.Decimal(strconv.FormatFloat(n*f.scale, 'f', 9, 64))
}

// told returns a value in words: 8/s, 500 ms, yes.
func (f *field) told(v *string) string {
	text := f.entered(v)
	yes, known := truth(v)
	n, err := strconv.ParseFloat(text, 64)
	switch {
	case v == nil, f.none && err == nil && n == 0:
		return cmp.Or(f.empty, "not set")
	case f.chosen(text) != "":
		return f.chosen(text)
	case f.flag && known && yes:
		return "yes"
	case f.flag && known:
		return "no"
	case f.unit == "/s" && err == nil:
		return text + f.unit
	case f.unit != "" && err == nil:
		return text + " " + f.unit
	}
	return figure.Name(text)
}

// chosen returns a value's choice in words; empty if it is none.
func (f *field) chosen(value string) string {
	for _, c := range f.choices {
		if c.Value == value {
			return c.Text
		}
	}
	return ""
}

// options returns the choices of a select: the default first, and a value that is none of them as it is, so that it can be seen.
func (f *field) options(v *string) []option {
	if f.choices == nil {
		return nil
	}
	all := []option{{choice{"", "by default"}, v == nil}}
	for _, c := range f.choices {
		all = append(all, option{c, v != nil && *v == c.Value})
	}
	if v != nil && f.chosen(*v) == "" {
		all = append(all, option{choice{*v, figure.Name(*v)}, true})
	}
	return all
}

// truth returns what a flag is; known is false if it is neither yes nor no.
func truth(v *string) (yes, known bool) {
	if v == nil {
		return false, true
	}
	switch strings.ToLower(*v) {
	case "1", "true", "t":
		return true, true
	case "0", "false", "f":
		return false, true
	}
	return false, false
}

// differences are what the fields of two rows differ in, in the order of the form: "Rate 5/s → 8/s". Columns that the database fills in
// by itself are not among them.
func (c *Console) differences(from, to editor.Values) (all []string) {
	columns := c.config.Editor.Columns()
	entry := editor.AuditEntry{From: from, To: to}
	changed := slices.DeleteFunc(entry.Changed(), func(column string) bool {
		return column == columns.Modified || column == columns.ID || column == columns.Name
	})
	for _, f := range fields(columns) {
		if i := slices.Index(changed, f.column); i >= 0 {
			changed = slices.Delete(changed, i, i+1)
			all = append(all, f.label+" "+f.told(from[f.column])+" → "+f.told(to[f.column]))
		}
	}
	for _, column := range changed {
		f := field{label: column}
		all = append(all, f.label+" "+f.told(from[column])+" → "+f.told(to[column]))
	}
	return all
}
