package registry

import (
	"context"
	"errors"
	"slices"
	"strings"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// WithShadow decides about every call and lets it pass: no limit, bad row or unknown name refuses. The limiters are shadows
// (tokenbucket.WithShadow), with buckets of their own; the observer hears what would have been refused, with Decision.Shadow, and the
// hook of [WithBypassHook] what would have been without a bucket (ByShadow). It is told to the log, again every minute. Limit.Shadow
// is the same for one row.
func WithShadow() Option {
	return func(s *settings) error {
		s.shadow = true
		return nil
	}
}

// shadows tells whether a row only counts.
func (s *settings) shadows(c *Limit) bool { return s.shadow || c.Shadow }

// inShadow lets pass what would be refused without a bucket.
func (r *Registry) inShadow(f found) found {
	if !f.pass && (r.shadow || f.entry != nil && f.entry.limit.Shadow) {
		f.by, f.pass = gate.ByShadow, true
	}
	return f
}

// consequence is what happens to the calls of a bad row without a good limit from before.
func (r *Registry) consequence(bad *RowError) string {
	if r.badRows.refuse && (r.shadow || bad.Shadow) {
		return "its calls pass, and count as refused: it is in shadow"
	}
	return r.badRows.describe()
}

// countShadows finds the rows that only count, of those that would limit, in order.
func (r *Registry) countShadows(next map[string]*entry, load *Load) {
	for name, e := range next {
		if e.limit.Shadow && !e.limit.Disabled {
			load.Shadow = append(load.Shadow, name)
		}
	}
	slices.Sort(load.Shadow)
}

// tellShadows tells which rows are in shadow, if that is something else than before.
func (r *Registry) tellShadows(load *Load, changed bool) {
	switch n := len(load.Shadow); {
	case !changed || r.shadow:
	case n > 0:
		r.log.Warn("registry: limits are in shadow: they count, and refuse nothing", "limits", n, "buckets", first(load.Shadow))
	default:
		r.log.Warn("registry: no limit is in shadow any more: all refuse")
	}
}

// remindShadows tells again what lasts.
func (r *Registry) remindShadows(s *Stats) {
	r.tellAllShadow(s)
	if n := len(s.Shadow); n > 0 && !r.shadow {
		r.log.Warn("registry: limits are still in shadow: they count, and refuse nothing", "limits", n, "buckets", first(s.Shadow))
	}
}

func (r *Registry) tellAllShadow(s *Stats) {
	if r.shadow {
		r.log.Warn("registry: all is in shadow: limits count, and refuse nothing", "limits", s.Limits)
	}
}

// first is the first few names, for a message.
func first(names []string) string {
	const most = 5
	if len(names) > most {
		return strings.Join(names[:most], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

// renewShadows begins the buckets of shadows anew that are of another kind than their rows. No call hears of that, since a shadow's
// calls have no errors. Each limiter is asked once.
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

// renewShadow is false if the store does not answer.
func (r *Registry) renewShadow(ctx context.Context, e *entry) bool {
	l := e.limiter.Load()
	if l == nil || e.asked == l {
		return true
	}
	_, err := l.State(ctx)
	if errors.Is(err, tokenbucket.ErrInvalidConfig) {
		r.log.Warn("registry: the bucket of a shadow is of another kind than its row says; it begins anew", "bucket", e.limit.Name, "row", e.limit.Row)
		err = r.renew(ctx, l, &e.limit)
	}
	if err == nil {
		e.asked = l
	}
	return err == nil
}
