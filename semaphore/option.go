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
)

// WithLease sets how long a permit outlives its process, 100 ms to 1 hour, default 10 s. It is renewed every third of it.
func WithLease(d time.Duration) Option {
	return func(o *options) { o.lease = d }
}

// WithTimeout bounds how long a call waits for an answer of the backend, 10 ms to 1 minute, default 1 s.
func WithTimeout(d time.Duration) Option {
	return func(o *options) { o.timeout = d }
}

// WithMaxWaiters bounds how many callers of a process may wait for the semaphore, or for the backend's answer, at a time.
// Whoever comes then gets ErrTooManyWaiters at once. At least 1, default 131,072.
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
	case o.waiters < 1:
		return nil, s.bad("max waiters", o.waiters, "at least 1")
	case len(o.label) > maxLabel || !utf8.ValidString(o.label):
		return nil, s.bad("label", fmt.Sprintf("%.40q of %d bytes", o.label, len(o.label)), "at most 200 bytes of UTF-8")
	case len(o.prefix) > maxName || strings.ContainsAny(o.prefix, "{}"):
		return nil, s.bad("key prefix", fmt.Sprintf("%.40q", o.prefix), "at most 512 bytes without braces")
	}
	s.observer = o.observer
	return o, nil
}

func (s *Semaphore) checkName() error {
	if len(s.name) < 1 || len(s.name) > maxName || !utf8.ValidString(s.name) {
		return s.bad("name", fmt.Sprintf("%.40q of %d bytes", s.name, len(s.name)), "1 to 512 bytes of UTF-8")
	}
	return nil
}
