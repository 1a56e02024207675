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
	fixed    bool   // the lease is not renewed
	leased   string // the option that has set the lease; "" if none has
	version  int64
	timeout  time.Duration
	policy   FailurePolicy
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

// WithLease sets how long a permit outlives its process, 100 ms to 1 hour, default 10 s. The process renews it every third of that. It is
// invalid in memory, where permits have no lease.
func WithLease(d time.Duration) Option {
	return func(o *options) { o.lease, o.fixed, o.leased = d, false, "WithLease" }
}

// WithFixedLease is [WithLease] for work that must end: a permit is not renewed, and is lost ([ErrExpired]) when its lease ends, whether
// its process lives or not. With WithLease, a goroutine that hangs holds its permit as long as its process lives. Since the process does
// not ask the store about the permit meanwhile, it does not notice that another process released it by its id (Group.Done): the permit's
// context ends with the lease. It is invalid in memory.
func WithFixedLease(d time.Duration) Option {
	return func(o *options) { o.lease, o.fixed, o.leased = d, true, "WithFixedLease" }
}

// WithVersion gives the number of permits a version, at most 2^52. The number with the highest version is in force for the whole fleet;
// processes that are configured with another number adopt it with their next reply. SetPermits and AddPermits make the next version. With
// 0, the default, the number has no version: as long as no version is set, the number of each process decides its own requests.
//
// The store keeps the number in force. If the store loses it, the first process that asks and has seen it restores it.
func WithVersion(v int64) Option {
	return func(o *options) { o.version = v }
}

// WithStoreTimeout bounds how long a call waits for a reply of the store, 10 ms to 1 minute, default 1 s.
func WithStoreTimeout(d time.Duration) Option {
	return func(o *options) { o.timeout = d }
}

// WithFailurePolicy sets how requests for permits are decided during an outage of the store: [FailClosed], the default, or [FailOpen].
func WithFailurePolicy(p FailurePolicy) Option {
	return func(o *options) { o.policy = p }
}

// WithMaxWaiters bounds how many callers of a process may wait at a time, for permits or for the store's reply. A call beyond that gets
// [ErrTooManyWaiters] at once. At least 1, default 131,072.
func WithMaxWaiters(n int) Option {
	return func(o *options) { o.waiters = n }
}

// WithLabel sets the label of this process in Holders, up to 200 bytes of UTF-8. Default: its host and process id.
func WithLabel(label string) Option {
	return func(o *options) { o.label = label }
}

// WithKeyPrefix sets the prefix of the keys in Redis. Default "semaphore:". Braces are invalid.
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
	case o.policy > FailOpen:
		return nil, s.bad("failure policy", o.policy, "FailClosed or FailOpen")
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
