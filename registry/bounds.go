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

// WindowFactory makes the window of a row: slidingwindow.New, with options of the caller's.
type WindowFactory func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error)

// SemaphoreFactory makes the semaphore of a row: semaphore.NewRedis of a client, say.
type SemaphoreFactory func(name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error)

// backends are where windows are counted, and places are kept.
type backends struct {
	window    WindowFactory             // nil: nowhere
	semaphore SemaphoreFactory          // nil: nowhere
	policy    tokenbucket.FailurePolicy // of the semaphores
}

// WithWindows sets how the windows of rows are made that are counted for a whole fleet (Limit.Window): slidingwindow.New with
// slidingwindow.WithRedis, for instance. The options that it is given say the version of the row. Without this and [WithLocalWindows] a
// row with a window is bad ([WithBadRows]).
func WithWindows(f WindowFactory) Option {
	return func(s *settings) error {
		if f == nil {
			return bad("windows", "nil", "a function")
		}
		s.backends.window = f
		return nil
	}
}

// WithLocalWindows counts the windows of rows in this process alone.
func WithLocalWindows(opts ...slidingwindow.Option) Option {
	return func(s *settings) error {
		s.backends.window = func(name string, limit int, window, resolution time.Duration, _ ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			return slidingwindow.New(name, limit, window, resolution, opts...)
		}
		return nil
	}
}

// WithSemaphores sets how the semaphores of rows are made that count the calls of a whole fleet (Limit.Concurrent):
// semaphore.NewRedis with a client, for instance. The options that it is given say the version of the row. Without this and
// [WithLocalSemaphores] a row with a concurrency is bad ([WithBadRows]).
func WithSemaphores(f SemaphoreFactory) Option {
	return func(s *settings) error {
		if f == nil {
			return bad("semaphores", "nil", "a function")
		}
		s.backends.semaphore = f
		return nil
	}
}

// WithLocalSemaphores counts the calls of rows in this process alone.
func WithLocalSemaphores(opts ...semaphore.Option) Option {
	return func(s *settings) error {
		s.backends.semaphore = func(_ string, permits int, _ ...semaphore.Option) (*semaphore.Semaphore, error) {
			return semaphore.NewMemory(permits, opts...)
		}
		return nil
	}
}

// WithSemaphoreFailurePolicy sets what calls of rows with a concurrency get during an outage of the semaphores' backend. Under
// tokenbucket.FailClosed, the default, they fail. Under FailOpen each process admits by itself up to the row's concurrency; under
// LocalShare(n) the nth part of it, at least one call. Calls that were admitted before the outage count. Windows and rates have failure
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

// localShare returns how many calls of a row this process admits by itself during an outage of the semaphores' backend.
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
	// parts is how finely a window is counted.
	parts = 100
	// longestLead and shortestLead bound how long before its permit is due a call asks for its place, and is counted in its window. What
	// that takes in a slot is measured (slot.took), since a place that is held ahead is of no use to others.
	longestLead  = 20 * time.Millisecond
	shortestLead = time.Millisecond
)

// bounded tells whether a row names more than a rate.
func (c *Limit) bounded() bool { return c.Window != 0 || c.Concurrent != 0 }

// lead is how long before it may begin a call is counted in a window at the earliest: a hundredth of it, but not more than is needed.
func lead(window time.Duration) time.Duration {
	if window == 0 {
		return longestLead
	}
	return min(longestLead, (window/parts + time.Millisecond - 1).Truncate(time.Millisecond))
}

// latest is how long after it was counted a call begins at the latest: it wants to after a lead, and answers and timers come late.
func latest(lead time.Duration) time.Duration { return 2 * lead }

// counted is how a window is counted: longer by what a call may begin after it was counted. So in no window of the row's length more
// calls begin than its limit.
func counted(window time.Duration) (length, resolution time.Duration) {
	length = window + latest(lead(window))
	return length, max(time.Millisecond, length/parts)
}

// try tells why the bounds of a row cannot be put in force.
func (b *backends) try(c *Limit, version int64) *RowError {
	missing := func(field string, value any) *RowError {
		return &RowError{Row: c.Row, Name: c.Name, Field: field, Value: fmt.Sprint(value), Want: "0: here is nothing that counts it"}
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

// bounds are what a row names besides its rate, of a version of the row.
type bounds struct {
	version  int64
	name     string // that the window is counted by
	lead     time.Duration
	window   *slidingwindow.Limiter // nil: none
	length   time.Duration          // of the window, as the row says
	limit    int                    // of it
	places   *semaphore.Semaphore   // nil: none
	most     int                    // of them
	disputed int                    // so many loads in a row found something else in force
}

// bounds makes those of a row. What this process has counted in a window of that name and length goes on, whatever else of the row has
// changed: it knows what passed while the backend was away. was: what there was before; nil: nothing.
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

// slot is what rows of one name have besides a bucket, one after another: what they count outlives a change of the row.
type slot struct {
	inForce atomic.Pointer[bounds]
	inside  atomic.Int64 // calls of this process that are in, or are asking for a place
	outage  outage
	pause   pause
	told    atomic.Int64 // when it was last told that a place was lost, see clock.Mono; 0: never
	takes   atomic.Int64 // what it takes to get a place and to be counted, in nanoseconds; 0 if that is not known

	mu   sync.Mutex // held by who puts others in force
	last bounds     // the last ones that had a window
}

// lead returns how long before its permit is due a call asks for the rest: twice what that took lately.
func (s *slot) lead(b *bounds) time.Duration {
	takes := time.Duration(s.takes.Load())
	if takes == 0 {
		return b.lead
	}
	return min(b.lead, shortestLead+2*takes)
}

// took notes what it took to get a place and to be counted. A longer time counts at once, shorter ones by and by.
func (s *slot) took(d time.Duration) {
	before := time.Duration(s.takes.Load())
	s.takes.Store(max(1, int64(d), int64(before-before/8)))
}

// crowded reports whether this process alone has as many calls under way as there may be.
func (s *slot) crowded(b *bounds) bool { return b.places != nil && s.inside.Load() >= int64(b.most) }

// get returns what is in force, counted by a name. Calls that found an older row have what the newest one says.
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

// countedAs is the name by which a row's window and concurrency are counted: in shadow apart, so that nobody else is refused for it.
func (r *Registry) countedAs(c *Limit) string {
	if r.shadows(c) {
		return unique("%shadow:" + c.Name)
	}
	return c.Name
}

// slot returns that of a row; nil: it has nothing but a rate.
func (r *Registry) slot(c *Limit) *slot {
	if !c.bounded() {
		return nil
	}
	if r.slots[c.Name] == nil {
		r.slots[c.Name] = new(slot)
	}
	return r.slots[c.Name]
}

// forgetSlots forgets those of rows that are gone, once they are many, except where calls are under way.
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

// outage is what is known of semaphores whose backend does not answer: one call in a while asks it, and the others do not wait for it.
type outage struct {
	until atomic.Int64 // see clock.Mono: the wall clock may be set; 0: it answers
	err   atomic.Pointer[error]
}

// askAgain is how often a backend is asked that was away.
const askAgain = time.Second

// known returns the error of an outage, unless it is this call's turn to see whether it is over.
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

// isOutage tells whether an error of a semaphore is that its backend cannot be reached, or does not answer in time.
func isOutage(ctx context.Context, err error) bool {
	return ctx.Err() == nil && (errors.Is(err, semaphore.ErrStoreTimeout) || script.Away(err))
}
