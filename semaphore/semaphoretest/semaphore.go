package semaphoretest

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Open opens a new semaphore for a test. Each call of the function that it returns opens it in another process or, if it has only one
// process, in the same. All are closed with the test.
type Open func(t *testing.T, permits int, opts ...semaphore.Option) (process func() *semaphore.Semaphore)

// Semaphore tests a semaphore, wherever it keeps its permits.
func Semaphore(t *testing.T, open Open) {
	for name, test := range map[string]func(*testing.T, Open){
		"holds at most so many": holdsAtMost, "try": try, "first come first served": firstCome, "many are not starved": manyAtOnce,
		"giving up": givingUp, "release": release, "context": contexts, "do": do, "set permits": setPermits, "add permits": addPermits, "stats": stats, "holders": holders,
		"group": group, "crowd": crowd, "bad input": badInput, "under load": underLoad,
	} {
		t.Run(name, func(t *testing.T) { test(t, open) })
	}
}

var background = context.Background()

// bounded returns a context that ends a test which hangs.
func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func acquire(t *testing.T, s *semaphore.Semaphore, n int) *semaphore.Permit {
	t.Helper()
	p, err := s.Acquire(bounded(t), n)
	require.NoError(t, err)
	require.Equal(t, n, p.Permits())
	return p
}

// free returns how many permits can be acquired at once; it releases them again.
func free(t *testing.T, s *semaphore.Semaphore, most int) (n int) {
	t.Helper()
	var all []*semaphore.Permit
	for range most {
		p, err := s.TryAcquire(bounded(t), 1, 0)
		if errors.Is(err, semaphore.ErrRefused) {
			break
		}
		require.NoError(t, err)
		all = append(all, p)
	}
	for _, p := range all {
		require.NoError(t, p.Release(bounded(t)))
	}
	return len(all)
}

// watched is a context that notifies the test when a call begins to wait with it.
type watched struct {
	context.Context
	once  sync.Once
	waits chan struct{}
}

func (w *watched) Done() <-chan struct{} {
	w.once.Do(func() { close(w.waits) })
	return w.Context.Done()
}

// queued starts a call that has to wait, and returns when the semaphore has queued it: a request sent after it, for which there is no
// permit either, has its reply. ended receives the call's error.
func queued(t *testing.T, s *semaphore.Semaphore, ctx context.Context, call func(ctx context.Context) error) (ended <-chan error) {
	t.Helper()
	w := &watched{Context: ctx, waits: make(chan struct{})}
	end := make(chan error, 1)
	go func() { end <- call(w) }()
	select {
	case <-w.waits:
	case err := <-end:
		require.Fail(t, "it did not wait", "%v", err)
	}
	require.Equal(t, 0, free(t, s, 1))
	return end
}

// passing returns a call that acquires and releases, and notifies the test when it has acquired.
func passing(s *semaphore.Semaphore, n int, acquired func()) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		p, err := s.Acquire(ctx, n)
		if err != nil {
			return err
		}
		acquired()
		return p.Release(background)
	}
}

func holdsAtMost(t *testing.T, open Open) {
	process := open(t, 3)
	a, b := process(), process()
	p := acquire(t, a, 2)
	q := acquire(t, b, 1)
	require.NotEqual(t, p.ID(), q.ID())
	require.Greater(t, q.Fence(), p.Fence())
	for _, s := range []*semaphore.Semaphore{a, b} {
		none, err := s.TryAcquire(background, 1, 0)
		require.ErrorIs(t, err, semaphore.ErrRefused)
		require.Nil(t, none)
	}
	require.NoError(t, p.Release(background))
	require.Equal(t, 2, free(t, b, 9))
	require.NoError(t, q.Release(background))
	require.Equal(t, 3, free(t, a, 9))
}

func try(t *testing.T, open Open) {
	process := open(t, 1)
	a, b := process(), process()
	p := acquire(t, a, 1)
	for _, timeout := range []time.Duration{math.MinInt64, -1, 0, time.Millisecond, 60 * time.Millisecond} {
		began := time.Now()
		none, err := b.TryAcquire(background, 1, timeout)
		require.ErrorIs(t, err, semaphore.ErrRefused)
		require.Nil(t, none)
		require.GreaterOrEqual(t, time.Since(began), timeout)
	}
	require.NoError(t, p.Release(background))
	for range 20 { // a timeout shorter than a round trip
		p, err := b.TryAcquire(background, 1, time.Nanosecond)
		require.NoError(t, err)
		require.NotNil(t, p, "it is free")
		require.NoError(t, p.Release(background))
	}
	p = acquire(t, a, 1)
	time.AfterFunc(50*time.Millisecond, func() { _ = p.Release(background) })
	q, err := b.TryAcquire(background, 1, 20*time.Second)
	require.NoError(t, err)
	require.NotNil(t, q, "it is released within the timeout")
	require.NoError(t, q.Release(background))
}

// A call beyond the bound is refused at once, and a caller that gives up makes room for another.
func crowd(t *testing.T, open Open) {
	s := open(t, 1, semaphore.WithMaxWaiters(2))()
	p := acquire(t, s, 1)
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	gone := make(chan error, 2)
	for range 2 {
		go func() {
			err := semaphore.ErrTooManyWaiters
			for errors.Is(err, semaphore.ErrTooManyWaiters) { // while the tries below take a place
				_, err = s.Acquire(ctx, 1)
			}
			gone <- err
		}()
	}
	full := func() bool {
		q, err := s.TryAcquire(bounded(t), 1, 5*time.Millisecond)
		require.Nil(t, q)
		return errors.Is(err, semaphore.ErrTooManyWaiters)
	}
	require.Eventually(t, full, 10*time.Second, time.Millisecond)
	_, err := s.Acquire(bounded(t), 1)
	require.ErrorIs(t, err, semaphore.ErrTooManyWaiters)
	cancel()
	for range 2 {
		require.ErrorIs(t, <-gone, context.Canceled)
	}
	require.Eventually(t, func() bool { return !full() }, 10*time.Second, time.Millisecond)
	require.NoError(t, p.Release(background))
	require.Equal(t, 1, free(t, s, 9))
}

// Waiters are served in the order of arrival, whatever process they are in.
func firstCome(t *testing.T, open Open) {
	process := open(t, 1)
	all := []*semaphore.Semaphore{process(), process(), process()}
	p := acquire(t, all[0], 1)
	var mu sync.Mutex
	var order []int
	var ends []<-chan error
	for i := range 12 {
		ends = append(ends, queued(t, all[i%3], bounded(t), passing(all[i%3], 1, func() {
			mu.Lock()
			defer mu.Unlock()
			order = append(order, i)
		})))
	}
	require.NoError(t, p.Release(background))
	for _, end := range ends {
		require.NoError(t, <-end)
	}
	require.Equal(t, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, order)
}

// A request for many permits is not passed by smaller ones that come later, nor does it lose its place when those leave.
func manyAtOnce(t *testing.T, open Open) {
	process := open(t, 4)
	a, b := process(), process()
	held := []*semaphore.Permit{acquire(t, a, 1), acquire(t, b, 1)}
	got := make(chan string, 2)
	four := queued(t, a, bounded(t), passing(a, 4, func() { got <- "four" }))
	one := queued(t, b, bounded(t), passing(b, 1, func() { got <- "one" }))
	require.Equal(t, 0, free(t, a, 1), "two are free, and wait for the four")
	require.Empty(t, got)
	for _, p := range held {
		require.NoError(t, p.Release(background))
	}
	require.Equal(t, "four", <-got)
	require.Equal(t, "one", <-got)
	require.NoError(t, <-four)
	require.NoError(t, <-one)
}

// A caller that gives up leaves no trace, and the waiters behind it go on.
func givingUp(t *testing.T, open Open) {
	process := open(t, 2)
	a, b := process(), process()
	p := acquire(t, a, 1)
	ctx, cancel := context.WithCancelCause(background)
	failed := queued(t, a, ctx, func(ctx context.Context) error {
		_, err := a.Acquire(ctx, 2)
		return err
	})
	passed := queued(t, b, bounded(t), passing(b, 1, func() {}))
	cancel(errors.New("enough"))
	require.ErrorIs(t, <-failed, context.Canceled)
	require.NoError(t, <-passed, "the one behind it fits")
	_, err := a.Acquire(ctx, 1)
	require.ErrorIs(t, err, context.Canceled, "a context that is done")
	short, end := context.WithTimeout(background, 30*time.Millisecond)
	defer end()
	_, err = b.Acquire(short, 2)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, p.Release(background))
	require.Eventually(t, func() bool { return free(t, b, 9) == 2 }, 10*time.Second, 5*time.Millisecond)
}

func release(t *testing.T, open Open) {
	process := open(t, 1)
	a, b := process(), process()
	p := acquire(t, a, 1)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := p.Release(background); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	q := acquire(t, b, 1)
	require.NoError(t, p.Release(background), "once more, while it is somebody else's")
	require.Equal(t, 0, free(t, a, 1))
	require.NoError(t, q.Release(background))
	require.Equal(t, 1, free(t, a, 9))
}

func contexts(t *testing.T, open Open) {
	s := open(t, 1)()
	p := acquire(t, s, 1)
	ctx := p.Context()
	require.NoError(t, ctx.Err())
	require.NoError(t, p.Release(background))
	<-ctx.Done()
	require.ErrorIs(t, context.Cause(ctx), semaphore.ErrReleased)
	q := acquire(t, s, 1)
	require.NoError(t, q.Release(background))
	<-q.Context().Done() // asked for afterwards
	require.ErrorIs(t, context.Cause(q.Context()), semaphore.ErrReleased)
}

func do(t *testing.T, open Open) {
	s := open(t, 1)()
	wrong := errors.New("wrong")
	type key struct{}
	ctx := context.WithValue(bounded(t), key{}, "value")
	require.NoError(t, s.Do(ctx, func(ctx context.Context) error {
		require.Equal(t, "value", ctx.Value(key{}))
		require.Equal(t, 0, free(t, s, 1))
		return nil
	}))
	require.ErrorIs(t, s.Do(ctx, func(context.Context) error { return wrong }), wrong)
	require.Panics(t, func() { _ = s.Do(ctx, func(context.Context) error { panic("oops") }) })
	require.Equal(t, 1, free(t, s, 9))
	canceled, cancel := context.WithCancel(ctx)
	require.NoError(t, s.Do(canceled, func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		return nil
	}))
	require.ErrorIs(t, s.Do(canceled, func(context.Context) error { panic("never called") }), context.Canceled)
	require.Equal(t, 1, free(t, s, 9))
}

func setPermits(t *testing.T, open Open) {
	process := open(t, 2)
	a, b := process(), process()
	require.NoError(t, a.SetPermits(background, 4))
	require.Equal(t, 4, free(t, b, 9))
	p := acquire(t, b, 3)
	waits := queued(t, a, bounded(t), passing(a, 2, func() {}))
	require.NoError(t, b.SetPermits(background, 5), "a raise lets in who waits")
	require.NoError(t, <-waits)
	waits = queued(t, a, bounded(t), passing(a, 3, func() {}))
	require.NoError(t, b.SetPermits(background, 2))
	require.ErrorIs(t, <-waits, semaphore.ErrTooMany, "it can never be granted")
	require.Equal(t, 0, free(t, a, 1), "three are held of two")
	require.NoError(t, p.Release(background))
	require.Equal(t, 2, free(t, a, 9))

	// Also behind a waiter that stays.
	require.NoError(t, a.SetPermits(background, 5))
	p = acquire(t, b, 3)
	fits := queued(t, a, bounded(t), passing(a, 3, func() {}))
	never := queued(t, b, bounded(t), passing(b, 4, func() {}))
	require.NoError(t, a.SetPermits(background, 3))
	require.ErrorIs(t, <-never, semaphore.ErrTooMany)
	require.Empty(t, fits)
	require.NoError(t, p.Release(background))
	require.NoError(t, <-fits)
}

func addPermits(t *testing.T, open Open) {
	process := open(t, 2)
	a, b := process(), process()
	require.NoError(t, a.AddPermits(background, 3))
	require.NoError(t, b.AddPermits(background, -1))
	require.NoError(t, b.AddPermits(background, 0))
	require.Equal(t, 4, free(t, a, 9))
	tooMany := int64(1 << 31) // negative where an int has 32 bits
	for _, n := range []int{-4, math.MinInt, int(tooMany), math.MaxInt} {
		require.ErrorIs(t, a.AddPermits(background, n), semaphore.ErrInvalidPermits, n)
	}
	require.Equal(t, 4, free(t, b, 9))
	require.NoError(t, a.ResetPermits(background))
	require.Equal(t, 2, free(t, b, 9))
	require.NoError(t, a.AddPermits(background, 1))
	require.Equal(t, 3, free(t, b, 9))
}

func stats(t *testing.T, open Open) {
	process := open(t, 5)
	a, b := process(), process()
	is := func(permits, used, waiting int) {
		t.Helper()
		s, err := b.Stats(bounded(t))
		require.NoError(t, err)
		s.Version = 0
		require.Equal(t, semaphore.Stats{Permits: permits, Used: used, Waiting: waiting}, s)
	}
	is(5, 0, 0)
	p := acquire(t, a, 3)
	is(5, 3, 0)
	waits := queued(t, a, bounded(t), passing(a, 5, func() {}))
	is(5, 3, 1)
	require.NoError(t, a.SetPermits(background, 6))
	is(6, 3, 1)
	require.NoError(t, p.Release(background))
	require.NoError(t, <-waits)
	is(6, 0, 0)
}

func holders(t *testing.T, open Open) {
	process := open(t, 5, semaphore.WithLabel("host é 7"))
	a, b := process(), process()
	all, err := a.Holders(background)
	require.NoError(t, err)
	require.Empty(t, all)
	before := time.Now()
	p, q := acquire(t, a, 2), acquire(t, b, 3)
	all, err = b.Holders(background)
	require.NoError(t, err)
	require.Len(t, all, 2)
	for i, want := range []*semaphore.Permit{p, q} {
		h := all[i]
		require.Equal(t, want.ID(), h.ID)
		require.Equal(t, want.Permits(), h.Permits)
		require.Equal(t, want.Fence(), h.Fence)
		require.Equal(t, "host é 7", h.Label)
		require.WithinDuration(t, before, h.Since, 10*time.Second)
		if !h.Expires.IsZero() {
			require.Greater(t, h.Expires, h.Since)
		}
	}
	require.NoError(t, p.Release(background))
	all, err = a.Holders(background)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.NoError(t, q.Release(background))
	p = acquire(t, a.Labelled("import é 8"), 5)
	all, err = a.Holders(background)
	require.NoError(t, err)
	require.Equal(t, "import é 8", all[0].Label)
	ended := make(chan error)
	go func() {
		ended <- passing(b.Labelled("waits"), 5, func() { all, err = a.Holders(background) })(bounded(t))
	}()
	require.NoError(t, p.Release(background))
	require.NoError(t, <-ended)
	require.NoError(t, err)
	require.Equal(t, "waits", all[0].Label)
	_, err = a.Labelled(strings.Repeat("l", 201)).Acquire(background, 1)
	require.ErrorIs(t, err, semaphore.ErrInvalidConfig)
}

func group(t *testing.T, open Open) {
	process := open(t, 2)
	a, b := process(), process()
	here, there := semaphore.NewGroup(a), semaphore.NewGroup(b)
	require.NoError(t, there.Wait(bounded(t)), "nobody holds anything")
	first, err := here.Add(bounded(t))
	require.NoError(t, err)
	second, err := there.Add(bounded(t))
	require.NoError(t, err)
	idle := []<-chan error{queued(t, a, bounded(t), here.Wait), queued(t, b, bounded(t), there.Wait)}
	short, cancel := context.WithTimeout(background, 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, here.Wait(short), context.DeadlineExceeded)
	require.NoError(t, there.Done(bounded(t), first.ID()), "another process'")
	require.ErrorIs(t, here.Done(bounded(t), first.ID()), semaphore.ErrNotHeld)
	for _, ended := range idle {
		require.Empty(t, ended)
	}
	require.NoError(t, there.Done(bounded(t), second.ID()))
	for _, ended := range idle {
		require.NoError(t, <-ended)
	}

	other := semaphore.NewGroup(open(t, 1)())
	foreign, err := other.Add(bounded(t))
	require.NoError(t, err)
	require.ErrorIs(t, here.Done(bounded(t), foreign.ID()), semaphore.ErrNotHeld, "a permit of another semaphore")
	for _, id := range []string{"", "no such", "a b", "\x00", strings.Repeat("x", 600)} {
		err := here.Done(bounded(t), id)
		require.ErrorIs(t, err, semaphore.ErrNotHeld, "%q", id)
	}
	require.NoError(t, other.Done(bounded(t), foreign.ID()))
}

func badInput(t *testing.T, open Open) {
	s := open(t, 2)()
	for _, n := range []int{0, -1, math.MinInt} {
		_, err := s.Acquire(background, n)
		require.ErrorIs(t, err, semaphore.ErrInvalidPermits)
		_, err = s.TryAcquire(background, n, time.Second)
		require.ErrorIs(t, err, semaphore.ErrInvalidPermits)
		require.ErrorIs(t, s.SetPermits(background, n), semaphore.ErrInvalidPermits)
	}
	tooMany := int64(1<<31 + 1) // negative where an int has 32 bits
	require.ErrorIs(t, s.SetPermits(background, int(tooMany)), semaphore.ErrInvalidPermits)
	for _, n := range []int{3, math.MaxInt} {
		_, err := s.Acquire(background, n)
		require.ErrorIs(t, err, semaphore.ErrTooMany)
		_, err = s.TryAcquire(background, n, 0)
		require.ErrorIs(t, err, semaphore.ErrTooMany)
	}
	require.Equal(t, 2, free(t, s, 9))
}

// Many goroutines of several processes, some of which give up. Never more permits are held than there are, and every caller ends.
func underLoad(t *testing.T, open Open) {
	const permits = 3
	process := open(t, permits)
	var working, most, done atomic.Int64
	var wg sync.WaitGroup
	for i := range 4 {
		s := process()
		for k := range 8 {
			wg.Go(func() {
				for round := range 25 {
					n := 1 + (i+k+round)%permits
					p, err := s.TryAcquire(bounded(t), n, time.Duration(1+(k*round)%40)*time.Millisecond*10)
					if errors.Is(err, semaphore.ErrRefused) {
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					most.Store(max(most.Load(), working.Add(int64(n))))
					time.Sleep(100 * time.Microsecond)
					working.Add(-int64(n))
					done.Add(1)
					if err := p.Release(bounded(t)); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	t.Logf("%d of %d came through, at most %d at once", done.Load(), 4*8*25, most.Load())
	require.LessOrEqual(t, most.Load(), int64(permits))
	require.Greater(t, done.Load(), int64(20)) // a busy machine refuses most in time
	require.Eventually(t, func() bool { return free(t, process(), 9) == permits }, 20*time.Second, 5*time.Millisecond, "who gave up as it was granted")
}
