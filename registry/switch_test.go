package registry_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

var (
	_ registry.Switch = (*registry.AtomicSwitch)(nil)
	_ registry.Switch = (*registry.PolledSwitch)(nil)
)

func TestAtomicSwitch(t *testing.T) {
	require.True(t, registry.NewSwitch(true).Enabled())
	s := registry.NewSwitch(false)
	require.False(t, s.Enabled())
	s.Set(true)
	require.True(t, s.Enabled())
}

// remoteSwitch is what a polled switch reads, in a bubble of synctest.
type remoteSwitch struct {
	on    atomic.Bool
	err   atomic.Pointer[error]
	hang  atomic.Bool // until the context ends
	stuck chan struct{}

	mu    sync.Mutex
	begun []time.Time
}

func (r *remoteSwitch) read(ctx context.Context) (bool, error) {
	r.mu.Lock()
	r.begun = append(r.begun, time.Now())
	r.mu.Unlock()
	if r.stuck != nil {
		<-r.stuck
	}
	if r.hang.Load() {
		<-ctx.Done()
		return false, ctx.Err()
	}
	if err := r.err.Load(); err != nil {
		return !r.on.Load(), *err
	}
	return r.on.Load(), nil
}

// reads are the times at which reads began.
func (r *remoteSwitch) reads() []time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.begun)
}

func (r *remoteSwitch) fail(err error) { r.err.Store(&err) }

// TestPollTimes: reads begin 3/4 to 1 interval apart, not always the same, and a flip is seen within an interval.
func TestPollTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := new(remoteSwitch)
		r.on.Store(true)
		const interval = 200 * time.Millisecond
		s, err := registry.NewPolledSwitch(r.read, registry.WithSwitchInterval(interval))
		require.NoError(t, err)
		require.Len(t, r.reads(), 1, "the constructor reads")
		for i := range 200 {
			on := i%3 == 0
			r.on.Store(on)
			time.Sleep(interval)
			synctest.Wait()
			require.Equal(t, on, s.Enabled())
			require.LessOrEqual(t, s.Age(), interval)
			time.Sleep(time.Duration(i) * time.Millisecond / 7) // at other times between two reads
		}
		s.Close()
		s.Close()
		gaps, reads := make(map[time.Duration]bool), r.reads()
		for i, at := range reads[1:] {
			gap := at.Sub(reads[i])
			require.GreaterOrEqual(t, gap, interval*3/4)
			require.LessOrEqual(t, gap, interval)
			gaps[gap] = true
		}
		require.Greater(t, len(gaps), 100, "a fleet that starts at once does not stay in step")
		n := len(reads)
		time.Sleep(time.Minute)
		require.Len(t, r.reads(), n, "closed")
	})
}

// TestSlowReads: the time that a read takes is part of the interval, but for a quarter of it.
func TestSlowReads(t *testing.T) {
	const interval = 200 * time.Millisecond
	for takes, want := range map[time.Duration][2]time.Duration{
		40 * time.Millisecond:  {interval * 3 / 4, interval},
		170 * time.Millisecond: {170*time.Millisecond + interval/4, 170*time.Millisecond + interval/4},
		900 * time.Millisecond: {900*time.Millisecond + interval/4, 900*time.Millisecond + interval/4},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := new(remoteSwitch)
			s, err := registry.NewPolledSwitch(func(ctx context.Context) (bool, error) {
				on, err := r.read(ctx)
				time.Sleep(takes)
				return on, err
			}, registry.WithSwitchInterval(interval))
			require.NoError(t, err)
			time.Sleep(time.Minute)
			require.NoError(t, s.Err())
			s.Close()
			time.Sleep(takes) // what was under way ends
			reads := r.reads()
			for i, at := range reads[2:] { // the constructor's is apart
				require.GreaterOrEqual(t, at.Sub(reads[i+1]), want[0], takes)
				require.LessOrEqual(t, at.Sub(reads[i+1]), want[1], takes)
			}
		})
	}
}

// TestOutage: the last value stays, its age grows, and the hook is told once of the beginning and once of the end.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := new(remoteSwitch)
		var told []error
		s, err := registry.NewPolledSwitch(r.read, registry.WithSwitchHook(func(err error) { told = append(told, err) }))
		require.NoError(t, err)
		defer s.Close()
		require.False(t, s.Enabled())
		require.Empty(t, told)

		down := errors.New("down")
		r.fail(down)
		r.on.Store(true)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.False(t, s.Enabled(), "what a failed read returns is not a value")
		require.ErrorIs(t, s.Err(), down)
		require.GreaterOrEqual(t, s.Age(), 9*time.Second)
		require.Len(t, told, 1)
		require.ErrorIs(t, told[0], down)

		r.err.Store(nil)
		r.hang.Store(true)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.ErrorIs(t, s.Err(), context.DeadlineExceeded)
		require.Len(t, told, 1, "another error of the same outage")

		r.hang.Store(false)
		time.Sleep(2250 * time.Millisecond) // the last read's timeout, a pause, a read
		synctest.Wait()
		require.True(t, s.Enabled())
		require.NoError(t, s.Err())
		require.LessOrEqual(t, s.Age(), time.Second)
		require.Len(t, told, 2)
		require.NoError(t, told[1])
	})
}

// TestFirstRead: a gateway starts without its switch, in time, with the initial value.
func TestFirstRead(t *testing.T) {
	for _, initial := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			r := new(remoteSwitch)
			r.on.Store(!initial)
			r.hang.Store(true)
			began := time.Now()
			var told error
			s, err := registry.NewPolledSwitch(r.read, registry.WithSwitchInitial(initial), registry.WithSwitchTimeout(300*time.Millisecond),
				registry.WithSwitchHook(func(err error) { told = err }))
			require.NoError(t, err)
			require.Equal(t, 300*time.Millisecond, time.Since(began))
			require.ErrorIs(t, told, context.DeadlineExceeded)
			require.Equal(t, initial, s.Enabled())
			r.hang.Store(false)
			time.Sleep(1300 * time.Millisecond)
			synctest.Wait()
			require.Equal(t, !initial, s.Enabled())
			s.Close()
		})
	}
	s, err := registry.NewPolledSwitch(func(context.Context) (bool, error) { return false, errors.New("down") },
		registry.WithSwitchHook(func(error) {}))
	require.NoError(t, err)
	require.True(t, s.Enabled(), "by default limits apply")
	s.Close()
}

// TestDeafRead: a read that does not heed its context delays neither constructor nor Close, is never joined by a second one,
// and its late answer counts for nothing.
func TestDeafRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &remoteSwitch{stuck: make(chan struct{})}
		s, err := registry.NewPolledSwitch(r.read, registry.WithSwitchHook(func(error) {}))
		require.NoError(t, err)
		time.Sleep(time.Minute)
		require.Len(t, r.reads(), 1)
		require.ErrorIs(t, s.Err(), context.DeadlineExceeded)
		r.stuck <- struct{}{} // the first returns; on was false then
		synctest.Wait()
		require.True(t, s.Enabled())
		time.Sleep(2 * time.Second)
		require.Len(t, r.reads(), 2)
		began := time.Now()
		s.Close()
		require.Zero(t, time.Since(began))
		close(r.stuck)
	})
}

// TestSetPasses: a read that was under way when Set succeeded does not undo it.
func TestSetPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := new(remoteSwitch)
		s, err := registry.NewPolledSwitch(func(ctx context.Context) (bool, error) {
			on, err := r.read(ctx)
			time.Sleep(100 * time.Millisecond) // on its way back
			return on, err
		}, registry.WithSwitchWrite(func(_ context.Context, on bool) error {
			r.on.Store(on)
			return nil
		}))
		require.NoError(t, err)
		defer s.Close()
		for on := true; len(r.reads()) < 20; on = !on {
			for n := len(r.reads()); len(r.reads()) == n; {
				time.Sleep(time.Millisecond)
			}
			time.Sleep(50 * time.Millisecond)
			require.Equal(t, !on, s.Enabled())
			require.NoError(t, s.Set(context.Background(), on))
			require.Equal(t, on, s.Enabled(), "at once")
			require.Zero(t, s.Age())
			time.Sleep(60 * time.Millisecond)
			require.Equal(t, on, s.Enabled(), "after the old answer")
		}
	})
}

// TestSetDeadline: a write that does not heed its context keeps nobody.
func TestSetDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		s, err := registry.NewPolledSwitch(func(context.Context) (bool, error) { return true, nil },
			registry.WithSwitchWrite(func(context.Context, bool) error { <-stuck; return nil }))
		require.NoError(t, err)
		defer s.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		began := time.Now()
		require.ErrorIs(t, s.Set(ctx, false), context.DeadlineExceeded)
		require.Equal(t, 200*time.Millisecond, time.Since(began))
		require.True(t, s.Enabled(), "it is unknown")
		close(stuck)
	})
}

func TestSwitchConfiguration(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	read := func(context.Context) (bool, error) { return true, nil }
	for field, opt := range map[string]registry.SwitchOption{
		"switch interval 0s":   registry.WithSwitchInterval(0),
		"switch interval 2h":   registry.WithSwitchInterval(2 * time.Hour),
		"switch timeout -1ns":  registry.WithSwitchTimeout(-1),
		"switch timeout 1m0.0": registry.WithSwitchTimeout(time.Minute + time.Millisecond),
		"switch hook nil":      registry.WithSwitchHook(nil),
		"switch write nil":     registry.WithSwitchWrite(nil),
		"switch option nil":    nil,
	} {
		_, err := registry.NewPolledSwitch(read, opt)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
		require.ErrorContains(t, err, field)
	}
	_, err := registry.NewPolledSwitch(nil)
	require.ErrorContains(t, err, "switch read nil")
	_, err = registry.NewRedisSwitch(nil, "key")
	require.ErrorContains(t, err, "client is nil")
	_, err = registry.NewRedisSwitch((*redis.Client)(nil), "key")
	require.ErrorContains(t, err, "client is nil")
	client := redis.NewClient(new(redis.Options))
	defer func() { require.NoError(t, client.Close()) }()
	_, err = registry.NewRedisSwitch(client, "")
	require.ErrorContains(t, err, "key")

	s, err := registry.NewPolledSwitch(read)
	require.NoError(t, err)
	defer s.Close()
	require.ErrorIs(t, s.Set(context.Background(), true), errors.ErrUnsupported)
}

// hookTold is the next word of a hook.
func hookTold(t *testing.T, outages <-chan error) error {
	t.Helper()
	select {
	case err := <-outages:
		return err
	case <-time.After(switchSlack):
		require.FailNow(t, "the hook was not called")
		return nil
	}
}

// seenWithin fails the test if what does not come about in time. Servers are other processes: there is no fake clock for them.
func seenWithin(t *testing.T, limit time.Duration, what func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !what() {
		if time.Since(began) > limit {
			require.FailNow(t, "not in time")
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(began)
}

const (
	pollEvery   = 100 * time.Millisecond
	switchSlack = 5 * time.Second // of a busy machine; what is measured is logged
)

func TestRedisSwitch(t *testing.T) {
	server := redistest.Start(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ctx := context.Background()
	client := redis.NewClient(&redis.Options{Addr: server.Addr})
	defer func() { require.NoError(t, client.Close()) }()
	var fleet []*registry.PolledSwitch
	outages := make(chan error, 100)
	for range 5 {
		s, err := registry.NewRedisSwitch(client, "limits", registry.WithSwitchInterval(pollEvery), registry.WithSwitchTimeout(10*time.Second),
			registry.WithSwitchHook(func(err error) { outages <- err }))
		require.NoError(t, err)
		defer s.Close()
		require.True(t, s.Enabled(), "a missing key means on")
		fleet = append(fleet, s)
	}
	all := func(on bool) func() bool {
		return func() bool {
			for _, s := range fleet {
				if s.Enabled() != on {
					return false
				}
			}
			return true
		}
	}
	var slowest time.Duration
	for i := range 10 {
		on := i%2 == 1
		require.NoError(t, fleet[i%5].Set(ctx, on))
		require.Equal(t, on, fleet[i%5].Enabled())
		slowest = max(slowest, seenWithin(t, pollEvery+switchSlack, all(on)))
	}
	t.Log("slowest of 10 flips until 5 switches saw it:", slowest, "with an interval of", pollEvery)

	for value, on := range map[string]bool{"off": false, "ON": true, "0": false, "1": true, "False": false, "true": true} {
		require.NoError(t, client.Set(ctx, "limits", value, 0).Err())
		seenWithin(t, pollEvery+switchSlack, all(on))
	}
	require.NoError(t, client.Set(ctx, "limits", "0", 0).Err())
	seenWithin(t, pollEvery+switchSlack, all(false))
	require.NoError(t, client.Del(ctx, "limits").Err())
	seenWithin(t, pollEvery+switchSlack, all(true))
	require.NoError(t, client.Set(ctx, "limits", "0", 0).Err())
	seenWithin(t, pollEvery+switchSlack, all(false))
	require.Empty(t, outages)

	require.NoError(t, client.Set(ctx, "limits", "maybe\n", 0).Err())
	seenWithin(t, pollEvery+switchSlack, func() bool { return len(outages) == 5 })
	require.ErrorContains(t, hookTold(t, outages), `value "maybe\n"`)
	require.True(t, all(false)(), "garbage is no value")
	require.NoError(t, client.Del(ctx, "limits").Err())
	require.NoError(t, client.LPush(ctx, "limits", "1").Err())
	seenWithin(t, pollEvery+switchSlack, func() bool { return fleet[0].Err() != nil })
	require.NoError(t, fleet[0].Set(ctx, false), "SET replaces what is not a text")
}

// TestRedisAway: a server that hangs or has gone leaves the last value, is reported once, and is read again when it is back.
func TestRedisAway(t *testing.T) {
	server := redistest.Start(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ctx := context.Background()
	// A client as it comes, that heeds no deadlines of contexts, and one that has them.
	for _, heeds := range []bool{false, true} {
		client := redis.NewClient(&redis.Options{Addr: server.Addr, ContextTimeoutEnabled: heeds})
		outages := make(chan error, 100)
		s, err := registry.NewRedisSwitch(client, "limits", registry.WithSwitchInterval(pollEvery), registry.WithSwitchTimeout(50*time.Millisecond),
			registry.WithSwitchHook(func(err error) { outages <- err }))
		require.NoError(t, err)
		require.NoError(t, s.Set(ctx, false))

		require.NoError(t, server.Stop())
		seenWithin(t, switchSlack, func() bool { return s.Age() > 8*pollEvery })
		require.False(t, s.Enabled())
		require.ErrorIs(t, s.Err(), context.DeadlineExceeded)
		require.Error(t, hookTold(t, outages))
		require.Empty(t, outages, "once, though several reads have failed")
		late := make(chan *registry.PolledSwitch, 1)
		go func() {
			other, err := registry.NewRedisSwitch(client, "limits", registry.WithSwitchHook(func(error) {}))
			if err != nil {
				t.Error(err)
			}
			late <- other
		}()
		other := <-late // which the server, hanging, does not prevent
		require.True(t, other.Enabled(), "the initial value")
		began := time.Now()
		other.Close()
		require.Less(t, time.Since(began), switchSlack)

		require.NoError(t, server.Continue())
		seenWithin(t, 4*switchSlack, func() bool { return s.Err() == nil })
		require.NoError(t, hookTold(t, outages))
		require.NoError(t, s.Set(ctx, true))
		s.Close()
		require.NoError(t, client.Close())
	}
}
