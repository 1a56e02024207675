// Package outage notices that a backend is away and that it is back, and tells those who want to know.
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
	// ProbePause is about how long after a probe that has failed the next one is sent. Beyond manyOutages of a Group it is longer, up to
	// ten times, and then an outage is forgotten if nobody has wanted to ask the backend for interest: who does next finds out.
	ProbePause  = 100 * time.Millisecond
	manyOutages = 32
	interest    = time.Minute
)

// Backend is what a Monitor is told of a backend.
type Backend struct {
	// Next is the probe to send. It reports false if nobody is left who would want to know.
	Next func() (Probe, bool)
	// Away tells whether an error of a probe, or nil, means that the backend is away. Any other is an answer, whatever it says.
	Away func(error) bool
	// Timeout is what the error of a probe that was not answered in time wraps. It means away.
	Timeout error
	// Changed is told of outages before everybody else.
	Changed func(Change)
}

// Change is the beginning of an outage, or its end.
type Change struct {
	Down      bool
	Err       error         // why it has begun
	After     time.Duration // how long it was, at its end
	Forgotten bool          // at its end: whether the backend is back is not known
	Others    int64         // outages of the Group besides
}

// Group is the outages of all monitors of one client: with a cluster there are many. The zero value is ready; it must not be copied.
type Group struct{ outages atomic.Int64 }

// Outages is how many there are.
func (g *Group) Outages() int64 { return g.outages.Load() }

// Monitor knows whether a backend is away. It is safe for concurrent use.
//
// What must hold: a suspicion costs others nothing; only a probe that fails is an outage; the end of an outage is told to those to whom
// its beginning was told, and to nobody else.
//
// The obvious way is to take a call that fails for an outage, and to let a call through now and then to see whether it is over. But then
// one lost reply shuts out everybody, so does one caller with little time, and the calls that are let through pay for what they find
// out. So a call that fails is a suspicion, which has a probe sent at once. If that fails, too, the backend is down: calls need not be
// sent, and more probes follow, until one is answered. An answer counts even if its probe was given up before: a backend that has become
// slow is away for no longer than it takes to answer, and from then on probes are given as much time.
//
// As long as the state is not up there is one prober, a goroutine or between two probes a timer. It alone ends suspicions and outages and
// calls those who are told, so they hear of one outage after the other, of each its beginning and then its end. No function of
// anybody else is called under a lock, so each may use the monitor.
type Monitor struct {
	group   *Group
	backend Backend
	probes  probes

	mu       sync.Mutex // guards what follows
	status   Status
	wantedAt time.Duration // when a call failed last, or was not sent; see clock.Mono
	watchers map[*watcher]struct{}

	notified []func(Change) // the prober's alone: those who were told of the beginning
}

// watcher wants to be told of outages. It returns the function to tell, nil if its user is used no more.
type watcher struct{ notify func() func(Change) }

// New returns the monitor of a backend that is up, as far as known.
func New(group *Group, backend Backend) *Monitor {
	return &Monitor{
		group: group, backend: backend, watchers: map[*watcher]struct{}{},
		probes: probes{away: backend.Away, timeout: backend.Timeout, late: make(chan error, 1)},
	}
}

// Watch has a user told of each outage that begins while it is used: notify returns the function that is told of the beginning, and of
// the end even if the user is used no more by then. The monitor does not keep the user alive; notify must not either.
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

func (m *Monitor) unwatch(w *watcher) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.watchers, w)
}

// Down is the outage that was noticed, or nil. It takes no lock.
func (m *Monitor) Down() *Outage { return m.status.Down() }

// Answered notes that a call was answered, and after what time.
func (m *Monitor) Answered(took time.Duration) { m.probes.answered(took) }

// Failed notes that a call has failed, or was not sent since the backend is down. It makes sure that probes are sent.
func (m *Monitor) Failed() {
	m.mu.Lock()
	m.wantedAt = clock.Mono()
	before := m.status.on(callFailed, nil)
	m.mu.Unlock()
	if before == up {
		go m.probe()
	}
}

// Ask is the error of the probe that is under way, or of this one. It waits as long as this one might take, and returns early if ctx
// ends. What it learns is for its caller alone: Failed is for the others.
func (m *Monitor) Ask(ctx context.Context, p Probe) error {
	ctx, cancel := context.WithTimeout(ctx, m.probes.patience(p.Timeout)) // the one under way may be given more
	defer cancel()
	return m.probes.ask(ctx, p, m.Down() != nil)
}

// probe is the prober's next step.
func (m *Monitor) probe() {
	p, wanted := m.next()
	if !wanted {
		m.end(forgotten)
		return
	}
	err := m.probes.ask(context.Background(), p, m.Down() != nil)
	if !m.backend.Away(err) {
		m.end(probeAnswered)
		return
	}
	time.AfterFunc(m.failed(err), m.probe)
}

// next is the probe to send. It reports false if nobody wants to know any more.
func (m *Monitor) next() (p Probe, wanted bool) {
	m.mu.Lock()
	unasked := clock.Mono() - m.wantedAt
	m.mu.Unlock()
	if unasked > interest && m.group.Outages() > manyOutages {
		return Probe{}, false
	}
	return m.backend.Next()
}

// failed notes that a probe has failed, and returns the time until the next.
func (m *Monitor) failed(err error) (pause time.Duration) {
	begins, others := m.Down() == nil, int64(0)
	if begins {
		m.probes.forgetLate() // of an earlier outage
		others = m.group.outages.Add(1) - 1
	}
	pause = ProbePause * time.Duration(min(10, 1+m.group.Outages()/manyOutages))
	m.mu.Lock()
	m.status.ProbeFailed(err, pause, pause)
	pause = m.status.UntilProbe()
	m.mu.Unlock()
	if begins {
		m.notified = m.audience()
		m.tell(Change{Down: true, Err: err, Others: others})
	}
	return pause
}

// end ends the suspicion or the outage. It goes on to probe if a call has failed meanwhile.
func (m *Monitor) end(e event) {
	o := m.Down()
	m.mu.Lock()
	m.status.on(e, nil)
	m.mu.Unlock()
	if o == nil {
		return
	}
	m.tell(Change{After: time.Since(o.Since), Forgotten: e == forgotten, Others: m.group.outages.Add(-1)})
	m.notified = nil
	m.mu.Lock()
	m.status.on(told, nil)
	again := m.status.state == suspected
	m.mu.Unlock()
	if again {
		m.probe()
	}
}

// audience is who is told of an outage that begins now.
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

func (m *Monitor) tell(c Change) {
	for _, notify := range m.notified {
		notify(c)
	}
}
