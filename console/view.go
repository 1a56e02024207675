package console

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// view is the fleet as the pages show it. It does not change any more.
type view struct {
	at        time.Time
	limits    []limit // by name, each once
	instances []instance
	sw        *fleet.Switch // of the living instance that has read it last; nil: there is none
	rejected  []fleet.Rejected
	skipped   []string
	now, past *fleet.Snapshot
}

// measured tells whether rates are known: they need two looks.
func (v *view) measured() bool { return v.now != v.past }

// limit is one limit in the whole fleet. Rates are per second.
type limit struct {
	total *fleet.Total
	rate  fleet.Rate
	// rejected says what is wrong with the row that should be in force; empty: nothing.
	rejected string
}

// instance is a process that limits.
type instance struct {
	*fleet.Instance
	granted, refused float64
}

// newView makes a view of two snapshots some seconds apart.
func newView(past, now *fleet.Snapshot) *view {
	v := &view{at: now.At, past: past, now: now}
	rates := fleet.Rates(past, now)
	wrong := map[string]string{}
	seen := map[string]bool{}
	var read time.Time
	for i := range now.Instances {
		n := &now.Instances[i]
		if n.Silent(now.At) {
			continue
		}
		if n.Switch.Known && !n.Switch.Read.Before(read) {
			v.sw, read = &n.Switch, n.Switch.Read
		}
		for _, r := range n.Rejected {
			if key := r.Row + "\x00" + r.Name + "\x00" + r.Field; !seen[key] {
				seen[key] = true
				v.rejected = append(v.rejected, r)
				wrong[r.Name] = reason(&r)
			}
		}
	}
	for _, t := range now.Totals() {
		v.limits = append(v.limits, limit{total: t, rate: rates[t.Name], rejected: wrong[t.Name]})
	}
	for _, s := range now.Skipped {
		v.skipped = append(v.skipped, s.Error())
	}
	v.instances = shares(past, now)
	return v
}

// include adds rows that no instance has told of.
func (v *view) include(rows []registry.Limit) {
	told := len(v.limits)
	for i := range rows {
		r := &rows[i]
		if (&view{limits: v.limits[:told]}).limit(r.Name) != nil {
			continue
		}
		by := fleet.DeciderOf(r).String()
		v.limits = append(v.limits, limit{total: &fleet.Total{
			Name: r.Name, Deciders: []string{by}, Newest: &fleet.Limit{Name: r.Name, Decider: by, Config: fleet.ConfigOf(r)},
		}})
	}
	slices.SortFunc(v.limits, func(a, b limit) int { return strings.Compare(a.name(), b.name()) })
}

// shares are the instances, with what each lets through and refuses.
func shares(past, now *fleet.Snapshot) []instance {
	before := map[string]*fleet.Instance{}
	for i := range past.Instances {
		before[past.Instances[i].ID] = &past.Instances[i]
	}
	var all []instance
	for i := range now.Instances {
		one := instance{Instance: &now.Instances[i]}
		if was := before[one.ID]; was != nil && one.Beat.After(was.Beat) {
			one.granted, one.refused = one.since(was)
		}
		all = append(all, one)
	}
	slices.SortStableFunc(all, func(a, b instance) int {
		return cmp.Or(cmp.Compare(rank(a.Silent(now.At)), rank(b.Silent(now.At))), cmp.Compare(a.title(), b.title()))
	})
	return all
}

// since is what an instance has let through and refused since then, per second.
func (i *instance) since(was *fleet.Instance) (granted, refused float64) {
	over := i.Beat.Sub(was.Beat).Seconds()
	for name, l := range i.Limits {
		var earlier fleet.Counters
		w := was.Limits[name]
		if w == l { // it has not changed: see fleet.Instance
			continue
		}
		if w != nil {
			earlier = w.Counters
		}
		gained := l.Minus(&earlier)
		granted += float64(gained.Granted + gained.Passed)
		refused += float64(gained.Refused + gained.WouldRefuse)
	}
	return granted / over, refused / over
}

func rank(b bool) int {
	if b {
		return 1
	}
	return 0
}

// title is an instance's name for people.
func (i *instance) title() string {
	if i.Host == "" {
		return i.ID
	}
	return i.Host + ":" + itoa(i.PID)
}

func reason(r *fleet.Rejected) string {
	if r.Field == "" {
		return r.Err
	}
	return r.Field + " " + r.Value + ": want " + r.Want
}

func (l *limit) name() string { return l.total.Name }

func (l *limit) config() *fleet.Config { return &l.total.Newest.Config }

// through and turned are what the columns show: of a limit in shadow, what would be refused counts as refused.
func (l *limit) through() float64 { return l.rate.Granted + l.rate.Passed }

func (l *limit) turned() float64 { return l.rate.Refused + l.rate.WouldRefuse }

// fill is the share of the bucket that is saved up, 0 to 1; negative: not known, or nothing can be saved up.
func (l *limit) fill() float64 {
	b := &l.total.Newest.Bucket
	if b.At.IsZero() || b.Max <= 0 {
		return -1
	}
	return min(max(b.Stored/b.Max, 0), 1)
}

// words say what is special about a limit.
func (l *limit) words(v *view) []string {
	var all []string
	add := func(is bool, word string) {
		if is {
			all = append(all, word)
		}
	}
	by := l.total.Deciders
	add(slices.Contains(by, "disabled"), "off")
	add(slices.Contains(by, "switch"), "switched off")
	add(slices.Contains(by, "zero"), "nothing passes")
	add(l.config().Shadow, "shadow")
	add(l.total.Newest.Bucket.HeldUntil.After(v.at), "penalised")
	add(l.rejected != "" || slices.Contains(by, "bad_row"), "rejected row")
	add(l.rate.Failed > 0, "failing")
	add(l.total.Instances == 0, "no instance")
	r := &l.rate
	add(v.measured() && r.Granted+r.Refused+r.Failed+r.Passed+r.WouldRefuse == 0 && l.total.Waiting.Count == 0, "no traffic")
	return all
}

// describe is a row in words: 5/s, saves up 10, at most 120 in any 5 s, at most 3 under way, waits up to 500 ms.
func describe(l *fleet.Limit) string {
	c := &l.Config
	var parts []string
	switch {
	case l.Decider == "bad_row":
		return "the row is bad"
	case c.NoRate:
		parts = append(parts, "any rate")
	case l.Decider == "zero" || c.Kind != fleet.NoLimit && c.Rate == 0:
		return "0/s: nothing passes"
	case c.Kind == fleet.NoLimit:
		return "no bucket"
	default:
		parts = append(parts, number(c.Rate)+"/s")
	}
	if c.PerKey {
		parts[0] += " for each key"
	}
	switch {
	case c.Kind == fleet.Quota:
		parts = append(parts, "quota")
	case c.Kind == fleet.WarmUp:
		parts = append(parts, "warms up in "+span(c.Warmup))
	case c.MaxPermits > 0:
		parts = append(parts, "saves up "+number(c.MaxPermits))
	}
	if c.Window > 0 {
		parts = append(parts, fmt.Sprintf("at most %d in any %s", c.WindowLimit, exact(c.Window)))
	}
	if c.Concurrent > 0 {
		parts = append(parts, fmt.Sprintf("at most %d under way", c.Concurrent))
	}
	switch {
	case c.Wait > 0:
		parts = append(parts, "waits up to "+span(c.Wait))
	case !c.NoRate:
		parts = append(parts, "no waiting")
	}
	return strings.Join(parts, ", ")
}

func (v *view) limit(name string) *limit {
	i, found := slices.BinarySearchFunc(v.limits, name, func(l limit, name string) int { return strings.Compare(l.name(), name) })
	if !found {
		return nil
	}
	return &v.limits[i]
}

// ranked are the limits as the first page shows them: most refused first, then most granted, then by name. If there are many, only the first
// are put in order.
func (v *view) ranked(most int) []*limit {
	before := func(a, b *limit) int {
		return cmp.Or(cmp.Compare(b.turned(), a.turned()), cmp.Compare(b.through(), a.through()), cmp.Compare(a.name(), b.name()))
	}
	var top []*limit
	for i := range v.limits {
		l := &v.limits[i]
		if len(top) == most && before(top[most-1], l) < 0 {
			continue
		}
		at, _ := slices.BinarySearchFunc(top, l, before)
		top = slices.Insert(top, at, l)
		top = top[:min(most, len(top))]
	}
	return top
}
