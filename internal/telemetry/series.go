package telemetry

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket"
)

// Series is one T for each name, up to a number of names, and one for all others together. It may be used by many goroutines
// at once, and takes no lock but for a name that is new: the map is never changed, only replaced by a larger one.
type Series[T any] struct {
	most   int
	create func(name string) *T

	known   atomic.Pointer[map[string]*T]
	further *T // of those that are beyond the bound

	mu sync.Mutex // held to add to known
}

// NewSeries returns a Series of at most so many names, besides the one of all others.
func NewSeries[T any](most int, others string, create func(name string) *T) *Series[T] {
	s := &Series[T]{most: most, create: create, further: create(others)}
	s.known.Store(&map[string]*T{})
	return s
}

// Of returns what belongs to a name.
func (s *Series[T]) Of(name string) *T {
	if t := s.find(name); t != nil {
		return t
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.find(name); t != nil {
		return t
	}
	name = strings.Clone(name) // it may be part of something large
	t := s.create(strings.ToValidUTF8(name, "\uFFFD"))
	next := maps.Clone(*s.known.Load())
	next[name] = t
	s.known.Store(&next)
	return t
}

// find returns nil for a name that is new, and has room.
func (s *Series[T]) find(name string) *T {
	known := *s.known.Load()
	if t := known[name]; t != nil {
		return t
	}
	if len(known) >= s.most {
		return s.further
	}
	return nil
}

// Bucket keeps what the decisions and the leases of one bucket are counted with: a D for each combination of labels that decisions
// have, and an L. What they are is the observer's affair. Looking it up by its labels costs more than counting, and allocates, so
// each is made once, when it is first needed: a bucket that never fails has no series of failures. It may be used by many
// goroutines at once. Two first uses at once may both make it, so what they make must count the same.
type Bucket[D, L any] struct {
	// Name is the value of the label bucket, "" for none.
	Name string

	decisions [results][deciders][2]atomic.Pointer[D]
	leases    atomic.Pointer[L]
}

// Decision is what a decision is counted with.
func (b *Bucket[D, L]) Decision(d *tokenbucket.Decision, create func(Labels) D) *D {
	l := LabelsOf(d)
	return once(&b.decisions[l.result()][decider(d.By)][Index(d.Shadow)], func() D { return create(l) })
}

// Lease is what leases are counted with.
func (b *Bucket[D, L]) Lease(create func() L) *L { return once(&b.leases, create) }

func once[T any](p *atomic.Pointer[T], create func() T) *T {
	v := p.Load()
	if v == nil {
		made := create()
		v = &made
		p.Store(v)
	}
	return v
}

// Index is 1 for true.
func Index(b bool) int {
	if b {
		return 1
	}
	return 0
}
