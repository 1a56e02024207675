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

// board is what all limits are now: the rows of the first page, for pages and for streams.
type board struct {
	source Source
	rows   func() []registry.Limit // nil: none
	feed   *feed

	mu     sync.Mutex
	seen   *view // of the last beat that succeeded; nil before
	err    error // of the last beat
	rounds chan struct{}
	past   map[string][]float64 // of each limit with traffic: granted and refused of the last beats, in turns

	// Used by the reading goroutine only.
	names  []string
	fixed  [][]byte // of each row: what changes with its configuration
	sent   [][]byte // of each row: the figures that all have been sent
	cursor int
	used   map[use][]float64 // of the last beats
	last   []*fleet.Snapshot // of the last seconds, the oldest first
}

const (
	// maxChanged bounds a frame: of more rows that change at once, the rest is sent in the next ones, in turns.
	maxChanged = 1000
	// over is the time that a rate is taken over: each instance has told of itself more than once in it.
	over = 6 * time.Second
	// sparkBeats are in a sparkline.
	sparkBeats = 30
	// linger is how long a reader goes on when nobody looks any more: who comes back finds everything in place.
	linger = time.Minute
)

func newBoard(source Source, rows func() []registry.Limit, beat time.Duration) *board {
	b := &board{source: source, rows: rows, rounds: make(chan struct{}), past: map[string][]float64{}}
	b.feed = &feed{beat: beat, linger: linger, read: b.read, ended: b.forget}
	return b
}

// now waits for the fleet as it is, if nobody has looked before.
func (b *board) now(ctx context.Context) (*view, error) {
	looks := b.feed.join()
	defer b.feed.leave(looks)
	for {
		b.mu.Lock()
		v, err, round := b.seen, b.err, b.rounds
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

// forget is called when the reading ends: what is known gets old.
func (b *board) forget() {
	b.mu.Lock()
	b.seen, b.err = nil, nil
	b.mu.Unlock()
}

// frame is what a browser is sent. Rows stand in the order of the names.
type frame struct {
	At       int64                      `json:"at"` // milliseconds since 1970
	Problems []problem                  `json:"problems"`
	Totals   totals                     `json:"totals"`
	Strip    []notice                   `json:"strip"`
	Rows     []json.RawMessage          `json:"rows,omitzero"`     // all, also if there are none: name, configuration, figures
	Changed  map[string]json.RawMessage `json:"changed,omitempty"` // by place: figures
	Sparks   map[string][]float64       `json:"sparks,omitempty"`  // by place: granted and refused in turns
}

type totals struct {
	Limits    int     `json:"limits"`
	Instances int     `json:"instances"`
	Granted   float64 `json:"granted"`
	Refused   float64 `json:"refused"`
	Measured  bool    `json:"measured"`
	Waiting   int     `json:"waiting"`
	SwitchOff bool    `json:"off"`
	// Calls without a row, which are among Granted and Refused.
	Unlimited        float64 `json:"unlimited"`
	UnlimitedRefused float64 `json:"unlimited_refused"`
	Empty            string  `json:"empty,omitempty"` // the text of a list without limits
}

// look asks the source, and makes a view of what has happened since some seconds ago.
func (b *board) look(ctx context.Context) (*view, error) {
	now, err := b.source.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	if n := len(b.last); n > 0 && now.At.Sub(b.last[n-1].At) > over+2*b.feed.beat { // nobody has looked meanwhile
		b.last, b.used = nil, nil
		b.mu.Lock()
		clear(b.past)
		b.mu.Unlock()
	}
	b.last = append(b.last, now)
	for len(b.last) > 2 && now.At.Sub(b.last[1].At) >= over {
		b.last = b.last[1:]
	}
	v := newView(b.last[0], now)
	b.used = v.remembered(b.used)
	v.used = b.used
	if b.rows != nil {
		v.include(b.rows())
	}
	if v.wants() {
		if events, err := b.source.Events(ctx, now.At.Add(-fleet.Day)); err == nil { // else it is not known who did it
			v.attribute(events)
		}
	}
	return v, nil
}

func (b *board) read(ctx context.Context) (change []byte, whole func() []byte) {
	v, err := b.look(ctx)
	b.mu.Lock()
	b.seen = v
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
		return event("lost", must(json.Marshal(lost(err)))), nil
	}
	return b.frames(v)
}

// frames are what has changed since the last beat, and everything.
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

// all is the frame of who comes now.
func (b *board) all(f frame, v *view, fixed, figures [][]byte) []byte {
	f.Rows, f.Sparks = make([]json.RawMessage, len(figures)), map[string][]float64{}
	b.mu.Lock()
	for i := range figures {
		f.Rows[i] = slices.Concat([]byte("["), fixed[i], []byte(","), figures[i], []byte("]"))
		if past := b.past[v.limits[i].name()]; len(past) > 2 && len(f.Sparks) < maxChanged {
			f.Sparks[itoa(i)] = slices.Clone(past)
		}
	}
	b.mu.Unlock()
	return event("all", must(json.Marshal(f)))
}

// changed are the figures that are not what has been sent, if there are many only those whose turn it is.
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

// remember keeps what a sparkline shows, of those that have had traffic.
func (b *board) remember(l *limit) {
	past := b.past[l.name()]
	if past == nil && l.through() == 0 && l.turned() == 0 {
		return
	}
	past = append(past, round(l.through()), round(l.turned()))
	if len(past) > 2*sparkBeats {
		past = append(past[:0], past[2:]...)
	}
	b.past[l.name()] = past
}

// prune forgets the limits that are no more.
func (b *board) prune(v *view) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name := range b.past {
		if v.limit(name) == nil {
			delete(b.past, name)
		}
	}
}

// fixed is the row's part that changes with its configuration, as elements of a JSON array.
func (l *limit) fixed() []byte {
	return slices.Concat(must(json.Marshal(l.name())), []byte(","), must(json.Marshal(describe(l.total.Newest))))
}

// figures is the row's other part: rate in force, granted, refused, waiting, fill, p99 in milliseconds, state, held until, by whom and
// why, what is in use and what refuses. Granted and refused are null as long as they are not known.
func (l *limit) figures(v *view) []byte {
	held := int64(0)
	if until := l.total.Newest.Bucket.HeldUntil; until.After(v.at) {
		held = until.UnixMilli()
	}
	var granted, refused any
	if v.measured() {
		granted, refused = round(l.through()), round(l.turned())
	}
	text := must(json.Marshal([]any{
		round(l.total.Newest.Bucket.Rate), granted, refused, l.total.Waiting.Count, round(l.fill()),
		round(l.rate.P99.Seconds() * 1000), strings.Join(l.words(v), ", "), held, v.heldBy(l.name()), v.inUseOf(l.name()),
	}))
	return text[1 : len(text)-1]
}

func (v *view) totals() totals {
	t := totals{Limits: len(v.limits), Instances: v.living(), Measured: v.measured(), SwitchOff: v.sw != nil && v.sw.Off}
	for i := range v.limits {
		l := &v.limits[i]
		t.Granted += l.through()
		t.Refused += l.turned()
		t.Waiting += l.total.Waiting.Count
	}
	t.Unlimited, t.UnlimitedRefused = round(v.others.Granted+v.others.Passed), round(v.others.Refused+v.others.WouldRefuse)
	t.Granted, t.Refused = round(t.Granted+v.others.Granted+v.others.Passed), round(t.Refused+v.others.Refused+v.others.WouldRefuse)
	t.Empty = v.empty()
	return t
}
