package registry

import (
	"fmt"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/admission"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// WindowFactory makes the window of a row, by slidingwindow.New with options of the caller for instance.
type WindowFactory func(name string, limit int, window, resolution time.Duration, opts ...slidingwindow.Option) (*slidingwindow.Limiter, error)

// SemaphoreFactory makes the semaphore of a row, by semaphore.NewRedis for instance.
type SemaphoreFactory func(name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error)

// WithWindows sets the function that makes the windows of rows (Limit.Window) and counts them for the whole fleet, such as slidingwindow.New
// with slidingwindow.WithRedis. Its options contain the version of the row. Without WithWindows or [WithLocalWindows] a row with a
// window is bad ([WithBadRows]).
func WithWindows(f WindowFactory) Option {
	return func(s *settings) error {
		if f == nil {
			return bad("windows", "nil", "a function")
		}
		s.admissions.Windows = f
		return nil
	}
}

// WithLocalWindows counts the windows of rows in this process only.
func WithLocalWindows(opts ...slidingwindow.Option) Option {
	return func(s *settings) error {
		s.admissions.Windows = func(name string, limit int, window, resolution time.Duration, _ ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
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
		s.admissions.Semaphores = f
		return nil
	}
}

// WithLocalSemaphores counts the calls of rows in this process only.
func WithLocalSemaphores(opts ...semaphore.Option) Option {
	return func(s *settings) error {
		s.admissions.Semaphores = func(_ string, permits int, _ ...semaphore.Option) (*semaphore.Semaphore, error) {
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
		s.admissions.Policy = p
		return nil
	}
}

// bounded reports whether a row has a window or a concurrency.
func (c *Limit) bounded() bool { return c.Window != 0 || c.Concurrent != 0 }

// bounds returns what the row's window and concurrency are made of. Rows in shadow are counted under another name, so that processes
// without the shadow refuse no call because of it.
func (s *settings) bounds(c *Limit, version int64) admission.Row {
	name := c.Name
	if s.shadows(c) {
		name = unique("%shadow:" + name)
	}
	return admission.Row{Name: name, Version: version, Window: c.Window, WindowLimit: c.WindowLimit, Concurrent: c.Concurrent}
}

// tryBounds returns an error if the window or the concurrency of a row cannot be put in force.
func (s *settings) tryBounds(c *Limit, version int64) *RowError {
	missing := func(field string, value any) *RowError {
		return &RowError{Row: c.Row, Name: c.Name, Field: field, Value: fmt.Sprint(value), Want: "no value: the registry counts none (WithWindows, WithSemaphores)"}
	}
	switch {
	case c.Window != 0 && s.admissions.Windows == nil:
		return missing("window", c.Window)
	case c.Concurrent != 0 && s.admissions.Semaphores == nil:
		return missing("concurrent", c.Concurrent)
	}
	if err := s.admissions.Try(s.bounds(c, version)); err != nil {
		return &RowError{Row: c.Row, Name: c.Name, Err: err}
	}
	return nil
}

// slot returns the slot of a row; nil if the row has a rate only.
func (r *Registry) slot(c *Limit) *admission.Slot {
	if !c.bounded() {
		return nil
	}
	if r.slots[c.Name] == nil {
		r.slots[c.Name] = new(admission.Slot)
	}
	return r.slots[c.Name]
}

// mostSlots bounds the slots of removed rows that are kept.
const mostSlots = 10_000

// forgetSlots drops the slots of removed rows, once there are many, but not those with calls in flight.
func (r *Registry) forgetSlots(rows map[string]*entry) {
	if len(r.slots) <= len(rows)+mostSlots {
		return
	}
	for name, s := range r.slots {
		if rows[name] == nil && s.Inside() == 0 {
			delete(r.slots, name)
		}
	}
}
