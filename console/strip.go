package console

import (
	"cmp"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// notice is an unusual state, shown on top of the first page: what, since when, where, and how many calls it concerns.
type notice struct {
	Text  string `json:"text"`
	Calls string `json:"calls"` // 12.5/s
	Tone  string `json:"tone"`  // bad, warm, quiet
	Link  string `json:"link"`

	rate float64
}

// kind is a state of limits that deserves a notice.
type kind struct {
	state     string // one of limit.states; empty for limits that refuse
	one, many string
	tone      string
	calls     func(*limit) float64
}

var kinds = []kind{
	{"rejected row", "has a row that is rejected", "rows are rejected", "bad", (*limit).calls},
	{"failing", "gets no decision", "limits get no decision", "bad", func(l *limit) float64 { return l.rate.Failed }},
	{"nothing passes", "lets nothing pass", "limits let nothing pass", "bad", (*limit).refused},
	{"penalised", "is held back", "limits are held back", "bad", (*limit).refused},
	{"no instance", "is in no instance", "limits are in no instance", "bad", (*limit).calls},
	{"", "refuses", "limits refuse", "warm", (*limit).refused},
	{"off", "is off", "limits are off", "warm", (*limit).granted},
	{"shadow", "is in shadow and would refuse", "limits are in shadow and would refuse", "warm", (*limit).refused},
	{"no traffic", "has no traffic", "limits have no traffic", "quiet", func(*limit) float64 { return 0 }},
}

// calls returns the calls of a limit, per second.
func (l *limit) calls() float64 { return l.granted() + l.refused() + l.rate.Failed }

// has reports whether a limit in these states belongs to the kind. A limit that refuses for a reason with a kind of its own
// is not counted among those that just refuse.
func (k *kind) has(l *limit, words []string) bool {
	if k.state != "" {
		return slices.Contains(words, k.state)
	}
	return l.refused() > 0 && !slices.ContainsFunc(words, func(w string) bool { return w != "failing" })
}

// newStrip returns the notices, sorted by the calls that they concern. view.strip caches the result.
func (v *view) newStrip() []notice {
	all := v.faults()
	broken := map[string]bool{}
	for _, f := range v.faulty() {
		broken[f.Limit] = true
	}
	of := make([][]*limit, len(kinds))
	for i := range v.limits {
		l := &v.limits[i]
		words := l.states(v)
		if broken[l.name()] { // it has a notice of its own
			words = slices.DeleteFunc(words, func(w string) bool { return w == "failing" })
		}
		for k := range kinds {
			if kinds[k].has(l, words) {
				of[k] = append(of[k], l)
			}
		}
	}
	for i, limits := range of {
		k := &kinds[i]
		if len(limits) == 0 {
			continue
		}
		n := notice{Text: figure.Count(len(limits)) + " " + k.many, Tone: k.tone, Link: "./?q=" + url.QueryEscape(k.state)}
		if k.state == "" {
			n.Link = "./?sort=-refused"
		}
		if len(limits) == 1 {
			l := limits[0]
			n.Text, n.Link = figure.Name(l.name())+" "+k.one, "limit?name="+url.QueryEscape(l.name())
			if by := v.refusers(l.name()); k.state == "" && by != "" {
				n.Text += ", by: " + by
			}
			if until := l.total.Newest.Bucket.HeldUntil; k.state == "penalised" {
				n.Text += " for another " + figure.Span(until.Sub(v.at))
				if by := v.heldBy(l.name()); by != "" {
					n.Text += ", " + by
				}
			}
		}
		for _, l := range limits {
			n.rate += k.calls(l)
		}
		all = append(all, n)
	}
	tones := []string{"bad", "warm", "quiet"}
	slices.SortStableFunc(all, func(a, b notice) int {
		return cmp.Or(cmp.Compare(rank(a.Tone == "quiet"), rank(b.Tone == "quiet")), cmp.Compare(b.rate, a.rate),
			cmp.Compare(slices.Index(tones, a.Tone), slices.Index(tones, b.Tone)))
	})
	for i := range all {
		if v.measured() && all[i].rate > 0 {
			all[i].Calls = figure.Number(all[i].rate) + "/s"
		}
	}
	return all
}

// faults returns the notices about the switch, the table and instances.
func (v *view) faults() (all []notice) {
	total := v.totals()
	if v.sw != nil && v.sw.Off {
		all = append(all, notice{Text: "The switch is off" + v.over(v.sw.Since), Tone: "bad", Link: "health", rate: total.Granted})
	}
	// Calls without a limit of their own are decided by --unknown. These are the calls that a lost row concerns.
	unlimited := v.others.Granted + v.others.Passed + v.others.Refused + v.others.WouldRefuse
	switch lost, _ := v.loss(); {
	case lost != nil && lost.Held > 0:
		all = append(all, notice{Text: lostOf(lost) + v.over(lost.Lost) + ", still in force", Tone: "bad", Link: "health"})
	case lost != nil:
		all = append(all, notice{Text: lostOf(lost) + v.over(lost.Lost), Tone: "bad", Link: "health", rate: unlimited})
	case len(v.limits) == 0 && v.living() > 0:
		all = append(all, notice{Text: "There are no limits", Tone: "bad", Link: "health", rate: unlimited})
	case len(v.instances) == 0:
		all = append(all, notice{Text: "No instance has reported yet", Tone: "bad", Link: "health"})
	}
	all = append(all, v.faultNotices()...)
	// group adds one notice for all instances of which is returns true, with the earliest time.
	group := func(text func(names, over string) string, is func(*instance) bool, began func(*instance) time.Time) {
		var names []string
		var since time.Time
		n := notice{Tone: "bad", Link: "health"}
		for i := range v.instances {
			if one := &v.instances[i]; !one.Ended && !v.replaced[one.ID] && is(one) {
				names = append(names, one.title())
				n.rate += one.granted + one.refused
				if at := began(one); !at.IsZero() && (since.IsZero() || at.Before(since)) {
					since = at
				}
			}
		}
		if len(names) == 0 {
			return
		}
		who := strings.Join(names, ", ")
		if len(names) > 2 {
			who = figure.Count(len(names)) + " of " + figure.Count(len(v.instances)) + " instances"
		}
		n.Text = text(who, v.over(since))
		all = append(all, n)
	}
	silent := func(i *instance) bool { return v.at.Sub(i.Beat) > overdue }
	group(func(who, over string) string { return "No report from " + who + over }, silent, func(i *instance) time.Time { return i.Beat })
	group(func(who, over string) string { return "Store unavailable" + over + ": " + who },
		func(i *instance) bool { return !silent(i) && i.Store.Down }, func(i *instance) time.Time { return i.Store.Since })
	group(func(who, over string) string {
		return "Loads fail" + over + ", the old limits stay in force: " + who
	},
		func(i *instance) bool { return !silent(i) && i.Loads.Err != "" }, func(i *instance) time.Time { return i.Loads.Last })
	group(func(who, _ string) string { return "Rows are gone whose limits are held: " + who },
		func(i *instance) bool { return !silent(i) && i.Loads.Held > 0 && i.Loads.Gone == 0 }, func(*instance) time.Time { return time.Time{} })
	return all
}

// lostOf describes a loss: "16 of 17 limits are gone from the table".
func lostOf(l *fleet.Loads) string {
	return figure.Count(l.Gone) + " of " + figure.Count(l.Before) + " limits are gone from the table"
}
