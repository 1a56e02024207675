package fleet

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
)

func quote(s string) string { return fmt.Sprintf("%.120q", s) }

// Through is how many calls have passed.
func (c *Counters) Through() int64 { return c.Granted + c.Passed + c.WouldRefuse }

// Calls is how many there were.
func (c *Counters) Calls() int64 { return c.Through() + c.Refused + c.Failed }

// Plus returns the sum.
func (c Counters) Plus(o *Counters) Counters { return c.add(o, 1) }

// Minus returns what was counted since o; what went down counts as nothing.
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

// numbers are all but the sum of the waits.
func (c *Counters) numbers() (all [6 + len(Histogram{})]*int64) {
	copy(all[:], []*int64{&c.Granted, &c.Waited, &c.Refused, &c.Failed, &c.Passed, &c.WouldRefuse})
	for i := range c.Waits {
		all[6+i] = &c.Waits[i]
	}
	return all
}

// Quantile estimates how long a granted call waited that is slower than a share q of them: 0.99 is the p99. One that had its
// permit at once has waited for 0. Between two bounds waits count as spread evenly; beyond the last it is the last.
func (c *Counters) Quantile(q float64) time.Duration { return c.QuantileWithin(q, math.MaxInt64) }

// QuantileWithin is Quantile of calls that wait for at most so long: waits are spread evenly up to there.
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

// Curve is that of a limit that warms up: what a permit takes, by how many are stored.
//
//	   ^ interval
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

// Curve returns the curve of a limit that warms up, at a rate in force; false: it does not, or not in numbers that can be shown.
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

// Interval is what the next permit takes when so many are stored.
func (c *Curve) Interval(stored float64) time.Duration {
	above := min(max(0, stored-c.Threshold)/(c.Max-c.Threshold), 1)
	return c.Stable + time.Duration(above*float64(c.Cold-c.Stable))
}

// Silent tells whether an instance has not published for so long that it counts as gone, or has ended.
func (i *Instance) Silent(at time.Time) bool { return i.Ended || at.Sub(i.Beat) > SilentAfter }

// Total is a limit in the whole fleet.
type Total struct {
	Name string
	// Counters of all instances, also of those that have ended or died in the last ten minutes.
	Counters
	// Instances that live and know it.
	Instances int
	// Newest is what the living instance says that has looked at the bucket last, or has the newest version; without a
	// living one, the one that was heard last.
	Newest *Limit
	// Deciders of the living instances, without duplicates: more than one means that they disagree.
	Deciders []string
	// Waiting in all living instances.
	Waiting Waiting
}

// Totals are all limits, by name.
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

// Total is one limit; nil: no instance knows it.
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

// include adds what an instance says.
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
	t.Waiting.Count += l.Waiting.Count
	if since := l.Waiting.Since; !since.IsZero() && (t.Waiting.Since.IsZero() || since.Before(t.Waiting.Since)) {
		t.Waiting.Since = since
	}
}

func (l *Limit) newer(o *Limit) bool {
	if l.Config.Version != o.Config.Version {
		return l.Config.Version > o.Config.Version
	}
	return l.Bucket.At.After(o.Bucket.At)
}

// Rate is what happens in a second.
type Rate struct {
	Granted, Waited, Refused, Failed, Passed, WouldRefuse float64
	// P99 of the waits of granted calls. It is not above what the row allows.
	P99 time.Duration
}

// Rates are those of all limits between two snapshots, by name; of those that nobody called there is none. Take them 5 to 15 s apart: closer, an instance may not have
// published in between; its rate then is 0.
func Rates(before, now *Snapshot) map[string]Rate {
	all, counts, longest := map[string]Rate{}, map[string]Counters{}, map[string]time.Duration{}
	each(before, now, func(i *Instance, name string, d Counters, over time.Duration) {
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

// RatesOf are the rates of one limit, by instance id.
func RatesOf(before, now *Snapshot, name string) map[string]Rate {
	all := map[string]Rate{}
	each(before.only(name), now.only(name), func(i *Instance, _ string, d Counters, over time.Duration) {
		r := Rate{}.plus(&d, over)
		r.P99 = d.QuantileWithin(0.99, i.Limits[name].longestWait())
		all[i.ID] = r
	})
	return all
}

// longestWait is how long a call waits at most, by the row; without a row there is no bound.
func (l *Limit) longestWait() time.Duration {
	if l.Config.Wait > 0 {
		return l.Config.Wait
	}
	return math.MaxInt64
}

// OthersRate is what happens in a second to calls of names that have no limit of their own.
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

// RefusedBy returns how many calls of each limit were refused in a second, by what refused them (Refusal). An instance publishes the most
// frequent of them: others, and those of older versions, are missing.
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
			if gained := r.Count - n; gained > 0 && (known || whole) { // else it may have been counted before, and not published
				if all[r.Limit] == nil {
					all[r.Limit] = map[string]float64{}
				}
				all[r.Limit][r.By] += float64(gained) / over.Seconds()
			}
		}
	})
	return all
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

// only is a snapshot with one limit.
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

// each calls f for each limit that has changed of each instance that has published in between, with what was counted, and in which time.
func each(before, now *Snapshot, f func(i *Instance, name string, d Counters, over time.Duration)) {
	spans(before, now, func(n, was *Instance, over time.Duration) {
		for name, l := range n.Limits {
			var earlier Counters
			if was != nil {
				w := was.Limits[name]
				if w == l { // it has not changed: see Instance.Limits
					continue
				}
				if w != nil {
					earlier = w.Counters
				}
			}
			f(n, name, l.Minus(&earlier), over)
		}
	})
}

// spans calls f for each instance that has published in between, with what it was before, and the time from then on. An instance that
// was not there before counts from nothing if it has started since: Redis may just have forgotten it.
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
