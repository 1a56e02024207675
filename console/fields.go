package console

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// field is a column of the table of limits. For a column that the registry does not know, only column and Label are set.
type field struct {
	registry.Field
	column  string
	setting string // the name of the field
	flag    bool   // yes or no
}

// fields returns the columns of a form in its order: all but the name, which a change does not touch.
func fields(c sqlsource.Columns) (all []field) {
	for _, f := range c.Fields() {
		if f.Setting != "name" {
			all = append(all, field{f.Field, f.Name, f.Setting, f.IsFlag()})
		}
	}
	return all
}

// fieldOf returns the field of a column, or of another name of the same field. The label of an unknown column is its name.
func (c *Console) fieldOf(column string) field {
	if c.config.Editor != nil {
		columns := c.config.Editor.Columns()
		if f, ok := columns.Field(column); ok {
			return field{f.Field, column, f.Setting, f.IsFlag()}
		}
	}
	for _, f := range registry.Fields() {
		if f.Key == column {
			return field{f, column, column, f.IsFlag()}
		}
	}
	return field{column: column, Field: registry.Field{Label: column}}
}

// formWant converts the "want" of a field's error into the words of a form. Other texts are returned as they are.
func formWant(want string) string {
	for _, f := range registry.Fields() {
		for _, name := range f.Names() {
			if as := f.As(name); want == as.Want(registry.InTable) || want == as.Want(registry.InFile) {
				return as.Want(registry.InForm)
			}
		}
	}
	return want
}

// entered returns a value as the form shows it.
func (f *field) entered(v *string) string {
	if v == nil {
		return ""
	}
	if d, err := time.ParseDuration(*v); err == nil && *v != "0" {
		switch f.Unit {
		case "ms":
			return figure.Decimal(strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', 9, 64))
		case "s":
			return figure.Decimal(strconv.FormatFloat(d.Seconds(), 'f', 9, 64))
		}
	}
	n, err := strconv.ParseFloat(*v, 64)
	switch {
	case f.Scale == 0:
		return figure.Decimal(*v)
	case err != nil:
		return *v
	}
	return figure.Decimal(strconv.FormatFloat(n*f.Scale, 'f', 9, 64))
}

// inWords returns a value in words: 8/s, 500 ms, yes.
func (f *field) inWords(v *string) string {
	text := f.entered(v)
	yes, known := truth(v)
	n, err := strconv.ParseFloat(text, 64)
	switch {
	case v == nil, f.ZeroIsEmpty && err == nil && n == 0:
		return cmp.Or(f.Empty, "not set")
	case f.chosen(text) != "":
		return f.chosen(text)
	case f.flag && known && yes:
		return "yes"
	case f.flag && known:
		return "no"
	case f.Unit == "/s" && err == nil:
		return text + f.Unit
	case f.Unit != "" && err == nil:
		return text + " " + f.Unit
	}
	return figure.Name(text)
}

// chosen returns the text of a value's choice; empty if the value is not a choice.
func (f *field) chosen(value string) string {
	for _, c := range f.Choices {
		if c.Value == value {
			return c.Text
		}
	}
	return ""
}

// options returns the choices of a select: the default first, and at the end a value that is none of the others, so that it
// is visible.
func (f *field) options(v *string) []option {
	if f.Choices == nil {
		return nil
	}
	all := []option{{registry.Choice{Text: "by default"}, v == nil}}
	for _, c := range f.Choices {
		all = append(all, option{c, v != nil && *v == c.Value})
	}
	if v != nil && f.chosen(*v) == "" {
		all = append(all, option{registry.Choice{Value: *v, Text: figure.Name(*v)}, true})
	}
	return all
}

// truth returns the value of a flag. known is false if the text is neither yes nor no.
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

// differences describes the fields in which two rows differ, in the order of the form: "Rate 5/s → 8/s". It omits columns
// that the database fills in by itself.
func (c *Console) differences(from, to editor.Values) (all []string) {
	columns := c.config.Editor.Columns()
	entry := editor.AuditEntry{From: from, To: to}
	changed := slices.DeleteFunc(entry.Changed(), func(column string) bool {
		return column == columns.Modified || column == columns.ID || c.fieldOf(column).setting == "name"
	})
	for _, f := range fields(columns) {
		if i := slices.Index(changed, f.column); i >= 0 {
			changed = slices.Delete(changed, i, i+1)
			all = append(all, f.Label+" "+f.inWords(from[f.column])+" → "+f.inWords(to[f.column]))
		}
	}
	for _, column := range changed {
		f := c.fieldOf(column) // of a column that the table has no longer, or that is no field
		all = append(all, f.Label+" "+f.inWords(from[column])+" → "+f.inWords(to[column]))
	}
	return all
}
