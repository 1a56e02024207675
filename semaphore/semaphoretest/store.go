// Package semaphoretest holds two conformance suites: Semaphore for semaphores, and Store for the stores that keep the permits of a fleet. A
// store outside of this module runs it so:
//
//	func TestStore(t *testing.T) {
//		semaphoretest.Store(t, func(t *testing.T) semaphoretest.Fixture {
//			db := openEmptyDatabase(t)
//			return semaphoretest.Fixture{Process: func() store.Store { return mystore.New(db, "name") }}
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

	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// Fixture opens stores of one semaphore that was never used. Their clock must be real.
type Fixture struct {
	// Process opens the store for another process.
	Process func() store.Store
	// SetBack changes the state as if the clock had been set back by d: it moves the latest time seen and the ends of leases and of
	// patience ahead by d. A negative d lets time pass. If it is nil, the suite sleeps instead, and the clock is never set back.
	SetBack func(t *testing.T, d time.Duration)
}

// Store tests a store. It calls open once per test, and many times for random tests.
func Store(t *testing.T, open func(t *testing.T) Fixture) {
	for name, test := range map[string]func(*fleet){
		"grants free permits":        grantsFreePermits,
		"no request passes":          noRequestPasses,
		"grants reach their process": grantsReachTheirProcess,
		"repeated requests":          repeatedRequests,
		"leases end":                 leasesEnd,
		"renewing never shortens":    renewingNeverShortens,
		"patience ends":              patienceEnds,
		"keeps its place":            keepsItsPlace,
		"a full batch":               fullBatch,
		"several steps":              severalSteps,
		"too many":                   tooManyWanted,
		"permits of the fleet":       permitsOfTheFleet,
		"own numbers":                ownNumbers,
		"limits":                     limits,
		"each its lease":             eachItsLease,
		"silent waiters":             silentWaiters,
		"stats":                      countsStats,
		"waits until none is held":   untilNoneIsHeld,
		"late changes nothing":       lateChangesNothing,
		"any id":                     anyID,
		"lists holders":              listsHolders,
		"a clock that goes back":     clockGoesBack,
		"own grants in the report":   ownGrantsInReport,
		"a done context":             contextDone,
	} {
		t.Run(name, func(t *testing.T) { test(newFleet(t, open(t))) })
	}
	t.Run("any sequence of batches", func(t *testing.T) { anySequence(t, open) })
	t.Run("all at once", func(t *testing.T) { allAtOnce(newFleet(t, open(t))) })
}

// fleet is the fixture with the processes that use it.
type fleet struct {
	*testing.T
	place Fixture
}

func newFleet(t *testing.T, p Fixture) *fleet { return &fleet{t, p} }

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
	f     *fleet
	name  string
	store store.Store

	mu   sync.Mutex
	news []store.Grant // received through Listen
	rung chan struct{}
}

func (f *fleet) member(name string) *member {
	return &member{f: f, name: name, store: f.place.Process(), rung: make(chan struct{}, 1)}
}

// listener returns a member that listens until the test ends.
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
			_ = m.store.Listen(ctx, m.name, func() { ready <- struct{}{} }, m.received)
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

func (m *member) received(g store.Grant) {
	m.mu.Lock()
	m.news = append(m.news, g)
	m.mu.Unlock()
	select {
	case m.rung <- struct{}{}:
	default:
	}
}

// receives waits until the member has received the given number of grants in all, and returns them.
func (m *member) receives(n int) []store.Grant {
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

// apply fills in the fields of a batch that are not set: three permits and enough time. Waiters count as alive as long as they are patient.
func (m *member) apply(b store.Batch) (*store.Report, error) {
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
	return m.store.Apply(ctx, &b)
}

func (m *member) do(b store.Batch) *store.Report {
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

// enter sends a batch of one request; it waits if patient is set.
func (m *member) enter(id string, permits int, patient bool) store.Result {
	m.f.Helper()
	b := store.Batch{Enter: []store.Entry{{ID: id, Permits: permits, Wait: patient}}}
	if patient {
		b.PatienceMicros = patience.Microseconds()
	}
	return m.do(b).Entered[0]
}

func (m *member) leave(ids ...string) *store.Report {
	m.f.Helper()
	return m.do(store.Batch{Leave: ids, PatienceMicros: patience.Microseconds()})
}

// ends ends an id, in a process that is configured with the given number of permits, and returns its standing.
func (m *member) ends(id string, permits int) store.Standing {
	m.f.Helper()
	return m.do(store.Batch{Permits: permits, PatienceMicros: patience.Microseconds(), Leave: []string{id}}).Left[0]
}

// is checks an outcome, and that a result has exactly the numbers that belong to it.
func is(t *testing.T, want store.Outcome, a store.Result) {
	t.Helper()
	require.Equal(t, want, a.Outcome)
	require.Equal(t, want == store.Granted, a.Fence > 0, "fence %d", a.Fence)
	require.Equal(t, want == store.Queued, a.Ticket > 0, "ticket %d", a.Ticket)
}

func grantsFreePermits(f *fleet) {
	a, b := f.member("a"), f.member("b")
	r := a.do(store.Batch{Enter: []store.Entry{{ID: "a1", Permits: 2}, {ID: "a2", Permits: 2}, {ID: "a3", Permits: 1}}})
	is(f.T, store.Granted, r.Entered[0])
	is(f.T, store.Refused, r.Entered[1]) // 2 of 3 are held
	is(f.T, store.Granted, r.Entered[2]) // which are all
	require.Greater(f, r.Entered[2].Fence, r.Entered[0].Fence)
	require.GreaterOrEqual(f, r.Entered[0].Fence, r.Now, "whose state was lost goes on above what it had")
	require.True(f, r.Fresh)
	require.Equal(f, 3, r.Permits)
	require.Equal(f, r.Now+lease.Microseconds(), r.Earliest)
	is(f.T, store.Refused, b.enter("b1", 1, false))
	require.Equal(f, []store.Standing{store.Holding, store.Gone, store.Gone}, b.leave("a1", "a1", "a2").Left,
		"any process may end any id, once")
	is(f.T, store.Refused, b.enter("b2", 3, false))
	is(f.T, store.Granted, b.enter("b3", 2, false))
	require.Equal(f, []store.Standing{store.Holding, store.Holding}, a.leave("a3", "b3").Left)
	require.Zero(f, a.leave().Earliest)
}

func noRequestPasses(f *fleet) {
	a, b := f.member("a"), f.member("b")
	is(f.T, store.Granted, a.enter("a1", 1, false))
	is(f.T, store.Granted, a.enter("a2", 1, false))
	is(f.T, store.Queued, b.enter("b1", 3, true))
	is(f.T, store.Refused, a.enter("a3", 1, false)) // it would fit
	second := a.enter("a4", 1, true)
	is(f.T, store.Queued, second)
	third := b.enter("b2", 1, true)
	require.Greater(f, third.Ticket, second.Ticket)
	require.Empty(f, b.leave("a1").Grants, "2 of 3 are not enough")
	require.Equal(f, "b1", b.leave("a2").Grants[0].ID)
	require.Empty(f, b.leave("a3").Grants)
	r := b.leave("b1") // 3 free: both are admitted, and b's grant is in its own report
	require.Len(f, r.Grants, 1)
	require.Equal(f, "b2", r.Grants[0].ID)
	holding := a.enter("a4", 1, false)
	is(f.T, store.Granted, holding)
	require.Less(f, holding.Fence, r.Grants[0].Fence, "it was there before")
	// A waiter that leaves makes way in the same batch.
	is(f.T, store.Queued, b.enter("b3", 3, true))
	is(f.T, store.Queued, b.enter("b4", 1, true))
	r = b.leave("b3")
	require.Equal(f, store.Waiting, r.Left[0])
	require.Equal(f, "b4", r.Grants[0].ID)
}

func grantsReachTheirProcess(f *fleet) {
	a, b, c := f.listener("a"), f.listener("b"), f.listener("c")
	is(f.T, store.Granted, a.enter("a1", 3, false))
	for _, id := range []string{"b1", "b2"} {
		is(f.T, store.Queued, b.enter(id, 1, true))
	}
	is(f.T, store.Queued, c.enter("c1", 1, true))
	r := a.leave("a1")
	require.Empty(f, r.Grants)
	told := b.receives(2)
	other := c.receives(1)
	require.Equal(f, "b1", told[0].ID)
	require.Equal(f, "b2", told[1].ID)
	require.Equal(f, "c1", other[0].ID)
	for i, g := range append(told, other...) {
		require.Equal(f, store.Granted, g.Outcome)
		require.Equal(f, r.Now+lease.Microseconds(), g.Expires, i)
	}
	require.Less(f, told[0].Fence, told[1].Fence)
	require.Less(f, told[1].Fence, other[0].Fence)
	again := b.leave("b1")
	require.EqualValues(f, 2, again.Notified)
	require.False(f, again.Fresh)
	require.EqualValues(f, 1, c.leave("c1").Notified)
	require.EqualValues(f, 0, a.leave().Notified)
	require.False(f, b.do(store.Batch{}).Fresh, "it still was one that waits")
	r = b.leave()
	require.True(f, r.Fresh, "and then was none")
	require.Zero(f, r.Notified)
}

// ownGrantsInReport: grants to waiters of the batch's own process are in its report, and are not sent through Listen.
func ownGrantsInReport(f *fleet) {
	a := f.listener("a")
	is(f.T, store.Granted, a.enter("a1", 3, false))
	is(f.T, store.Queued, a.enter("a2", 3, true))
	r := a.leave("a1")
	require.Len(f, r.Grants, 1)
	require.Equal(f, store.Grant{ID: "a2", Outcome: store.Granted, Fence: r.Grants[0].Fence, Expires: r.Earliest}, r.Grants[0])
	require.Zero(f, r.Notified)
	// The next grant through Listen comes after all earlier ones.
	b := f.member("b")
	is(f.T, store.Queued, a.enter("a3", 3, true))
	require.Empty(f, b.leave("a2").Grants)
	require.Equal(f, "a3", a.receives(1)[0].ID)
	require.EqualValues(f, 1, a.leave().Notified)
}

func repeatedRequests(f *fleet) {
	a, b := f.member("a"), f.member("b")
	twice := store.Batch{PatienceMicros: patience.Microseconds(), Enter: []store.Entry{
		{ID: "a1", Permits: 2, Wait: true}, {ID: "a1", Permits: 2, Wait: true}, // in one batch too
		{ID: "a2", Permits: 2, Wait: true}, {ID: "a2", Permits: 2, Wait: true},
	}}
	first := a.do(twice)
	is(f.T, store.Granted, first.Entered[0])
	is(f.T, store.Queued, first.Entered[2])
	require.Equal(f, first.Entered[0], first.Entered[1])
	require.Equal(f, first.Entered[2], first.Entered[3])
	f.pass(50 * time.Millisecond)
	second := a.do(twice)
	require.Equal(f, first.Entered, second.Entered)
	require.Equal(f, second.Now+lease.Microseconds(), second.Earliest, "to ask again renews")
	is(f.T, store.Refused, b.enter("b1", 1, false))
	require.Equal(f, []store.Standing{store.Holding, store.Waiting}, a.do(store.Batch{Leave: []string{"a1", "a2"}}).Left)
	is(f.T, store.Granted, b.enter("b2", 3, false))
}

func leasesEnd(f *fleet) {
	a, b := f.member("a"), f.member("b")
	short := 30 * time.Millisecond
	r := a.do(store.Batch{LeaseMicros: short.Microseconds(), Enter: []store.Entry{{ID: "a1", Permits: 3}}})
	is(f.T, store.Granted, r.Entered[0])
	require.Equal(f, r.Now+short.Microseconds(), r.Earliest)
	f.pass(short)
	is(f.T, store.Granted, b.enter("b1", 3, false))
	r = a.do(store.Batch{Renew: []string{"a1"}, Leave: []string{"a1"}})
	require.False(f, r.Renewed[0])
	require.Equal(f, store.Gone, r.Left[0])
	require.False(f, a.do(store.Batch{Renew: []string{"never"}}).Renewed[0])
	// By the clock alone, without the suite's help.
	b.leave("b1")
	r = a.do(store.Batch{LeaseMicros: short.Microseconds(), Enter: []store.Entry{{ID: "a2", Permits: 3}}})
	granted, expires := time.Now(), r.Earliest
	for {
		r = b.do(store.Batch{Enter: []store.Entry{{ID: "b2", Permits: 3}}})
		if r.Entered[0].Outcome == store.Granted {
			break
		}
		require.Less(f, r.Now, expires, "still held after its end")
		require.Less(f, time.Since(granted), 30*time.Second)
	}
	require.GreaterOrEqual(f, r.Now, expires, "granted before its end")
}

func renewingNeverShortens(f *fleet) {
	a := f.member("a")
	r := a.do(store.Batch{Enter: []store.Entry{{ID: "a1", Permits: 1}}})
	ends := r.Earliest
	r = a.do(store.Batch{LeaseMicros: 1000, Renew: []string{"a1"}, Enter: []store.Entry{{ID: "a1", Permits: 1}}})
	require.True(f, r.Renewed[0])
	require.Equal(f, ends, r.Earliest)
	r = a.do(store.Batch{LeaseMicros: 2 * lease.Microseconds(), Renew: []string{"a1"}})
	require.Equal(f, r.Now+2*lease.Microseconds(), r.Earliest)
}

func patienceEnds(f *fleet) {
	a, b, c := f.listener("a"), f.listener("b"), f.listener("c")
	is(f.T, store.Granted, a.enter("a1", 3, false))
	queued := b.do(store.Batch{PatienceMicros: 1000, Enter: []store.Entry{{ID: "b1", Permits: 3, Wait: true}}})
	is(f.T, store.Queued, queued.Entered[0])
	f.pass(5 * time.Millisecond)
	is(f.T, store.Queued, c.enter("c1", 1, true))
	a.leave("a1")
	require.Equal(f, "c1", c.receives(1)[0].ID, "b is not heard of any more, and does not block")
	r := b.leave()
	require.True(f, r.Fresh)
	require.Zero(f, r.Notified)
	require.Equal(f, store.Gone, b.leave("b1").Left[0])
	// A sign of life just in time is enough.
	is(f.T, store.Queued, b.enter("b2", 3, true))
	r = b.leave()
	require.False(f, r.Fresh)
	c.leave("c1")
	require.Equal(f, "b2", b.receives(1)[0].ID)
	// The waiters of a process that ends its patience are dropped at once.
	is(f.T, store.Queued, c.enter("c2", 1, true))
	c.do(store.Batch{})
	a.leave("b2")
	require.Equal(f, store.Gone, c.leave("c2").Left[0])
}

func keepsItsPlace(f *fleet) {
	a, b := f.member("a"), f.member("b")
	is(f.T, store.Granted, a.enter("a1", 3, false))
	first := b.do(store.Batch{PatienceMicros: 1000, Enter: []store.Entry{{ID: "b1", Permits: 1, Wait: true}}}).Entered[0]
	f.pass(5 * time.Millisecond)
	is(f.T, store.Queued, a.enter("a2", 3, true)) // and b's process is found to be dead
	require.Equal(f, store.Gone, a.leave("b1").Left[0])
	again := store.Batch{PatienceMicros: patience.Microseconds(),
		Enter: []store.Entry{{ID: "b1", Permits: 1, Ticket: first.Ticket, Wait: true}}}
	require.Equal(f, first, b.do(again).Entered[0])
	require.Empty(f, a.leave("a1").Grants, "b1 has it, and a2 wants three")
	again.Enter[0].Wait = false
	is(f.T, store.Granted, b.do(again).Entered[0])
	// With its ticket it may also be admitted at once, before the requests behind it.
	b.leave("b1")
	a.leave("a2")
	is(f.T, store.Granted, a.enter("a3", 1, false))
	behind := a.enter("a4", 3, true)
	is(f.T, store.Queued, behind)
	for _, try := range []struct {
		ticket int64
		want   store.Outcome
	}{{behind.Ticket + 1, store.Refused}, {0, store.Refused}, {behind.Ticket - 1, store.Granted}} {
		r := b.do(store.Batch{Enter: []store.Entry{{ID: "b2", Permits: 1, Ticket: try.ticket}}})
		is(f.T, try.want, r.Entered[0])
	}
	a.leave("a4", "b2")
	r := a.do(store.Batch{PatienceMicros: patience.Microseconds(),
		Enter: []store.Entry{{ID: "a5", Permits: 3, Wait: true}, {ID: "b2", Permits: 1, Ticket: behind.Ticket}}})
	is(f.T, store.Queued, r.Entered[0]) // also before one of its own batch
	is(f.T, store.Granted, r.Entered[1])
}

// fullBatch: as many requests as a batch may have enter, are admitted and leave together, in their order.
func fullBatch(f *fleet) {
	const many = 512
	a, b := f.member("a"), f.listener("b")
	is(f.T, store.Granted, a.enter("all", 3, false))
	queue := func(m *member) (ids []string) {
		batch := store.Batch{PatienceMicros: patience.Microseconds()}
		for i := range many {
			ids = append(ids, fmt.Sprint(m.name, i))
			batch.Enter = append(batch.Enter, store.Entry{ID: ids[i], Permits: 1, Wait: true})
		}
		for _, answer := range m.do(batch).Entered {
			is(f.T, store.Queued, answer)
		}
		return ids
	}
	first, second := queue(a), queue(b)
	r := a.do(store.Batch{PatienceMicros: patience.Microseconds(), SetPermits: 2*many + 3})
	fence := int64(0)
	check := func(ids []string, grants []store.Grant) {
		require.Len(f, grants, len(ids))
		slices.SortFunc(grants, func(a, b store.Grant) int { return cmp.Compare(a.Fence, b.Fence) })
		for i, g := range grants {
			require.Equal(f, ids[i], g.ID)
			require.Less(f, fence, g.Fence)
			fence = g.Fence
		}
	}
	check(first, r.Grants)
	check(second, b.receives(many))
	for _, ids := range [][]string{first, second} {
		left := a.leave(append(ids, ids[0])...).Left
		require.Equal(f, store.Gone, left[many], "it has left already")
		require.NotContains(f, left[:many], store.Gone)
		require.NotContains(f, left[:many], store.Waiting)
	}
	require.Equal(f, store.Holding, a.leave("all").Left[0])
}

// severalSteps: more waiters are dismissed, admitted or dropped at once than a store may handle in one step; Enter comes last, however many
// steps that takes.
func severalSteps(f *fleet) {
	const many = 1500
	a, b := f.member("a"), f.listener("b")
	is(f.T, store.Granted, a.enter("all", 3, false))
	queue := func(ticket int64, permits func(i int) int) (ids []string) {
		f.T.Helper()
		for i := range many {
			ids = append(ids, fmt.Sprint("b", i))
		}
		for i := 0; i < many; i += 500 {
			batch := store.Batch{PatienceMicros: patience.Microseconds()}
			for j, id := range ids[i : i+500] {
				batch.Enter = append(batch.Enter, store.Entry{ID: id, Permits: permits(i + j), Ticket: ticket, Wait: true})
			}
			for _, answer := range b.do(batch).Entered {
				require.Equal(f, store.Queued, answer.Outcome)
			}
		}
		return ids
	}
	waiting := func() int {
		ctx, cancel := context.WithTimeout(background, 30*time.Second)
		defer cancel()
		s, err := a.store.Stats(ctx)
		require.NoError(f, err)
		return s.Waiting
	}
	one := func(int) int { return 1 }
	heard := 0 // grants that b has received
	told := func(outcome store.Outcome, ids []string) {
		f.T.Helper()
		news := b.receives(heard + len(ids))[heard:]
		heard += len(news)
		require.Len(f, news, len(ids))
		fence := int64(0)
		for i, g := range news {
			require.Equal(f, outcome, g.Outcome)
			if outcome == store.TooMany || ids[0] == "" {
				continue
			}
			require.Equal(f, ids[i], g.ID)
			require.Less(f, fence, g.Fence)
			fence = g.Fence
		}
	}

	// All waiters but the first few want more permits than there will be.
	ids := queue(0, func(i int) int { return 1 + min(2, i/10) })
	r := a.do(store.Batch{SetPermits: 1, Enter: []store.Entry{{ID: "two", Permits: 2, Wait: true}}})
	is(f.T, store.TooMany, r.Entered[0])
	told(store.TooMany, ids[10:])
	require.Equal(f, 10, waiting())
	a.leave(ids...)

	// All of them enter again, and keep their places.
	a.do(store.Batch{SetPermits: 3})
	ids = queue(1, func(int) int { return 2 })
	a.do(store.Batch{SetPermits: 1})
	told(store.TooMany, ids)

	// All are admitted, and after them the newcomer.
	a.do(store.Batch{SetPermits: 3})
	ids = queue(0, one)
	r = a.do(store.Batch{SetPermits: 3 + many + 1, Leave: []string{"nobody"}, Enter: []store.Entry{{ID: "last", Permits: 2}, {ID: "fits", Permits: 1}}})
	is(f.T, store.Refused, r.Entered[0])
	is(f.T, store.Granted, r.Entered[1])
	require.Equal(f, []store.Standing{store.Gone}, r.Left)
	told(store.Granted, ids)
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	holders, err := a.store.Holders(ctx)
	require.NoError(f, err)
	require.Len(f, holders, many+2)
	for i, h := range holders[1 : many+1] {
		require.Equal(f, ids[i], h.ID)
	}

	// All leases end, and every place is free.
	f.pass(lease + time.Second)
	b.do(store.Batch{PatienceMicros: patience.Microseconds()})
	is(f.T, store.Granted, a.enter("all again", 3+many+1, false))

	// Requests that wait until no permit is held, in any order.
	queue(0, func(int) int { return 0 })
	r = a.do(store.Batch{SetPermits: 3, Leave: []string{"all again"}, Enter: []store.Entry{{ID: "all", Permits: 3}}})
	is(f.T, store.Granted, r.Entered[0])
	require.Equal(f, []store.Standing{store.Holding}, r.Left)
	told(store.Granted, make([]string, many))

	// The process of all waiters has died: no process waits any more.
	queue(0, one)
	f.pass(patience + time.Second)
	r = a.do(store.Batch{Leave: []string{"all"}, Enter: []store.Entry{{ID: "alone", Permits: 3}}})
	is(f.T, store.Granted, r.Entered[0])
	require.Zero(f, waiting())
}

func tooManyWanted(f *fleet) {
	a, b := f.listener("a"), f.listener("b")
	is(f.T, store.TooMany, a.enter("a1", 4, true))
	is(f.T, store.Granted, a.enter("a2", 2, false))
	is(f.T, store.Queued, a.enter("a3", 3, true))
	is(f.T, store.Queued, b.enter("b1", 3, true))
	is(f.T, store.Queued, b.enter("b2", 1, true))
	r := a.do(store.Batch{PatienceMicros: patience.Microseconds(), SetPermits: 2})
	require.Equal(f, 2, r.Permits)
	require.Equal(f, []store.Grant{{ID: "a3", Outcome: store.TooMany}}, r.Grants)
	require.Equal(f, []store.Grant{{ID: "b1", Outcome: store.TooMany}}, b.receives(1))
	require.EqualValues(f, 1, b.leave().Notified)
	require.Equal(f, store.Waiting, a.leave("b2").Left[0], "who wants less waits on")
	// Also behind a waiter that stays.
	is(f.T, store.Queued, b.enter("b3", 1, true))
	is(f.T, store.Queued, b.enter("b4", 2, true))
	is(f.T, store.Queued, a.enter("a4", 2, true))
	r = a.do(store.Batch{PatienceMicros: patience.Microseconds(), SetPermits: 1})
	require.Equal(f, []store.Grant{{ID: "a4", Outcome: store.TooMany}}, r.Grants)
	require.Equal(f, store.Grant{ID: "b4", Outcome: store.TooMany}, b.receives(2)[1])
	require.Equal(f, store.Waiting, a.leave("b3").Left[0])
}

// ownNumbers: as long as no limit was set, each process has its own number, whichever process admits.
func ownNumbers(f *fleet) {
	five, two := f.listener("five"), f.listener("two")
	patient := func(permits int, enter ...store.Entry) store.Batch {
		return store.Batch{Permits: permits, PatienceMicros: patience.Microseconds(), Enter: enter}
	}
	is(f.T, store.Granted, five.do(patient(5, store.Entry{ID: "f1", Permits: 3})).Entered[0])
	is(f.T, store.Queued, five.do(patient(5, store.Entry{ID: "f2", Permits: 4, Wait: true})).Entered[0])
	r := two.do(patient(2, store.Entry{ID: "t1", Permits: 1}))
	is(f.T, store.Refused, r.Entered[0])
	require.Equal(f, 2, r.Permits)
	require.Equal(f, store.Waiting, five.ends("f2", 5), "it was not dismissed")
	is(f.T, store.Queued, two.do(patient(2, store.Entry{ID: "t2", Permits: 1, Wait: true})).Entered[0])
	require.Empty(f, five.do(patient(5)).Grants)
	require.Equal(f, store.Waiting, two.ends("t2", 2), "3 of 2 are held, whoever asks")
}

// limits: the limit with the highest version is in force for all.
func limits(f *fleet) {
	a, b, c := f.listener("a"), f.listener("b"), f.listener("c")
	of := func(permits int, version int64) store.Limit {
		return store.Limit{Permits: permits, Version: version}
	}
	r := a.do(store.Batch{Permits: 5, Limit: of(5, 3)})
	require.Equal(f, of(5, 3), r.Limit)
	require.Equal(f, 5, r.Permits)
	r = b.do(store.Batch{Permits: 2, Limit: of(2, 2)})
	require.Equal(f, of(5, 3), r.Limit, "older")
	require.Equal(f, 5, r.Permits)
	require.Equal(f, of(5, 3), c.do(store.Batch{Permits: 9}).Limit)
	require.Equal(f, of(5, 3), b.do(store.Batch{Permits: 2, Limit: of(2, 3)}).Limit, "the first of equals stays")
	is(f.T, store.Granted, c.do(store.Batch{Permits: 1, Enter: []store.Entry{{ID: "c1", Permits: 4}}}).Entered[0])
	is(f.T, store.Queued, c.do(store.Batch{PatienceMicros: patience.Microseconds(), Permits: 1,
		Enter: []store.Entry{{ID: "c2", Permits: 4, Wait: true}}}).Entered[0])
	// A newer one is in force at once.
	require.Equal(f, of(3, 4), b.do(store.Batch{Permits: 3, Limit: of(3, 4)}).Limit)
	require.Equal(f, []store.Grant{{ID: "c2", Outcome: store.TooMany}}, c.receives(1))
	// SetPermits makes the next version.
	require.Equal(f, of(7, 5), b.do(store.Batch{Permits: 3, Limit: of(3, 4), SetPermits: 7}).Limit)
	require.Equal(f, of(5, 6), b.do(store.Batch{Permits: 3, AddPermits: -2}).Limit)
	r = b.do(store.Batch{Permits: 3, AddPermits: -5})
	require.True(f, r.Unchanged)
	require.Equal(f, of(5, 6), r.Limit)
	tooMany := int64(1 << 31) // negative where an int has 32 bits
	require.True(f, b.do(store.Batch{Permits: 3, AddPermits: int(tooMany)}).Unchanged)
	// OwnPermits puts the configured numbers in force again.
	r = b.do(store.Batch{Permits: 3, SetPermits: store.OwnPermits})
	require.Equal(f, of(0, 7), r.Limit)
	require.Equal(f, 3, r.Permits)
	require.Equal(f, 1, c.do(store.Batch{Permits: 1}).Permits)
	r = b.do(store.Batch{Permits: 3, AddPermits: 1})
	require.Equal(f, of(4, 8), r.Limit, "from its own")
	require.False(f, r.Unchanged)
	require.Equal(f, of(6, 100), b.do(store.Batch{Permits: 3, Limit: of(5, 99), AddPermits: 1}).Limit)
}

// eachItsLease: a waiter gets the lease of its own process, whichever process admits it.
func eachItsLease(f *fleet) {
	a, b := f.listener("a"), f.listener("b")
	is(f.T, store.Granted, a.enter("a1", 3, false))
	short := 5 * time.Second
	b.do(store.Batch{LeaseMicros: short.Microseconds(), PatienceMicros: patience.Microseconds(),
		Enter: []store.Entry{{ID: "b1", Permits: 3, Wait: true}}})
	r := a.leave("a1")
	require.Equal(f, r.Now+short.Microseconds(), b.receives(1)[0].Expires)
	require.Equal(f, r.Now+short.Microseconds(), r.Earliest)
}

// silentWaiters: a waiter of a silent process is not admitted, and no other waiter takes its place until it is dropped.
func silentWaiters(f *fleet) {
	a, b, c := f.listener("a"), f.listener("b"), f.listener("c")
	is(f.T, store.Granted, a.enter("a1", 3, false))
	wait := func(m *member, id string) *store.Report {
		return m.do(store.Batch{PatienceMicros: patience.Microseconds(), AliveMicros: 1000,
			Enter: []store.Entry{{ID: id, Permits: 2, Wait: true}}})
	}
	is(f.T, store.Queued, wait(b, "b1").Entered[0])
	is(f.T, store.Queued, wait(c, "c1").Entered[0])
	f.pass(5 * time.Millisecond)
	require.Equal(f, store.Holding, a.leave("a1").Left[0])
	is(f.T, store.Refused, a.enter("a2", 1, false)) // it would pass
	require.Empty(f, c.do(store.Batch{PatienceMicros: patience.Microseconds()}).Grants, "b is before it")
	r := b.do(store.Batch{PatienceMicros: patience.Microseconds()})
	require.Len(f, r.Grants, 1, "it was heard of")
	require.Equal(f, "b1", r.Grants[0].ID)
	// A waiter of a silent process blocks the others for its patience, not for a lease.
	b.leave("b1")
	require.Equal(f, "c1", c.receives(1)[0].ID)
	b.do(store.Batch{PatienceMicros: 5e6, AliveMicros: 500, Enter: []store.Entry{{ID: "b2", Permits: 3, Wait: true}}})
	is(f.T, store.Queued, a.enter("a3", 1, true))
	f.pass(5 * time.Second)
	r = a.leave("c1")
	require.Len(f, r.Grants, 1)
	require.Equal(f, "a3", r.Grants[0].ID)
}

func countsStats(f *fleet) {
	a, b := f.member("a"), f.member("b")
	stats := func() store.Stats {
		ctx, cancel := context.WithTimeout(background, 30*time.Second)
		defer cancel()
		s, err := b.store.Stats(ctx)
		require.NoError(f, err)
		return s
	}
	require.Zero(f, stats())
	is(f.T, store.Granted, a.enter("a1", 2, false))
	require.Equal(f, store.Stats{Used: 2}, stats())
	is(f.T, store.Queued, b.enter("b1", 2, true))
	require.Equal(f, store.Queued, b.enter("b2", 0, true).Outcome)
	require.Equal(f, store.Stats{Used: 2, Waiting: 1}, stats())
	a.do(store.Batch{SetPermits: 7})
	require.Equal(f, store.Stats{Permits: 7, Version: 1, Used: 4}, stats())
	f.pass(lease)
	require.Equal(f, store.Stats{Permits: 7, Version: 1}, stats(), "nobody has come since the leases have ended")
}

func permitsOfTheFleet(f *fleet) {
	a, b := f.listener("a"), f.listener("b")
	r := a.do(store.Batch{Permits: 1, Enter: []store.Entry{{ID: "a1", Permits: 1}, {ID: "a2", Permits: 1}}})
	is(f.T, store.Refused, r.Entered[1])
	r = b.do(store.Batch{Permits: 2, Enter: []store.Entry{{ID: "b1", Permits: 1}}})
	is(f.T, store.Granted, r.Entered[0]) // to each its own number
	require.Equal(f, 2, r.Permits)
	r = b.do(store.Batch{Permits: 2, PatienceMicros: patience.Microseconds(),
		Enter: []store.Entry{{ID: "b2", Permits: 1, Wait: true}, {ID: "b3", Permits: 1, Wait: true}}})
	is(f.T, store.Queued, r.Entered[0])
	require.Equal(f, 3, a.do(store.Batch{Permits: 1, SetPermits: 3}).Permits) // and from now on to all the same
	require.Equal(f, "b2", b.receives(1)[0].ID)
	require.Equal(f, 3, b.do(store.Batch{Permits: 2, PatienceMicros: patience.Microseconds()}).Permits)
	// A lower limit takes no permits away, and admits no request until enough are released.
	a.do(store.Batch{SetPermits: 1})
	for _, id := range []string{"a1", "b1"} {
		require.Equal(f, store.Holding, a.leave(id).Left[0])
		require.Zero(f, a.leave().Grants)
	}
	a.leave("b2")
	require.Equal(f, "b3", b.receives(2)[1].ID)
}

func untilNoneIsHeld(f *fleet) {
	a, b := f.listener("a"), f.listener("b")
	first := a.enter("a1", 0, true)
	require.Equal(f, store.Result{Outcome: store.Granted}, first, "nobody holds anything")
	is(f.T, store.Granted, a.enter("a2", 2, false))
	for range 2 {
		require.Equal(f, store.Result{Outcome: store.Queued}, a.enter("a3", 0, true))
		require.Equal(f, store.Result{Outcome: store.Queued}, b.enter("b1", 0, true))
	}
	require.Equal(f, store.Result{Outcome: store.Queued}, b.enter("b2", 0, true))
	is(f.T, store.Granted, b.enter("b3", 1, true)) // it blocks no other request
	require.Equal(f, store.Waiting, b.leave("b2").Left[0])
	require.Empty(f, a.leave("a2").Grants)
	require.Equal(f, []store.Grant{{ID: "a3", Outcome: store.Granted}}, a.leave("b3").Grants)
	require.Equal(f, []store.Grant{{ID: "b1", Outcome: store.Granted}}, b.receives(1))
	require.Equal(f, store.Gone, b.leave("b1").Left[0])
}

func lateChangesNothing(f *fleet) {
	a := f.member("a")
	now := a.do(store.Batch{Enter: []store.Entry{{ID: "a1", Permits: 1}}}).Now
	r := a.do(store.Batch{Deadline: now - 1, SetPermits: 9, Leave: []string{"a1"},
		Enter: []store.Entry{{ID: "a2", Permits: 1}}})
	require.True(f, r.Late)
	require.GreaterOrEqual(f, r.Now, now-2_000_000)
	r = a.do(store.Batch{Deadline: now + time.Hour.Microseconds(), Leave: []string{"a1", "a2"}})
	require.False(f, r.Late)
	require.Equal(f, []store.Standing{store.Holding, store.Gone}, r.Left)
	require.Equal(f, 3, r.Permits)
}

// anyID: callers may release ids that no process has made.
func anyID(f *fleet) {
	a := f.member("a")
	hostile := []string{"", "\x00", "a b", "%41", "A", "'; --", "{}", "\xff\xfe", "ü", "\n", `\`, `"`, "NULL"}
	r := a.leave(hostile...)
	require.Equal(f, make([]store.Standing, len(hostile)), r.Left)
	r = a.do(store.Batch{Renew: hostile, Enter: []store.Entry{{ID: "A", Permits: 1}}})
	require.NotContains(f, r.Renewed, true)
	r = a.leave(hostile...)
	for i, id := range hostile {
		require.Equal(f, id == "A", r.Left[i] == store.Holding, "%q", id)
	}
}

func listsHolders(f *fleet) {
	a, b := f.member("a"), f.member("b")
	list := func() []store.Holder {
		ctx, cancel := context.WithTimeout(background, 30*time.Second)
		defer cancel()
		all, err := b.store.Holders(ctx)
		require.NoError(f, err)
		return all
	}
	require.Empty(f, list())
	var want []store.Holder
	for i, id := range []string{"z", "y"} {
		r := a.do(store.Batch{Enter: []store.Entry{{ID: id, Permits: 1 + i}}})
		want = append(want, store.Holder{ID: id, Permits: 1 + i, Fence: r.Entered[0].Fence, Since: time.UnixMicro(r.Now),
			Expires: time.UnixMicro(r.Now + lease.Microseconds()), Label: "label of a"})
	}
	is(f.T, store.Queued, b.enter("b1", 1, true))
	require.Equal(f, want, list())
	a.leave("z")
	got := list() // b1 was admitted, with the label of its own process
	require.Len(f, got, 2)
	require.Equal(f, want[1], got[0])
	require.Equal(f, "b1", got[1].ID)
	require.Equal(f, "label of b", got[1].Label)
	f.pass(lease)
	require.Empty(f, list())
	a.do(store.Batch{Enter: []store.Entry{{ID: "x", Permits: 1, Label: "its own"}}})
	b.do(store.Batch{PatienceMicros: patience.Microseconds(), Enter: []store.Entry{{ID: "b2", Permits: 3, Wait: true, Label: "and its own"}}})
	require.Equal(f, "its own", list()[0].Label)
	a.leave("x")
	require.Equal(f, "and its own", list()[0].Label)
}

func clockGoesBack(f *fleet) {
	if f.place.SetBack == nil {
		f.Skip("its clock cannot be set back")
	}
	a, b := f.member("a"), f.member("b")
	before := a.do(store.Batch{Enter: []store.Entry{{ID: "a1", Permits: 3}}})
	fence := before.Entered[0].Fence
	b.enter("b1", 1, true)
	// Up to two seconds, the clock stands still: leases and patience last longer, and no number goes back.
	var still *store.Report
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
	// Further back, expiries move with it: the rest of a lease stays the same.
	f.place.SetBack(f.T, time.Hour)
	back := a.leave()
	require.Less(f, back.Now, still.Now)
	// Expiries and the latest time seen were moved by an hour, and back again.
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
	_, err := b.Apply(ctx, &store.Batch{Process: "a", LeaseMicros: 1e6, Permits: 1})
	require.ErrorIs(f, err, context.Canceled)
	_, err = b.Holders(ctx)
	require.ErrorIs(f, err, context.Canceled)
	_, err = b.Stats(ctx)
	require.ErrorIs(f, err, context.Canceled)
	require.ErrorIs(f, b.Listen(ctx, "a", func() {}, func(store.Grant) {}), context.Canceled)
}

// span is how long a permit was held.
type span struct {
	id          string
	permits     int
	fence       int64
	ticket      int64 // 0 if it did not wait
	from, until int64
}

// allAtOnce lets many goroutines of several processes send batches at the same time, and checks the grants that they receive.
func allAtOnce(f *fleet) {
	const permits, processes, workers, rounds = 5, 3, 8, 25
	var mu sync.Mutex
	var all []span
	waits := map[string]chan store.Grant{} // by id
	told := map[string]int{}
	wake := func(g store.Grant) {
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
		listening.Go(func() { _ = m.store.Listen(ctx, m.name, func() { ready <- struct{}{} }, wake) })
		<-ready
		m.leave() // registers the process
	}
	for w := range processes * workers {
		running.Go(func() {
			m := members[w%processes]
			for i := range rounds {
				s := span{id: fmt.Sprintf("w%d-%d", w, i), permits: 1 + (w+i)%3}
				granted := make(chan store.Grant, 1)
				mu.Lock()
				waits[s.id] = granted
				mu.Unlock()
				send := func(b store.Batch) *store.Report {
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
				r := send(store.Batch{Enter: []store.Entry{{ID: s.id, Permits: s.permits, Wait: true}}})
				if r == nil {
					return
				}
				s.from, s.fence, s.ticket = r.Now, r.Entered[0].Fence, r.Entered[0].Ticket
				if r.Entered[0].Outcome == store.Queued {
					select {
					case g := <-granted:
						s.from, s.fence = g.Expires-lease.Microseconds(), g.Fence
					case <-time.After(time.Minute):
						f.Errorf("%s was queued, and never told", s.id)
						return
					}
				} else if r.Entered[0].Outcome != store.Granted {
					f.Errorf("%s: outcome %d", s.id, r.Entered[0].Outcome)
					return
				}
				r = send(store.Batch{Leave: []string{s.id}})
				if r == nil || !assert.Equal(f, store.Holding, r.Left[0]) {
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

// checkSpans checks that never more permits are held than there are, and that fences rise in the order of the grants.
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
