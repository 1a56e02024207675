package waiting

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// ask is a call of echo.
type ask struct {
	Ticket
	since time.Duration
	err   error
	left  bool
}

// echo is the least machine: every call is sent, and ends with the outcome of its batch.
type echo struct {
	queue, flying []*ask
	fault         error
	outages, late int
}

func (e *echo) Join(c *ask, now Moment, out *Out) Way {
	if c.since = now.Mono; e.fault != nil && now.Pause > 0 {
		c.err = e.fault
		out.End(&c.Ticket)
		return Ended
	}
	e.queue = append(e.queue, c)
	if e.flying != nil {
		return Queued
	}
	return Alone
}

func (e *echo) Leave(c *ask, _ Moment, _ *Out) { c.left = true }

func (e *echo) Build(Moment, *Out) ([]*ask, bool) {
	e.flying, e.queue = e.queue, nil
	return e.flying, len(e.flying) > 0
}

func (e *echo) end(calls []*ask, err error, out *Out) {
	for _, c := range calls {
		if !c.left && !c.Ended() {
			c.err = err
			out.End(&c.Ticket)
		}
	}
}

func (e *echo) Settle(b []*ask, _ int, how Landing, err error, _ Moment, out *Out) {
	if how == Late {
		e.late++
		return
	}
	e.flying = nil
	e.end(b, err, out)
}

func (e *echo) Expire(now Moment, out *Out) (next time.Duration) {
	for _, c := range append(append([]*ask(nil), e.flying...), e.queue...) {
		if by := c.since + time.Second; by > now.Mono && (next == 0 || by < next) {
			next = by
		} else if by <= now.Mono {
			e.end([]*ask{c}, errExpired, out)
		}
	}
	return next
}

func (e *echo) Tick(Moment, *Out) Next {
	return Next{Send: e.flying == nil && len(e.queue) > 0}
}

func (e *echo) Outage(err error, _ Moment, out *Out) {
	if err != nil && e.fault == nil {
		e.outages++
	}
	if e.fault = err; err != nil {
		e.end(e.queue, err, out)
		e.queue = nil
	}
}

var errExpired, errAway = errors.New("expired"), errors.New("away")

// run runs a test in virtual time with a process whose round trips are made by send.
func run(t *testing.T, send func(context.Context) error, test func(e *echo, call func(context.Context) error)) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(50 * 365 * 24 * time.Hour)
		e := new(echo)
		p := New(Config[*ask, []*ask, int]{
			Machine: e, Timeout: time.Second,
			Send:    func(ctx context.Context, _ []*ask) (int, error) { return 0, send(ctx) },
			Failure: func(err error) (Landing, error) { return Failed, err },
		})
		test(e, func(ctx context.Context) error {
			c := new(ask)
			if err := p.Do(ctx, c); err != nil {
				return err
			}
			return c.err
		})
		time.Sleep(time.Minute)
		synctest.Wait()
	})
}

// A call ends by its result, by its context, or by the timeout while it waits behind another batch.
func TestCallsEnd(t *testing.T) {
	slow := func(context.Context) error { time.Sleep(900 * time.Millisecond); return nil }
	run(t, slow, func(e *echo, call func(context.Context) error) {
		var calls sync.WaitGroup
		calls.Go(func() { require.NoError(t, call(context.Background())) })
		synctest.Wait()
		began := time.Now()
		calls.Go(func() {
			require.ErrorIs(t, call(context.Background()), errExpired)
			require.LessOrEqual(t, time.Since(began), time.Second+time.Millisecond)
		})
		short, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, call(short), context.DeadlineExceeded)
		calls.Wait()
		synctest.Wait()
		require.Zero(t, e.outages)
	})
}

// A batch without a reply by the timeout begins an outage. During it calls end at once, but one when a probe is due. A reply ends it.
func TestOutage(t *testing.T) {
	away := true
	hangs := func(ctx context.Context) error {
		if away {
			time.Sleep(3 * time.Second) // whatever the context
			return errAway
		}
		return nil
	}
	run(t, hangs, func(e *echo, call func(context.Context) error) {
		began := time.Now()
		require.Error(t, call(context.Background()))
		require.Equal(t, time.Second, time.Since(began))
		synctest.Wait() // the timeouts of the call and of its batch end in one instant, in any order
		require.Equal(t, 1, e.outages)
		require.Error(t, call(context.Background()))
		require.Equal(t, time.Second, time.Since(began), "at once")
		away = false
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, e.late)
		require.NoError(t, call(context.Background()))
		synctest.Wait()
		require.NoError(t, e.fault)
	})
}
