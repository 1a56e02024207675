package console

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// view is an immutable picture of the fleet, as the pages show it.
type view struct {
	at           time.Time
	limits       []limit // sorted by name, without duplicates
	instances    []instance
	sw           *fleet.Switch // as the living instance with the newest reading has it; nil if there is no switch
	here         Here
	lastSwitch   *fleet.Instance // the silent instance that read the switch last; nil if there is none
	rejected     []fleet.Rejected
	skipped      []string
	others       fleet.Rate                    // calls of names without a limit of their own
	uses         map[string]string             // the usage of windows and concurrency in words, by limit
	used         map[use][]float64             // the usage in the last beats, the oldest first
	refusedBy    map[string]map[string]float64 // calls per second, by limit and by the bound that refuses them
	replaced     map[string]bool               // silent instances, by ID, that another one of the same host has replaced
	held         map[string]fleet.Event        // penalties in force that a person gave, by limit
	switchedOff  *fleet.Event                  // how the switch was turned off; nil if it is on, or not known
	now, earlier *fleet.Snapshot
	strip        func() []notice // the notices, computed once
}

// measured reports whether rates are known. They need two snapshots.
func (v *view) measured() bool { return v.now != v.earlier }

// limit is one limit in the whole fleet. Rates are per second.
type limit struct {
	total *fleet.Total
	rate  fleet.Rate
	// rejected is the error in the row that should be in force; empty if there is none.
	rejected string
}

// instance is a process of the fleet.
type instance struct {
	*fleet.Instance
	granted, refused float64
}

// newView returns the view of two snapshots some seconds apart.
func newView(past, now *fleet.Snapshot) *view {
	v := &view{at: now.At, earlier: past, now: now}
	rates := fleet.Rates(past, now)
	wrong := map[string]string{}
	seen := map[string]bool{}
	var read time.Time
	for i := range now.Instances {
		n := &now.Instances[i]
		if n.Silent(now.At) {
			if last := v.lastSwitch; n.Switch.Known && (last == nil || !n.Switch.Read.Before(last.Switch.Read)) {
				v.lastSwitch = n
			}
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
	v.others = fleet.OthersRate(past, now)
	v.refusedBy = fleet.RefusedBy(past, now)
	v.instances = shares(past, now)
	v.replaced = replaced(now)
	v.uses = v.inUse()
	v.strip = sync.OnceValue(v.newStrip)
	return v
}

// replaced returns the silent instances, by ID, whose place a later instance of the same host has taken, one for one.
func replaced(now *fleet.Snapshot) map[string]bool {
	all := map[string]bool{}
	taken := map[string]bool{}
	for i := range now.Instances {
		gone := &now.Instances[i]
		if gone.Host == "" || now.At.Sub(gone.Beat) <= overdue {
			continue
		}
		for j := range now.Instances {
			n := &now.Instances[j]
			if n.Host == gone.Host && !taken[n.ID] && n.Started.After(gone.Beat) {
				taken[n.ID], all[gone.ID] = true, true
				break
			}
		}
	}
	return all
}

// attribute takes the persons behind penalties and the switch from events, the oldest first.
func (v *view) attribute(events []fleet.Event) {
	v.held = map[string]fleet.Event{}
	for i := range events {
		switch e := &events[i]; {
		case e.Kind == fleet.LimitReset:
			delete(v.held, e.Limit)
		case e.Kind == fleet.Penalized && e.Who != "" && e.At.Add(e.For).After(v.at):
			v.held[e.Limit] = *e
		case e.Kind == fleet.SwitchOn:
			v.switchedOff = nil
		case e.Kind == fleet.SwitchOff && e.Who != "":
			v.switchedOff = e
		}
	}
}

// needsEvents reports whether events may explain a penalty or the switch.
func (v *view) needsEvents() bool {
	return v.sw != nil && v.sw.Off || slices.ContainsFunc(v.limits, func(l limit) bool { return l.total.Newest.Bucket.HeldUntil.After(v.at) })
}

// living returns the number of instances that report.
func (v *view) living() (n int) {
	for i := range v.instances {
		if !v.instances[i].Silent(v.at) {
			n++
		}
	}
	return n
}

// empty returns the text in place of an empty list of limits; empty if there are limits.
func (v *view) empty() string {
	switch {
	case len(v.limits) > 0:
		return ""
	case v.living() == 0:
		return "No limit is known yet."
	case !v.measured():
		return "There are no limits: calls have what --unknown says."
	}
	return fmt.Sprintf("There are no limits: %s calls a second pass without one, and %s are refused.",
		figure.Number(v.others.Granted+v.others.Passed+v.others.WouldRefuse), figure.Number(v.others.Refused))
}

// include adds rows that no instance reports.
func (v *view) include(rows []registry.Limit) {
	reported := len(v.limits)
	for i := range rows {
		r := &rows[i]
		if (&view{limits: v.limits[:reported]}).limit(r.Name) != nil {
			continue
		}
		by := fleet.DeciderOf(r).String()
		v.limits = append(v.limits, limit{total: &fleet.Total{
			Name: r.Name, Deciders: []string{by}, Newest: &fleet.Limit{Name: r.Name, Decider: by, Config: fleet.ConfigOf(r)},
		}})
	}
	slices.SortFunc(v.limits, func(a, b limit) int { return strings.Compare(a.name(), b.name()) })
}

// shares returns the instances, with the rates at which each grants and refuses.
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

// since returns the rates at which an instance has granted and refused since an earlier snapshot.
func (i *instance) since(was *fleet.Instance) (granted, refused float64) {
	over := i.Beat.Sub(was.Beat).Seconds()
	for name, l := range i.Limits {
		var earlier fleet.Counters
		w := was.Limits[name]
		if w == l { // unchanged: see fleet.Instance
			continue
		}
		if w != nil {
			earlier = w.Counters
		}
		gained := l.Minus(&earlier)
		granted += float64(gained.Through())
		refused += float64(gained.Refused)
	}
	others := i.Others.Minus(&was.Others)
	granted += float64(others.Through())
	refused += float64(others.Refused)
	return granted / over, refused / over
}

func rank(b bool) int {
	if b {
		return 1
	}
	return 0
}

// title returns an instance's name for people.
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
	if r.Value == noValue {
		return r.Field + " has no value: want " + r.Want
	}
	return r.Field + " " + r.Value + ": want " + r.Want
}

func (l *limit) name() string { return l.total.Name }

func (l *limit) config() *fleet.Config { return &l.total.Newest.Config }

// granted and refused return the rates of the columns. For a shadow limit, calls that would be refused count as refused.
func (l *limit) granted() float64 { return l.rate.Granted + l.rate.Passed }

func (l *limit) refused() float64 { return l.rate.Refused + l.rate.WouldRefuse }

// through returns the rate of the calls that passed. Sums over several limits count it, and only calls that were refused as
// refused: a shadow refuses none.
func (l *limit) through() float64 { return through(&l.rate) }

func through(r *fleet.Rate) float64 { return r.Granted + r.Passed + r.WouldRefuse }

// fill returns the stored share of the bucket, 0 to 1; negative if not known, or if nothing can be stored.
func (l *limit) fill() float64 {
	b := &l.total.Newest.Bucket
	if b.At.IsZero() || b.Max <= 0 {
		return -1
	}
	return min(max(b.Stored/b.Max, 0), 1)
}

// states returns the labels of everything unusual about a limit.
func (l *limit) states(v *view) []string {
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

// describe returns a row in words: see registry.Limit.String.
func describe(l *fleet.Limit) string {
	c := &l.Config
	switch {
	case l.Decider == "bad_row":
		return "the row is bad"
	case c.Kind == fleet.NoLimit && !c.NoRate && l.Decider != "zero" && c.Rate != 0:
		return "no bucket"
	}
	means := registry.Limit{
		Rate: c.Rate, NoRate: c.NoRate, Quota: c.Kind == fleet.Quota, Warmup: c.Warmup, ColdFactor: c.ColdFactor, MaxWait: c.Wait,
		Window: c.Window, WindowLimit: c.WindowLimit, Concurrent: c.Concurrent, ConcurrentWait: c.ConcurrentWait, PerKey: c.PerKey,
	}
	if c.MaxPermits > 0 {
		means.Burst = &c.MaxPermits
	}
	if l.Decider == "zero" {
		means.Rate = 0
	}
	return means.String()
}

func (v *view) limit(name string) *limit {
	i, found := slices.BinarySearchFunc(v.limits, name, func(l limit, name string) int { return strings.Compare(l.name(), name) })
	if !found {
		return nil
	}
	return &v.limits[i]
}

// ranked returns the limits in the order of the first page: by refusals, then by grants, then by name. It sorts only as many
// as are shown.
func (v *view) ranked(most int) []*limit {
	before := func(a, b *limit) int {
		return cmp.Or(cmp.Compare(b.refused(), a.refused()), cmp.Compare(b.granted(), a.granted()), cmp.Compare(a.name(), b.name()))
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
