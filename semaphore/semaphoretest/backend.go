// Package semaphoretest holds the conformance suites of the package semaphore: Semaphore, of what every semaphore must do,
// and Backend, of what every place must do that keeps permits for a fleet. A backend of your own runs it so:
//
//	func TestBackend(t *testing.T) {
//		semaphoretest.Backend(t, func(t *testing.T) semaphoretest.Place {
//			db := openEmptyDatabase(t)
//			return semaphoretest.Place{Process: func() semaphore.Backend { return mybackend.New(db, "name") }}
//		})
//	}
package semaphoretest

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Place is where a semaphore is kept of which nothing is there yet. The clock must be real.
type Place struct {
	// Process makes a backend of the semaphore, as another process would have it.
	Process func() semaphore.Backend
	// SetBack changes what is stored so as if the clock had been set back by d after all that has happened: the latest
	// time seen, ends of leases and of patience lie later by d. A negative d lets time pass. It may be nil: then the suite
	// sleeps instead, and the clock is never set back.
	SetBack func(t *testing.T, d time.Duration)
}

// Backend is what every semaphore.Backend must do. open is called once a test, and many times for random ones.
func Backend(t *testing.T, open func(t *testing.T) Place) {
	for name, test := range map[string]func(*fleet){
		"grants what there is":     grantsWhatThereIs,
		"nobody passes":            nobodyPasses,
		"tells whom it concerns":   tellsWhomItConcerns,
		"may be asked again":       mayBeAskedAgain,
		"leases end":               leasesEnd,
		"renewing never shortens":  renewingNeverShortens,
		"patience ends":            patienceEnds,
		"keeps its place":          keepsItsPlace,
		"a full batch":             fullBatch,
		"several steps":            severalSteps,
		"too many":                 tooManyWanted,
		"permits of the fleet":     permitsOfTheFleet,
		"own numbers":              ownNumbers,
		"limits":                   limits,
		"each its lease":           eachItsLease,
		"silent waiters":           silentWaiters,
		"stats":                    tellsStats,
		"waits until nobody holds": untilNobodyHolds,
		"late changes nothing":     lateChangesNothing,
		"any id":                   anyID,
		"lists holders":            listsHolders,
		"a clock that goes back":   clockGoesBack,
		"hears of its own grants":  hearsItsOwn,
		"a done context":           contextDone,
	} {
		t.Run(name, func(t *testing.T) { test(newFleet(t, open(t))) })
	}
	t.Run("any sequence of batches", func(t *testing.T) { anySequence(t, open) })
	t.Run("all at once", func(t *testing.T) { allAtOnce(newFleet(t, open(t))) })
}

// fleet is a place and who uses it.
type fleet struct {
	*testing.T
	place Place
}

func newFleet(t *testing.T, p Place) *fleet { return &fleet{t, p} }

// pass lets time pass.
func (f *fleet) pass(d time.Duration) {
	if f.place.SetBack != nil {
		f.place.SetBack(f.T, -d)
	} else {
		time.Sleep(d)
	}
}

const (
	lease    = 20 * time.Second
	patience = 10 * time.Second
)

// member is one process.
type member struct {
	f       *fleet
	name    string
	backend semaphore.Backend

	mu   sync.Mutex
	news []semaphore.Grant // heard through Listen
	rung chan struct{}
}

func (f *fleet) member(name string) *member {
	return &member{f: f, name: name, backend: f.place.Process(), rung: make(chan struct{}, 1)}
}

// listener is a member that listens, as long as the test.
func (f *fleet) listener(name string) *member {
	m := f.member(name)
	stop := m.listen()
	f.Cleanup(stop)
	return m
}

func (m *member) listen() (stop func()) {
	ctx, cancel := context.WithCancel(background)
	ready, ended := make(chan struct{}, 100), make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			_ = m.backend.Listen(ctx, m.name, func() { ready <- struct{}{} }, m.heard)
		}
	}()
	select {
	case <-ready:
	case <-time.After(30 * time.Second):
		m.f.Error("Listen does not begin")
	}
	return func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			m.f.Error("Listen does not end with its context")
		}
	}
}

func (m *member) heard(g semaphore.Grant) {
	m.mu.Lock()
	m.news = append(m.news, g)
	m.mu.Unlock()
	select {
	case m.rung <- struct{}{}:
	default:
	}
}

// hears waits for so many grants in all.
func (m *member) hears(n int) []semaphore.Grant {
	m.f.Helper()
	for deadline := time.After(30 * time.Second); ; {
		m.mu.Lock()
		news := slices.Clone(m.news)
		m.mu.Unlock()
		if len(news) >= n {
			return news
		}
		select {
		case <-m.rung:
		case <-deadline:
			m.f.Fatalf("process %s was told of %d grants, want %d", m.name, len(news), n)
		}
	}
}

// apply fills in what a batch leaves open: three permits, and time enough. Who is waited for counts as alive as long.
func (m *member) apply(b semaphore.Batch) (*semaphore.Report, error) {
	b.Process, b.Label = m.name, "label of "+m.name
	if b.Permits == 0 {
		b.Permits = 3
	}
	if b.LeaseMicros == 0 {
		b.LeaseMicros = lease.Microseconds()
	}
	if b.AliveMicros == 0 {
		b.AliveMicros = b.PatienceMicros
	}
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	return m.backend.Apply(ctx, &b)
}

func (m *member) do(b semaphore.Batch) *semaphore.Report {
	m.f.Helper()
	r, err := m.apply(b)
	require.NoError(m.f, err)
	if !r.Late {
		require.Len(m.f, r.Left, len(b.Leave))
		require.Len(m.f, r.Renewed, len(b.Renew))
		require.Len(m.f, r.Entered, len(b.Enter))
	}
	return r
}

// enter is a batch of one request; it waits if patient.
func (m *member) enter(id string, permits int, patient bool) semaphore.Answer {
	m.f.Helper()
	b := semaphore.Batch{Enter: []semaphore.Entry{{ID: id, Permits: permits, Wait: patient}}}
	if patient {
		b.PatienceMicros = patience.Microseconds()
	}
	return m.do(b).Entered[0]
}

func (m *member) leave(ids ...string) *semaphore.Report {
	m.f.Helper()
	return m.do(semaphore.Batch{Leave: ids, PatienceMicros: patience.Microseconds()})
}

// ends ends an id, by a process that is configured with so many permits.
func (m *member) ends(id string, permits int) semaphore.Standing {
	m.f.Helper()
	return m.do(semaphore.Batch{Permits: permits, PatienceMicros: patience.Microseconds(), Leave: []string{id}}).Left[0]
}

// is checks an outcome, and that the numbers are there that belong to it, and no others.
func is(t *testing.T, want semaphore.Outcome, a semaphore.Answer) {
	t.Helper()
	require.Equal(t, want, a.Outcome)
	require.Equal(t, want == semaphore.Granted, a.Fence > 0, "fence %d", a.Fence)
	require.Equal(t, want == semaphore.Queued, a.Ticket > 0, "ticket %d", a.Ticket)
}

func grantsWhatThereIs(f *fleet) {
	a, b := f.member("a"), f.member("b")
	r := a.do(semaphore.Batch{Enter: []semaphore.Entry{{ID: "a1", Permits: 2}, {ID: "a2", Permits: 2}, {ID: "a3", Permits: 1}}})
	is(f.T, semaphore.Granted, r.Entered[0])
	is(f.T, semaphore.Refused, r.Entered[1]) // 2 of 3 are held
	is(f.T, semaphore.Granted, r.Entered[2]) // which are all
	require.Greater(f, r.Entered[2].Fence, r.Entered[0].Fence)
	require.GreaterOrEqual(f, r.Entered[0].Fence, r.Now, "whose state was lost goes on above what it had")
	require.True(f, r.Fresh)
	require.Equal(f, 3, r.Permits)
	require.Equal(f, r.Now+lease.Microseconds(), r.Earliest)
	is(f.T, semaphore.Refused, b.enter("b1", 1, false))
	require.Equal(f, []semaphore.Standing{semaphore.Holding, semaphore.Gone, semaphore.Gone}, b.leave("a1", "a1", "a2").Left,
		"any process may end any id, once")
	is(f.T, semaphore.Refused, b.enter("b2", 3, false))
	is(f.T, semaphore.Granted, b.enter("b3", 2, false))
	require.Equal(f, []semaphore.Standing{semaphore.Holding, semaphore.Holding}, a.leave("a3", "b3").Left)
	require.Zero(f, a.leave().Earliest)
}

func nobodyPasses(f *fleet) {
	a, b := f.member("a"), f.member("b")
	is(f.T, semaphore.Granted, a.enter("a1", 1, false))
	is(f.T, semaphore.Granted, a.enter("a2", 1, false))
	is(f.T, semaphore.Queued, b.enter("b1", 3, true))
	is(f.T, semaphore.Refused, a.enter("a3", 1, false)) // it would fit
	second := a.enter("a4", 1, true)
	is(f.T, semaphore.Queued, second)
	third := b.enter("b2", 1, true)
	require.Greater(f, third.Ticket, second.Ticket)
	require.Empty(f, b.leave("a1").Grants, "2 of 3 are not enough")
	require.Equal(f, "b1", b.leave("a2").Grants[0].ID)
	require.Empty(f, b.leave("a3").Grants)
	r := b.leave("b1") // 3 free: both come in; b is told its own
	require.Len(f, r.Grants, 1)
	require.Equal(f, "b2", r.Grants[0].ID)
	holding := a.enter("a4", 1, false)
	is(f.T, semaphore.Granted, holding)
	require.Less(f, holding.Fence, r.Grants[0].Fence, "it was there before")
	// One who waits and goes makes way in the same batch.
	is(f.T, semaphore.Queued, b.enter("b3", 3, true))
	is(f.T, semaphore.Queued, b.enter("b4", 1, true))
	r = b.leave("b3")
	require.Equal(f, semaphore.Waiting, r.Left[0])
	require.Equal(f, "b4", r.Grants[0].ID)
}

func tellsWhomItConcerns(f *fleet) {
	a, b, c := f.listener("a"), f.listener("b"), f.listener("c")
	is(f.T, semaphore.Granted, a.enter("a1", 3, false))
	for _, id := range []string{"b1", "b2"} {
		is(f.T, semaphore.Queued, b.enter(id, 1, true))
	}
	is(f.T, semaphore.Queued, c.enter("c1", 1, true))
	r := a.leave("a1")
	require.Empty(f, r.Grants)
	told := b.hears(2)
	other := c.hears(1)
	require.Equal(f, "b1", told[0].ID)
	require.Equal(f, "b2", told[1].ID)
	require.Equal(f, "c1", other[0].ID)
	for i, g := range append(told, other...) {
		require.Equal(f, semaphore.Granted, g.Outcome)
		require.Equal(f, r.Now+lease.Microseconds(), g.Expires, i)
	}
	require.Less(f, told[0].Fence, told[1].Fence)
	require.Less(f, told[1].Fence, other[0].Fence)
	again := b.leave("b1")
	require.EqualValues(f, 2, again.Told)
	require.False(f, again.Fresh)
	require.EqualValues(f, 1, c.leave("c1").Told)
	require.EqualValues(f, 0, a.leave().Told)
	require.False(f, b.do(semaphore.Batch{}).Fresh, "it still was one that waits")
	r = b.leave()
	require.True(f, r.Fresh, "and then was none")
	require.Zero(f, r.Told)
}

// hearsItsOwn: what a process' own batch admits is in the report, and nowhere else.
func hearsItsOwn(f *fleet) {
	a := f.listener("a")
	is(f.T, semaphore.Granted, a.enter("a1", 3, false))
	is(f.T, semaphore.Queued, a.enter("a2", 3, true))
	r := a.leave("a1")
	require.Len(f, r.Grants, 1)
	require.Equal(f, semaphore.Grant{ID: "a2", Outcome: semaphore.Granted, Fence: r.Grants[0].Fence, Expires: r.Earliest}, r.Grants[0])
	require.Zero(f, r.Told)
	// What it is told next comes behind whatever was sent before.
	b := f.member("b")
	is(f.T, semaphore.Queued, a.enter("a3", 3, true))
	require.Empty(f, b.leave("a2").Grants)
	require.Equal(f, "a3", a.hears(1)[0].ID)
	require.EqualValues(f, 1, a.leave().Told)
}

func mayBeAskedAgain(f *fleet) {
	a, b := f.member("a"), f.member("b")
	twice := semaphore.Batch{PatienceMicros: patience.Microseconds(), Enter: []semaphore.Entry{
		{ID: "a1", Permits: 2, Wait: true}, {ID: "a1", Permits: 2, Wait: true}, // in one batch too
		{ID: "a2", Permits: 2, Wait: true}, {ID: "a2", Permits: 2, Wait: true},
	}}
	first := a.do(twice)
	is(f.T, semaphore.Granted, first.Entered[0])
	is(f.T, semaphore.Queued, first.Entered[2])
	require.Equal(f, first.Entered[0], first.Entered[1])
	require.Equal(f, first.Entered[2], first.Entered[3])
	f.pass(50 * time.Millisecond)
	second := a.do(twice)
	require.Equal(f, first.Entered, second.Entered)
	require.Equal(f, second.Now+lease.Microseconds(), second.Earliest, "to ask again renews")
	is(f.T, semaphore.Refused, b.enter("b1", 1, false))
	require.Equal(f, []semaphore.Standing{semaphore.Holding, semaphore.Waiting}, a.do(semaphore.Batch{Leave: []string{"a1", "a2"}}).Left)
	is(f.T, semaphore.Granted, b.enter("b2", 3, false))
}

func leasesEnd(f *fleet) {
	a, b := f.member("a"), f.member("b")
	short := 30 * time.Millisecond
	r := a.do(semaphore.Batch{LeaseMicros: short.Microseconds(), Enter: []semaphore.Entry{{ID: "a1", Permits: 3}}})
	is(f.T, semaphore.Granted, r.Entered[0])
	require.Equal(f, r.Now+short.Microseconds(), r.Earliest)
	f.pass(short)
	is(f.T, semaphore.Granted, b.enter("b1", 3, false))
	r = a.do(semaphore.Batch{Renew: []string{"a1"}, Leave: []string{"a1"}})
	require.False(f, r.Renewed[0])
	require.Equal(f, semaphore.Gone, r.Left[0])
	require.False(f, a.do(semaphore.Batch{Renew: []string{"never"}}).Renewed[0])
	// By the clock alone, without the suite's help.
	b.leave("b1")
	r = a.do(semaphore.Batch{LeaseMicros: short.Microseconds(), Enter: []semaphore.Entry{{ID: "a2", Permits: 3}}})
	granted, expires := time.Now(), r.Earliest
	for {
		r = b.do(semaphore.Batch{Enter: []semaphore.Entry{{ID: "b2", Permits: 3}}})
		if r.Entered[0].Outcome == semaphore.Granted {
			break
		}
		require.Less(f, r.Now, expires, "still held after its end")
		require.Less(f, time.Since(granted), 30*time.Second)
	}
	require.GreaterOrEqual(f, r.Now, expires, "granted before its end")
}

func renewingNeverShortens(f *fleet) {
	a := f.member("a")
	r := a.do(semaphore.Batch{Enter: []semaphore.Entry{{ID: "a1", Permits: 1}}})
	ends := r.Earliest
	r = a.do(semaphore.Batch{LeaseMicros: 1000, Renew: []string{"a1"}, Enter: []semaphore.Entry{{ID: "a1", Permits: 1}}})
	require.True(f, r.Renewed[0])
	require.Equal(f, ends, r.Earliest)
	r = a.do(semaphore.Batch{LeaseMicros: 2 * lease.Microseconds(), Renew: []string{"a1"}})
	require.Equal(f, r.Now+2*lease.Microseconds(), r.Earliest)
}

func patienceEnds(f *fleet) {
	a, b, c := f.listener("a"), f.listener("b"), f.listener("c")
	is(f.T, semaphore.Granted, a.enter("a1", 3, false))
	queued := b.do(semaphore.Batch{PatienceMicros: 1000, Enter: []semaphore.Entry{{ID: "b1", Permits: 3, Wait: true}}})
	is(f.T, semaphore.Queued, queued.Entered[0])
	f.pass(5 * time.Millisecond)
	is(f.T, semaphore.Queued, c.enter("c1", 1, true))
	a.leave("a1")
	require.Equal(f, "c1", c.hears(1)[0].ID, "b is not heard of any more, and does not block")
	r := b.leave()
	require.True(f, r.Fresh)
	require.Zero(f, r.Told)
	require.Equal(f, semaphore.Gone, b.leave("b1").Left[0])
	// To come back in time is soon enough.
	is(f.T, semaphore.Queued, b.enter("b2", 3, true))
	r = b.leave()
	require.False(f, r.Fresh)
	c.leave("c1")
	require.Equal(f, "b2", b.hears(1)[0].ID)
	// Who says that it waits no more is dropped at once.
	is(f.T, semaphore.Queued, c.enter("c2", 1, true))
	c.do(semaphore.Batch{})
	a.leave("b2")
	require.Equal(f, semaphore.Gone, c.leave("c2").Left[0])
}

func keepsItsPlace(f *fleet) {
	a, b := f.member("a"), f.member("b")
	is(f.T, semaphore.Granted, a.enter("a1", 3, false))
	first := b.do(semaphore.Batch{PatienceMicros: 1000, Enter: []semaphore.Entry{{ID: "b1", Permits: 1, Wait: true}}}).Entered[0]
	f.pass(5 * time.Millisecond)
	is(f.T, semaphore.Queued, a.enter("a2", 3, true)) // and b is found to be gone
	require.Equal(f, semaphore.Gone, a.leave("b1").Left[0])
	again := semaphore.Batch{PatienceMicros: patience.Microseconds(),
		Enter: []semaphore.Entry{{ID: "b1", Permits: 1, Ticket: first.Ticket, Wait: true}}}
	require.Equal(f, first, b.do(again).Entered[0])
	require.Empty(f, a.leave("a1").Grants, "b1 has it, and a2 wants three")
	again.Enter[0].Wait = false
	is(f.T, semaphore.Granted, b.do(again).Entered[0])
	// With its place it may also come in at once, before those behind it.
	b.leave("b1")
	a.leave("a2")
	is(f.T, semaphore.Granted, a.enter("a3", 1, false))
	behind := a.enter("a4", 3, true)
	is(f.T, semaphore.Queued, behind)
	for _, try := range []struct {
		ticket int64
		want   semaphore.Outcome
	}{{behind.Ticket + 1, semaphore.Refused}, {0, semaphore.Refused}, {behind.Ticket - 1, semaphore.Granted}} {
		r := b.do(semaphore.Batch{Enter: []semaphore.Entry{{ID: "b2", Permits: 1, Ticket: try.ticket}}})
		is(f.T, try.want, r.Entered[0])
	}
	a.leave("a4", "b2")
	r := a.do(semaphore.Batch{PatienceMicros: patience.Microseconds(),
		Enter: []semaphore.Entry{{ID: "a5", Permits: 3, Wait: true}, {ID: "b2", Permits: 1, Ticket: behind.Ticket}}})
	is(f.T, semaphore.Queued, r.Entered[0]) // also before one of its own batch
	is(f.T, semaphore.Granted, r.Entered[1])
}

// fullBatch: as many as a batch may have enter, are admitted and leave together, in their order.
func fullBatch(f *fleet) {
	const many = 512
	a, b := f.member("a"), f.listener("b")
	is(f.T, semaphore.Granted, a.enter("all", 3, false))
	queue := func(m *member) (ids []string) {
		batch := semaphore.Batch{PatienceMicros: patience.Microseconds()}
		for i := range many {
			ids = append(ids, fmt.Sprint(m.name, i))
			batch.Enter = append(batch.Enter, semaphore.Entry{ID: ids[i], Permits: 1, Wait: true})
		}
		for _, answer := range m.do(batch).Entered {
			is(f.T, semaphore.Queued, answer)
		}
		return ids
	}
	first, second := queue(a), queue(b)
	r := a.do(semaphore.Batch{PatienceMicros: patience.Microseconds(), SetPermits: 2*many + 3})
	fence := int64(0)
	check := func(ids []string, grants []semaphore.Grant) {
		require.Len(f, grants, len(ids))
		slices.SortFunc(grants, func(a, b semaphore.Grant) int { return cmp.Compare(a.Fence, b.Fence) })
		for i, g := range grants {
			require.Equal(f, ids[i], g.ID)
			require.Less(f, fence, g.Fence)
			fence = g.Fence
		}
	}
	check(first, r.Grants)
	check(second, b.hears(many))
	for _, ids := range [][]string{first, second} {
		left := a.leave(append(ids, ids[0])...).Left
		require.Equal(f, semaphore.Gone, left[many], "it has left already")
		require.NotContains(f, left[:many], semaphore.Gone)
		require.NotContains(f, left[:many], semaphore.Waiting)
	}
	require.Equal(f, semaphore.Holding, a.leave("all").Left[0])
}

// severalSteps: so many are dismissed, admitted or dropped at once that a backend may need several steps; Enter comes last, whatever that takes.
func severalSteps(f *fleet) {
	const many = 1500
	a, b := f.member("a"), f.listener("b")
	is(f.T, semaphore.Granted, a.enter("all", 3, false))
	queue := func(ticket int64, permits func(i int) int) (ids []string) {
		f.T.Helper()
		for i := range many {
			ids = append(ids, fmt.Sprint("b", i))
		}
		for i := 0; i < many; i += 500 {
			batch := semaphore.Batch{PatienceMicros: patience.Microseconds()}
			for j, id := range ids[i : i+500] {
				batch.Enter = append(batch.Enter, semaphore.Entry{ID: id, Permits: permits(i + j), Ticket: ticket, Wait: true})
			}
			for _, answer := range b.do(batch).Entered {
				require.Equal(f, semaphore.Queued, answer.Outcome)
			}
		}
		return ids
	}
	waiting := func() int {
		ctx, cancel := context.WithTimeout(background, 30*time.Second)
		defer cancel()
		s, err := a.backend.Stats(ctx)
		require.NoError(f, err)
		return s.Waiting
	}
	one := func(int) int { return 1 }
	heard := 0 // of what b was told
	told := func(outcome semaphore.Outcome, ids []string) {
		f.T.Helper()
		news := b.hears(heard + len(ids))[heard:]
		heard += len(news)
		require.Len(f, news, len(ids))
		fence := int64(0)
		for i, g := range news {
			require.Equal(f, outcome, g.Outcome)
			if outcome == semaphore.TooMany || ids[0] == "" {
				continue
			}
			require.Equal(f, ids[i], g.ID)
			require.Less(f, fence, g.Fence)
			fence = g.Fence
		}
	}

	// Of those who wait, all but the first few want more than there will be.
	ids := queue(0, func(i int) int { return 1 + min(2, i/10) })
	r := a.do(semaphore.Batch{SetPermits: 1, Enter: []semaphore.Entry{{ID: "two", Permits: 2, Wait: true}}})
	is(f.T, semaphore.TooMany, r.Entered[0])
	told(semaphore.TooMany, ids[10:])
	require.Equal(f, 10, waiting())
	a.leave(ids...)

	// So do all, and they have the same place.
	a.do(semaphore.Batch{SetPermits: 3})
	ids = queue(1, func(int) int { return 2 })
	a.do(semaphore.Batch{SetPermits: 1})
	told(semaphore.TooMany, ids)

	// All are admitted, and after them who comes now.
	a.do(semaphore.Batch{SetPermits: 3})
	ids = queue(0, one)
	r = a.do(semaphore.Batch{SetPermits: 3 + many + 1, Leave: []string{"nobody"}, Enter: []semaphore.Entry{{ID: "last", Permits: 2}, {ID: "fits", Permits: 1}}})
	is(f.T, semaphore.Refused, r.Entered[0])
	is(f.T, semaphore.Granted, r.Entered[1])
	require.Equal(f, []semaphore.Standing{semaphore.Gone}, r.Left)
	told(semaphore.Granted, ids)
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	holders, err := a.backend.Holders(ctx)
	require.NoError(f, err)
	require.Len(f, holders, many+2)
	for i, h := range holders[1 : many+1] {
		require.Equal(f, ids[i], h.ID)
	}

	// The leases of all end, and everybody's place is free.
	f.pass(lease + time.Second)
	b.do(semaphore.Batch{PatienceMicros: patience.Microseconds()})
	is(f.T, semaphore.Granted, a.enter("all again", 3+many+1, false))

	// Who waits until nobody holds anything, in any order.
	queue(0, func(int) int { return 0 })
	r = a.do(semaphore.Batch{SetPermits: 3, Leave: []string{"all again"}, Enter: []semaphore.Entry{{ID: "all", Permits: 3}}})
	is(f.T, semaphore.Granted, r.Entered[0])
	require.Equal(f, []semaphore.Standing{semaphore.Holding}, r.Left)
	told(semaphore.Granted, make([]string, many))

	// The process of all who wait has died: nobody waits for them.
	queue(0, one)
	f.pass(patience + time.Second)
	r = a.do(semaphore.Batch{Leave: []string{"all"}, Enter: []semaphore.Entry{{ID: "alone", Permits: 3}}})
	is(f.T, semaphore.Granted, r.Entered[0])
	require.Zero(f, waiting())
}

func tooManyWanted(f *fleet) {
	a, b := f.listener("a"), f.listener("b")
	is(f.T, semaphore.TooMany, a.enter("a1", 4, true))
	is(f.T, semaphore.Granted, a.enter("a2", 2, false))
	is(f.T, semaphore.Queued, a.enter("a3", 3, true))
	is(f.T, semaphore.Queued, b.enter("b1", 3, true))
	is(f.T, semaphore.Queued, b.enter("b2", 1, true))
	r := a.do(semaphore.Batch{PatienceMicros: patience.Microseconds(), SetPermits: 2})
	require.Equal(f, 2, r.Permits)
	require.Equal(f, []semaphore.Grant{{ID: "a3", Outcome: semaphore.TooMany}}, r.Grants)
	require.Equal(f, []semaphore.Grant{{ID: "b1", Outcome: semaphore.TooMany}}, b.hears(1))
	require.EqualValues(f, 1, b.leave().Told)
	require.Equal(f, semaphore.Waiting, a.leave("b2").Left[0], "who wants less waits on")
	// Also behind one who waits on.
	is(f.T, semaphore.Queued, b.enter("b3", 1, true))
	is(f.T, semaphore.Queued, b.enter("b4", 2, true))
	is(f.T, semaphore.Queued, a.enter("a4", 2, true))
	r = a.do(semaphore.Batch{PatienceMicros: patience.Microseconds(), SetPermits: 1})
	require.Equal(f, []semaphore.Grant{{ID: "a4", Outcome: semaphore.TooMany}}, r.Grants)
	require.Equal(f, semaphore.Grant{ID: "b4", Outcome: semaphore.TooMany}, b.hears(2)[1])
	require.Equal(f, semaphore.Waiting, a.leave("b3").Left[0])
}

// ownNumbers: as long as nobody has set a limit each process has its own, whoever admits.
func ownNumbers(f *fleet) {
	five, two := f.listener("five"), f.listener("two")
	patient := func(permits int, enter ...semaphore.Entry) semaphore.Batch {
		return semaphore.Batch{Permits: permits, PatienceMicros: patience.Microseconds(), Enter: enter}
	}
	is(f.T, semaphore.Granted, five.do(patient(5, semaphore.Entry{ID: "f1", Permits: 3})).Entered[0])
	is(f.T, semaphore.Queued, five.do(patient(5, semaphore.Entry{ID: "f2", Permits: 4, Wait: true})).Entered[0])
	r := two.do(patient(2, semaphore.Entry{ID: "t1", Permits: 1}))
	is(f.T, semaphore.Refused, r.Entered[0])
	require.Equal(f, 2, r.Permits)
	require.Equal(f, semaphore.Waiting, five.ends("f2", 5), "it was not dismissed")
	is(f.T, semaphore.Queued, two.do(patient(2, semaphore.Entry{ID: "t2", Permits: 1, Wait: true})).Entered[0])
	require.Empty(f, five.do(patient(5)).Grants)
	require.Equal(f, semaphore.Waiting, two.ends("t2", 2), "3 of 2 are held, whoever asks")
}

// limits: the newest is in force, for all.
func limits(f *fleet) {
	a, b, c := f.listener("a"), f.listener("b"), f.listener("c")
	of := func(permits int, version int64) semaphore.Limit {
		return semaphore.Limit{Permits: permits, Version: version}
	}
	r := a.do(semaphore.Batch{Permits: 5, Limit: of(5, 3)})
	require.Equal(f, of(5, 3), r.Limit)
	require.Equal(f, 5, r.Permits)
	r = b.do(semaphore.Batch{Permits: 2, Limit: of(2, 2)})
	require.Equal(f, of(5, 3), r.Limit, "older")
	require.Equal(f, 5, r.Permits)
	require.Equal(f, of(5, 3), c.do(semaphore.Batch{Permits: 9}).Limit)
	require.Equal(f, of(5, 3), b.do(semaphore.Batch{Permits: 2, Limit: of(2, 3)}).Limit, "the first of equals stays")
	is(f.T, semaphore.Granted, c.do(semaphore.Batch{Permits: 1, Enter: []semaphore.Entry{{ID: "c1", Permits: 4}}}).Entered[0])
	is(f.T, semaphore.Queued, c.do(semaphore.Batch{PatienceMicros: patience.Microseconds(), Permits: 1,
		Enter: []semaphore.Entry{{ID: "c2", Permits: 4, Wait: true}}}).Entered[0])
	// A newer one counts at once.
	require.Equal(f, of(3, 4), b.do(semaphore.Batch{Permits: 3, Limit: of(3, 4)}).Limit)
	require.Equal(f, []semaphore.Grant{{ID: "c2", Outcome: semaphore.TooMany}}, c.hears(1))
	// To set it is the next version.
	require.Equal(f, of(7, 5), b.do(semaphore.Batch{Permits: 3, Limit: of(3, 4), SetPermits: 7}).Limit)
	require.Equal(f, of(5, 6), b.do(semaphore.Batch{Permits: 3, AddPermits: -2}).Limit)
	r = b.do(semaphore.Batch{Permits: 3, AddPermits: -5})
	require.True(f, r.Unchanged)
	require.Equal(f, of(5, 6), r.Limit)
	tooMany := int64(1 << 31) // negative where an int has 32 bits
	require.True(f, b.do(semaphore.Batch{Permits: 3, AddPermits: int(tooMany)}).Unchanged)
	// Until the configurations count again.
	r = b.do(semaphore.Batch{Permits: 3, SetPermits: semaphore.OwnPermits})
	require.Equal(f, of(0, 7), r.Limit)
	require.Equal(f, 3, r.Permits)
	require.Equal(f, 1, c.do(semaphore.Batch{Permits: 1}).Permits)
	r = b.do(semaphore.Batch{Permits: 3, AddPermits: 1})
	require.Equal(f, of(4, 8), r.Limit, "from its own")
	require.False(f, r.Unchanged)
	require.Equal(f, of(6, 100), b.do(semaphore.Batch{Permits: 3, Limit: of(5, 99), AddPermits: 1}).Limit)
}

// eachItsLease: who waits is admitted for as long as its own process wants, whoever admits it.
func eachItsLease(f *fleet) {
	a, b := f.listener("a"), f.listener("b")
	is(f.T, semaphore.Granted, a.enter("a1", 3, false))
	short := 5 * time.Second
	b.do(semaphore.Batch{LeaseMicros: short.Microseconds(), PatienceMicros: patience.Microseconds(),
		Enter: []semaphore.Entry{{ID: "b1", Permits: 3, Wait: true}}})
	r := a.leave("a1")
	require.Equal(f, r.Now+short.Microseconds(), b.hears(1)[0].Expires)
	require.Equal(f, r.Now+short.Microseconds(), r.Earliest)
}

// silentWaiters: who was not heard of lately is not admitted, and nobody in its place either until it is dropped.
func silentWaiters(f *fleet) {
	a, b, c := f.listener("a"), f.listener("b"), f.listener("c")
	is(f.T, semaphore.Granted, a.enter("a1", 3, false))
	wait := func(m *member, id string) *semaphore.Report {
		return m.do(semaphore.Batch{PatienceMicros: patience.Microseconds(), AliveMicros: 1000,
			Enter: []semaphore.Entry{{ID: id, Permits: 2, Wait: true}}})
	}
	is(f.T, semaphore.Queued, wait(b, "b1").Entered[0])
	is(f.T, semaphore.Queued, wait(c, "c1").Entered[0])
	f.pass(5 * time.Millisecond)
	require.Equal(f, semaphore.Holding, a.leave("a1").Left[0])
	is(f.T, semaphore.Refused, a.enter("a2", 1, false)) // it would pass
	require.Empty(f, c.do(semaphore.Batch{PatienceMicros: patience.Microseconds()}).Grants, "b is before it")
	r := b.do(semaphore.Batch{PatienceMicros: patience.Microseconds()})
	require.Len(f, r.Grants, 1, "it was heard of")
	require.Equal(f, "b1", r.Grants[0].ID)
	// One who is not heard of any more blocks the others for its patience, and no lease.
	b.leave("b1")
	require.Equal(f, "c1", c.hears(1)[0].ID)
	b.do(semaphore.Batch{PatienceMicros: 5e6, AliveMicros: 500, Enter: []semaphore.Entry{{ID: "b2", Permits: 3, Wait: true}}})
	is(f.T, semaphore.Queued, a.enter("a3", 1, true))
	f.pass(5 * time.Second)
	r = a.leave("c1")
	require.Len(f, r.Grants, 1)
	require.Equal(f, "a3", r.Grants[0].ID)
}

func tellsStats(f *fleet) {
	a, b := f.member("a"), f.member("b")
	stats := func() semaphore.Stats {
		ctx, cancel := context.WithTimeout(background, 30*time.Second)
		defer cancel()
		s, err := b.backend.Stats(ctx)
		require.NoError(f, err)
		return s
	}
	require.Zero(f, stats())
	is(f.T, semaphore.Granted, a.enter("a1", 2, false))
	require.Equal(f, semaphore.Stats{Used: 2}, stats())
	is(f.T, semaphore.Queued, b.enter("b1", 2, true))
	require.Equal(f, semaphore.Queued, b.enter("b2", 0, true).Outcome)
	require.Equal(f, semaphore.Stats{Used: 2, Waiting: 1}, stats())
	a.do(semaphore.Batch{SetPermits: 7})
	require.Equal(f, semaphore.Stats{Permits: 7, Version: 1, Used: 4}, stats())
	f.pass(lease)
	require.Equal(f, semaphore.Stats{Permits: 7, Version: 1}, stats(), "nobody has come since the leases have ended")
}

func permitsOfTheFleet(f *fleet) {
	a, b := f.listener("a"), f.listener("b")
	r := a.do(semaphore.Batch{Permits: 1, Enter: []semaphore.Entry{{ID: "a1", Permits: 1}, {ID: "a2", Permits: 1}}})
	is(f.T, semaphore.Refused, r.Entered[1])
	r = b.do(semaphore.Batch{Permits: 2, Enter: []semaphore.Entry{{ID: "b1", Permits: 1}}})
	is(f.T, semaphore.Granted, r.Entered[0]) // to each its own number
	require.Equal(f, 2, r.Permits)
	r = b.do(semaphore.Batch{Permits: 2, PatienceMicros: patience.Microseconds(),
		Enter: []semaphore.Entry{{ID: "b2", Permits: 1, Wait: true}, {ID: "b3", Permits: 1, Wait: true}}})
	is(f.T, semaphore.Queued, r.Entered[0])
	require.Equal(f, 3, a.do(semaphore.Batch{Permits: 1, SetPermits: 3}).Permits) // and from now on to all the same
	require.Equal(f, "b2", b.hears(1)[0].ID)
	require.Equal(f, 3, b.do(semaphore.Batch{Permits: 2, PatienceMicros: patience.Microseconds()}).Permits)
	// Lowered, it takes nothing away, and admits nobody until enough has come back.
	a.do(semaphore.Batch{SetPermits: 1})
	for _, id := range []string{"a1", "b1"} {
		require.Equal(f, semaphore.Holding, a.leave(id).Left[0])
		require.Zero(f, a.leave().Grants)
	}
	a.leave("b2")
	require.Equal(f, "b3", b.hears(2)[1].ID)
}

func untilNobodyHolds(f *fleet) {
	a, b := f.listener("a"), f.listener("b")
	first := a.enter("a1", 0, true)
	require.Equal(f, semaphore.Answer{Outcome: semaphore.Granted}, first, "nobody holds anything")
	is(f.T, semaphore.Granted, a.enter("a2", 2, false))
	for range 2 {
		require.Equal(f, semaphore.Answer{Outcome: semaphore.Queued}, a.enter("a3", 0, true))
		require.Equal(f, semaphore.Answer{Outcome: semaphore.Queued}, b.enter("b1", 0, true))
	}
	require.Equal(f, semaphore.Answer{Outcome: semaphore.Queued}, b.enter("b2", 0, true))
	is(f.T, semaphore.Granted, b.enter("b3", 1, true)) // it blocks nobody
	require.Equal(f, semaphore.Waiting, b.leave("b2").Left[0])
	require.Empty(f, a.leave("a2").Grants)
	require.Equal(f, []semaphore.Grant{{ID: "a3", Outcome: semaphore.Granted}}, a.leave("b3").Grants)
	require.Equal(f, []semaphore.Grant{{ID: "b1", Outcome: semaphore.Granted}}, b.hears(1))
	require.Equal(f, semaphore.Gone, b.leave("b1").Left[0])
}

func lateChangesNothing(f *fleet) {
	a := f.member("a")
	now := a.do(semaphore.Batch{Enter: []semaphore.Entry{{ID: "a1", Permits: 1}}}).Now
	r := a.do(semaphore.Batch{Deadline: now - 1, SetPermits: 9, Leave: []string{"a1"},
		Enter: []semaphore.Entry{{ID: "a2", Permits: 1}}})
	require.True(f, r.Late)
	require.GreaterOrEqual(f, r.Now, now-2_000_000)
	r = a.do(semaphore.Batch{Deadline: now + time.Hour.Microseconds(), Leave: []string{"a1", "a2"}})
	require.False(f, r.Late)
	require.Equal(f, []semaphore.Standing{semaphore.Holding, semaphore.Gone}, r.Left)
	require.Equal(f, 3, r.Permits)
}

// anyID: callers may be asked to end ids that nobody has made.
func anyID(f *fleet) {
	a := f.member("a")
	hostile := []string{"", "\x00", "a b", "%41", "A", "'; --", "{}", "\xff\xfe", "ü", "\n", `\`, `"`, "NULL"}
	r := a.leave(hostile...)
	require.Equal(f, make([]semaphore.Standing, len(hostile)), r.Left)
	r = a.do(semaphore.Batch{Renew: hostile, Enter: []semaphore.Entry{{ID: "A", Permits: 1}}})
	require.NotContains(f, r.Renewed, true)
	r = a.leave(hostile...)
	for i, id := range hostile {
		require.Equal(f, id == "A", r.Left[i] == semaphore.Holding, "%q", id)
	}
}

func listsHolders(f *fleet) {
	a, b := f.member("a"), f.member("b")
	list := func() []semaphore.Holder {
		ctx, cancel := context.WithTimeout(background, 30*time.Second)
		defer cancel()
		all, err := b.backend.Holders(ctx)
		require.NoError(f, err)
		return all
	}
	require.Empty(f, list())
	var want []semaphore.Holder
	for i, id := range []string{"z", "y"} {
		r := a.do(semaphore.Batch{Enter: []semaphore.Entry{{ID: id, Permits: 1 + i}}})
		want = append(want, semaphore.Holder{ID: id, Permits: 1 + i, Fence: r.Entered[0].Fence, Since: time.UnixMicro(r.Now),
			Expires: time.UnixMicro(r.Now + lease.Microseconds()), Label: "label of a"})
	}
	is(f.T, semaphore.Queued, b.enter("b1", 1, true))
	require.Equal(f, want, list())
	a.leave("z")
	got := list() // b1 was admitted, with the label of its own process
	require.Len(f, got, 2)
	require.Equal(f, want[1], got[0])
	require.Equal(f, "b1", got[1].ID)
	require.Equal(f, "label of b", got[1].Label)
	f.pass(lease)
	require.Empty(f, list())
	a.do(semaphore.Batch{Enter: []semaphore.Entry{{ID: "x", Permits: 1, Label: "its own"}}})
	b.do(semaphore.Batch{PatienceMicros: patience.Microseconds(), Enter: []semaphore.Entry{{ID: "b2", Permits: 3, Wait: true, Label: "and its own"}}})
	require.Equal(f, "its own", list()[0].Label)
	a.leave("x")
	require.Equal(f, "and its own", list()[0].Label)
}

func clockGoesBack(f *fleet) {
	if f.place.SetBack == nil {
		f.Skip("its clock cannot be set back")
	}
	a, b := f.member("a"), f.member("b")
	before := a.do(semaphore.Batch{Enter: []semaphore.Entry{{ID: "a1", Permits: 3}}})
	fence := before.Entered[0].Fence
	b.enter("b1", 1, true)
	// Up to two seconds it stands still: leases and patience last longer, no number goes back.
	var still *semaphore.Report
	for tries := 1; ; tries++ {
		began := time.Now()
		before = a.leave()
		f.place.SetBack(f.T, 1900*time.Millisecond)
		still = a.leave()
		require.GreaterOrEqual(f, still.Now, before.Now+1_900_000)
		require.Equal(f, before.Earliest+1_900_000, still.Earliest)
		again := a.leave()
		if time.Since(began) < 1900*time.Millisecond {
			require.Equal(f, still.Now, again.Now)
			break
		}
		require.Less(f, tries, 20, "the machine is too slow")
	}
	// Further back, ends move with it: what was left of a lease is left.
	f.place.SetBack(f.T, time.Hour)
	back := a.leave()
	require.Less(f, back.Now, still.Now)
	// Both ends and the latest time seen moved by an hour, and by as much back again.
	require.Equal(f, still.Earliest-still.Now, back.Earliest-back.Now)
	r := b.leave("a1")
	require.False(f, r.Fresh, "its patience has moved too")
	require.Len(f, r.Grants, 1)
	require.Greater(f, r.Grants[0].Fence, fence)
	require.Equal(f, r.Now+lease.Microseconds(), r.Earliest)
}

func contextDone(f *fleet) {
	ctx, cancel := context.WithCancel(background)
	cancel()
	b := f.place.Process()
	_, err := b.Apply(ctx, &semaphore.Batch{Process: "a", LeaseMicros: 1e6, Permits: 1})
	require.ErrorIs(f, err, context.Canceled)
	_, err = b.Holders(ctx)
	require.ErrorIs(f, err, context.Canceled)
	_, err = b.Stats(ctx)
	require.ErrorIs(f, err, context.Canceled)
	require.ErrorIs(f, b.Listen(ctx, "a", func() {}, func(semaphore.Grant) {}), context.Canceled)
}

// span is how long somebody held permits.
type span struct {
	id          string
	permits     int
	fence       int64
	ticket      int64 // 0: it did not wait
	from, until int64
}

// allAtOnce lets many goroutines of several processes send batches at the same time, and looks at what they were told.
func allAtOnce(f *fleet) {
	const permits, processes, workers, rounds = 5, 3, 8, 25
	var mu sync.Mutex
	var all []span
	waits := map[string]chan semaphore.Grant{} // by id
	told := map[string]int{}
	wake := func(g semaphore.Grant) {
		mu.Lock()
		defer mu.Unlock()
		told[g.ID]++
		if told[g.ID] == 1 {
			waits[g.ID] <- g
		}
	}
	var members []*member
	var running, listening sync.WaitGroup
	ctx, cancel := context.WithCancel(background)
	for p := range processes {
		m := f.member(fmt.Sprint("p", p))
		members = append(members, m)
		ready := make(chan struct{}, 10)
		listening.Go(func() { _ = m.backend.Listen(ctx, m.name, func() { ready <- struct{}{} }, wake) })
		<-ready
		m.leave() // known from now on
	}
	for w := range processes * workers {
		running.Go(func() {
			m := members[w%processes]
			for i := range rounds {
				s := span{id: fmt.Sprintf("w%d-%d", w, i), permits: 1 + (w+i)%3}
				granted := make(chan semaphore.Grant, 1)
				mu.Lock()
				waits[s.id] = granted
				mu.Unlock()
				send := func(b semaphore.Batch) *semaphore.Report {
					b.Permits, b.PatienceMicros = permits, time.Minute.Microseconds()
					r, err := m.apply(b)
					if !assert.NoError(f, err) {
						return nil
					}
					for _, g := range r.Grants {
						wake(g)
					}
					return r
				}
				r := send(semaphore.Batch{Enter: []semaphore.Entry{{ID: s.id, Permits: s.permits, Wait: true}}})
				if r == nil {
					return
				}
				s.from, s.fence, s.ticket = r.Now, r.Entered[0].Fence, r.Entered[0].Ticket
				if r.Entered[0].Outcome == semaphore.Queued {
					select {
					case g := <-granted:
						s.from, s.fence = g.Expires-lease.Microseconds(), g.Fence
					case <-time.After(time.Minute):
						f.Errorf("%s was queued, and never told", s.id)
						return
					}
				} else if r.Entered[0].Outcome != semaphore.Granted {
					f.Errorf("%s: outcome %d", s.id, r.Entered[0].Outcome)
					return
				}
				r = send(semaphore.Batch{Leave: []string{s.id}})
				if r == nil || !assert.Equal(f, semaphore.Holding, r.Left[0]) {
					return
				}
				s.until = r.Now
				mu.Lock()
				all = append(all, s)
				mu.Unlock()
			}
		})
	}
	running.Wait()
	cancel()
	listening.Wait()
	if f.Failed() {
		return
	}
	require.Len(f, all, processes*workers*rounds)
	checkSpans(f.T, all, permits)
	queued := slices.DeleteFunc(slices.Clone(all), func(s span) bool { return s.ticket == 0 })
	f.Logf("%d were granted, %d of them had to wait", len(all), len(queued))
	require.NotEmpty(f, queued)
	for _, s := range all {
		require.Equal(f, s.ticket != 0, told[s.id] == 1, "%s with ticket %d was told %d times", s.id, s.ticket, told[s.id])
	}
	slices.SortFunc(queued, func(a, b span) int { return int(a.ticket - b.ticket) })
	for i := range queued[1:] {
		require.Less(f, queued[i].fence, queued[i+1].fence, "%s was passed by %s", queued[i].id, queued[i+1].id)
	}
}

// checkSpans: never more than permits held, and fences rise in the order of the grants.
func checkSpans(t *testing.T, all []span, permits int) {
	type event struct {
		at    int64
		taken int
	}
	var events []event
	slices.SortFunc(all, func(a, b span) int { return int(a.fence - b.fence) })
	for i, s := range all {
		events = append(events, event{s.from, s.permits}, event{s.until, -s.permits})
		if i > 0 {
			require.Less(t, all[i-1].fence, s.fence)
			require.LessOrEqual(t, all[i-1].from, s.from, "fences rise as time does")
		}
	}
	slices.SortFunc(events, func(a, b event) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		return a.taken - b.taken // in the same microsecond what ends comes first
	})
	held, most := 0, 0
	for _, e := range events {
		held += e.taken
		most = max(most, held)
		require.LessOrEqual(t, held, permits, "at %d", e.at)
	}
	require.Equal(t, permits, most, "the load was not enough to find out")
}
