package registry

import (
	"fmt"
	"slices"
	"strings"
)

// WithNames sets a function that reports why no call has the name of a row, or one that its * stands for: a path that ends with a blank,
// say. It returns "" if there may be such a call. Such a row is in force, and limits nothing: it is in the log, again every minute, and
// in Stats.Unmatched. The function is called once for each content of a row.
func WithNames(why func(row string) string) Option {
	return func(s *settings) error {
		if why == nil {
			return bad("names", "nil", "a function")
		}
		s.unmatched = why
		return nil
	}
}

// unmatchedBy returns what is wrong with the name of a row that holds for no call; nil if it may hold for some.
func (s *settings) unmatchedBy(c *Limit) *RowError {
	if s.unmatched == nil || c.Disabled {
		return nil
	}
	why := s.unmatched(c.Name)
	if why == "" {
		return nil
	}
	return &RowError{Row: c.Row, Name: c.Name, Field: "name", Value: fmt.Sprintf("%.80q", c.Name), Want: "one that calls have: " + why,
		Consequence: "it is in force, and holds for no call"}
}

// countUnmatched finds the rows that hold for no call, in order.
func (r *Registry) countUnmatched(next map[string]*entry, load *Load) {
	for _, e := range next {
		if e.unmatched != nil {
			load.Unmatched = append(load.Unmatched, *e.unmatched)
		}
	}
	slices.SortFunc(load.Unmatched, func(a, b RowError) int { return strings.Compare(a.Name, b.Name) })
}

func (r *Registry) tellUnmatched(rows []RowError) {
	for i := range rows {
		if i == mostTold {
			r.log.Warn("registry: further rows hold for no call, see Stats", "rows", len(rows)-i)
			return
		}
		r.log.Warn("registry: a row holds for no call", "error", &rows[i], "bucket", rows[i].Name, "row", rows[i].Row)
	}
}
