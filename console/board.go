package console

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// board keeps the current figures of all limits: the rows of the first page, for pages and streams.
type board struct {
	source Source
	rows   func() []registry.Limit // the configured limits; may be nil
	here   func() Here
	feed   *feed

	mu     sync.Mutex
	latest *view // of the last successful beat; nil before the first
	err    error // of the last beat
	rounds chan struct{}
	sparks map[string][]float64 // of each limit with traffic: granted and refused of the last beats, alternating

	// Used by the reading goroutine only.
	names  []string
	fixed  [][]byte // of each row: the part that changes with the configuration only
	sent   [][]byte // of each row: the figures last sent
	cursor int
	used   map[use][]float64 // of the last beats
	last   []*fleet.Snapshot // of the last seconds, the oldest first
}

const (
	// maxChanged bounds the rows of a frame. If more rows change at once, the others follow in the next frames, in turns.
	maxChanged = 1000
	// rateWindow is the time over which rates are computed. Each instance reports more than once within it.
	rateWindow = 6 * time.Second
	// sparkBeats is the length of a sparkline, in beats.
	sparkBeats = 30
	// linger is how long the reader continues without viewers, so that a page that is opened again has its figures at once.
	linger = time.Minute
)

func newBoard(source Source, rows func() []registry.Limit, beat time.Duration) *board {
	b := &board{source: source, rows: rows, here: func() Here { return Here{} }, rounds: make(chan struct{}), sparks: map[string][]float64{}}
	b.feed = &feed{beat: beat, linger: linger, read: b.read, ended: b.forget}
	return b
}

// now returns the latest view, and waits for the first one if necessary.
func (b *board) now(ctx context.Context) (*view, error) {
	looks := b.feed.join()
	defer b.feed.leave(looks)
	for {
		b.mu.Lock()
		v, err, round := b.latest, b.err, b.rounds
		b.mu.Unlock()
		if v != nil || err != nil {
			return v, err
		}
		select {
		case <-round:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// forget drops the view when the reader ends, because it becomes stale.
func (b *board) forget() {
	b.mu.Lock()
	b.latest, b.err = nil, nil
	b.mu.Unlock()
}

// frame is one message to a browser. Rows are sorted by name.
type frame struct {
	At       int64                      `json:"at"` // milliseconds since 1970
	Problems []problem                  `json:"problems"`
	Totals   totals                     `json:"totals"`
	Strip    []notice                   `json:"strip"`
	Rows     []json.RawMessage          `json:"rows,omitzero"`     // every row as name, configuration and figures; also if empty
	Changed  map[string]json.RawMessage `json:"changed,omitempty"` // figures by row number
	Sparks   map[string][]float64       `json:"sparks,omitempty"`  // granted and refused, alternating, by row number
}

type totals struct {
	Limits    int     `json:"limits"`
	Instances int     `json:"instances"`
	Granted   float64 `json:"granted"`
	Refused   float64 `json:"refused"`
	Measured  bool    `json:"measured"`
	Waiting   int     `json:"waiting"`
	SwitchOff bool    `json:"off"`
	// Unlimited and UnlimitedRefused are calls without a row. They are included in Granted and Refused.
	Unlimited        float64 `json:"unlimited"`
	UnlimitedRefused float64 `json:"unlimited_refused"`
	Empty            string  `json:"empty,omitempty"` // the text shown in place of an empty list
}

// look reads a snapshot from the source and compares it with the one some seconds ago.
func (b *board) look(ctx context.Context) (*view, error) {
	now, err := b.source.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	if n := len(b.last); n > 0 && now.At.Sub(b.last[n-1].At) > rateWindow+2*b.feed.beat { // there were no viewers meanwhile
		b.last, b.used = nil, nil
		b.mu.Lock()
		clear(b.sparks)
		b.mu.Unlock()
	}
	b.last = append(b.last, now)
	for len(b.last) > 2 && now.At.Sub(b.last[1].At) >= rateWindow {
		b.last = b.last[1:]
	}
	v := newView(b.last[0], now)
	if v.here = b.here(); v.here.Switch != nil {
		v.sw = v.here.Switch
	}
	b.used = v.remembered(b.used)
	v.used = b.used
	if b.rows != nil {
		v.include(b.rows())
	}
	if v.needsEvents() {
		if events, err := b.source.Events(ctx, now.At.Add(-fleet.Day)); err == nil { // without the events, only the name of the person is missing
			v.attribute(events)
		}
	}
	return v, nil
}

func (b *board) read(ctx context.Context) (change []byte, whole func() []byte) {
	v, err := b.look(ctx)
	b.mu.Lock()
	b.latest = v
	if err == nil && v.measured() {
		for i := range v.limits {
			b.remember(&v.limits[i])
		}
	}
	b.err = err
	close(b.rounds)
	b.rounds = make(chan struct{})
	b.mu.Unlock()
	if err != nil {
		here := b.here()
		return event("lost", must(json.Marshal(here.lost(err)))), nil
	}
	return b.frames(v)
}

// frames returns the frame with the changes since the last beat, and a function for the full frame.
func (b *board) frames(v *view) (change []byte, whole func() []byte) {
	f := frame{At: v.at.UnixMilli(), Problems: v.problems(), Totals: v.totals(), Strip: v.strip()}
	same := b.names != nil && len(v.limits) == len(b.names)
	fixed, figures := make([][]byte, len(v.limits)), make([][]byte, len(v.limits))
	for i := range v.limits {
		l := &v.limits[i]
		fixed[i], figures[i] = l.fixed(), l.figures(v)
		same = same && b.names[i] == l.name() && bytes.Equal(b.fixed[i], fixed[i])
	}
	whole = sync.OnceValue(func() []byte { return b.all(f, v, fixed, figures) })
	if !same {
		b.names = make([]string, len(v.limits))
		for i := range v.limits {
			b.names[i] = v.limits[i].name()
		}
		b.fixed, b.sent, b.cursor = fixed, figures, 0
		b.prune(v)
		return whole(), whole
	}
	f.Changed = b.changed(figures)
	return event("some", must(json.Marshal(f))), whole
}

// all returns the full frame, for a new viewer.
func (b *board) all(f frame, v *view, fixed, figures [][]byte) []byte {
	f.Rows, f.Sparks = make([]json.RawMessage, len(figures)), map[string][]float64{}
	b.mu.Lock()
	for i := range figures {
		f.Rows[i] = slices.Concat([]byte("["), fixed[i], []byte(","), figures[i], []byte("]"))
		if past := b.sparks[v.limits[i].name()]; len(past) > 2 && len(f.Sparks) < maxChanged {
			f.Sparks[itoa(i)] = slices.Clone(past)
		}
	}
	b.mu.Unlock()
	return event("all", must(json.Marshal(f)))
}

// changed returns the figures that differ from those sent. If there are too many, the rows take turns.
func (b *board) changed(figures [][]byte) map[string]json.RawMessage {
	rows := map[string]json.RawMessage{}
	from := b.cursor
	for n := range figures {
		i := (from + n) % len(figures)
		if bytes.Equal(figures[i], b.sent[i]) {
			continue
		}
		b.sent[i] = figures[i]
		rows[itoa(i)] = append(append([]byte("["), figures[i]...), ']')
		if b.cursor = i + 1; len(rows) == maxChanged {
			break
		}
	}
	return rows
}

// remember adds a beat to the limit's sparkline, once the limit has had traffic.
func (b *board) remember(l *limit) {
	past := b.sparks[l.name()]
	if past == nil && l.granted() == 0 && l.refused() == 0 {
		return
	}
	past = append(past, round(l.granted()), round(l.refused()))
	if len(past) > 2*sparkBeats {
		past = append(past[:0], past[2:]...)
	}
	b.sparks[l.name()] = past
}

// prune drops the sparklines of limits that no longer exist.
func (b *board) prune(v *view) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name := range b.sparks {
		if v.limit(name) == nil {
			delete(b.sparks, name)
		}
	}
}

// fixed returns the part of a row that changes with the configuration only, as elements of a JSON array.
func (l *limit) fixed() []byte {
	return slices.Concat(must(json.Marshal(l.name())), []byte(","), must(json.Marshal(describe(l.total.Newest))))
}

// figures returns the rest of a row: rate in force, granted, refused, waiting, fill, p99 in milliseconds, states, held until,
// by whom and why, and usage of windows and concurrency. Granted and refused are null until they are measured.
func (l *limit) figures(v *view) []byte {
	held := int64(0)
	if until := l.total.Newest.Bucket.HeldUntil; until.After(v.at) {
		held = until.UnixMilli()
	}
	var granted, refused any
	if v.measured() {
		granted, refused = round(l.granted()), round(l.refused())
	}
	text := must(json.Marshal([]any{
		round(l.total.Newest.Bucket.Rate), granted, refused, l.total.Waiting.Count, round(l.fill()),
		round(l.rate.P99.Seconds() * 1000), strings.Join(l.states(v), ", "), held, v.heldBy(l.name()), v.inUseOf(l.name()),
	}))
	return text[1 : len(text)-1]
}

func (v *view) totals() totals {
	t := totals{Limits: len(v.limits), Instances: v.living(), Measured: v.measured(), SwitchOff: v.sw != nil && v.sw.Off}
	for i := range v.limits {
		l := &v.limits[i]
		t.Granted += l.through()
		t.Refused += l.rate.Refused
		t.Waiting += l.total.Waiting.Count
	}
	t.Unlimited, t.UnlimitedRefused = round(through(&v.others)), round(v.others.Refused)
	t.Granted, t.Refused = round(t.Granted+through(&v.others)), round(t.Refused+v.others.Refused)
	t.Empty = v.empty()
	return t
}
