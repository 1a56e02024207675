package registry

import (
	"fmt"
	"slices"
	"strings"
)

// WithNames sets a function that returns why no call can match the name of a row, for instance a path with a trailing blank. It returns ""
// if a call can match. A row that matches no call is in force without effect. It is logged, again every minute, and is in
// Stats.Unmatched. The function is called once for each version of a row.
func WithNames(why func(row string) string) Option {
	return func(s *settings) error {
		if why == nil {
			return bad("names", "nil", "a function")
		}
		s.unmatched = why
		return nil
	}
}

// unmatchedBy returns the error of a row that matches no call; nil if a call may match.
func (s *settings) unmatchedBy(c *Limit) *RowError {
	if s.unmatched == nil || c.Disabled {
		return nil
	}
	why := s.unmatched(c.Name)
	if why == "" {
		return nil
	}
	return &RowError{Row: c.Row, Name: c.Name, Field: "name", Value: fmt.Sprintf("%.80q", c.Name), Want: "one that calls have: " + why,
		Consequence: "it is in force, and matches no call"}
}

// countUnmatched records the rows that match no call, sorted by name.
func (r *Registry) countUnmatched(next map[string]*entry, load *Load) {
	for _, e := range next {
		if e.unmatched != nil {
			load.Unmatched = append(load.Unmatched, *e.unmatched)
		}
	}
	slices.SortFunc(load.Unmatched, func(a, b RowError) int { return strings.Compare(a.Name, b.Name) })
}

// logUnmatched logs rows that match no call.
func (r *Registry) logUnmatched(rows []RowError) {
	for i := range rows {
		if i == mostLogged {
			r.log.Warn("registry: further rows match no call, see Stats", "rows", len(rows)-i)
			return
		}
		r.log.Warn("registry: a row matches no call", "error", &rows[i], "bucket", rows[i].Name, "row", rows[i].Row)
	}
}
