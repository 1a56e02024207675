package registry

import (
	"maps"
	"slices"
	"strings"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// Load has the results of one load.
type Load struct {
	// Err of the source. If it is not nil, the earlier limits stay in force.
	Err error
	// Took is the duration of Source.Load.
	Took time.Duration
	// Rows in the table, and Limits in force afterwards. Of these, Added are new, Changed have changed, and Kept are in force although their
	// row is bad now. Removed limits are no longer in force.
	Rows, Limits, Added, Changed, Kept, Removed int
	// Bad is the number of names whose rows never were valid, so that WithBadRows decides about their calls.
	Bad int
	// Held is the number of limits that are in force although their rows are gone or off, because more than half of the table is (WithAllowEmpty).
	Held int
	// Disabled is the number of limits that are off (Limit.Disabled).
	Disabled int
	// Outdated has the names of rows whose version is earlier than another that a table has given: to this process before, so that the earlier limit stays
	// in force, or to another process, so that its limit is in force in the bucket. The source may be a replica that lags behind.
	Outdated []string
	// Shadow has the names of the limits in shadow, which refuse no call (Limit.Shadow).
	Shadow []string
	// Rejected rows, each with its consequence.
	Rejected []RowError
	// Unmatched rows are in force and match no call (WithNames).
	Unmatched []RowError
}

// Stats are the figures of a Registry.
type Stats struct {
	// Loads and failed loads (Failures) so far. Err is the error of the last load, nil if it succeeded.
	Loads, Failures int
	Err             error
	// LastLoad and LastGood are the times of the last load and of the last load that succeeded. Age is the time since LastGood.
	LastLoad, LastGood time.Time
	Age                time.Duration
	// Limits in force, and Limiters made for them so far. Unknown and Keys are the limiters kept for names without a row (Default) and for
	// keys of rows (Limit.PerKey).
	Limits, Limiters, Unknown, Keys int
	// Shared is the number of calls whose keys had no bucket of their own: see WithMaxKeys.
	Shared int
	// Bad names, Held and Disabled limits, and Outdated rows: see Load.
	Bad, Held, Disabled int
	Outdated            []string
	// Loss of limits that is not confirmed yet; the zero Loss if there is none.
	Loss Loss
	// Shadow has the names of the limits in shadow (Limit.Shadow). AllShadow reports whether all limits are (WithShadow).
	Shadow    []string
	AllShadow bool
	// Off is the time since which the switch is off, zero if it is on. Origin is its Origin() string.
	Off    time.Time
	Origin string
	// Rejected rows of the last load that succeeded, and Unmatched rows, which are in force and match no call (WithNames).
	Rejected, Unmatched []RowError
	// Faults that an operator must repair, at most 100. Faulty is the number of calls that faults have failed since New.
	Faults []Fault
	Faulty int
}

// Stats returns the present figures.
func (r *Registry) Stats() Stats {
	r.notes.mu.Lock()
	s := r.notes.stats
	r.notes.mu.Unlock()
	s.Unmatched = slices.Clone(s.Unmatched)
	s.Rejected, s.Shadow, s.AllShadow = slices.Clone(s.Rejected), slices.Clone(s.Shadow), r.shadow
	s.Faults, s.Faulty = r.faults.listed(func(*fault) bool { return true }), int(r.faults.calls.Load())
	s.Outdated, s.Loss = slices.Clone(s.Outdated), r.loss()
	s.Age = time.Since(s.LastGood)
	r.machine.mu.Lock()
	s.Off, s.Origin = r.machine.Off()
	r.machine.mu.Unlock()
	for _, e := range r.limits.Load().rows {
		if e.limiter.Load() != nil {
			s.Limiters++
		}
	}
	s.Unknown, s.Keys, s.Shared = r.unnamed.len(), r.keys.len(), r.callers.sharedCalls()
	return s
}

// Has reports whether the table has a row with exactly that name, valid or bad. Match finds the row that matches a name.
func (r *Registry) Has(name string) bool {
	limits := r.limits.Load()
	return limits != nil && limits.rows[name] != nil
}

// Limiters returns the limiters of rows that have had a call, by name, without those of keys (Limit.PerKey). They are those in force
// now, for their State and Waiting. After a load that changes their rows, their calls fail with tokenbucket.ErrSuperseded: for calls there is
// [Registry.Limiter].
func (r *Registry) Limiters() map[string]*tokenbucket.RateLimiter {
	all := map[string]*tokenbucket.RateLimiter{}
	for name, e := range r.limits.Load().rows {
		if l := e.limiter.Load(); l != nil {
			all[name] = l
		}
	}
	return all
}

// Limits returns copies of the limits in force, sorted by name. It omits names whose rows never were valid: see Stats.
func (r *Registry) Limits() []Limit {
	var all []Limit
	for e := range maps.Values(r.limits.Load().rows) {
		if !e.bad {
			all = append(all, e.limit.clone())
		}
	}
	slices.SortFunc(all, func(a, b Limit) int { return strings.Compare(a.Name, b.Name) })
	return all
}
