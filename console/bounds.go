package console

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
)

// bounds are what refuses a call, in words, by gate.Decider. A word of a newer gateway is shown as it is.
var bounds = map[string]string{"limit": "rate", "zero": "rate of 0", "bad_row": "rejected row", "penalty": "hold-back", "unknown": "no row"}

// bound returns a decider in words.
func bound(by string) string { return cmp.Or(bounds[by], figure.Name(by)) }

// refusers returns which bounds of a limit refuse calls now, in words and by name, so that the text stays the same while they do.
func (v *view) refusers(name string) string {
	var all []string
	for by := range v.refusedBy[name] {
		all = append(all, bound(by))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// refusedRates returns which bounds of a limit refuse calls now, the most frequent first, with how many if there are several:
// window 20, rate 9.3.
func (v *view) refusedRates(name string) string {
	rates := v.refusedBy[name]
	var all []string
	for _, by := range slices.SortedFunc(maps.Keys(rates), func(a, b string) int {
		return cmp.Or(cmp.Compare(rates[b], rates[a]), cmp.Compare(a, b))
	}) {
		text := bound(by)
		if len(rates) > 1 {
			text += " " + figure.Number(rates[by])
		}
		all = append(all, text)
	}
	return strings.Join(all, ", ")
}

// inUseOf returns what refuses the calls of a limit, and what of it is in use: refused by: window · 312 of 10,000 in 1 d. A narrow list has
// room for the beginning only.
func (v *view) inUseOf(name string) string {
	by, text := v.refusers(name), v.uses[name]
	if by != "" {
		text = strings.TrimSuffix("refused by: "+by+" · "+text, " · ")
	}
	return text
}
