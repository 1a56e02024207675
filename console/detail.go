package console

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// detail is what the page of one limit is sent, once in a beat.
type detail struct {
	At       int64    `json:"at"` // milliseconds since 1970
	Problems []string `json:"problems"`
	Known    bool     `json:"known"` // an instance has the limit
	Measured bool     `json:"measured"`
	Config   string   `json:"config"`
	Uses     string   `json:"uses"` // of its window and its concurrency
	State    string   `json:"state"`
	Rejected string   `json:"rejected,omitempty"`
	Held     int64    `json:"held,omitempty"` // until then, in milliseconds since 1970
	Figures  figures  `json:"figures"`
	Shares   []share  `json:"shares"`
	Keys     []key    `json:"keys"`
	Bucket   *bucket  `json:"bucket,omitempty"`
	Curve    *curve   `json:"curve,omitempty"`
}

// figures are per second; those in milliseconds are named so.
type figures struct {
	Granted float64 `json:"granted"`
	Refused float64 `json:"refused"`
	Waited  float64 `json:"waited"`
	Failed  float64 `json:"failed"`
	Rate    float64 `json:"rate"`
	Waiting int     `json:"waiting"`
	Oldest  float64 `json:"oldest_ms"`
	P99     float64 `json:"p99_ms"`
	Stored  float64 `json:"stored"`
	Max     float64 `json:"max"`
}

// share is what one instance does of a limit.
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

// curve is that of a warm-up: milliseconds that a permit takes, by stored permits.
type curve struct {
	Stable    float64 `json:"stable_ms"`
	Cold      float64 `json:"cold_ms"`
	Threshold float64 `json:"threshold"`
	Max       float64 `json:"max"`
	Stored    float64 `json:"stored"`
	Now       float64 `json:"now_ms"`
}

const mostKeys = 20

// detail is one limit as the view has it.
func (v *view) detail(name string) *detail {
	d := &detail{At: v.at.UnixMilli(), Measured: v.measured(), Problems: v.problems(), Shares: []share{}, Keys: v.keys(name)}
	for i := range v.rejected {
		if v.rejected[i].Name == name {
			d.Rejected = reason(&v.rejected[i]) + "; " + v.rejected[i].Consequence
		}
	}
	l := v.limit(name)
	if l == nil {
		return d
	}
	b := &l.total.Newest.Bucket
	d.Known, d.Config, d.State = true, describe(l.total.Newest), strings.Join(l.words(v), ", ")
	if b.HeldUntil.After(v.at) {
		d.Held = b.HeldUntil.UnixMilli()
	}
	d.Figures = figures{
		Granted: round(l.through()), Refused: round(l.turned()), Waited: round(l.rate.Waited), Failed: round(l.rate.Failed), Rate: round(b.Rate),
		Waiting: l.total.Waiting.Count, Oldest: v.since(l.total.Waiting.Since), P99: millis(l.rate.P99), Stored: round(b.Stored), Max: round(b.Max),
	}
	d.Uses = v.uses(name)
	d.Shares = v.shares(name)
	if c, ok := l.config().Curve(cmp.Or(b.Rate, l.config().Rate)); ok && !b.At.IsZero() {
		d.Curve = &curve{millis(c.Stable), millis(c.Cold), c.Threshold, c.Max, b.Stored, millis(c.Interval(b.Stored))}
	}
	return d
}

// uses is how much is in use of what a limit has besides its rate, in the whole fleet; empty: nobody has told.
func (v *view) uses(name string) string {
	var parts []string
	h := v.holders()
	for _, w := range h.Windows {
		if w.Name == name {
			parts = append(parts, fmt.Sprintf("%d of %d calls in the last %s", w.Used, w.Limit, exact(w.Length)))
		}
	}
	for _, s := range h.Semaphores {
		if s.Name == name {
			parts = append(parts, fmt.Sprintf("%d of %d calls under way", s.Used, s.Permits))
		}
	}
	return strings.Join(parts, ", ")
}

func millis(d time.Duration) float64 { return round(d.Seconds() * 1000) }

// since is how many milliseconds ago something was.
func (v *view) since(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return max(0, millis(v.at.Sub(t)))
}

func (v *view) shares(name string) []share {
	all := []share{}
	rates := fleet.RatesOf(v.past, v.now, name)
	for i := range v.instances {
		one := &v.instances[i]
		l := one.Limits[name]
		if l == nil {
			continue
		}
		r := rates[one.ID]
		s := share{
			Instance: one.title(), Granted: round(r.Granted + r.Passed), Refused: round(r.Refused + r.WouldRefuse), Failed: round(r.Failed),
			Waiting: l.Waiting.Count, Oldest: v.since(l.Waiting.Since), Config: describe(l), Problem: one.trouble(v.at),
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

// keys are those of a limit that were refused most, by all instances.
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

// limitStream is for who looks at one limit.
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

func (c *Console) readLimit(ctx context.Context, name string) []byte {
	v, err := c.board.now(ctx)
	if err != nil {
		return event("lost", must(json.Marshal(lost(err))))
	}
	d := v.detail(name)
	if source, ok := c.config.Source.(Buckets); ok {
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
