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

// nearest returns before + the name closest to the misspelt one + "?", or "" if none is close.
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

// distance returns the Damerau–Levenshtein distance: the fewest insertions, deletions, replacements and swaps of neighbouring letters that turn
// one word into the other.
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

// wanted describes the values that a flag's type accepts.
func wanted(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "duration":
		return "a duration such as 2s"
	case "bool":
		return "true or false"
	}
	return f.Value.Type()
}

// flagError rewrites an error of the command line to say what is accepted or probably meant, and hides passwords.
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

// kubernetesVariables matches the variables that Kubernetes sets for a service named tokenbucket.
var kubernetesVariables = regexp.MustCompile(`^TOKENBUCKET_(SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)$`)

// logUnknownVariables warns of variables that look like settings but are none: they may be misspelt.
func (c *config) logUnknownVariables(log *slog.Logger) {
	for _, name := range c.unknownVariables {
		log.Warn("an environment variable is not a setting and is ignored"+nearest(": did you mean ", name, c.variables), "variable", name)
	}
}

// findUnknownVariables collects the variables with the settings' prefix that are not settings. known maps variables to flags.
func (o *options) findUnknownVariables(known map[string]string, environ []string) {
	o.variables = slices.Collect(maps.Keys(known))
	for _, variable := range environ {
		name, value, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, envPrefix) && value != "" && known[name] == "" && !kubernetesVariables.MatchString(name) {
			o.unknownVariables = append(o.unknownVariables, name)
		}
	}
}
