package registry

import (
	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// priorityValue is Limit.Priority.
type priorityValue struct{}

func (priorityValue) read(l *Limit, text []byte, _ Notation) bool {
	return len(text) > 0 && l.Priority.UnmarshalText(text) == nil
}
func (priorityValue) valid(l *Limit) bool   { return l.Priority <= tokenbucket.Lowest }
func (priorityValue) text(l *Limit) string  { return l.Priority.String() }
func (priorityValue) same(a, b *Limit) bool { return a.Priority == b.Priority }
func (priorityValue) want(Notation) string  { return "normal, low or lowest" }

// priorityChoices are the values of the column priority.
var priorityChoices = []Choice{{"normal", "normal"}, {"low", "low"}, {"lowest", "lowest"}}
