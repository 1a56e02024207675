package admission

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Slot has the counts of a row with a window or a concurrency. It outlives changes and removals of the row.
type Slot struct {
	// Pause is the penalty of a row without a rate.
	Pause Pause

	inForce  atomic.Pointer[bounds]
	inside   atomic.Int64 // calls of this process that are in flight or ask for a place
	leaving  atomic.Int64 // those of inside that are releasing their places
	asking   atomic.Int64 // those of inside that ask for a place, and have none yet
	queueing atomic.Int64 // calls of this process that wait for a place
	approach approach     // calls of this process that wait for their permits first, and may wait for a place
	line     line         // those of them whose place is a fleet's, and that need permits, too
	outage   outage
	logged   atomic.Int64 // when the loss of a place was last logged, by clock.Mono; 0 if never
	takes    atomic.Int64 // duration of the round trips for place and count, in nanoseconds; 0 if not known

	mu     sync.Mutex           // guards the fields below, and changes of inForce
	last   bounds               // the last bounds with a window
	places *semaphore.Semaphore // of this process; nil before. All versions of the row have it, so the calls of before keep their places
}

// lead returns the time before its permit is due at which a call asks for its place and its count: twice the recent duration.
func (s *Slot) lead(b *bounds) time.Duration {
	takes := time.Duration(s.takes.Load())
	if takes == 0 {
		return b.lead
	}
	return min(b.lead, shortestLead+2*takes)
}

// took records the duration of the round trips for place and count. A longer one counts at once, shorter ones by an eighth each.
func (s *Slot) took(d time.Duration) {
	before := time.Duration(s.takes.Load())
	s.takes.Store(max(1, int64(d), int64(before-before/8)))
}

// crowded reports whether the calls of this process alone take all places.
func (s *Slot) crowded(b *bounds) bool { return b.places != nil && s.inside.Load() >= int64(b.most) }

// get returns the bounds in force. A call that found an older row gets the bounds of the newest one.
func (s *Slot) get(e *Env, row Row) (*bounds, error) {
	if is := s.inForce.Load(); is != nil && is.version >= row.Version {
		return is, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if is := s.inForce.Load(); is != nil && is.version >= row.Version {
		return is, nil
	}
	next, err := e.bounds(row, &s.last)
	if err != nil {
		return nil, fmt.Errorf("registry: bucket %.80q: %w", row.Name, err)
	}
	if next.window != nil {
		s.last = *next
	}
	if next.places != nil && !next.remote {
		if s.places != nil && s.places != next.places {
			if err := s.places.SetPermits(context.Background(), next.most); err != nil {
				return nil, fmt.Errorf("registry: bucket %.80q: %w", row.Name, err)
			}
			next.places = s.places
		}
		s.places = next.places
	}
	s.inForce.Store(next)
	return next, nil
}

// Inside returns the number of this process' calls in flight.
func (s *Slot) Inside() int64 { return s.inside.Load() }

// Version returns the version of the bounds in force. ok is false if the row has had no call yet.
func (s *Slot) Version() (version int64, ok bool) {
	b := s.inForce.Load()
	if b == nil {
		return 0, false
	}
	return b.version, true
}

// Usage is the usage of a row's window and concurrency, by the whole fleet; its fields are those of registry.Usage.
type Usage struct {
	Window                     time.Duration
	WindowUsed, WindowLimit    int
	Inside, Places, Concurrent int
}

// Usage asks the stores for the usage of the bounds in force. ok is false if the row has had no call yet.
func (s *Slot) Usage(ctx context.Context) (u Usage, ok bool, err error) {
	b := s.inForce.Load()
	if b == nil {
		return u, false, nil
	}
	if b.window != nil {
		left, err := b.window.Remaining(ctx)
		if err != nil {
			return u, true, err
		}
		u.Window, u.WindowLimit = b.length, b.window.Limit()
		u.WindowUsed = max(0, u.WindowLimit-left)
	}
	if b.places != nil {
		stats, err := b.places.Stats(ctx)
		if err != nil {
			return u, true, err
		}
		u.Inside, u.Places, u.Concurrent = int(s.inside.Load()), stats.Used, stats.Permits
	}
	return u, true, nil
}

// Differs returns the version in force of the window or the concurrency if one has another limit than the bounds of that version, by the last replies: it was
// set by another program, or belongs to a later row.
func (s *Slot) Differs(version int64) (there int64, differs bool) {
	b := s.inForce.Load()
	if b == nil || b.version != version {
		return 0, false
	}
	there = version
	if b.window != nil && b.window.Limit() != b.limit {
		there, differs = max(there, b.window.Version()), true
	}
	if b.places != nil && b.places.Permits() != b.most {
		there, differs = max(there, b.places.Version()), true
	}
	return there, differs
}
