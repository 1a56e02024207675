package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// mostPoints is the length of a history: a day.
const mostPoints = int(Day / Minute)

// History returns a point for each minute since from, the present one included, but at most a day. Minutes begin by Redis'
// clock. The rate of a point is that of the last call before it, or 0 if there is none.
func (r *Reader) History(ctx context.Context, name string, from time.Time) ([]Point, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if !named(name) {
		return nil, fmt.Errorf("fleet: limit %.40q: want 1 to %d bytes of UTF-8", name, mostName)
	}
	at, err := r.time(ctx)
	if err != nil {
		return nil, err
	}
	last := time.UnixMilli(at).Truncate(Minute)
	first := last.Add(-time.Duration(mostPoints-1) * Minute)
	if from.After(first) {
		first = from.Truncate(Minute)
	}
	if first.After(last) {
		return nil, nil
	}
	var keys []string
	begin, end := hourOf(first.UnixMilli()), hourOf(at)
	for hour := begin; hour <= end; hour++ {
		keys = append(keys, r.publishedKey(hour), r.historyKey(hour, name))
	}
	reply, err := historyScript.run(ctx, r.client, len(keys), keys...)
	if err != nil {
		return nil, err
	}
	points := make([]Point, last.Sub(first)/Minute+1)
	for i := range points {
		points[i].Minute = first.Add(time.Duration(i) * Minute)
	}
	return points, fill(points, begin, reply)
}

// fill decodes the reply of history.lua, whose first hour is hour, into points.
func fill(points []Point, hour int64, reply []string) error {
	rate, at := 0.0, func(minute int64) *Point {
		i := minute - points[0].Minute.Unix()/60
		if i < 0 || i >= int64(len(points)) {
			return &Point{}
		}
		return &points[i]
	}
	for ; len(reply) >= 2; hour++ {
		published := reply[0]
		n, err := strconv.Atoi(reply[1])
		if err != nil || n < 0 || n > len(reply)-2 {
			return unreadable(nil)
		}
		fields := map[string]string{}
		for i := 2; i+1 < n+2; i += 2 {
			fields[reply[i]] = reply[i+1]
		}
		reply = reply[n+2:]
		for m := range int64(60) {
			p := at(hour*60 + m)
			p.Published = m/8 < int64(len(published)) && published[m/8]&(0x80>>(m%8)) != 0
			field := strconv.FormatInt(m, 10)
			if r, err := numbers(fields["r"+field], 1); err == nil && len(r) == 1 {
				rate = r[0]
			}
			p.Rate = rate
			var c Counters
			if parseCounters(fields[field], &c) == nil { // otherwise no Publisher has written it
				p.Granted, p.Refused, p.Waited, p.Failed, p.Passed, p.WouldRefuse = c.Granted, c.Refused, c.Waited, c.Failed, c.Passed, c.WouldRefuse
				p.WaitSum = c.WaitSum
			}
		}
	}
	return nil
}

// Events returns the events since from, but at most a day back and at most MostEvents, the oldest first.
func (r *Reader) Events(ctx context.Context, from time.Time) ([]Event, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	least := max(0, from.UnixMilli())
	members, _, err := r.members(ctx, r.eventsKey(), strconv.FormatInt(least, 10), MostEvents, mostEventSize, &Snapshot{})
	if err != nil {
		return nil, err
	}
	var all []Event
	for _, m := range members {
		if e, ok := parseEvent(m); ok {
			all = append(all, e)
		}
	}
	slices.Reverse(all)
	return all, nil
}

// parseEvent decodes time:text.
func parseEvent(m member) (e Event, ok bool) {
	_, text, found := strings.Cut(m.text, ":")
	if !found || !(m.score >= 0 && m.score < 1<<42) || json.Unmarshal([]byte(text), &e) != nil || e.Kind == "" {
		return Event{}, false
	}
	e.At = time.UnixMilli(int64(m.score))
	e.shorten()
	return e, true
}
