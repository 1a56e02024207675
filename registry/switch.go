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

// AtomicSwitch is a switch of this process, for tests, signals and admin pages. The zero value is off. Its methods may be
// called by many goroutines at once.
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

// PolledSwitch is one switch for a whole fleet, kept where all of it can read: [NewRedisSwitch], sqlsource.NewSwitch, or
// whatever [NewPolledSwitch] is given. Enabled is one atomic load.
//
// It is read in the background. Reads begin 3/4 to 1 interval apart ([WithSwitchInterval], default 1 s), at random, so that a
// fleet does not read in step: a flip is seen within one interval plus a round trip. After a slow read the next one still
// waits a quarter of an interval. When reads fail, what was last read stays, for as long as that lasts: see Age and Err.
//
// The methods may be called by many goroutines at once. Close ends the reading.
type PolledSwitch struct {
	read    func(context.Context) (bool, error)
	options switchOptions
	on      atomic.Bool
	cancel  context.CancelFunc
	done    chan struct{}
	late    chan answer // of a read that was given up but has not returned; used by the reading goroutine only

	mu     sync.Mutex
	sets   int       // Sets that have succeeded; a read that began before one is worth nothing
	readAt time.Time // the last successful read or Set, or else the beginning
	err    error
}

type answer struct {
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

// WithSwitchInterval sets how far apart reads are at most. 10 ms to 1 hour, default 1 s.
func WithSwitchInterval(d time.Duration) SwitchOption {
	return func(o *switchOptions) {
		if d < 10*time.Millisecond || d > time.Hour {
			o.fail("switch interval", d, "10ms to 1h")
		}
		o.interval = d
	}
}

// WithSwitchTimeout bounds one read, the first in the constructor included. 1 ms to 1 minute, default 1 s.
func WithSwitchTimeout(d time.Duration) SwitchOption {
	return func(o *switchOptions) {
		if d < time.Millisecond || d > time.Minute {
			o.fail("switch timeout", d, "1ms to 1m")
		}
		o.timeout = d
	}
}

// WithSwitchInitial sets what the switch says until it has been read for the first time. Default true: limits apply.
func WithSwitchInitial(on bool) SwitchOption {
	return func(o *switchOptions) { o.initial = on }
}

// WithSwitchHook sets what is told of outages: the error of the first read that fails, and nil when a read succeeds again;
// nothing in between. It is called by the reading goroutine and must neither block nor call Close. Default: they are logged,
// see [WithSwitchLogger].
func WithSwitchHook(hook func(error)) SwitchOption {
	return func(o *switchOptions) {
		if hook == nil {
			o.fail("switch hook", "nil", "a function")
		}
		o.hook = hook
	}
}

// WithSwitchLogger sets where outages are logged, their beginning and their end, if there is no [WithSwitchHook]. Default
// slog.Default().
func WithSwitchLogger(l *slog.Logger) SwitchOption {
	return func(o *switchOptions) {
		if l == nil {
			o.fail("switch logger", "nil", "a logger")
		}
		o.log = l
	}
}

// WithSwitchWrite sets how Set writes.
func WithSwitchWrite(write func(ctx context.Context, on bool) error) SwitchOption {
	return func(o *switchOptions) {
		if write == nil {
			o.fail("switch write", "nil", "a function")
		}
		o.write = write
	}
}

// WithSwitchOrigin sets who knows by whom the switch was turned last, and when, for messages; it returns "" if that is not known.
func WithSwitchOrigin(origin func() string) SwitchOption {
	return func(o *switchOptions) {
		if origin == nil {
			o.fail("switch origin", "nil", "a function")
		}
		o.origin = origin
	}
}

// logOutage is what is told of outages by default.
func logOutage(log *slog.Logger) func(error) {
	return func(err error) {
		if err != nil {
			log.Warn("registry: switch cannot be read, the last value stays", "error", err)
			return
		}
		log.Info("registry: switch can be read again")
	}
}

// NewPolledSwitch returns a switch that read is asked for, by one goroutine at a time. It reads once before it returns, and
// waits for that no longer than the timeout of a read: a failure goes to the hook, not to the caller, since a gateway must
// start without its switch. Errors are those of the configuration.
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

// Origin tells by whom the switch was turned last, and when, as far as that is known where it is kept; "" if it is not.
func (s *PolledSwitch) Origin() string {
	if s.options.origin == nil {
		return ""
	}
	return s.options.origin()
}

// Age is the time since the switch was last read or set; if it never was, since it was made.
func (s *PolledSwitch) Age() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.readAt)
}

// Err is the error of the last read; nil if it succeeded.
func (s *PolledSwitch) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Set turns the switch of the whole fleet on or off. This process sees it at once, others when they next read. It returns when
// ctx ends, even if the write does not heed that. After an error it is unknown whether it was written. A switch without [WithSwitchWrite] returns errors.ErrUnsupported.
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

// Close ends the reading; the last value stays. A read that is under way is cancelled, and not waited for if it does not
// heed its context. Closing twice does nothing.
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

// poll reads once and takes note of the result.
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

// ask returns within the timeout even if read does not. No read begins while another is under way.
func (s *PolledSwitch) ask(ctx context.Context) answer {
	ctx, cancel := context.WithTimeout(ctx, s.options.timeout)
	defer cancel()
	if s.late != nil {
		select {
		case <-s.late: // too old to be of use
		case <-ctx.Done():
			return answer{err: fmt.Errorf("registry: read switch: an earlier read has not returned: %w", ctx.Err())}
		}
	}
	s.late = make(chan answer, 1)
	go func(to chan<- answer) {
		on, err := s.read(ctx)
		to <- answer{on, err}
	}(s.late)
	select {
	case a := <-s.late:
		s.late = nil
		if a.err != nil {
			a.err = fmt.Errorf("registry: read switch: %w", a.err)
		}
		return a
	case <-ctx.Done():
		return answer{err: fmt.Errorf("registry: read switch: %w", ctx.Err())}
	}
}

// SwitchClient is the least that a Redis switch needs of a client; all clients of go-redis have it.
type SwitchClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// NewRedisSwitch returns a switch that is one key in Redis, for the whole fleet: 1, on and true turn it on, 0, off and false
// turn it off, in any case; Set writes 1 or 0, without expiry. A missing key means on: limits apply. Anything else is an
// error, and the last value stays. One GET a read.
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
	// An option of the caller's may replace write, as it may anything else.
	return NewPolledSwitch(read, append([]SwitchOption{WithSwitchWrite(write)}, opts...)...)
}
