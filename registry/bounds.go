package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// WindowFactory makes the window of a row, by slidingwindow.New with options of the caller for instance.
type WindowFactory func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error)

// SemaphoreFactory makes the semaphore of a row, by semaphore.NewRedis for instance.
type SemaphoreFactory func(name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error)

// backends make the windows and the semaphores of rows.
type backends struct {
	window    WindowFactory             // nil if rows cannot have a window
	semaphore SemaphoreFactory          // nil if rows cannot have a concurrency
	policy    tokenbucket.FailurePolicy // of the semaphores
}

// WithWindows sets the function that makes the windows of rows (Limit.Window) and counts them for the whole fleet, such as slidingwindow.New
// with slidingwindow.WithRedis. Its options contain the version of the row. Without WithWindows or [WithLocalWindows] a row with a
// window is bad ([WithBadRows]).
func WithWindows(f WindowFactory) Option {
	return func(s *settings) error {
		if f == nil {
			return bad("windows", "nil", "a function")
		}
		s.backends.window = f
		return nil
	}
}

// WithLocalWindows counts the windows of rows in this process only.
func WithLocalWindows(opts ...slidingwindow.Option) Option {
	return func(s *settings) error {
		s.backends.window = func(name string, limit int, window, resolution time.Duration, _ ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			return slidingwindow.New(name, limit, window, resolution, opts...)
		}
		return nil
	}
}

// WithSemaphores sets the function that makes the semaphores of rows (Limit.Concurrent) and counts calls of the whole fleet, such as
// semaphore.NewRedis with a client. Its options contain the version of the row. Without WithSemaphores or [WithLocalSemaphores] a row with
// a concurrency is bad ([WithBadRows]).
func WithSemaphores(f SemaphoreFactory) Option {
	return func(s *settings) error {
		if f == nil {
			return bad("semaphores", "nil", "a function")
		}
		s.backends.semaphore = f
		return nil
	}
}

// WithLocalSemaphores counts the calls of rows in this process only.
func WithLocalSemaphores(opts ...semaphore.Option) Option {
	return func(s *settings) error {
		s.backends.semaphore = func(_ string, permits int, _ ...semaphore.Option) (*semaphore.Semaphore, error) {
			return semaphore.NewMemory(permits, opts...)
		}
		return nil
	}
}

// WithSemaphoreFailurePolicy sets the policy for calls of rows with a concurrency during an outage of the semaphores' backend. Under
// tokenbucket.FailClosed, the default, they fail. Under FailOpen each process admits calls up to the row's concurrency; under
// LocalShare(n) up to an nth of it, at least one call. Calls that were admitted before the outage count. Windows and rates have failure
// policies of their own: slidingwindow.WithFailurePolicy, tokenbucket.WithFailurePolicy.
func WithSemaphoreFailurePolicy(p tokenbucket.FailurePolicy) Option {
	return func(s *settings) error {
		if n, shares := p.Instances(); shares && n < 1 {
			return bad("semaphore failure policy", fmt.Sprintf("LocalShare(%d)", n), "a local share of at least 1 instance")
		}
		s.backends.policy = p
		return nil
	}
}

// localShare returns the number of calls of a row that this process admits during an outage of the semaphores' backend.
func (b *backends) localShare(concurrent int) int {
	n, shares := b.policy.Instances()
	switch {
	case shares:
		return max(1, concurrent/n)
	case b.policy == tokenbucket.FailOpen:
		return concurrent
	}
	return 0
}

const (
	// parts is the number of steps in which a window is counted.
	parts = 100
	// longestLead and shortestLead bound the lead: the time before its permit is due at which a call asks for its place and its count. A
	// place that is held ahead is useless to others, so the lead is as short as these round trips allow (slot.took).
	longestLead  = 20 * time.Millisecond
	shortestLead = time.Millisecond
)

// bounded reports whether a row has a window or a concurrency.
func (c *Limit) bounded() bool { return c.Window != 0 || c.Concurrent != 0 }

// lead returns the longest time before its beginning at which a call is counted: a hundredth of the window, at most longestLead.
func lead(window time.Duration) time.Duration {
	if window == 0 {
		return longestLead
	}
	return min(longestLead, (window/parts + time.Millisecond - 1).Truncate(time.Millisecond))
}

// latest returns the longest time from the count of a call to its beginning: twice the lead, as replies and timers are late.
func latest(lead time.Duration) time.Duration { return 2 * lead }

// counted returns the length and the resolution of the window in the store. The window is longer than the row's, by the time from a count
// to the beginning of its call. So in no window of the row's length do more calls begin than its limit.
func counted(window time.Duration) (length, resolution time.Duration) {
	length = window + latest(lead(window))
	return length, max(time.Millisecond, length/parts)
}

// try returns an error if the window or the concurrency of a row cannot be put in force.
func (b *backends) try(c *Limit, version int64) *RowError {
	missing := func(field string, value any) *RowError {
		return &RowError{Row: c.Row, Name: c.Name, Field: field, Value: fmt.Sprint(value), Want: "no value: the registry counts none (WithWindows, WithSemaphores)"}
	}
	switch {
	case c.Window != 0 && b.window == nil:
		return missing("window", c.Window)
	case c.Concurrent != 0 && b.semaphore == nil:
		return missing("concurrent", c.Concurrent)
	}
	if _, err := b.bounds(c, version, nil); err != nil {
		return &RowError{Row: c.Row, Name: c.Name, Err: err}
	}
	return nil
}

// bounds are the window and the concurrency of one version of a row.
type bounds struct {
	version  int64
	name     string // under which the window and the concurrency are counted
	lead     time.Duration
	window   *slidingwindow.Limiter // nil if there is none
	length   time.Duration          // of the window, in the row
	limit    int                    // of the window
	places   *semaphore.Semaphore   // nil if there is none
	most     int                    // of the concurrency
	disputed int                    // consecutive loads that found other limits in force
}

// bounds makes the window and the concurrency of a row. A window of the same name and length as in was keeps its local counts, which
// include the calls that passed during an outage of the backend. was may be nil.
func (b *backends) bounds(c *Limit, version int64, was *bounds) (*bounds, error) {
	next := &bounds{version: version, name: c.Name, lead: lead(c.Window), length: c.Window, limit: c.WindowLimit, most: c.Concurrent}
	var err error
	if c.Window != 0 {
		length, resolution := counted(c.Window)
		if next.window, err = b.window(c.Name, c.WindowLimit, length, resolution, slidingwindow.WithVersion(version)); err != nil {
			return nil, err
		}
		if was != nil && was.window != nil && was.name == c.Name && was.length == c.Window && was.window.Reconfigure(next.window) == nil {
			next.window = was.window
		}
	}
	if c.Concurrent != 0 {
		next.places, err = b.semaphore(c.Name, c.Concurrent, semaphore.WithVersion(version))
	}
	return next, err
}

// slot has the counts of a row with a window or a concurrency. It outlives changes and removals of the row.
type slot struct {
	inForce atomic.Pointer[bounds]
	inside  atomic.Int64 // calls of this process that are in flight or ask for a place
	outage  outage
	pause   pause
	logged  atomic.Int64 // when the loss of a place was last logged, by clock.Mono; 0 if never
	takes   atomic.Int64 // duration of the round trips for place and count, in nanoseconds; 0 if not known

	mu   sync.Mutex // guards last, and changes of inForce
	last bounds     // the last bounds with a window
}

// lead returns the time before its permit is due at which a call asks for its place and its count: twice the recent duration.
func (s *slot) lead(b *bounds) time.Duration {
	takes := time.Duration(s.takes.Load())
	if takes == 0 {
		return b.lead
	}
	return min(b.lead, shortestLead+2*takes)
}

// took records the duration of the round trips for place and count. A longer one counts at once, shorter ones by an eighth each.
func (s *slot) took(d time.Duration) {
	before := time.Duration(s.takes.Load())
	s.takes.Store(max(1, int64(d), int64(before-before/8)))
}

// crowded reports whether the calls of this process alone take all places.
func (s *slot) crowded(b *bounds) bool { return b.places != nil && s.inside.Load() >= int64(b.most) }

// get returns the bounds in force, counted under a name. A call that found an older row gets the bounds of the newest one.
func (s *slot) get(b *backends, e *entry, name string) (*bounds, error) {
	if is := s.inForce.Load(); is != nil && is.version >= e.version {
		return is, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if is := s.inForce.Load(); is != nil && is.version >= e.version {
		return is, nil
	}
	row := e.limit
	row.Name = name
	next, err := b.bounds(&row, e.version, &s.last)
	if err != nil {
		return nil, fmt.Errorf("registry: bucket %.80q: %w", e.limit.Name, err)
	}
	if next.window != nil {
		s.last = *next
	}
	s.inForce.Store(next)
	return next, nil
}

// countedAs returns the name under which a row's window and concurrency are counted. Rows in shadow have another one, so that processes
// without the shadow refuse no call because of it.
func (r *Registry) countedAs(c *Limit) string {
	if r.shadows(c) {
		return unique("%shadow:" + c.Name)
	}
	return c.Name
}

// slot returns the slot of a row; nil if the row has a rate only.
func (r *Registry) slot(c *Limit) *slot {
	if !c.bounded() {
		return nil
	}
	if r.slots[c.Name] == nil {
		r.slots[c.Name] = new(slot)
	}
	return r.slots[c.Name]
}

// forgetSlots drops the slots of removed rows, once there are many, but not those with calls in flight.
func (r *Registry) forgetSlots(rows map[string]*entry) {
	if len(r.slots) <= len(rows)+maxPast {
		return
	}
	for name, s := range r.slots {
		if rows[name] == nil && s.inside.Load() == 0 {
			delete(r.slots, name)
		}
	}
}

// outage is an outage of the semaphores' backend. One call in a while asks the backend; the others fail at once.
type outage struct {
	until atomic.Int64 // when the next call asks, by clock.Mono; 0 if there is no outage
	err   atomic.Pointer[error]
}

// askAgain is the time between two calls that ask during an outage.
const askAgain = time.Second

// known returns the error of the outage. It returns nil if there is none, and for the one call that shall ask the backend.
func (o *outage) known() error {
	until := o.until.Load()
	if until == 0 {
		return nil
	}
	now := int64(clock.Mono())
	if now < until || !o.until.CompareAndSwap(until, now+int64(askAgain)) {
		return *o.err.Load()
	}
	return nil
}

func (o *outage) began(err error) {
	o.err.Store(&err)
	o.until.Store(int64(clock.Mono() + askAgain))
}

func (o *outage) ended() {
	if o.until.Load() != 0 {
		o.until.Store(0)
	}
}

// isOutage reports whether an error of a semaphore means that its backend is unreachable or does not reply in time.
func isOutage(ctx context.Context, err error) bool {
	return ctx.Err() == nil && (errors.Is(err, semaphore.ErrStoreTimeout) || script.Away(err))
}
