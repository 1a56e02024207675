package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"
)

const (
	// probeTimeout is how long a probe may take, or three times as long as answers took of late, but no longer than the
	// store may. As long as it fails, the next one follows after probePause.
	probeTimeout = 250 * time.Millisecond
	probePause   = 100 * time.Millisecond
	// probeLife is how long a probe is kept beyond that, for a store that has become slow is not away: its late answer says so.
	// maxProbes bounds those that are kept.
	probeLife = 4 * time.Second
	maxProbes = 16
)

// health is what this process knows of a store: whether it answers. A call that fails raises a suspicion, which costs others
// nothing; a probe settles it. So neither one lost reply nor a caller with little time shuts out the others, and no call is
// spent on finding out.
type health struct {
	others  *atomic.Int64 // outages of this client that are noticed: with a cluster each bucket has its own
	hung    atomic.Int32
	now     atomic.Pointer[outage] // nil: it answers, as far as known
	probing atomic.Bool
	slowest atomic.Int64 // of the answers of late, in nanoseconds; 0: none yet
	late    chan error   // answers of probes whose time was over
	logger  logger

	telling sync.Mutex // held from noticing until all have heard

	mu      sync.Mutex
	asked   *asked                    // under way
	last    weak.Pointer[coordinator] // that wanted to ask,
	lastAt  time.Duration             // and when; see mono
	told    map[weak.Pointer[RateLimiter]]struct{}
	sweepAt int            // entries of told
	heard   []func(Health) // of those who were told of the outage, whether they are used any more or not
	timer   *time.Timer
}

// asked is a probe that some may wait for.
type asked struct {
	done chan struct{}
	err  error
}

// outage is what was noticed.
type outage struct {
	since time.Time
	err   error
}

func newHealth(others *atomic.Int64) *health {
	return &health{others: others, late: make(chan error, 1)}
}

// took notes how long an answer took.
func (h *health) took(d time.Duration) {
	before := h.slowest.Load()
	if after := max(int64(d), before-before/16); after != before {
		h.slowest.Store(after) // one that is lost to another goroutine's does not matter
	}
}

// patience is how long a probe may take.
func (h *health) patience(timeout time.Duration) time.Duration {
	slowest := time.Duration(h.slowest.Load())
	if slowest == 0 { // nothing was ever answered
		return min(timeout, defaultStoreTimeout)
	}
	return min(timeout, max(probeTimeout, 3*slowest))
}

// suspect makes sure that the store of a line is probed, after a call of it has failed.
func (h *health) suspect(l *coordinator) {
	h.wanted(l)
	if h.probing.CompareAndSwap(false, true) {
		go h.probe()
	}
}

// wanted notes that a line wants to ask the store.
func (h *health) wanted(l *coordinator) {
	h.mu.Lock()
	h.last, h.lastAt = weak.Make(l), mono()
	h.mu.Unlock()
}

const (
	// Beyond outagesAtOnce, buckets are probed less often, at last once a second each, and the outage of one that nobody has wanted
	// for idle is forgotten: the next who does finds out.
	outagesAtOnce = 32
	idle          = time.Minute
)

// next is the line whose bucket is to be probed: the last that wanted to ask, or another if nobody uses that any more. It is nil
// if nobody has wanted to for long, and if no line is left: then the outage is forgotten.
func (h *health) next() (l *coordinator, forgotten bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if mono()-h.lastAt > idle && h.others.Load() > outagesAtOnce {
		return nil, true
	}
	if l := h.last.Value(); l != nil {
		return l, false
	}
	for other := range coordinators.All {
		if other.health == h {
			h.last = weak.Make(other)
			return other, false
		}
	}
	return nil, true
}

// probe asks the store until it answers, or nobody wants to know.
func (h *health) probe() {
	l, forgotten := h.next()
	if forgotten {
		h.settled(false)
	}
	if l == nil {
		return
	}
	err := h.ask(context.Background(), l)
	if !away(err) {
		h.settled(true)
		return
	}
	h.failed(err)
	pause := (probePause/2 + rand.N(probePause)) * time.Duration(min(10, 1+h.others.Load()/outagesAtOnce))
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.timer == nil {
		h.timer = time.AfterFunc(pause, h.probe)
	} else {
		h.timer.Reset(pause)
	}
	runtime.KeepAlive(l) // so that end comes after failed
}

// end is that of the line whose health it is alone.
func (h *health) end() {
	if h.now.Load() != nil {
		go h.settled(false)
	}
}

// ask probes the store, or waits for the probe that is under way. It returns early if the context ends.
func (h *health) ask(ctx context.Context, l *coordinator) error {
	h.mu.Lock()
	a := h.asked
	if a == nil {
		a = &asked{done: make(chan struct{})}
		h.asked = a
		go func() {
			a.err = h.knock(l)
			h.mu.Lock()
			h.asked = nil
			h.mu.Unlock()
			close(a.done)
		}()
	}
	h.mu.Unlock()
	select {
	case <-a.done:
		return a.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// knock is one probe.
func (h *health) knock(l *coordinator) error {
	if h.hung.Load() >= maxProbes {
		return fmt.Errorf("%w: probes are not answered", ErrStoreTimeout)
	}
	limit := h.patience(l.timeout)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	answer, left := make(chan error), make(chan struct{})
	defer close(left)
	h.hung.Add(1)
	go func() {
		defer h.hung.Add(-1)
		ctx, cancel := context.WithTimeout(context.Background(), max(limit, min(l.timeout, probeLife)))
		defer cancel()
		began := mono()
		err := h.reach(ctx, l)
		if !away(err) {
			h.took(min(mono()-began, time.Second)) // or the next is too late again; more may have been an outage
		}
		select {
		case answer <- err:
		case <-left:
			if !away(err) {
				select {
				case h.late <- err:
				default:
				}
			}
		}
	}()
	var late <-chan error
	if h.now.Load() != nil {
		late = h.late
	}
	select {
	case err := <-answer:
		return err
	case err := <-late:
		return err
	case <-timer.C:
		return fmt.Errorf("%w: a probe was not answered within %v", ErrStoreTimeout, limit)
	}
}

// reach asks the store.
func (h *health) reach(ctx context.Context, l *coordinator) error {
	if probe := l.traits.probe; probe != nil {
		return probe(ctx, l.name)
	}
	_, err := l.store.Apply(ctx, &Batch{Name: l.name, Config: placeholder, Epoch: newEpoch(), LocalMicros: l.micros, probe: true})
	if errors.Is(err, ErrInvalidConfig) { // of a bucket of the other kind: it was read
		return nil
	}
	return err
}

// failed notes an outage.
func (h *health) failed(err error) {
	h.telling.Lock()
	defer h.telling.Unlock()
	if h.now.Load() != nil {
		return
	}
	select { // of an earlier outage
	case <-h.late:
	default:
	}
	h.now.Store(&outage{time.Now(), err})
	if h.others.Add(1) == 1 { // one of many is logged
		h.logger.get().Warn("tokenbucket: the store is away", "error", err)
	}
	h.mu.Lock()
	for p := range h.told {
		if l := p.Value(); l == nil {
			delete(h.told, p)
		} else {
			tell, bucket, policy := l.observer.Health, l.Name(), l.policy
			h.heard = append(h.heard, func(what Health) {
				what.Bucket, what.Policy = bucket, policy
				tell(what)
			})
		}
	}
	h.mu.Unlock()
	for _, tell := range h.heard {
		tell(Health{Down: true, Err: err})
	}
}

// settled ends the probes, and the outage if there was one: it is over, or forgotten.
func (h *health) settled(over bool) {
	h.telling.Lock()
	defer h.telling.Unlock()
	o := h.now.Swap(nil)
	h.mu.Lock()
	h.timer = nil
	h.mu.Unlock()
	h.probing.Store(false)
	if o != nil {
		after := time.Since(o.since)
		if h.others.Add(-1) == 0 && over {
			h.logger.get().Info("tokenbucket: the store is back", "after", after)
		}
		for _, tell := range h.heard {
			tell(Health{After: after})
		}
		h.heard = nil
	}
}

// watch has a limiter told of outages, as long as it is used.
func (h *health) watch(l *RateLimiter) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.told == nil {
		h.told = make(map[weak.Pointer[RateLimiter]]struct{})
	}
	if len(h.told) >= h.sweepAt {
		maps.DeleteFunc(h.told, func(p weak.Pointer[RateLimiter], _ struct{}) bool { return p.Value() == nil })
		h.sweepAt = 2*len(h.told) + 16
	}
	h.told[weak.Make(l)] = struct{}{}
}
