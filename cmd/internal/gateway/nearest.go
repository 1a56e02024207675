package gateway

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// nearest returns the name that was probably meant, with something before it; "" if none is near.
func nearest(before, name string, names []string) string {
	best, least := "", 3
	for _, n := range slices.Sorted(slices.Values(names)) {
		if d := distance(name, n); d < least && d < len(n) {
			best, least = n, d
		}
	}
	if best == "" {
		return ""
	}
	return before + best + "?"
}

// distance is how many letters must be inserted, removed, replaced or swapped with their neighbour to make one word of another.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replaced := rows[i-1][j-1]
			if a[i-1] != b[j-1] {
				replaced++
			}
			rows[i][j] = min(replaced, rows[i-1][j]+1, rows[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}

func flagNames(flags *pflag.FlagSet) (names []string) {
	flags.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return names
}

// wanted is what a flag's type wants.
func wanted(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "duration":
		return "a duration such as 2s"
	case "bool":
		return "true or false"
	}
	return f.Value.Type()
}

// flagError says of an error of the command line what was meant, and hides passwords.
func flagError(flags *pflag.FlagSet, err error) error {
	var value *pflag.InvalidValueError
	var missing *pflag.NotExistError
	message := err.Error()
	switch {
	case errors.As(err, &value):
		message = fmt.Sprintf("--%s %q: want %s", value.GetFlag().Name, value.GetValue(), wanted(value.GetFlag()))
	case errors.As(err, &missing):
		message += nearest(": did you mean --", missing.GetSpecifiedName(), flagNames(flags))
	}
	return errors.New(hideUserinfo(message))
}

// clusters is what Kubernetes sets for a service named tokenbucket.
var clusters = regexp.MustCompile(`^TOKENBUCKET_(SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)$`)

// tellStrangers logs variables that are no setting, since one may be misspelt.
func (c *config) tellStrangers(log *slog.Logger) {
	for _, name := range c.strangers {
		log.Warn("a variable is no setting, and was ignored"+nearest(": did you mean ", name, c.variables), "variable", name)
	}
}

// notKnown finds the variables that are no setting.
func (o *options) notKnown(known map[string]string, environ []string) {
	o.variables = slices.Collect(maps.Keys(known))
	for _, variable := range environ {
		name, value, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, envPrefix) && value != "" && known[name] == "" && !clusters.MatchString(name) {
			o.strangers = append(o.strangers, name)
		}
	}
}
