// Package outage detects when a backend stops replying and when it replies again, and notifies watchers of both.
package outage

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

const (
	// ProbePause is the mean pause after a failed probe. With more than manyOutages outages in a Group the pause grows, up to ten times.
	// Then an outage is also abandoned once no call has needed the backend for the duration interest. The next call detects it again.
	ProbePause  = 100 * time.Millisecond
	manyOutages = 32
	interest    = time.Minute
)

// Backend describes a backend to its Monitor.
type Backend struct {
	// Next returns the probe to send. It reports false if the backend has no users left.
	Next func() (Probe, bool)
	// Away reports whether the result of a probe, an error or nil, means that the backend is away. Any other result is a reply.
	Away func(error) bool
	// Timeout is wrapped by the error of a probe that timed out. Away must report true for it.
	Timeout error
	// Changed is called for each change, before the watchers.
	Changed func(Change)
}

// Change is the beginning of an outage, or its end.
type Change struct {
	Down      bool
	Err       error         // cause of the outage, at its beginning
	After     time.Duration // duration of the outage, at its end
	Forgotten bool          // at the end: probing was abandoned, so the backend may still be away
	Others    int64         // other outages in the Group
}

// Group counts the outages of all monitors of one client; a cluster's client has many. The zero value is ready for use. A Group must not
// be copied.
type Group struct {
	outages  atomic.Int64
	reminded atomic.Int64 // when an outage was last logged, as clock.Mono
}

// Remind reports whether no outage of the group was logged for at least a time, and records that one is logged now.
func (g *Group) Remind(least time.Duration) bool {
	now, last := clock.Mono(), g.reminded.Load()
	return now-time.Duration(last) >= least && g.reminded.CompareAndSwap(last, int64(now))
}

// Outages returns the number of current outages.
func (g *Group) Outages() int64 { return g.outages.Load() }

// Monitor detects outages of one backend. It is safe for concurrent use.
//
// Invariants:
//   - A suspicion does not delay or refuse other calls.
//   - Only a failed probe starts an outage.
//   - Exactly the watchers that were notified of the beginning of an outage are notified of its end.
//
// The obvious design is a circuit breaker: a failed call starts an outage, and an occasional trial call finds its end. Then one lost reply,
// or one caller with a short timeout, shuts out all callers, and the trial calls bear the cost of detection. Here, a failed call is only a
// suspicion, and a probe is sent at once. If the probe fails too, the backend is down: calls need not be sent, and probes follow until one
// is answered. A reply counts even after its probe timed out. So a backend that has become slow is down only until its first late reply,
// and later probes get a longer timeout.
//
// While the state is not up there is one prober: a goroutine, or a timer between two probes. Only the prober ends suspicions and outages,
// and only the prober calls watchers. So a watcher sees outages one after the other, each with its beginning and then its end. Callbacks
// run without a lock, so they may use the monitor.
type Monitor struct {
	group   *Group
	backend Backend
	probes  probes

	mu          sync.Mutex // guards status, lastFailure and watchers
	status      Status
	lastFailure time.Duration // when a call last failed or was not sent, as clock.Mono
	watchers    map[*watcher]struct{}

	receivers []func(Change) // watchers of the current outage; used by the prober only
}

// watcher receives the changes of outages that begin while its user exists. notify returns the callback, or nil if the user is gone.
type watcher struct{ notify func() func(Change) }

// New returns a monitor. The backend is up until a probe fails.
func New(group *Group, backend Backend) *Monitor {
	return &Monitor{
		group: group, backend: backend, watchers: map[*watcher]struct{}{},
		probes: probes{away: backend.Away, timeout: backend.Timeout, late: make(chan error, 1)},
	}
}

// Watch notifies a user of each outage that begins while the user is reachable. notify returns the callback, which is called at the
// beginning and at the end of the outage. The end is reported even if the user is unreachable by then. The monitor does not keep the user
// reachable, and notify must not either.
func Watch[T any](m *Monitor, user *T, notify func(*T) func(Change)) {
	used := weak.Make(user)
	w := &watcher{func() func(Change) {
		if user := used.Value(); user != nil {
			return notify(user)
		}
		return nil
	}}
	m.mu.Lock()
	m.watchers[w] = struct{}{}
	m.mu.Unlock()
	runtime.AddCleanup(user, m.unwatch, w)
}

// unwatch removes a watcher.
func (m *Monitor) unwatch(w *watcher) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.watchers, w)
}

// Down returns the current outage, or nil. It takes no lock.
func (m *Monitor) Down() *Outage { return m.status.Down() }

// Answered records that a call was answered, and how long the reply took.
func (m *Monitor) Answered(took time.Duration) { m.probes.answered(took) }

// Failed records that a call failed, or was not sent because the backend is down. It starts probing if no prober runs.
func (m *Monitor) Failed() {
	m.mu.Lock()
	m.lastFailure = clock.Mono()
	before := m.status.on(callFailed, nil)
	m.mu.Unlock()
	if before == up {
		go m.probe()
	}
}

// Ask returns the error of the probe in flight, or sends p if there is none. It waits at most for the timeout of p, and returns early if
// ctx ends. It does not change the state; callers report failures by Failed.
func (m *Monitor) Ask(ctx context.Context, p Probe) error {
	ctx, cancel := context.WithTimeout(ctx, m.probes.patience(p.Timeout)) // the probe in flight may have a longer timeout
	defer cancel()
	return m.probes.ask(ctx, p, m.Down() != nil)
}

// probe is the next step of the prober: it sends a probe, then ends the outage or schedules the next step.
func (m *Monitor) probe() {
	p, wanted := m.next()
	if !wanted {
		m.end(abandoned)
		return
	}
	err := m.probes.ask(context.Background(), p, m.Down() != nil)
	if !m.backend.Away(err) {
		m.end(probeAnswered)
		return
	}
	time.AfterFunc(m.failed(err), m.probe)
}

// next returns the probe to send. It reports false if probing is to be abandoned.
func (m *Monitor) next() (p Probe, wanted bool) {
	m.mu.Lock()
	idle := clock.Mono() - m.lastFailure
	m.mu.Unlock()
	if idle > interest && m.group.Outages() > manyOutages {
		return Probe{}, false
	}
	return m.backend.Next()
}

// failed records a failed probe and returns the time until the next one.
func (m *Monitor) failed(err error) (pause time.Duration) {
	begins, others := m.Down() == nil, int64(0)
	if begins {
		m.probes.forgetLate() // it belongs to an earlier outage
		others = m.group.outages.Add(1) - 1
	}
	pause = ProbePause * time.Duration(min(10, 1+m.group.Outages()/manyOutages))
	m.mu.Lock()
	m.status.ProbeFailed(err, pause, pause)
	pause = m.status.UntilProbe()
	m.mu.Unlock()
	if begins {
		m.receivers = m.audience()
		m.notify(Change{Down: true, Err: err, Others: others})
	}
	return pause
}

// end ends the suspicion or the outage. It keeps probing if a call failed while watchers were being notified.
func (m *Monitor) end(e event) {
	o := m.Down()
	m.mu.Lock()
	m.status.on(e, nil)
	m.mu.Unlock()
	if o == nil {
		return
	}
	m.notify(Change{After: time.Since(o.Since), Forgotten: e == abandoned, Others: m.group.outages.Add(-1)})
	m.receivers = nil
	m.mu.Lock()
	m.status.on(notified, nil)
	again := m.status.state == suspected
	m.mu.Unlock()
	if again {
		m.probe()
	}
}

// audience returns the callbacks to notify of an outage that begins now.
func (m *Monitor) audience() []func(Change) {
	m.mu.Lock()
	watchers := make([]*watcher, 0, len(m.watchers))
	for w := range m.watchers {
		watchers = append(watchers, w)
	}
	m.mu.Unlock()
	all := []func(Change){m.backend.Changed}
	for _, w := range watchers {
		if notify := w.notify(); notify != nil {
			all = append(all, notify)
		}
	}
	return all
}

// notify calls the receivers of the current outage.
func (m *Monitor) notify(c Change) {
	for _, notify := range m.receivers {
		notify(c)
	}
}
