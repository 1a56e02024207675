package console

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// detail is the message to a limit's page, sent once per beat.
type detail struct {
	At       int64     `json:"at"` // milliseconds since 1970
	Problems []problem `json:"problems"`
	Known    bool      `json:"known"` // whether an instance has the limit
	Measured bool      `json:"measured"`
	Config   string    `json:"config"`
	State    string    `json:"state"`
	Rejected string    `json:"rejected,omitempty"`
	Held     int64     `json:"held,omitempty"` // until when, in milliseconds since 1970; 0 if not held back
	HeldBy   string    `json:"held_by,omitempty"`
	Figures  figures   `json:"figures"`
	Tiles    []tile    `json:"tiles"`
	Shares   []share   `json:"shares"`
	Keys     []key     `json:"keys"`
	NoKeys   string    `json:"no_keys"` // why Keys is empty
	Bucket   *bucket   `json:"bucket,omitempty"`
	Curve    *curve    `json:"curve,omitempty"`
	// Priorities is empty unless there are calls below Normal.
	Priorities []priority `json:"priorities,omitempty"`
	// Marks are the events in the chart's first period, for pages without scripts; NoMarks is why they are not known.
	Marks   []mark `json:"-"`
	NoMarks string `json:"-"`
	// Shadow reports whether the row refuses no call: then figures of refused calls are of those that it would refuse.
	Shadow bool `json:"shadow"`
}

// figures are the chart's values, per second.
type figures struct {
	Granted float64 `json:"granted"`
	Refused float64 `json:"refused"`
	Waited  float64 `json:"waited"`
	Rate    float64 `json:"rate"`
}

// tile is a figure in words. If Of is positive, it has a bar of Used out of Of.
type tile struct {
	Title string  `json:"title"`
	Value string  `json:"value"`
	Unit  string  `json:"unit"`
	Tone  string  `json:"tone"` // good, bad, or none
	Used  float64 `json:"used"`
	Of    float64 `json:"of"`
	// Past has the earlier values of Used, the oldest first; for windows and concurrency only.
	Past []float64 `json:"past,omitempty"`
}

// share is one instance's part in a limit.
type share struct {
	Instance string  `json:"instance"`
	Granted  float64 `json:"granted"`
	Refused  float64 `json:"refused"`
	Failed   float64 `json:"failed"`
	Waiting  int     `json:"waiting"`
	Oldest   float64 `json:"oldest_ms"`
	Config   string  `json:"config"`
	Problem  string  `json:"problem,omitempty"`
}

// priority has the calls of one priority that the rate has decided.
type priority struct {
	Name    string  `json:"name"`
	Granted float64 `json:"granted"`
	Refused float64 `json:"refused"`
	Waiting int     `json:"waiting"`
	P99     float64 `json:"p99_ms"` // of the waits; 0 if there are none
}

type key struct {
	Key   string `json:"key"`
	Count int64  `json:"count"`
	Error int64  `json:"error,omitempty"`
}

type bucket struct {
	Key     string      `json:"key"`
	Fields  [][2]string `json:"fields"`
	Problem string      `json:"problem,omitempty"`
}

// curve is a warm-up curve: milliseconds per permit by the number of stored permits.
type curve struct {
	Stable    float64 `json:"stable_ms"`
	Cold      float64 `json:"cold_ms"`
	Threshold float64 `json:"threshold"`
	Max       float64 `json:"max"`
	Stored    float64 `json:"stored"`
	Now       float64 `json:"now_ms"`
}

const mostKeys, mostPriorities = 20, 10

// detail returns one limit of the view.
func (v *view) detail(name string) *detail {
	d := &detail{At: v.at.UnixMilli(), Measured: v.measured(), Problems: v.problems(), Shares: []share{}, Tiles: []tile{}, Keys: v.keys(name)}
	for i := range v.rejected {
		if v.rejected[i].Name == name {
			bad := v.rejected[i]
			bad.Want = formWant(bad.Want)
			d.Rejected = reason(&bad) + "; " + bad.Consequence
		}
	}
	l := v.limit(name)
	if l == nil {
		return d
	}
	b := &l.total.Newest.Bucket
	d.Shadow = l.config().Shadow
	d.Known, d.Config, d.State = true, describe(l.total.Newest), strings.Join(l.states(v), ", ")
	if b.HeldUntil.After(v.at) {
		d.Held, d.HeldBy = b.HeldUntil.UnixMilli(), v.heldBy(name)
	}
	d.Figures = figures{Granted: round(l.granted()), Refused: round(l.refused()), Waited: round(l.rate.Waited), Rate: round(b.Rate)}
	d.Tiles = v.tiles(l)
	switch refused := l.total.Refused + l.total.WouldRefuse; {
	case len(d.Keys) > 0:
	case refused == 0:
		d.NoKeys = "No call was refused since the instances started."
	default:
		d.NoKeys = "Keys are not counted for this row: its calls have no other key than its name."
	}
	d.Shares, d.Priorities = v.shares(name), v.priorities(name)
	if c, ok := l.config().Curve(cmp.Or(b.Rate, l.config().Rate)); ok && !b.At.IsZero() {
		d.Curve = &curve{millis(c.Stable), millis(c.Cold), c.Threshold, c.Max, b.Stored, millis(c.Interval(b.Stored))}
	}
	return d
}

// heldBy returns the person who holds a limit back, and the reason; empty if not known.
func (v *view) heldBy(name string) string {
	if e, ok := v.held[name]; ok {
		return author(&e)
	}
	return ""
}

// tiles returns the figures that apply to a limit. One without a window has no tile for it, for example.
func (v *view) tiles(l *limit) (all []tile) {
	c, b, r := l.config(), &l.total.Newest.Bucket, &l.rate
	add := func(t tile) { all = append(all, t) }
	perSecond := func(title string, f float64, tone string) {
		text := "–"
		if v.measured() {
			text = figure.Number(f)
		}
		if f == 0 {
			tone = ""
		}
		add(tile{Title: title, Value: text, Unit: "/s", Tone: tone})
	}
	if !c.NoRate && b.Rate > 0 {
		add(tile{Title: "Rate in force", Value: figure.Number(b.Rate), Unit: "/s"})
	}
	perSecond("Granted", l.granted(), "good")
	if c.Shadow {
		perSecond("Would be refused", l.refused(), "bad")
	} else {
		perSecond("Refused", l.refused(), "bad")
		if by := v.refusedRates(l.name()); by != "" {
			all[len(all)-1].Unit += ", by: " + by
		}
	}
	if r.Failed > 0 {
		perSecond("Failed", r.Failed, "bad")
	}
	all = append(all, v.useTiles(l.name())...)
	if waiting := l.total.Waiting; c.Wait > 0 && !c.NoRate || waiting.Count > 0 || r.Waited > 0 {
		perSecond("Waited", r.Waited, "")
		p99 := tile{Title: "p99 wait", Value: "–"}
		if r.P99 > 0 {
			p99.Value, p99.Unit, _ = strings.Cut(figure.Span(r.P99), " ")
		}
		add(p99)
		now := tile{Title: "Waiting now", Value: figure.Count(waiting.Count)}
		if oldest := v.oldest(l.name()); oldest > 0 {
			now.Unit = "oldest " + figure.Span(oldest)
		}
		add(now)
	}
	if b.Max > 0 && c.Kind != fleet.Quota {
		add(tile{Title: "Saved up", Value: figure.Number(b.Stored), Unit: "of " + figure.Number(b.Max), Used: min(b.Stored, b.Max), Of: b.Max})
	}
	return all
}

// useTiles returns the usage of a limit's window and concurrency in the whole fleet. It is empty if no instance reports any.
func (v *view) useTiles(name string) (all []tile) {
	add := func(title string, used, of int64, key use) {
		all = append(all, tile{title, figure.Count(used), "of " + figure.Count(of) + " calls", full(used, of), float64(used), float64(of), v.used[key]})
	}
	h := v.holders()
	for _, w := range h.Windows {
		if w.Name == name {
			add("In the last "+figure.Exact(w.Length), w.Used, w.Limit, use{name, true})
		}
	}
	for _, s := range h.Semaphores {
		if s.Name == name {
			add("At once", int64(s.Used), int64(s.Permits), use{name, false})
		}
	}
	return all
}

func millis(d time.Duration) float64 { return round(d.Seconds() * 1000) }

// oldest returns how long the oldest waiter of a limit had waited when its instance reported it; 0 without waiters. It may
// have left since, so the time until the view was made is no part of its wait.
func (i *instance) oldest(l *fleet.Limit) time.Duration {
	if l == nil || l.Waiting.Since.IsZero() {
		return 0
	}
	return max(0, i.Beat.Sub(l.Waiting.Since))
}

// oldest returns the longest of the waits in all living instances.
func (v *view) oldest(name string) (longest time.Duration) {
	for i := range v.instances {
		if one := &v.instances[i]; !one.Silent(v.at) {
			longest = max(longest, one.oldest(one.Limits[name]))
		}
	}
	return longest
}

func (v *view) shares(name string) []share {
	all := []share{}
	rates := fleet.RatesOf(v.earlier, v.now, name)
	for i := range v.instances {
		one := &v.instances[i]
		l := one.Limits[name]
		if l == nil {
			continue
		}
		r := rates[one.ID]
		s := share{
			Instance: one.title(), Granted: round(r.Granted + r.Passed), Refused: round(r.Refused + r.WouldRefuse), Failed: round(r.Failed),
			Waiting: l.Waiting.Count, Oldest: millis(one.oldest(l)), Config: describe(l), Problem: v.trouble(one),
		}
		if one.Ended {
			s.Problem = "has ended"
		}
		if one.Silent(v.at) {
			s.Waiting, s.Oldest = 0, 0
		}
		all = append(all, s)
	}
	return all
}

// priorities returns the calls of a limit by priority, the highest first. Those of a newer gateway come last.
func (v *view) priorities(name string) (all []priority) {
	for p, r := range fleet.RatesByPriority(v.earlier, v.now, name) {
		refused := r.Refused + r.WouldRefuse
		if p == tokenbucket.Normal.String() {
			for by, n := range v.refusedBy[name] {
				if by != gate.ByLimit.String() && by != gate.ByPenalty.String() { // a bound without priorities
					refused -= n
				}
			}
		}
		all = append(all, priority{figure.Name(p), round(r.Granted + r.Passed), round(max(0, refused)), r.Waiting, millis(r.P99)})
	}
	slices.SortFunc(all, func(a, b priority) int {
		return cmp.Or(cmp.Compare(place(a.Name), place(b.Name)), cmp.Compare(a.Name, b.Name))
	})
	return all[:min(len(all), mostPriorities)]
}

// place returns the place of a priority in a list.
func place(name string) tokenbucket.Priority {
	p, err := tokenbucket.ParsePriority(name)
	if err != nil {
		return tokenbucket.Lowest + 1
	}
	return p
}

// keys returns the keys of a limit with the most refusals, summed over all instances.
func (v *view) keys(name string) []key {
	sums := map[string]*key{}
	for i := range v.instances {
		for _, k := range v.instances[i].Refused {
			if k.Limit != name {
				continue
			}
			text := cmp.Or(k.Key, k.Limit)
			if sums[text] == nil {
				sums[text] = &key{Key: text}
			}
			sums[text].Count += k.Count
			sums[text].Error += k.Error
		}
	}
	all := []key{}
	for _, k := range sums {
		all = append(all, *k)
	}
	slices.SortFunc(all, func(a, b key) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Key, b.Key)) })
	return all[:min(len(all), mostKeys)]
}

// limitStream streams the page of one limit.
func (c *Console) limitStream(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("name")
	if name == "" || len(name) > maxName {
		c.refuse(w, r, errName)
		return
	}
	c.stream(w, r, func() *feed {
		return c.feedOf("limit "+name, func(ctx context.Context) []byte { return c.readLimit(ctx, name) })
	})
}

// mostBucketReads bounds the buckets that are read in a beat, for the pages of limits.
const mostBucketReads = 100

// readBudget counts readings of buckets. The zero value is ready for use by several goroutines.
type readBudget struct {
	mu    sync.Mutex
	began time.Time // of the present beat
	used  int       // in it
}

// take reports whether there may be one reading more in this beat.
func (b *readBudget) take(now time.Time, beat time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now.Sub(b.began) >= beat {
		b.began, b.used = now, 0
	}
	b.used++
	return b.used <= mostBucketReads
}

func (c *Console) readLimit(ctx context.Context, name string) []byte {
	v, err := c.board.now(ctx)
	if err != nil {
		return c.lost(err)
	}
	d := v.detail(name)
	switch source, ok := c.config.Source.(Buckets); {
	case !ok, !d.Known: // anybody can invent a name, and each would cost a command of Redis per beat
	case !c.bucketReads.take(time.Now(), c.config.Beat):
		d.Bucket = &bucket{Fields: [][2]string{}, Problem: "Not read: more than " + figure.Count(mostBucketReads) + " limits are being viewed."}
	default:
		d.Bucket = &bucket{Fields: [][2]string{}}
		key, fields, err := source.Bucket(ctx, name)
		if d.Bucket.Key = key; len(fields) > 0 {
			d.Bucket.Fields = fields
		}
		if err != nil {
			d.Bucket.Problem = err.Error()
		}
	}
	return event("limit", must(json.Marshal(d)))
}
