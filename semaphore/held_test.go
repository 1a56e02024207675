package semaphore_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// Every call returns within the timeout even if a batch in flight hangs, also the calls that came after its departure.
func TestTimeoutBehindABatch(t *testing.T) {
	const timeout = time.Second
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		var hang atomic.Bool
		f := &faulty{apply: func(ctx context.Context, _ *store.Batch) error {
			if hang.Load() {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}}
		s := f.process(t, b, 5, semaphore.WithStoreTimeout(timeout))
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		hang.Store(true)
		var calls sync.WaitGroup
		for name, call := range map[string]func() error{
			"acquire":     func() error { _, err := s.Acquire(ctx, 1); return err },
			"try":         func() error { _, err := s.TryAcquire(ctx, 1, time.Hour); return err },
			"until idle":  func() error { return semaphore.NewGroup(s).Wait(ctx) },
			"set permits": func() error { return s.SetPermits(ctx, 7) },
			"release":     func() error { return p.Release(ctx) },
			"done":        func() error { return semaphore.NewGroup(s).Done(ctx, "x") },
		} {
			for _, later := range []time.Duration{0, 200, 999} {
				calls.Go(func() {
					time.Sleep(later * time.Millisecond)
					began := time.Now()
					assert.ErrorIs(t, call(), semaphore.ErrStoreTimeout, name)
					if took := time.Since(began); name != "release" || later == 0 { // the second release has its result with the first
						assert.LessOrEqual(t, took, timeout, "%s %v later", name, later)
					}
				})
			}
		}
		calls.Wait()
		hang.Store(false)
		q, err := s.Acquire(ctx, 4)
		require.NoError(t, err, "nothing of them is left")
		require.NoError(t, q.Release(ctx))
		synctest.Wait()
	})
}

// A waiter that has its place in the queue keeps it when it is sent again in a batch that hangs, although it has waited for longer than the
// timeout: only calls that have had no reply fail with that batch.
func TestWaiterBesideATimeout(t *testing.T) {
	const timeout = time.Second
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		var step atomic.Int64
		var resent atomic.Bool
		f := &faulty{apply: func(ctx context.Context, b *store.Batch) error {
			if !slices.ContainsFunc(b.Enter, func(e store.Entry) bool { return !e.Wait }) {
				return nil // without a TryAcquire, such as a heartbeat
			}
			switch step.Load() {
			case 1: // a failure, after which waiters are sent again
				step.Store(2)
				return errReset
			case 2:
				step.Store(3)
				time.Sleep(timeout / 2)
			case 3:
				step.Store(4)
				resent.Store(len(b.Enter) == 2)
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}}
		s := f.process(t, b, 1, semaphore.WithStoreTimeout(timeout))
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		granted := make(chan error, 1)
		go func() {
			q, err := s.Acquire(ctx, 1)
			if err == nil {
				err = q.Release(ctx)
			}
			granted <- err
		}()
		time.Sleep(3 * timeout)
		step.Store(1)
		_, err = s.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, errReset)
		var calls sync.WaitGroup
		calls.Go(func() {
			_, err := s.TryAcquire(ctx, 1, 0)
			assert.ErrorIs(t, err, semaphore.ErrRefused)
		})
		time.Sleep(timeout / 4) // it begins before the batch that hangs departs
		calls.Go(func() {
			_, err := s.TryAcquire(ctx, 1, 0)
			assert.ErrorIs(t, err, semaphore.ErrStoreTimeout)
		})
		calls.Wait()
		require.True(t, resent.Load(), "the batch that hung had the waiter and the last call")
		time.Sleep(3 * timeout)
		require.Empty(t, granted, "the waiter waits")
		require.NoError(t, p.Release(ctx))
		require.NoError(t, <-granted)
	})
}

// A release by id ends the permit's context as lost, also in the process that holds it, and also the context of Do.
func TestReleasedByItsID(t *testing.T) {
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		memory, err := semaphore.NewMemory(1)
		require.NoError(t, err)
		for _, s := range []*semaphore.Semaphore{memory, new(faulty).process(t, b, 1)} {
			err := s.Do(ctx, func(under context.Context) error {
				all, err := s.Holders(ctx)
				require.NoError(t, err)
				require.NoError(t, semaphore.NewGroup(s).Done(ctx, all[0].ID))
				<-under.Done()
				require.ErrorIs(t, context.Cause(under), semaphore.ErrLost)
				return nil
			})
			require.ErrorIs(t, err, semaphore.ErrLost)
		}
	})
}

// After the end of its lease a permit is expired for every method, even if no timer has fired yet.
func TestStoppedHolder(t *testing.T) {
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		for name, look := range map[string]func(p *semaphore.Permit, ctx context.Context) error{
			"permit":  func(p *semaphore.Permit, _ context.Context) error { return p.Err() },
			"context": func(_ *semaphore.Permit, ctx context.Context) error { return ctx.Err() },
			"cause":   func(_ *semaphore.Permit, ctx context.Context) error { return context.Cause(ctx) },
			"done": func(_ *semaphore.Permit, ctx context.Context) error {
				select {
				case <-ctx.Done():
					return ctx.Err()
				default:
					return nil
				}
			},
		} {
			s := new(faulty).process(t, b, 9, semaphore.WithFixedLease(time.Second))
			p, err := s.Acquire(ctx, 1)
			require.NoError(t, err)
			held := p.Context()
			require.NoError(t, look(p, held), name)
			require.ErrorIs(t, s.Do(ctx, func(under context.Context) error {
				require.NoError(t, look(p, under))
				semaphore.Stop(s)
				time.Sleep(899 * time.Millisecond)
				require.NoError(t, look(p, under))
				time.Sleep(time.Millisecond)
				require.Error(t, look(p, under), name)
				require.Error(t, look(p, held), name)
				return nil
			}), semaphore.ErrExpired, name)
		}
	})
}

// A lease that is not renewed ends, and then another caller is granted the place.
func TestFixedLease(t *testing.T) {
	const lease = time.Second
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		f := &faulty{apply: func(_ context.Context, b *store.Batch) error {
			assert.Empty(t, b.Renew)
			return nil
		}}
		s := f.process(t, b, 1, semaphore.WithFixedLease(lease))
		began := time.Now()
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		<-p.Context().Done()
		require.Equal(t, lease*9/10, time.Since(began))
		require.ErrorIs(t, context.Cause(p.Context()), semaphore.ErrExpired)
		require.ErrorIs(t, p.Release(ctx), semaphore.ErrExpired)
		q, err := s.TryAcquire(ctx, 1, lease)
		require.NoError(t, err)
		require.NoError(t, q.Release(ctx))
		_, err = semaphore.NewMemory(1, semaphore.WithFixedLease(lease))
		require.ErrorIs(t, err, semaphore.ErrInvalidConfig)
	})
}

func TestNilPermit(t *testing.T) {
	var p *semaphore.Permit
	require.Zero(t, p.ID())
	require.Zero(t, p.Permits())
	require.Zero(t, p.Fence())
	require.ErrorIs(t, p.Err(), semaphore.ErrNotHeld)
	require.ErrorIs(t, p.Release(ctx), semaphore.ErrNotHeld)
	<-p.Context().Done()
	require.ErrorIs(t, context.Cause(p.Context()), semaphore.ErrNotHeld)
}

// watcher records the events of an observer.
type watcher struct {
	mu     sync.Mutex
	events []any
}

func (w *watcher) add(e any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

// take returns the events since its last call.
func (w *watcher) take() []any {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.events
	w.events = nil
	return all
}

func (w *watcher) option() semaphore.Option {
	return semaphore.WithObserver(semaphore.Observer{
		Decision: func(_ context.Context, d semaphore.Decision) { w.add(d) },
		Trip:     func(t semaphore.Trip) { w.add(t) },
		Lease:    func(l semaphore.LeaseUse) { w.add(l) },
		Health:   func(h semaphore.Health) { w.add(h) },
	})
}

func TestObserver(t *testing.T) {
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		var fail atomic.Bool
		away := fmt.Errorf("%w: connection refused", semaphore.ErrStoreUnavailable)
		refuse := func() error {
			time.Sleep(time.Millisecond)
			if fail.Load() {
				return away
			}
			return nil
		}
		f := &faulty{apply: func(context.Context, *store.Batch) error { return refuse() }, asked: refuse}
		var w watcher
		s := f.process(t, b, 2, w.option(), semaphore.WithFixedLease(time.Second))
		p, err := s.Acquire(ctx, 2)
		require.NoError(t, err)
		require.Equal(t, []any{
			semaphore.Trip{Semaphore: "x", Requests: 1, Elapsed: time.Millisecond},
			semaphore.Decision{Semaphore: "x", Permits: 2, Granted: true, Elapsed: time.Millisecond},
		}, w.take())
		_, err = s.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, semaphore.ErrRefused)
		_, err = s.Acquire(ctx, 0)
		require.ErrorIs(t, err, semaphore.ErrInvalidPermits)
		events := w.take()
		require.Equal(t, semaphore.Decision{Semaphore: "x", Permits: 1, Elapsed: time.Millisecond}, events[1])
		require.Equal(t, semaphore.Decision{Semaphore: "x", Err: err}, events[2])
		time.Sleep(5 * time.Millisecond)
		require.NoError(t, p.Release(ctx))
		require.Equal(t, semaphore.LeaseUse{Semaphore: "x", Permits: 2, Held: 6 * time.Millisecond}, w.take()[0])

		p, err = s.Acquire(ctx, 1)
		require.NoError(t, err)
		w.take()
		<-p.Context().Done()
		synctest.Wait()
		require.Equal(t, semaphore.LeaseUse{Semaphore: "x", Permits: 1, Held: 899 * time.Millisecond, Err: semaphore.ErrExpired}, w.take()[0])
		fail.Store(true)
		_, err = s.Acquire(ctx, 1)
		require.ErrorIs(t, err, away)
		time.Sleep(time.Second) // for the probe
		synctest.Wait()
		events = w.take()
		told := slices.IndexFunc(events, func(e any) bool { d, ok := e.(semaphore.Decision); return ok && d.Err == err && !d.Granted })
		require.NotEqual(t, -1, told, events) // before or after the event of the outage
		health := healthOf(events)
		require.Len(t, health, 1)
		require.True(t, health[0].Down)
		require.ErrorIs(t, health[0].Err, away)
		fail.Store(false)
		time.Sleep(time.Second)
		p, err = s.Acquire(ctx, 1)
		require.NoError(t, err)
		synctest.Wait()
		health = healthOf(w.take())
		require.Len(t, health, 1)
		require.False(t, health[0].Down)
		require.Positive(t, health[0].After)
		require.NoError(t, p.Release(ctx))
	})
}

func healthOf(events []any) (all []semaphore.Health) {
	for _, e := range events {
		if h, ok := e.(semaphore.Health); ok {
			all = append(all, h)
		}
	}
	return all
}

func TestObserverInMemory(t *testing.T) {
	var w watcher
	s, err := semaphore.NewMemory(1, w.option())
	require.NoError(t, err)
	p, err := s.Acquire(ctx, 1)
	require.NoError(t, err)
	require.True(t, w.take()[0].(semaphore.Decision).Granted)
	require.NoError(t, semaphore.NewGroup(s).Done(ctx, p.ID()))
	require.ErrorIs(t, w.take()[0].(semaphore.LeaseUse).Err, semaphore.ErrLost)
	require.ErrorIs(t, p.Release(ctx), semaphore.ErrLost)
	require.Empty(t, w.take())
}

// Stats and Holders return within the timeout, too, with the same error. If the context ends first, its error is returned.
func TestTimeoutOfQuestions(t *testing.T) {
	const timeout = time.Second
	inBubble(t, func(t *testing.T, b *semaphoremodel.Store) {
		for name, ask := range map[string]func(*semaphore.Semaphore, context.Context) error{
			"stats":   func(s *semaphore.Semaphore, ctx context.Context) error { _, err := s.Stats(ctx); return err },
			"holders": func(s *semaphore.Semaphore, ctx context.Context) error { _, err := s.Holders(ctx); return err },
		} {
			s, err := semaphore.New(deaf{b}, "x", 5, semaphore.WithStoreTimeout(timeout))
			require.NoError(t, err)
			soon, cancel := context.WithTimeout(ctx, timeout/2)
			err = ask(s, soon)
			require.ErrorIs(t, err, context.DeadlineExceeded, name)
			require.NotErrorIs(t, err, semaphore.ErrStoreTimeout, name)
			cancel()
			began := time.Now()
			require.ErrorIs(t, ask(s, ctx), semaphore.ErrStoreTimeout, name)
			require.Equal(t, timeout, time.Since(began), name)
			require.NoError(t, s.Close(ctx))
		}
		time.Sleep(timeout) // for the probe
	})
}

// deaf is a store whose Stats and Holders return only when their context ends.
type deaf struct{ store.Store }

func (deaf) Stats(ctx context.Context) (store.Stats, error) {
	<-ctx.Done()
	return store.Stats{}, ctx.Err()
}

func (deaf) Holders(ctx context.Context) ([]store.Holder, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}
