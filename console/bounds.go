package console

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
)

// bounds has the words for deciders (gate.Decider). A decider of a newer gateway is shown by its name.
var bounds = map[string]string{"limit": "rate", "zero": "rate of 0", "bad_row": "rejected row", "penalty": "hold-back", "unknown": "no row"}

// bound returns a decider in words.
func bound(by string) string { return cmp.Or(bounds[by], figure.Name(by)) }

// refusers returns the bounds of a limit that refuse calls now, in words. They are sorted by name, so that the text does not
// change with the rates.
func (v *view) refusers(name string) string {
	var all []string
	for by := range v.refusedBy[name] {
		all = append(all, bound(by))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// refusedRates returns the bounds of a limit that refuse calls now, the most frequent first. If there are several, it adds
// their rates: "window 20, rate 9.3".
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

// inUseOf returns the bounds that refuse calls of a limit, and its usage: "refused by: window · 312 of 10,000 in 1 d". A
// narrow list shows only the beginning.
func (v *view) inUseOf(name string) string {
	by, text := v.refusers(name), v.uses[name]
	if by != "" {
		text = strings.TrimSuffix("refused by: "+by+" · "+text, " · ")
	}
	return text
}
