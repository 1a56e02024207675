package console

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// faulty returns the faults that living instances report, each once, sorted by the number of failed calls. Reports of the
// same fault are merged: the earliest Since, and the sum of all calls.
func (v *view) faulty() []fleet.Fault {
	type key struct{ limit, bucket, by string }
	places := map[key]int{}
	var all []fleet.Fault
	for i := range v.instances {
		if v.instances[i].Silent(v.at) {
			continue
		}
		for _, f := range v.instances[i].Faults {
			k := key{f.Limit, f.Bucket, f.By}
			at, known := places[k]
			if !known {
				places[k] = len(all)
				all = append(all, f)
				continue
			}
			one := &all[at]
			one.Calls += f.Calls
			if !f.Since.IsZero() && (one.Since.IsZero() || f.Since.Before(one.Since)) {
				one.Since = f.Since
			}
		}
	}
	slices.SortStableFunc(all, func(a, b fleet.Fault) int {
		return cmp.Or(cmp.Compare(b.Calls, a.Calls), cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.Bucket, b.Bucket), cmp.Compare(a.By, b.By))
	})
	return all
}

// faultText returns what cannot be used, and for how long: "/a: its window cannot be used for 3 min".
func (v *view) faultText(f *fleet.Fault) string {
	what := bound(f.By)
	if f.By == "limit" {
		what = "bucket"
	}
	if f.Bucket != f.Limit && f.Limit != "" {
		what += " " + figure.Name(f.Bucket)
	}
	return fmt.Sprintf("%s: its %s cannot be used%s", figure.Name(cmp.Or(f.Limit, f.Bucket)), what, v.over(f.Since))
}

// over returns how long something has lasted, as the end of a sentence; empty if not known.
func (v *view) over(since time.Time) string {
	if since.IsZero() {
		return ""
	}
	return " for " + figure.Span(max(0, v.at.Sub(since)).Truncate(time.Second))
}

// faultNotices returns the faults for the strip, one per limit.
func (v *view) faultNotices() (all []notice) {
	seen := map[string]bool{}
	for _, f := range v.faulty() {
		name := cmp.Or(f.Limit, f.Bucket)
		if seen[name] {
			continue
		}
		seen[name] = true
		n := notice{Text: v.faultText(&f), Tone: "bad", Link: "limit?name=" + url.QueryEscape(name)}
		if l := v.limit(name); l != nil {
			n.rate = l.rate.Failed
		}
		if len(seen) > mostNamed {
			last := &all[len(all)-1]
			last.Text, last.Link = "Further buckets, windows or concurrencies cannot be used", "./?q=failing"
			last.rate += n.rate
			continue
		}
		all = append(all, n)
	}
	return all
}
