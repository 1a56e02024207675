package registry

import (
	"maps"
	"slices"
	"strings"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// Load tells how one load went.
type Load struct {
	// Err of the source; nothing changed then.
	Err error
	// Took is how long the source took.
	Took time.Duration
	// Rows that there were, Limits in force afterwards; of these Added, Changed, and Kept though their row is bad now; Removed
	// ones are no longer in force.
	Rows, Limits, Added, Changed, Kept, Removed int
	// Bad names: their rows never were good, and WithBadRows decides about their calls.
	Bad int
	// Held limits are in force though their rows are gone: with them, more than half of the table is (WithAllowEmpty).
	Held int
	// Shadow names the limits that count and refuse nothing (Limit.Shadow).
	Shadow []string
	// Rejected rows, each with its consequence.
	Rejected []RowError
	// Unmatched rows are in force and hold for no call (WithNames).
	Unmatched []RowError
}

// Stats are the figures of a Registry.
type Stats struct {
	// Loads were tried, Failures of them failed; Err is the last one's error, nil if it succeeded.
	Loads, Failures int
	Err             error
	// LastLoad was tried then; LastGood succeeded, and is so old.
	LastLoad, LastGood time.Time
	Age                time.Duration
	// Limits in force; Limiters of them have been asked for. Unknown names have a limiter by default, and
	// Keys have that of a row (Limit.PerKey).
	Limits, Limiters, Unknown, Keys int
	// Shared counts calls whose keys had no bucket of their own: see WithMaxKeys.
	Shared int
	// Bad names and Held limits: see Load.
	Bad, Held int
	// Loss of limits that was not confirmed; the zero Loss if there is none.
	Loss Loss
	// Shadow names the limits that count and refuse nothing (Limit.Shadow); with AllShadow no call is refused (WithShadow).
	Shadow    []string
	AllShadow bool
	// Off since then, by its Origin: the switch; zero if it is on.
	Off    time.Time
	Origin string
	// Rejected rows of the last good load, and Unmatched ones, which are in force and hold for no call (WithNames).
	Rejected, Unmatched []RowError
	// Faults that last, at most 100: somebody must repair them. Faulty calls have failed so since New.
	Faults []Fault
	Faulty int
}

// Stats returns the figures as of now.
func (r *Registry) Stats() Stats {
	r.notes.mu.Lock()
	s := r.notes.stats
	r.notes.mu.Unlock()
	s.Unmatched = slices.Clone(s.Unmatched)
	s.Rejected, s.Shadow, s.AllShadow = slices.Clone(s.Rejected), slices.Clone(s.Shadow), r.shadow
	s.Faults, s.Faulty = r.faults.all()
	s.Loss = r.lost.now()
	s.Age = time.Since(s.LastGood)
	for _, e := range r.limits.Load().rows {
		if e.limiter.Load() != nil {
			s.Limiters++
		}
	}
	s.Unknown, s.Keys, s.Shared = r.strange.len(), r.keys.len(), r.callers.sharedCalls()
	return s
}

// Has tells whether there is a row of that very name, good or bad; Match finds those that hold for it.
func (r *Registry) Has(name string) bool {
	limits := r.limits.Load()
	return limits != nil && limits.rows[name] != nil
}

// Limiters returns the limiters of rows that have been asked for, by name. Those of a row's keys (Limit.PerKey) are not among them.
func (r *Registry) Limiters() map[string]*tokenbucket.RateLimiter {
	all := map[string]*tokenbucket.RateLimiter{}
	for name, e := range r.limits.Load().rows {
		if l := e.limiter.Load(); l != nil {
			all[name] = l
		}
	}
	return all
}

// Limits returns what is in force, by name. Names whose rows are bad are not among them: see Stats.
func (r *Registry) Limits() []Limit {
	var all []Limit
	for e := range maps.Values(r.limits.Load().rows) {
		if !e.bad {
			all = append(all, e.limit)
		}
	}
	slices.SortFunc(all, func(a, b Limit) int { return strings.Compare(a.Name, b.Name) })
	return all
}
