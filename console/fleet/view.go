package fleet

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

func quote(s string) string { return fmt.Sprintf("%.120q", s) }

// Through returns the number of calls that passed.
func (c *Counters) Through() int64 { return c.Granted + c.Passed + c.WouldRefuse }

// Calls returns the number of all calls.
func (c *Counters) Calls() int64 { return c.Through() + c.Refused + c.Failed }

// Plus returns the sum.
func (c Counters) Plus(o *Counters) Counters { return c.add(o, 1) }

// Minus returns the difference. Counters that went down count as 0.
func (c Counters) Minus(o *Counters) Counters {
	d := c.add(o, -1)
	for _, n := range d.numbers() {
		*n = max(0, *n)
	}
	d.WaitSum = max(0, d.WaitSum)
	return d
}

func (c Counters) add(o *Counters, sign int64) Counters {
	others := o.numbers()
	for i, n := range c.numbers() {
		*n += sign * *others[i]
	}
	c.WaitSum += time.Duration(sign) * o.WaitSum
	return c
}

// numbers returns pointers to all counters but WaitSum.
func (c *Counters) numbers() (all [6 + len(Histogram{})]*int64) {
	copy(all[:], []*int64{&c.Granted, &c.Waited, &c.Refused, &c.Failed, &c.Passed, &c.WouldRefuse})
	for i := range c.Waits {
		all[6+i] = &c.Waits[i]
	}
	return all
}

// Quantile estimates the q-quantile of the waits of granted calls: 0.99 for the p99. A call without a wait counts as 0.
// Between two bounds waits are taken as spread evenly, and those beyond the last bound as equal to it.
func (c *Counters) Quantile(q float64) time.Duration { return c.QuantileWithin(q, math.MaxInt64) }

// QuantileWithin is Quantile for calls that wait at most longest: waits are taken as spread evenly up to there.
func (c *Counters) QuantileWithin(q float64, longest time.Duration) time.Duration {
	var waited int64
	for _, n := range c.Waits {
		waited += n
	}
	total := max(c.Granted, waited)
	rank := q * float64(total)
	below := float64(total - waited)
	if total == 0 || rank <= below {
		return 0
	}
	lower := time.Duration(0)
	for i, n := range c.Waits {
		if i == len(waitBounds) {
			break
		}
		if n > 0 && rank <= below+float64(n) {
			lower, upper := min(lower, longest), min(waitBounds[i], longest)
			return lower + time.Duration((rank-below)/float64(n)*float64(upper-lower))
		}
		below += float64(n)
		lower = waitBounds[i]
	}
	return min(lower, longest)
}

// Curve is the interval between permits of a limit that warms up, by the number of stored permits.
//
//	     ^ interval
//	Cold +                    /
//	     |              /
//	Stable +----------/
//	     |          .         .
//	   0 +----------+---------+----> stored permits
//	     0      Threshold    Max
type Curve struct {
	Stable, Cold   time.Duration
	Threshold, Max float64
}

// Curve returns the curve of a limit that warms up, at a rate in force. It returns false if the limit does not warm up, or if
// the numbers are too large to show.
func (c *Config) Curve(rate float64) (Curve, bool) {
	cold := c.ColdFactor
	if cold == 0 {
		cold = 3
	}
	if c.Kind != WarmUp || !(rate > 0) || !(cold > 1) || c.Warmup <= 0 {
		return Curve{}, false
	}
	stable, period := 1/rate, c.Warmup.Seconds()
	threshold := period / 2 / stable
	most := threshold + 2*period/(stable*(1+cold))
	return Curve{
		Stable:    time.Duration(stable * float64(time.Second)),
		Cold:      time.Duration(stable * cold * float64(time.Second)),
		Threshold: threshold,
		Max:       most,
	}, most > threshold && most <= math.MaxFloat32
}

// Interval returns the time that the next permit takes, given the number of stored permits.
func (c *Curve) Interval(stored float64) time.Duration {
	above := min(max(0, stored-c.Threshold)/(c.Max-c.Threshold), 1)
	return c.Stable + time.Duration(above*float64(c.Cold-c.Stable))
}

// Silent reports whether an instance has ended, or has not published for longer than SilentAfter.
func (i *Instance) Silent(at time.Time) bool { return i.Ended || at.Sub(i.Beat) > SilentAfter }

// Total is a limit in the whole fleet.
type Total struct {
	Name string
	// Counters summed over all instances, including those that ended or died in the last ten minutes.
	Counters
	// Instances that live and have the limit.
	Instances int
	// Newest is the state in the living instance with the newest version of the row, or the newest reading of the bucket.
	// Without a living instance, it is that of a silent one.
	Newest *Limit
	// Deciders of the living instances, without duplicates. More than one means that they disagree.
	Deciders []string
	// Waiting in all living instances.
	Waiting Waiting
}

// Totals returns all limits, sorted by name.
func (s *Snapshot) Totals() []*Total {
	all := map[string]*Total{}
	for i := range s.Instances {
		for name := range s.Instances[i].Limits {
			t := all[name]
			if t == nil {
				t = &Total{Name: name}
				all[name] = t
			}
			t.include(&s.Instances[i], s.At)
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b *Total) int { return cmp.Compare(a.Name, b.Name) })
}

// Total returns one limit; nil if no instance has it.
func (s *Snapshot) Total(name string) *Total {
	t := &Total{Name: name}
	for i := range s.Instances {
		t.include(&s.Instances[i], s.At)
	}
	if t.Newest == nil {
		return nil
	}
	return t
}

// include adds the state in one instance.
func (t *Total) include(i *Instance, at time.Time) {
	l := i.Limits[t.Name]
	if l == nil {
		return
	}
	t.Counters = t.Plus(&l.Counters)
	if i.Silent(at) {
		if t.Newest == nil {
			t.Newest = l
		}
		return
	}
	if t.Instances++; t.Instances == 1 || l.newer(t.Newest) {
		t.Newest = l
	}
	if !slices.Contains(t.Deciders, l.Decider) {
		t.Deciders = append(t.Deciders, l.Decider)
	}
	t.Waiting = t.Waiting.plus(l.Waiting)
}

// plus returns the waiters of both.
func (w Waiting) plus(o Waiting) Waiting {
	w.Count += o.Count
	if !o.Since.IsZero() && (w.Since.IsZero() || o.Since.Before(w.Since)) {
		w.Since = o.Since
	}
	return w
}

func (l *Limit) newer(o *Limit) bool {
	if l.Config.Version != o.Config.Version {
		return l.Config.Version > o.Config.Version
	}
	return l.Bucket.At.After(o.Bucket.At)
}

// Rate has counts per second.
type Rate struct {
	Granted, Waited, Refused, Failed, Passed, WouldRefuse float64
	// P99 of the waits of granted calls. It does not exceed the wait that the row allows.
	P99 time.Duration
}

// Rates returns the rates between two snapshots, by limit. Limits without calls are missing. Take the snapshots 5 to 15 s
// apart: with less, an instance may not have published in between, and its rate is 0.
func Rates(before, now *Snapshot) map[string]Rate {
	all, counts, longest := map[string]Rate{}, map[string]Counters{}, map[string]time.Duration{}
	each(before, now, func(i, _ *Instance, name string, d Counters, over time.Duration) {
		all[name] = all[name].plus(&d, over)
		counts[name] = d.Plus(ref(counts[name]))
		longest[name] = max(longest[name], i.Limits[name].longestWait())
	})
	for name, c := range counts {
		r := all[name]
		r.P99 = c.QuantileWithin(0.99, longest[name])
		all[name] = r
	}
	return all
}

// RatesOf returns the rates of one limit, by instance ID.
func RatesOf(before, now *Snapshot, name string) map[string]Rate {
	all := map[string]Rate{}
	each(before.only(name), now.only(name), func(i, _ *Instance, _ string, d Counters, over time.Duration) {
		r := Rate{}.plus(&d, over)
		r.P99 = d.QuantileWithin(0.99, i.Limits[name].longestWait())
		all[i.ID] = r
	})
	return all
}

// longestWait returns how long a call may wait according to the row; without a row there is no bound.
func (l *Limit) longestWait() time.Duration {
	if l.Config.Wait > 0 {
		return l.Config.Wait
	}
	return math.MaxInt64
}

// OthersRate returns the rates of calls of names without a limit of their own.
func OthersRate(before, now *Snapshot) (sum Rate) {
	var counts Counters
	spans(before, now, func(i, was *Instance, over time.Duration) {
		var earlier Counters
		if was != nil {
			earlier = was.Others
		}
		d := i.Others.Minus(&earlier)
		sum, counts = sum.plus(&d, over), counts.Plus(&d)
	})
	sum.P99 = counts.Quantile(0.99)
	return sum
}

// RefusedBy returns the refused calls of each limit per second, by what refused them (Refusal). An instance publishes only
// the most frequent ones. The others are missing, and so are those of older versions.
func RefusedBy(before, now *Snapshot) map[string]map[string]float64 {
	type bound struct{ limit, by string }
	all := map[string]map[string]float64{}
	spans(before, now, func(i, was *Instance, over time.Duration) {
		earlier, whole := map[bound]int64{}, true
		if was != nil {
			for _, r := range was.Refusals {
				earlier[bound{r.Limit, r.By}] = r.Count
			}
			whole = len(was.Refusals) < MostRefusals
		}
		for _, r := range i.Refusals {
			n, known := earlier[bound{r.Limit, r.By}]
			if gained := r.Count - n; gained > 0 && (known || whole) { // otherwise it may have been counted earlier, and not published
				if all[r.Limit] == nil {
					all[r.Limit] = map[string]float64{}
				}
				all[r.Limit][r.By] += float64(gained) / over.Seconds()
			}
		}
	})
	return all
}

// PriorityRate has the calls of a limit with one priority, per second, and the number of its waiters.
type PriorityRate struct {
	Rate
	Waiting int
	counts  Counters
}

// RatesByPriority returns the rates of one limit by the name of the priority, and nil if no instance reports calls below Normal. Normal has
// the rest of the calls: also those of older versions, and those that no rate has decided, such as refusals by a window. An instance publishes
// only the priorities with the most calls. Calls of the others count as Normal.
func RatesByPriority(before, now *Snapshot, name string) map[string]*PriorityRate {
	all := map[string]*PriorityRate{}
	of := func(priority string) *PriorityRate {
		if all[priority] == nil {
			all[priority] = &PriorityRate{}
		}
		return all[priority]
	}
	normal := of(tokenbucket.Normal.String())
	for i := range now.Instances {
		n := &now.Instances[i]
		if l := n.Limits[name]; l != nil && !n.Silent(now.At) {
			rest := l.Waiting.Count
			for _, p := range n.priorities(name) {
				of(p.Name).Waiting += p.Waiting
				rest -= p.Waiting
			}
			normal.Waiting += max(0, rest)
		}
	}
	longest := time.Duration(0)
	each(before.only(name), now.only(name), func(i, was *Instance, _ string, d Counters, over time.Duration) {
		for _, p := range i.priorities(name) {
			if lower, known := was.gained(&p); known {
				of(p.Name).add(&lower, over)
				d = d.Minus(&lower)
			}
		}
		normal.add(&d, over)
		longest = max(longest, i.Limits[name].longestWait())
	})
	if len(all) == 1 {
		return nil
	}
	for _, r := range all {
		r.P99 = r.counts.QuantileWithin(0.99, longest)
	}
	return all
}

func (r *PriorityRate) add(d *Counters, over time.Duration) {
	r.Rate, r.counts = r.plus(d, over), r.counts.Plus(d)
}

// priorities returns the lower priorities of a limit.
func (i *Instance) priorities(name string) (all []Priority) {
	for _, p := range i.Priorities {
		if p.Limit == name {
			all = append(all, p)
		}
	}
	return all
}

// gained returns the calls of a priority since i, which is nil for an instance that was not there. It returns false if they are not known,
// because i had published others in their place.
func (i *Instance) gained(now *Priority) (d Counters, known bool) {
	if i == nil {
		return now.Counters, true
	}
	for _, p := range i.Priorities {
		if p.Limit == now.Limit && p.Name == now.Name {
			return now.Counters.Minus(&p.Counters), true
		}
	}
	return now.Counters, len(i.Priorities) < MostPriorities
}

func ref[T any](v T) *T { return &v }

func (r Rate) plus(d *Counters, over time.Duration) Rate {
	s := over.Seconds()
	r.Granted += float64(d.Granted) / s
	r.Waited += float64(d.Waited) / s
	r.Refused += float64(d.Refused) / s
	r.Failed += float64(d.Failed) / s
	r.Passed += float64(d.Passed) / s
	r.WouldRefuse += float64(d.WouldRefuse) / s
	return r
}

// only returns a snapshot with one limit.
func (s *Snapshot) only(name string) *Snapshot {
	few := &Snapshot{At: s.At}
	for _, i := range s.Instances {
		limits := map[string]*Limit{}
		if l := i.Limits[name]; l != nil {
			limits[name] = l
		}
		i.Limits = limits
		few.Instances = append(few.Instances, i)
	}
	return few
}

// each calls f for every changed limit of every instance that has published in between, with its earlier state, the difference of the
// counters and the time. See spans.
func each(before, now *Snapshot, f func(i, was *Instance, name string, d Counters, over time.Duration)) {
	spans(before, now, func(n, was *Instance, over time.Duration) {
		for name, l := range n.Limits {
			var earlier Counters
			if was != nil {
				w := was.Limits[name]
				if w == l { // unchanged: see Instance.Limits
					continue
				}
				if w != nil {
					earlier = w.Counters
				}
			}
			f(n, was, name, l.Minus(&earlier), over)
		}
	})
}

// spans calls f for every instance that has published in between, with its earlier state and the time since. An instance
// missing from the earlier snapshot counts from 0 if it started since then. Otherwise Redis may have lost it for a while.
func spans(before, now *Snapshot, f func(i, was *Instance, over time.Duration)) {
	past := map[string]*Instance{}
	for i := range before.Instances {
		past[before.Instances[i].ID] = &before.Instances[i]
	}
	for i := range now.Instances {
		n := &now.Instances[i]
		was := past[n.ID]
		since := before.At
		if was != nil {
			since = was.Beat
		} else if n.Started.Before(before.At.Add(-BeatEvery)) {
			continue
		}
		if over := n.Beat.Sub(since); over > 0 {
			f(n, was, over)
		}
	}
}
