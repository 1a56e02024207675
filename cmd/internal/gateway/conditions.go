package gateway

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/cmd/internal/condition"
	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// mostNamed bounds the names in one line of /readyz.
const mostNamed = 5

// conditions returns the state of Redis, of the switch and of the rows, as far as the gateway has them. Whatever reports a state takes it from
// here.
func (a *admin) conditions() (all []condition.Condition) {
	unneeded := ""
	if sw := a.sw.Load(); sw != nil {
		all = append(all, a.ofSwitch(sw))
		if !sw.Enabled() {
			unneeded = "while the switch is off"
		}
	}
	if limits := a.proxy.metrics.limits.Load(); limits != nil {
		s := limits.Stats()
		all = append(all, a.config.ofRows(&s))
	}
	if a.pulse != nil {
		if a.config.store == "memory" {
			unneeded = "with --store memory"
		}
		took, err := a.pulse.check(a.config.storeTimeout)
		all = append(all, condition.OfRedis(err, took, a.config.storeTimeout, a.config.policy, unneeded))
	}
	for i := range all {
		a.since(&all[i])
	}
	return all
}

// since sets when a condition began, if it does not know that itself.
func (a *admin) since(c *condition.Condition) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if before, ok := a.states[c.Part]; ok && before.State == c.State && c.Since.IsZero() {
		c.Since = before.Since
	} else if c.State != condition.OK && c.Since.IsZero() {
		c.Since = time.Now()
	}
	if a.states == nil {
		a.states = map[condition.Part]condition.Condition{}
	}
	a.states[c.Part] = *c
}

func (a *admin) ofSwitch(sw *killswitch.Switch) condition.Condition {
	c := condition.OfSwitch(sw.Enabled(), sw.Err())
	if limits := a.proxy.metrics.limits.Load(); limits != nil && c.State == condition.Off {
		if s := limits.Stats(); !s.Off.IsZero() {
			c.Why, c.Since = s.Origin, s.Off
		}
	}
	return c
}

// ofRows returns the state of the rows.
func (c *config) ofRows(s *registry.Stats) condition.Condition {
	rows := condition.OfRows(condition.Table{
		Limits: s.Limits, Bad: s.Bad, Rejected: len(s.Rejected), Gone: s.Loss.Gone, Before: s.Loss.Before, Held: s.Loss.Held, Lost: s.Loss.Since,
		Off: s.Loss.Off, Disabled: s.Disabled, Outdated: len(s.Outdated),
		Pass: c.options.unknown == "pass", Err: s.Err,
	})
	if rows.State == condition.Held || rows.State == condition.Lost {
		names := s.Loss.Names
		if len(names) > mostNamed {
			names = append(names[:mostNamed:mostNamed], "…")
		}
		rows.Why = fmt.Sprintf("%s; confirm the loss (tokenbucket confirm, or the console) or restore the rows", strings.Join(names, ", "))
	}
	return rows
}

// remindEvery is the time between two log lines about a condition that lasts.
const remindEvery = time.Minute

// tell logs each condition when it begins, every minute while it lasts, and when it ends, until ctx ends. The registry logs that the switch is
// off.
func (a *admin) tell(ctx context.Context, log *slog.Logger) {
	type told struct {
		condition.Condition
		at time.Time
	}
	last := map[condition.Part]told{}
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		now := time.Now()
		for _, c := range a.conditions() {
			before := last[c.Part]
			fresh := before.Says != c.Says
			if c.State == condition.OK && (before.State == condition.OK || before.State == "") || !fresh && now.Sub(before.at) < remindEvery {
				continue
			}
			last[c.Part] = told{c, now}
			if c.Part == condition.Switch && c.State != condition.Unknown && before.State != condition.Unknown {
				continue
			}
			about := []any{"part", string(c.Part), "state", c.State, "calls", c.Calls.String(), "policy", a.config.fail}
			if !c.Since.IsZero() && !fresh {
				about = append(about, "for", now.Sub(c.Since).Round(time.Second))
			}
			if c.Why != "" {
				about = append(about, "why", c.Why)
			}
			log.Log(ctx, c.Level(), c.Says, about...)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// here returns what the console shows of this gateway, published or not.
func (a *admin) here() (h console.Here) {
	all := condition.Problems(a.conditions())
	for i := range all {
		if c := &all[i]; c.State != condition.Off { // the pages show the switch
			h.Problems = append(h.Problems, c.Line(time.Now()))
		}
	}
	if sw := a.sw.Load(); sw != nil {
		h.Switch = &fleet.Switch{Known: true, Off: !sw.Enabled(), Read: time.Now().Add(-sw.Age()), Err: message(sw.Err())}
		if limits := a.proxy.metrics.limits.Load(); limits != nil && h.Switch.Off {
			s := limits.Stats()
			h.Switch.Since, h.Switch.Origin = s.Off, s.Origin
		}
		if h.Switch.Since.IsZero() {
			h.Switch.Since = h.Switch.Read
		}
	}
	return h
}
