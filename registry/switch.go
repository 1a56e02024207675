package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// AtomicSwitch is a switch of this process, for tests, signals and admin pages. The zero value is off. It is safe for concurrent use.
type AtomicSwitch struct{ on atomic.Bool }

// NewSwitch returns a switch that is on or off.
func NewSwitch(on bool) *AtomicSwitch {
	s := new(AtomicSwitch)
	s.Set(on)
	return s
}

// Set turns the switch on or off.
func (s *AtomicSwitch) Set(on bool) { s.on.Store(on) }

// Enabled implements Switch.
func (s *AtomicSwitch) Enabled() bool { return s.on.Load() }

const (
	defaultSwitchInterval = time.Second
	defaultSwitchTimeout  = time.Second
)

// PolledSwitch is one switch for a whole fleet, in a store that all processes read: [NewRedisSwitch], sqlsource.NewSwitch, or a function
// ([NewPolledSwitch]). Enabled is one atomic load.
//
// A goroutine reads the store. Reads begin 3/4 to 1 interval apart ([WithSwitchInterval], default 1 s), at random, so that a fleet does not
// read in step. A change takes effect within one interval plus a round trip. After a slow read the next one waits at least a quarter of an
// interval. While reads fail, the last known state stays in force: see Age and Err.
//
// It is safe for concurrent use. Close ends the reading.
type PolledSwitch struct {
	read    func(context.Context) (bool, error)
	options switchOptions
	on      atomic.Bool
	cancel  context.CancelFunc
	done    chan struct{}
	late    chan reply // reply of a read that was given up but has not returned; used by the reading goroutine only

	mu     sync.Mutex
	sets   int       // number of successful Sets; a read that began before one is outdated
	readAt time.Time // time of the last successful read or Set, or of the constructor
	err    error
}

// reply is the result of one read.
type reply struct {
	on  bool
	err error
}

// SwitchOption configures a PolledSwitch. An option with a bad value makes the constructor fail.
type SwitchOption func(*switchOptions)

type switchOptions struct {
	interval, timeout time.Duration
	initial           bool
	hook              func(error)
	log               *slog.Logger
	write             func(context.Context, bool) error
	origin            func() string
	err               error
}

func (o *switchOptions) fail(field string, value any, want string) {
	if o.err == nil {
		o.err = bad(field, value, want)
	}
}

// WithSwitchInterval sets the longest time between the beginnings of two reads, 10 ms to 1 hour. Default 1 s.
func WithSwitchInterval(d time.Duration) SwitchOption {
	return func(o *switchOptions) {
		if d < 10*time.Millisecond || d > time.Hour {
			o.fail("switch interval", d, "10ms to 1h")
		}
		o.interval = d
	}
}

// WithSwitchTimeout bounds one read, also the first in the constructor: 1 ms to 1 minute. Default 1 s.
func WithSwitchTimeout(d time.Duration) SwitchOption {
	return func(o *switchOptions) {
		if d < time.Millisecond || d > time.Minute {
			o.fail("switch timeout", d, "1ms to 1m")
		}
		o.timeout = d
	}
}

// WithSwitchInitial sets the state of the switch until the first successful read. Default true: limits apply.
func WithSwitchInitial(on bool) SwitchOption {
	return func(o *switchOptions) { o.initial = on }
}

// WithSwitchHook sets a function that is called at the beginning of an outage, with the error of the first read that fails, and at its end,
// with nil. The reading goroutine calls it, so it must neither block nor call Close. By default outages are logged, see
// [WithSwitchLogger].
func WithSwitchHook(hook func(error)) SwitchOption {
	return func(o *switchOptions) {
		if hook == nil {
			o.fail("switch hook", "nil", "a function")
		}
		o.hook = hook
	}
}

// WithSwitchLogger sets the logger for the beginning and the end of outages, if there is no [WithSwitchHook]. Default slog.Default().
func WithSwitchLogger(l *slog.Logger) SwitchOption {
	return func(o *switchOptions) {
		if l == nil {
			o.fail("switch logger", "nil", "a logger")
		}
		o.log = l
	}
}

// WithSwitchWrite sets the function by which Set writes.
func WithSwitchWrite(write func(ctx context.Context, on bool) error) SwitchOption {
	return func(o *switchOptions) {
		if write == nil {
			o.fail("switch write", "nil", "a function")
		}
		o.write = write
	}
}

// WithSwitchOrigin sets a function that returns, for messages, the author and the time of the last change; it returns "" if they are not known.
func WithSwitchOrigin(origin func() string) SwitchOption {
	return func(o *switchOptions) {
		if origin == nil {
			o.fail("switch origin", "nil", "a function")
		}
		o.origin = origin
	}
}

// logOutage returns the default hook, which logs.
func logOutage(log *slog.Logger) func(error) {
	return func(err error) {
		if err != nil {
			log.Warn("registry: the switch cannot be read, so its last known state stays in force", "error", err)
			return
		}
		log.Info("registry: the switch can be read again")
	}
}

// NewPolledSwitch returns a switch whose state read returns. One goroutine at a time calls read. NewPolledSwitch reads once before it
// returns, within the timeout of a read. If that fails, the hook gets the error, because a gateway must be able to start without its switch.
// NewPolledSwitch fails only if an option is invalid.
func NewPolledSwitch(read func(ctx context.Context) (on bool, err error), opts ...SwitchOption) (*PolledSwitch, error) {
	o := switchOptions{interval: defaultSwitchInterval, timeout: defaultSwitchTimeout, initial: true, log: slog.Default()}
	if read == nil {
		o.fail("switch read", "nil", "a function")
	}
	for _, opt := range opts {
		if opt == nil {
			o.fail("switch option", "nil", "no nil options")
			break
		}
		opt(&o)
	}
	if o.err != nil {
		return nil, o.err
	}
	if o.hook == nil {
		o.hook = logOutage(o.log)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &PolledSwitch{read: read, options: o, cancel: cancel, done: make(chan struct{}), readAt: time.Now()}
	s.on.Store(o.initial)
	s.poll(ctx)
	go s.run(ctx)
	return s, nil
}

// Enabled implements Switch.
func (s *PolledSwitch) Enabled() bool { return s.on.Load() }

// Origin returns the author and the time of the last change, as far as the store has them; "" if it has neither.
func (s *PolledSwitch) Origin() string {
	if s.options.origin == nil {
		return ""
	}
	return s.options.origin()
}

// Age returns the time since the last successful read or Set; if there was none, since the constructor.
func (s *PolledSwitch) Age() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.readAt)
}

// Err returns the error of the last read; nil if it succeeded.
func (s *PolledSwitch) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Set turns the switch of the whole fleet on or off: in this process at once, in others with their next read. It returns when ctx ends, even
// if the write ignores ctx. After an error the write may have succeeded or not. Without [WithSwitchWrite], Set returns errors.ErrUnsupported.
func (s *PolledSwitch) Set(ctx context.Context, on bool) error {
	if s.options.write == nil {
		return fmt.Errorf("registry: set switch: %w", errors.ErrUnsupported)
	}
	written := make(chan error, 1)
	go func() { written <- s.options.write(ctx, on) }()
	var err error
	select {
	case err = <-written:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("registry: set switch: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sets++
	s.readAt = time.Now()
	s.on.Store(on)
	return nil
}

// Close ends the reading. The last known state stays in force. Close cancels a read in flight, and does not wait for a read that ignores its
// context. A second Close does nothing.
func (s *PolledSwitch) Close() {
	s.cancel()
	<-s.done
}

func (s *PolledSwitch) run(ctx context.Context) {
	defer close(s.done)
	began := time.Now()
	for {
		least := s.options.interval / 4
		pause := 3*least + rand.N(least+1) - time.Since(began)
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(pause, least)):
		}
		began = time.Now()
		s.poll(ctx)
	}
}

// poll reads once and records the result.
func (s *PolledSwitch) poll(ctx context.Context) {
	s.mu.Lock()
	sets, before := s.sets, s.err
	s.mu.Unlock()
	a := s.ask(ctx)
	if ctx.Err() != nil {
		return // closed
	}
	s.mu.Lock()
	s.err = a.err
	if a.err == nil && sets == s.sets {
		s.readAt = time.Now()
		s.on.Store(a.on)
	}
	s.mu.Unlock()
	if (a.err == nil) != (before == nil) {
		s.options.hook(a.err)
	}
}

// ask calls read. It returns within the timeout even if read does not. It begins no read while another is in flight.
func (s *PolledSwitch) ask(ctx context.Context) reply {
	ctx, cancel := context.WithTimeout(ctx, s.options.timeout)
	defer cancel()
	if s.late != nil {
		select {
		case <-s.late: // outdated
		case <-ctx.Done():
			return reply{err: fmt.Errorf("registry: read switch: an earlier read has not returned: %w", ctx.Err())}
		}
	}
	s.late = make(chan reply, 1)
	go func(to chan<- reply) {
		on, err := s.read(ctx)
		to <- reply{on, err}
	}(s.late)
	select {
	case a := <-s.late:
		s.late = nil
		if a.err != nil {
			a.err = fmt.Errorf("registry: read switch: %w", a.err)
		}
		return a
	case <-ctx.Done():
		return reply{err: fmt.Errorf("registry: read switch: %w", ctx.Err())}
	}
}

// SwitchClient is the method of a client that a Redis switch needs. All clients of go-redis have it.
type SwitchClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// NewRedisSwitch returns a switch of the whole fleet under one key in Redis. The values 1, on and true turn it on, 0, off and false turn it
// off, in upper or lower case. Set writes 1 or 0, without expiry. A missing key means on: limits apply. Any other value is an error, and the
// last known state stays in force. A read is one GET.
func NewRedisSwitch(client SwitchClient, key string, opts ...SwitchOption) (*PolledSwitch, error) {
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, bad("redis client", "nil", "a client")
	}
	if len(key) < 1 || len(key) > 512 {
		return nil, bad("switch key", fmt.Sprintf("%.40q of %d bytes", key, len(key)), "1 to 512 bytes")
	}
	read := func(ctx context.Context) (bool, error) {
		cmd := redis.NewStringCmd(ctx, "get", key)
		_ = client.Process(ctx, cmd) // its error is the command's
		value, err := cmd.Result()
		if errors.Is(err, redis.Nil) {
			return true, nil
		}
		if err != nil {
			return false, fmt.Errorf("key %q: %w", key, err)
		}
		switch strings.ToLower(value) {
		case "1", "on", "true":
			return true, nil
		case "0", "off", "false":
			return false, nil
		}
		return false, fmt.Errorf("key %q: value %.40q: want 1 or 0", key, value)
	}
	write := func(ctx context.Context, on bool) error {
		value := "0"
		if on {
			value = "1"
		}
		cmd := redis.NewStatusCmd(ctx, "set", key, value)
		_ = client.Process(ctx, cmd)
		if err := cmd.Err(); err != nil {
			return fmt.Errorf("key %q: %w", key, err)
		}
		return nil
	}
	// The caller's options come last, so they may replace write.
	return NewPolledSwitch(read, append([]SwitchOption{WithSwitchWrite(write)}, opts...)...)
}
