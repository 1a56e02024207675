package registry

import (
	"context"
	"errors"
	"strings"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// WithShadow evaluates every call and then lets it pass. Neither a limit nor a bad row nor an unknown name refuses it. The limiters are
// shadows (tokenbucket.WithShadow), with buckets of their own. Calls that would have been refused go to the observer, with
// Decision.Shadow, or without a bucket to the hook of [WithBypassHook] (ByShadow). The log has the shadow every minute. Limit.Shadow is the
// same for one row.
func WithShadow() Option {
	return func(s *settings) error {
		s.shadow = true
		return nil
	}
}

// shadows reports whether a row is in shadow.
func (s *settings) shadows(c *Limit) bool { return s.shadow || c.Shadow }

// inShadow lets calls of a row in shadow pass that would be refused without a bucket.
func (r *Registry) inShadow(f found) found {
	if !f.pass && (r.shadow || f.entry != nil && f.entry.limit.Shadow) {
		f.by, f.pass = gate.ByShadow, true
	}
	return f
}

// consequence returns the outcome of calls of a bad row without an earlier valid limit, in words.
func (r *Registry) consequence(bad *RowError) string {
	if r.badRows.refuse && (r.shadow || bad.Shadow) {
		return "its calls pass, and count as refused: it is in shadow"
	}
	return r.badRows.describe()
}

// logShadows logs the rows in shadow.
func (r *Registry) logShadows(names []string) {
	if len(names) == 0 {
		r.log.Warn("registry: no limit is in shadow any longer: all refuse calls")
		return
	}
	r.log.Warn("registry: limits are in shadow: they count calls and refuse none", "limits", len(names), "buckets", first(names))
}

// remindShadows logs the rows in shadow again.
func (r *Registry) remindShadows(s *Stats) {
	r.logAllShadow(s)
	if n := len(s.Shadow); n > 0 && !r.shadow {
		r.log.Warn("registry: limits are still in shadow: they count calls and refuse none", "limits", n, "buckets", first(s.Shadow))
	}
}

// logAllShadow logs that all rows are in shadow, if they are.
func (r *Registry) logAllShadow(s *Stats) {
	if r.shadow {
		r.log.Warn("registry: every limit is in shadow: it counts calls and refuses none", "limits", s.Limits)
	}
}

// first returns the first few names, for a message.
func first(names []string) string {
	const most = 5
	if len(names) > most {
		return strings.Join(names[:most], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

// renewShadows resets the buckets of shadows that are of another kind than their rows. Calls cannot find such a bucket, because a shadow hides
// errors. Each limiter is checked once.
func (r *Registry) renewShadows(ctx context.Context, rows map[string]*entry) {
	for _, e := range rows {
		if !r.shadows(&e.limit) {
			continue
		}
		if e.limit.PerKey {
			var keys []*entry
			r.keys.each(e, func(e *entry) { keys = append(keys, e) })
			for _, e := range keys {
				if !r.renewShadow(ctx, e) {
					return
				}
			}
		} else if !r.renewShadow(ctx, e) {
			return
		}
	}
}

// renewShadow checks one limiter. It returns false if the store fails.
func (r *Registry) renewShadow(ctx context.Context, e *entry) bool {
	l := e.limiter.Load()
	if l == nil || e.asked == l {
		return true
	}
	_, err := l.State(ctx)
	if errors.Is(err, tokenbucket.ErrInvalidConfig) {
		r.log.Warn("registry: the bucket of a shadow is of another kind than its row; it is reset", "bucket", e.limit.Name, "row", e.limit.Row)
		err = r.renew(ctx, l, &e.limit)
	}
	if err == nil {
		e.asked = l
	}
	return err == nil
}
