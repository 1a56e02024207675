package matrix

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// cell is some features on a bucket of its own: all of it, or the part of it that runs in this process.
type cell struct {
	name     string
	features []feature
	lasts    time.Duration
	began    time.Time // of all its processes
	stores   []*tokenbuckettest.Store
	limiters []*tb.RateLimiter
	rows     *rows
	off      atomic.Bool // the switch
	away     atomic.Bool // the store was away, so that errors may say so

	mu sync.Mutex
	part
}

// part is what a process has seen of a cell. Durations are since the cell began.
type part struct {
	Uses     []use         `json:",omitempty"`
	Lost     float64       `json:",omitempty"` // permits that need not be used
	More     float64       `json:",omitempty"` // permits that may be used on top of the bound
	RaisedAt time.Duration `json:",omitempty"` // when the rate was raised, until a reset unless it is that of a row; 0 if it was not
	ResetAt  time.Duration `json:",omitempty"`
	EndedAt  time.Duration
	Stays    bool          `json:",omitempty"` // the raised rate outlives a reset
	Free     bool          `json:",omitempty"` // calls may pass without a limit, so there is no bound
	Second   bool          `json:",omitempty"` // a choice has a second bucket
	Refusal  string        `json:",omitempty"`
	Failures []string      `json:",omitempty"`
	Late     time.Duration `json:",omitempty"` // by how much the process was late at most
	// The bucket after Close, unless AsOf is 0: permits that are stored, and those that are taken and not due yet.
	AsOf         time.Duration
	Stored, Owed float64
}

// use is permits that a caller has used.
type use struct {
	Asked   time.Duration `json:"a"`
	At      time.Duration `json:"t"`
	Permits int           `json:"n"`
	Caller  int           `json:"c"`
	Process int           `json:"p,omitempty"`
	Waited  bool          `json:"w,omitempty"` // in the queue of its process
	Face    int           `json:"f,omitempty"` // which of the faces
}

// newCell returns a cell of features by their names.
func newCell(name string, lasts time.Duration, names ...string) *cell {
	c := &cell{name: name, lasts: lasts}
	for _, f := range features {
		if slices.Contains(names, f.name) {
			c.features = append(c.features, f)
		}
	}
	return c
}

// has reports whether the cell has one of the features.
func (c *cell) has(names ...string) bool {
	return slices.ContainsFunc(c.features, func(f feature) bool { return slices.Contains(names, f.name) })
}

func (c *cell) now() time.Duration { return time.Since(c.began) }

// less takes permits out of what is possible, and allows others beyond it.
func (c *cell) less(lost, more float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Lost += lost
	c.More += more
}

// faster notes a change to the rate faster, which stays after a reset or not. What is owned already keeps its due time.
func (c *cell) faster(change func() error, stays bool) error {
	before := c.now()
	err := change()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Stays = c.Stays || stays
	if c.RaisedAt == 0 && err == nil {
		c.RaisedAt = before
		c.Lost += c.owned()/2*(1-rate/faster) + (faster-rate)*(c.now()-before).Seconds()
	}
	return err
}

func (c *cell) fail(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.Failures) < 4 {
		c.Failures = append(c.Failures, fmt.Sprintf(format, args...))
	}
}

// note keeps an error: a refusal of the combination, what an outage explains, or a failure.
func (c *cell) note(ctx context.Context, what string, err error) {
	switch {
	case err == nil, ctx.Err() != nil && errors.Is(err, context.Canceled):
	case c.away.Load() && errors.Is(err, tb.ErrStoreUnavailable):
	case refused(err):
		c.mu.Lock()
		c.Refusal = err.Error()
		c.mu.Unlock()
	default:
		c.fail("%s: %v", what, err)
	}
}

// refused reports whether an error is the typed error of a combination that cannot be.
func refused(err error) bool {
	return errors.Is(err, tb.ErrInvalidConfig) || errors.Is(err, tb.ErrInvalidPermits) || errors.Is(err, errNoSuchVerb)
}

// crowd is how many callers of Acquire a cell has in addition: of each priority, so that the highest wants more than a lower one looks ahead;
// and as many again for a choice, which has twice the rate.
func (c *cell) crowd() (n int) {
	if faces := len(c.faces()); faces > 1 {
		n += 40 * faces
	}
	if c.has("Any") {
		n += callers
	}
	return n
}

// owned bounds the permits that the callers own ahead.
func (c *cell) owned() float64 { return float64(4*callers + 1 + c.crowd()) }

// tenant is that of a caller: half of them are of one tenant, and a quarter of each of two others.
func tenant(caller int) int { return max(0, caller%callers/(callers/4)-1) }

// run makes the limiters of this process, lets the callers and the disturbances run, and closes everything. Of a number of processes the
// cell has those that stores names: all of them, or one.
func (c *cell) run(ctx context.Context, processes int, stores map[int]tb.Store) {
	s := &spec{cell: c}
	for _, f := range c.features {
		if f.limit != nil {
			f.limit(c, s)
		}
	}
	c.rows = &rows{spec: s}
	defer c.rows.close()
	targets := make([][]target, processes) // by target and face
	faces := c.faces()
	var closing []func(context.Context) error
	for p := range processes {
		inner, here := stores[p]
		if !here {
			continue
		}
		store := tokenbuckettest.Wrap(inner)
		c.stores = append(c.stores, store)
		l, err := s.build(c.name, rate, store)
		if err != nil {
			c.note(ctx, "making the limiter", err)
			return
		}
		c.limiters = append(c.limiters, l)
		closing = append(closing, l.Close)
		for _, face := range faces {
			for _, make := range c.targets() {
				to, err := make(c, s, store, face(l))
				if err != nil {
					c.note(ctx, "making the target", err)
					return
				}
				targets[p] = append(targets[p], to)
				closing = append(closing, to.Close)
			}
		}
	}
	within, end := context.WithCancel(ctx)
	defer end()
	var running sync.WaitGroup
	sleep(ctx, time.Until(c.began))
	calls, queues := c.calls()
	rest := pause
	if c.Second {
		rest /= 2
	}
	makes := len(targets[slices.Min(slices.Collect(maps.Keys(stores)))]) / len(faces)
	for i := range callers + c.crowd() {
		process := i / 2 % processes
		if _, here := stores[process]; !here {
			continue
		}
		by := targets[process]
		which := i / 4 % len(by)
		kind := i % len(calls)
		call, waits := calls[kind], queues[kind]
		if i >= callers {
			call, waits = features[0].call, true
		}
		to := by[which]
		mine := context.WithValue(within, callerKey{}, i)
		running.Go(func() {
			for within.Err() == nil {
				asked := c.now()
				n, err := call(c, mine, to)
				if n > 0 && err == nil {
					c.mu.Lock()
					c.Uses = append(c.Uses, use{Asked: asked, At: c.now(), Permits: n, Caller: i, Process: process, Waited: waits, Face: which / makes})
					c.mu.Unlock()
				}
				c.note(within, "call", err)
				if n == 0 && c.now()-asked < time.Millisecond || c.Free || err != nil {
					sleep(within, rest)
				}
			}
		})
	}
	_, first := stores[0]
	for _, f := range c.features {
		if f.disturb != nil && (first || f.everywhere) {
			running.Go(func() { c.note(within, f.name, f.disturb(c, within)) })
		}
	}
	sleep(within, c.lasts-c.now())
	c.EndedAt = c.now()
	end()
	running.Wait()
	for _, close := range closing {
		bounded, cancel := context.WithTimeout(background, 5*time.Second)
		if err := close(bounded); err != nil && !c.away.Load() {
			c.fail("Close: %v", err)
		}
		cancel()
	}
	for _, l := range c.limiters {
		if n, _ := l.Waiting(); n != 0 {
			c.fail("%d waiters are left", n)
		}
	}
	sleep(ctx, c.lasts+drain-c.now()) // until all processes have closed theirs
	if b, err := c.limiters[0].State(background); err == nil {
		c.AsOf = c.now()
		c.Stored, c.Owed = b.StoredPermits, max(0, float64(b.NextFreeTicketMicros-b.SeenMicros)/b.IntervalMicros)
	} else if !c.away.Load() { // on a busy machine an outage may last
		c.fail("State: %v", err)
	}
}

// faces returns the priorities of the callers, the highest first.
func (c *cell) faces() (all []func(*tb.RateLimiter) *tb.RateLimiter) {
	all = append(all, func(l *tb.RateLimiter) *tb.RateLimiter { return l })
	for _, f := range c.features {
		if f.face != nil {
			all = append(all, f.face)
		}
	}
	return all
}

// targets returns what makes the targets of the callers.
func (c *cell) targets() (all []func(*cell, *spec, tb.Store, *tb.RateLimiter) (target, error)) {
	for _, f := range c.features {
		if f.target != nil {
			all = append(all, f.target)
		}
	}
	if len(all) == 0 {
		all = append(all, func(c *cell, _ *spec, _ tb.Store, l *tb.RateLimiter) (target, error) {
			one := one{RateLimiter: l}
			if s := c.rows.registries; len(s) > 0 {
				one.rows = s[len(s)-1]
			}
			return one, nil
		})
	}
	return all
}

// calls returns the ways of calling: those of the features, and Acquire beside a single one or those that give up. queues tells which wait
// in the queue of their process until they are served.
func (c *cell) calls() (all []func(*cell, context.Context, target) (int, error), queues []bool) {
	leave := true
	for _, f := range c.features {
		if f.call != nil {
			all = append(all, f.call)
			queues = append(queues, slices.Contains([]string{"Acquire", "TryAcquire", "Try", "TryAwait"}, f.name))
			leave = leave && f.leaves
		}
	}
	if len(all) < 2 || leave {
		all, queues = append(all, features[0].call), append(queues, true)
	}
	return all, queues
}

// names returns those of the features.
func (c *cell) names() (all []string) {
	for _, f := range c.features {
		all = append(all, f.name)
	}
	return all
}

// key returns the cell's name: a feature beside itself stands twice.
func (c *cell) key() string {
	names := c.names()
	if len(names) == 1 {
		names = append(names, names[0])
	}
	return strings.Join(names, " + ")
}
