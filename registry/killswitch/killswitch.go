// Package killswitch turns limits off, and on again, while a fleet runs: a [Switch] is one state for all processes, a [Local] one for this
// process.
//
//	sw, err := killswitch.NewRedis(client, "limits")
//	limits, err := registry.New(source, store, registry.WithSwitch(sw))
//
// It needs neither a table nor a registry. A limiter that is used alone takes it as well:
//
//	limiter, err := tokenbucket.NewSmoothBursty("upstream", 100, tokenbucket.WithSwitch(sw.Enabled))
//
// While the switch is off, every call passes, and no store is used. A switch that cannot be read keeps its last known state.
package killswitch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Local is a switch of this process, for tests, signals and admin pages. The zero value is off. It is safe for concurrent use.
type Local struct{ on atomic.Bool }

// NewLocal returns a switch that is on or off.
func NewLocal(on bool) *Local {
	s := new(Local)
	s.Set(on)
	return s
}

// Set turns the switch on or off.
func (s *Local) Set(on bool) { s.on.Store(on) }

// Enabled reports whether limits apply.
func (s *Local) Enabled() bool { return s.on.Load() }

// Switch is one switch for a whole fleet, in a store that all processes read: [NewRedis], sqlsource.NewSwitch, or a function
// ([New]). Enabled is one atomic load.
//
// A goroutine reads the store. Reads begin 3/4 to 1 interval apart ([WithInterval], default 1 s), at random, so that a fleet does not
// read in step. A change takes effect within one interval plus a round trip. After a slow read the next one waits at least a quarter of an
// interval. While reads fail, the last known state stays in force: see Age and Err.
//
// It is safe for concurrent use. Close ends the reading.
type Switch struct {
	read    func(context.Context) (bool, error)
	options options
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

// New returns a switch whose state read returns. One goroutine at a time calls read. New reads once before it
// returns, within the timeout of a read. If that fails, the hook gets the error, because a gateway must be able to start without its switch.
// New fails only if an option is invalid.
func New(read func(ctx context.Context) (on bool, err error), opts ...Option) (*Switch, error) {
	o := options{interval: defaultInterval, timeout: defaultTimeout, initial: true, log: slog.Default()}
	if read == nil {
		o.fail("read", "nil", "a function")
	}
	for _, opt := range opts {
		if opt == nil {
			o.fail("option", "nil", "no nil options")
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
	s := &Switch{read: read, options: o, cancel: cancel, done: make(chan struct{}), readAt: time.Now()}
	s.on.Store(o.initial)
	s.poll(ctx)
	go s.run(ctx)
	return s, nil
}

// Enabled reports whether limits apply.
func (s *Switch) Enabled() bool { return s.on.Load() }

// Origin returns the author and the time of the last change, as far as the store has them; "" if it has neither.
func (s *Switch) Origin() string {
	if s.options.origin == nil {
		return ""
	}
	return s.options.origin()
}

// Age returns the time since the last successful read or Set; if there was none, since the constructor.
func (s *Switch) Age() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.readAt)
}

// Err returns the error of the last read; nil if it succeeded.
func (s *Switch) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Set turns the switch of the whole fleet on or off: in this process at once, in others with their next read. It returns when ctx ends, even
// if the write ignores ctx. After an error the write may have succeeded or not. Without [WithWrite], Set returns errors.ErrUnsupported.
func (s *Switch) Set(ctx context.Context, on bool) error {
	if s.options.write == nil {
		return fmt.Errorf("killswitch: set: %w", errors.ErrUnsupported)
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
		return fmt.Errorf("killswitch: set: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sets++
	s.readAt = time.Now()
	s.on.Store(on)
	return nil
}

// Close ends the reading. The last known state stays in force. Close cancels a read in flight, and does not wait for a read that ignores its
// context, nor for a hook that is running. A second Close does nothing.
func (s *Switch) Close() {
	s.cancel()
	<-s.done
}

func (s *Switch) run(ctx context.Context) {
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
func (s *Switch) poll(ctx context.Context) {
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
		s.callHook(ctx, a.err)
	}
}

// callHook calls the hook, and returns after it or at Close, which the hook may call.
func (s *Switch) callHook(ctx context.Context, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.options.hook(err)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// ask calls read. It returns within the timeout even if read does not. It begins no read while another is in flight.
func (s *Switch) ask(ctx context.Context) reply {
	ctx, cancel := context.WithTimeout(ctx, s.options.timeout)
	defer cancel()
	if s.late != nil {
		select {
		case <-s.late: // outdated
		case <-ctx.Done():
			return reply{err: fmt.Errorf("killswitch: read: an earlier read has not returned: %w", ctx.Err())}
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
			a.err = fmt.Errorf("killswitch: read: %w", a.err)
		}
		return a
	case <-ctx.Done():
		return reply{err: fmt.Errorf("killswitch: read: %w", ctx.Err())}
	}
}
