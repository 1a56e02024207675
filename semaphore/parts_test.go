package semaphore

import (
	"context"
	"crypto/rand"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// deaf is a store whose Listen fails at once. It counts the attempts.
type deaf struct {
	store.Store
	listens atomic.Int32
}

func (d *deaf) Listen(context.Context, string, func(), func(store.Grant)) error {
	d.listens.Add(1)
	return errors.New("no connection")
}

// A Listen that fails is repeated ten times a second, by one goroutine, until the listener is stopped.
func TestListenIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := new(deaf)
		l := listener{store: d, tasks: new(tasks)}
		l.listen(clock.Mono())
		l.listen(clock.Mono())
		time.Sleep(10*listenAgain - listenAgain/2)
		require.EqualValues(t, 10, d.listens.Load())
		l.stop()
		<-l.tasks.ended()
		require.EqualValues(t, 10, d.listens.Load())
	})
}

// Changes of the limit are sent in the order of the calls. A batch that decided nothing puts its change back in front, unless the call has
// its result.
func TestLimitChangesInOrder(t *testing.T) {
	var l limits
	first, second := l.add(change{set: 1}, 0), l.add(change{add: 2}, 0)
	require.Same(t, first, l.take())
	l.putBack(first)
	require.Same(t, first, l.take())
	require.Same(t, second, l.take())
	require.Nil(t, l.take())
	l.putBack(nil)
	second.finish(nil)
	l.putBack(second)
	require.Nil(t, l.take())

	overdue := l.add(change{set: 3}, time.Second)
	later := l.add(change{set: 4}, 2*time.Second)
	why := errors.New("too late")
	l.fail(func(since time.Duration) bool { return since == time.Second }, why)
	require.Equal(t, why, overdue.wait(context.Background()))
	require.Same(t, later, l.take())
}

// After a failed batch, requests without a caller pause. The next reply ends the pause.
func TestPauseAfterAFailure(t *testing.T) {
	h := health{pause: time.Second}
	require.True(t, h.calm(1))
	h.failed(1)
	require.False(t, h.calm(time.Second))
	require.True(t, h.calm(time.Second+1))
	h.recovered()
	require.True(t, h.calm(2))
}

// Requests are sent again in the order of their tickets. Those without a ticket come last, and those that are done not at all.
func TestAskAgainByTickets(t *testing.T) {
	w := newWaiters()
	for id, ticket := range map[string]int64{"none": 0, "3": 3, "1": 1, "2": 2, "gone": 1} {
		w.sent[id] = &request{id: id, ticket: ticket, done: id == "gone"}
	}
	w.askAgain(nil)
	var order []string
	for _, r := range w.resend {
		order = append(order, r.id)
	}
	require.Equal(t, []string{"1", "2", "3", "none"}, order)
}

// Requests of callers that have given up before they were sent do not pile up.
func TestGoneRequestsAreDropped(t *testing.T) {
	w := newWaiters()
	for range 1000 {
		r := new(request)
		require.True(t, w.add(r, 2))
		w.end(r)
	}
	require.LessOrEqual(t, len(w.fresh), 4)
}

// A batch renews at most maxBatch permits. The renewal of the others is due at once.
func TestRenewalsBeyondABatch(t *testing.T) {
	h := holdings{lease: 3 * time.Second, permits: map[string]*Permit{}}
	for range maxBatch + 1 {
		p := new(Permit)
		p.more = &more{id: rand.Text(), deadline: time.Minute}
		h.add(p)
	}
	require.Equal(t, time.Second, h.nextRenewal())
	require.Empty(t, h.due(time.Second-1))
	require.Len(t, h.due(time.Second), maxBatch)
	require.Equal(t, time.Second, h.nextRenewal())
}

// An id that the store has dropped by now is released only if a caller waits for that.
func TestReleasesAfterTheirLease(t *testing.T) {
	var l releases
	l.add("over", 0, time.Second)
	awaited := l.await("awaited", 0, time.Second)
	l.add("lasts", 0, time.Minute)
	require.Equal(t, []*release{awaited}, l.take(2*time.Second, false))
	l.putBack([]*release{awaited})
	var ids []string
	for _, r := range l.take(2*time.Second, true) {
		ids = append(ids, r.id)
	}
	require.Equal(t, []string{"awaited", "lasts"}, ids)
}

// Of two limits for the fleet the one with the higher version counts, in whatever order the reports arrive.
func TestNewestLimit(t *testing.T) {
	var v view
	report := func(permits int, version int64) {
		v.update(&store.Report{Permits: permits, Limit: store.Limit{Permits: permits, Version: version}}, 1, 2, time.Second)
	}
	report(5, 2)
	report(3, 1)
	require.Equal(t, store.Limit{Permits: 5, Version: 2}, v.limit)
	report(4, 2)
	require.Equal(t, store.Limit{Permits: 4, Version: 2}, v.limit)
}
