package semaphore

import (
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"
)

// Option configures a Semaphore. An option with a bad value makes the constructor fail.
type Option func(*options)

type options struct {
	lease    time.Duration
	fixed    bool // it is not renewed
	version  int64
	timeout  time.Duration
	waiters  int
	label    string
	prefix   string
	observer *Observer
}

const (
	defaultLease   = 10 * time.Second
	minLease       = 100 * time.Millisecond
	maxLease       = time.Hour
	defaultTimeout = time.Second
	defaultWaiters = 1 << 17
	maxName        = 512
	maxLabel       = 200
	maxVersion     = 1 << 52
)

// WithLease sets how long a permit outlives its process, 100 ms to 1 hour, default 10 s. It is renewed every third of it.
func WithLease(d time.Duration) Option {
	return func(o *options) { o.lease, o.fixed = d, false }
}

// WithFixedLease is [WithLease] for work that must end: a permit is not renewed, and is lost ([ErrExpired]) when its time is over, whether
// its process lives or not. With WithLease a goroutine that hangs holds its permit for as long as its process lives. As nothing is asked
// about it meanwhile, its process does not hear that another one has released it by its id (Group.Done): its context ends with the lease.
// Not in memory.
func WithFixedLease(d time.Duration) Option {
	return func(o *options) { o.lease, o.fixed = d, true }
}

// WithVersion says which configuration of the number of permits is the newest: it is in force for the whole fleet, also for processes
// that were configured otherwise, which learn of it with their next answer. SetPermits and AddPermits make the next version. 0, the
// default, means none: as long as nobody sets a version, each process' number counts for its own requests. At most 2^52.
//
// The number in force is kept in the backend. If the backend loses it, the first process that asks and has heard of it restores it.
func WithVersion(v int64) Option {
	return func(o *options) { o.version = v }
}

// WithTimeout bounds how long a call waits for an answer of the backend, 10 ms to 1 minute, default 1 s.
func WithTimeout(d time.Duration) Option {
	return func(o *options) { o.timeout = d }
}

// WithMaxWaiters bounds how many callers of a process may wait for the semaphore, or for the backend's answer, at a time.
// A call beyond that gets [ErrTooManyWaiters] at once. At least 1, default 131,072.
func WithMaxWaiters(n int) Option {
	return func(o *options) { o.waiters = n }
}

// WithLabel sets what Holders shows of this process, up to 200 bytes of UTF-8. Default: its host and process id.
func WithLabel(label string) Option {
	return func(o *options) { o.label = label }
}

// WithKeyPrefix sets what the keys in Redis begin with. Default "semaphore:". Braces are not allowed.
func WithKeyPrefix(p string) Option {
	return func(o *options) { o.prefix = p }
}

func (s *Semaphore) options(permits int, opts []Option) (*options, error) {
	host, _ := os.Hostname()
	o := &options{
		lease: defaultLease, timeout: defaultTimeout, waiters: defaultWaiters, prefix: "semaphore:",
		label: fmt.Sprintf("%s pid %d", host, os.Getpid()),
	}
	for _, opt := range opts {
		if opt == nil {
			return nil, s.bad("option", "nil", "no nil options")
		}
		opt(o)
	}
	switch {
	case permits < 1 || int64(permits) > maxPermits:
		return nil, s.bad("permits", permits, "1 to 2^31")
	case o.lease < minLease || o.lease > maxLease:
		return nil, s.bad("lease", o.lease, "100ms to 1h")
	case o.timeout < 10*time.Millisecond || o.timeout > time.Minute:
		return nil, s.bad("timeout", o.timeout, "10ms to 1m")
	case o.version < 0 || o.version > maxVersion:
		return nil, s.bad("version", o.version, "0 (none) to 2^52")
	case o.waiters < 1:
		return nil, s.bad("max waiters", o.waiters, "at least 1")
	case !validLabel(o.label):
		return nil, s.badLabel(o.label)
	case len(o.prefix) > maxName || strings.ContainsAny(o.prefix, "{}"):
		return nil, s.bad("key prefix", fmt.Sprintf("%.40q", o.prefix), "at most 512 bytes without braces")
	}
	s.observer = o.observer
	return o, nil
}

func validLabel(label string) bool { return len(label) <= maxLabel && utf8.ValidString(label) }

func (s *Semaphore) badLabel(label string) error {
	return s.bad("label", fmt.Sprintf("%.40q of %d bytes", label, len(label)), "at most 200 bytes of UTF-8")
}

func (s *Semaphore) checkName() error {
	if len(s.name) < 1 || len(s.name) > maxName || !utf8.ValidString(s.name) {
		return s.bad("name", fmt.Sprintf("%.40q of %d bytes", s.name, len(s.name)), "1 to 512 bytes of UTF-8")
	}
	return nil
}
