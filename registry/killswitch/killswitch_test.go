package killswitch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
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
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

var (
	_ registry.Switch = (*killswitch.Local)(nil)
	_ registry.Switch = (*killswitch.Switch)(nil)
)

func TestMain(m *testing.M) { redistest.Main(m) }

func TestLocal(t *testing.T) {
	require.True(t, killswitch.NewLocal(true).Enabled())
	s := killswitch.NewLocal(false)
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
		s, err := killswitch.New(r.read, killswitch.WithInterval(interval))
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

// TestSlowReads: the duration of a read is part of the interval, except for its last quarter.
func TestSlowReads(t *testing.T) {
	const interval = 200 * time.Millisecond
	for takes, want := range map[time.Duration][2]time.Duration{
		40 * time.Millisecond:  {interval * 3 / 4, interval},
		170 * time.Millisecond: {170*time.Millisecond + interval/4, 170*time.Millisecond + interval/4},
		900 * time.Millisecond: {900*time.Millisecond + interval/4, 900*time.Millisecond + interval/4},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := new(remoteSwitch)
			s, err := killswitch.New(func(ctx context.Context) (bool, error) {
				on, err := r.read(ctx)
				time.Sleep(takes)
				return on, err
			}, killswitch.WithInterval(interval))
			require.NoError(t, err)
			time.Sleep(time.Minute)
			require.NoError(t, s.Err())
			s.Close()
			time.Sleep(takes) // reads in flight end
			reads := r.reads()
			for i, at := range reads[2:] { // the constructor's is apart
				require.GreaterOrEqual(t, at.Sub(reads[i+1]), want[0], takes)
				require.LessOrEqual(t, at.Sub(reads[i+1]), want[1], takes)
			}
		})
	}
}

// TestOutage: the last known state stays in force, its age grows, and the hook is called once at the beginning and once at the end.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := new(remoteSwitch)
		var told []error
		s, err := killswitch.New(r.read, killswitch.WithHook(func(err error) { told = append(told, err) }))
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
			s, err := killswitch.New(r.read, killswitch.WithInitial(initial), killswitch.WithTimeout(300*time.Millisecond),
				killswitch.WithHook(func(err error) { told = err }))
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
	s, err := killswitch.New(func(context.Context) (bool, error) { return false, errors.New("down") },
		killswitch.WithHook(func(error) {}))
	require.NoError(t, err)
	require.True(t, s.Enabled(), "by default limits apply")
	s.Close()
}

// TestDeafRead: a read that does not heed its context delays neither constructor nor Close, is never joined by a second one,
// and its late answer counts for nothing.
func TestDeafRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &remoteSwitch{stuck: make(chan struct{})}
		s, err := killswitch.New(r.read, killswitch.WithHook(func(error) {}))
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
		s, err := killswitch.New(func(ctx context.Context) (bool, error) {
			on, err := r.read(ctx)
			time.Sleep(100 * time.Millisecond) // on its way back
			return on, err
		}, killswitch.WithWrite(func(_ context.Context, on bool) error {
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

// TestSetDeadline: Set returns when its context ends, also if the write ignores it.
func TestSetDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		s, err := killswitch.New(func(context.Context) (bool, error) { return true, nil },
			killswitch.WithWrite(func(context.Context, bool) error { <-stuck; return nil }))
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

func TestConfiguration(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	read := func(context.Context) (bool, error) { return true, nil }
	for field, opt := range map[string]killswitch.Option{
		"interval 0s":   killswitch.WithInterval(0),
		"interval 2h":   killswitch.WithInterval(2 * time.Hour),
		"timeout -1ns":  killswitch.WithTimeout(-1),
		"timeout 1m0.0": killswitch.WithTimeout(time.Minute + time.Millisecond),
		"hook nil":      killswitch.WithHook(nil),
		"logger nil":    killswitch.WithLogger(nil),
		"write nil":     killswitch.WithWrite(nil),
		"option nil":    nil,
	} {
		_, err := killswitch.New(read, opt)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
		require.ErrorContains(t, err, field)
	}
	_, err := killswitch.New(nil)
	require.ErrorContains(t, err, "read nil")
	_, err = killswitch.NewRedis(nil, "key")
	require.ErrorContains(t, err, "killswitch: tokenbucket: invalid configuration: redis client nil: want a client")
	_, err = killswitch.NewRedis((*redis.Client)(nil), "key")
	require.ErrorContains(t, err, "killswitch: tokenbucket: invalid configuration: redis client nil: want a client")
	client := redis.NewClient(new(redis.Options))
	defer func() { require.NoError(t, client.Close()) }()
	_, err = killswitch.NewRedis(client, "")
	require.ErrorContains(t, err, "key")

	s, err := killswitch.New(read)
	require.NoError(t, err)
	defer s.Close()
	require.ErrorIs(t, s.Set(context.Background(), true), errors.ErrUnsupported)
}

// keyRedis is a Redis of one key within the process, for bubbles of synctest.
type keyRedis struct {
	mu    sync.Mutex
	value string
	there bool
	wrong error         // not nil: what GET answers
	down  error         // not nil: nothing arrives
	hung  chan struct{} // not nil: commands are answered when it is closed
	heeds bool          // contexts, while it hangs
}

func (r *keyRedis) change(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *keyRedis) set(value string) {
	r.change(func() { r.value, r.there, r.wrong = value, true, nil })
}

func (r *keyRedis) del() { r.change(func() { r.there, r.wrong = false, nil }) }

func (r *keyRedis) Process(ctx context.Context, cmd redis.Cmder) error {
	r.mu.Lock()
	hung, heeds := r.hung, r.heeds
	r.mu.Unlock()
	if hung != nil {
		done := ctx.Done()
		if !heeds {
			done = nil
		}
		select {
		case <-hung:
		case <-done:
			cmd.SetErr(ctx.Err())
			return ctx.Err()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch cmd := cmd.(type) {
	case *redis.StringCmd: // GET
		switch {
		case r.down != nil:
			cmd.SetErr(r.down)
		case r.wrong != nil:
			cmd.SetErr(r.wrong)
		case !r.there:
			cmd.SetErr(redis.Nil)
		default:
			cmd.SetVal(r.value)
		}
	case *redis.StatusCmd: // SET
		if r.down != nil {
			cmd.SetErr(r.down)
			break
		}
		r.value, r.there, r.wrong = cmd.Args()[2].(string), true, nil
	}
	return cmd.Err()
}

const pollEvery = 100 * time.Millisecond

// The server is in a bubble of synctest: each process reads a written value within an interval.
func TestRedisSwitch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		client := new(keyRedis)
		var fleet []*killswitch.Switch
		var outages []error
		var mu sync.Mutex
		for range 5 {
			s, err := killswitch.NewRedis(client, "limits", killswitch.WithInterval(pollEvery), killswitch.WithHook(func(err error) {
				mu.Lock()
				defer mu.Unlock()
				outages = append(outages, err)
			}))
			require.NoError(t, err)
			defer s.Close()
			require.True(t, s.Enabled(), "a missing key means on")
			fleet = append(fleet, s)
		}
		all := func(on bool) {
			t.Helper()
			time.Sleep(pollEvery)
			synctest.Wait()
			for _, s := range fleet {
				require.Equal(t, on, s.Enabled())
			}
		}
		for i := range 10 {
			on := i%2 == 1
			require.NoError(t, fleet[i%5].Set(ctx, on))
			require.Equal(t, on, fleet[i%5].Enabled())
			all(on)
		}
		for value, on := range map[string]bool{"off": false, "ON": true, "0": false, "1": true, "False": false, "true": true} {
			client.set(value)
			all(on)
		}
		client.set("0")
		all(false)
		client.del()
		all(true)
		client.set("0")
		all(false)
		require.Empty(t, outages)

		client.set("maybe\n")
		all(false) // garbage is no value
		require.Len(t, outages, 5)
		require.ErrorContains(t, outages[0], `value "maybe\n"`)
		client.change(func() { client.wrong = errors.New("WRONGTYPE Operation against a key holding the wrong kind of value") })
		all(false)
		require.ErrorContains(t, fleet[0].Err(), "WRONGTYPE")
		require.NoError(t, fleet[0].Set(ctx, false), "SET replaces what is not a text")
		all(false)
		require.NoError(t, fleet[0].Err())
	})
}

// TestRedisKey: a switch on a real server.
func TestRedisKey(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	ctx, key := context.Background(), fmt.Sprintf("%s:%d", t.Name(), time.Now().UnixNano())
	for value, on := range map[string]bool{"": true, "off": false, "ON": true, "0": false, "1": true} {
		if value != "" {
			require.NoError(t, client.Set(ctx, key, value, time.Minute).Err())
		}
		s, err := killswitch.NewRedis(client, key)
		require.NoError(t, err)
		require.NoError(t, s.Err())
		require.Equal(t, on, s.Enabled(), value)
		require.NoError(t, s.Set(ctx, !on))
		require.Equal(t, map[bool]string{true: "1", false: "0"}[!on], client.Get(ctx, key).Val())
		require.EqualValues(t, -1, client.TTL(ctx, key).Val(), "it does not expire")
		s.Close()
		require.NoError(t, client.Del(ctx, key).Err())
	}
	require.NoError(t, client.LPush(ctx, key, "1").Err())
	hook := make(chan error, 1)
	s, err := killswitch.NewRedis(client, key, killswitch.WithHook(func(err error) { hook <- err }))
	require.NoError(t, err)
	defer s.Close()
	require.ErrorContains(t, <-hook, "WRONGTYPE")
	require.NoError(t, s.Set(ctx, false), "SET replaces what is not a text")
	require.NoError(t, client.Del(ctx, key).Err())
}

// TestRedisAway: a server that hangs or has gone leaves the last value, is reported once, and is read again when it is back.
func TestRedisAway(t *testing.T) {
	ctx := context.Background()
	for name, begin := range map[string]func(r *keyRedis){
		"hangs":                   func(r *keyRedis) { r.hung = make(chan struct{}) },
		"hangs, the client heeds": func(r *keyRedis) { r.hung, r.heeds = make(chan struct{}), true },
		"gone":                    func(r *keyRedis) { r.down = errors.New("connection refused") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := new(keyRedis)
				var outages []error
				s, err := killswitch.NewRedis(client, "limits", killswitch.WithInterval(pollEvery),
					killswitch.WithTimeout(50*time.Millisecond), killswitch.WithHook(func(err error) { outages = append(outages, err) }))
				require.NoError(t, err)
				require.NoError(t, s.Set(ctx, false))

				client.change(func() { begin(client) })
				time.Sleep(8 * pollEvery)
				synctest.Wait()
				require.GreaterOrEqual(t, s.Age(), 6*pollEvery)
				require.False(t, s.Enabled())
				if name == "gone" {
					require.ErrorContains(t, s.Err(), "connection refused")
				} else {
					require.ErrorIs(t, s.Err(), context.DeadlineExceeded)
				}
				require.Len(t, outages, 1, "once, though several reads have failed")
				require.Error(t, outages[0])
				began := time.Now()
				other, err := killswitch.NewRedis(client, "limits", killswitch.WithTimeout(time.Second), killswitch.WithHook(func(error) {}))
				require.NoError(t, err)
				require.LessOrEqual(t, time.Since(began), time.Second)
				require.True(t, other.Enabled(), "the initial value")
				began = time.Now()
				other.Close()
				require.Zero(t, time.Since(began))

				client.change(func() {
					if client.hung != nil {
						close(client.hung)
					}
					client.hung, client.down = nil, nil
				})
				time.Sleep(2 * pollEvery)
				synctest.Wait()
				require.NoError(t, s.Err())
				require.Len(t, outages, 2)
				require.NoError(t, outages[1])
				require.NoError(t, s.Set(ctx, true))
				s.Close()
			})
		})
	}
}

// TestLog: without a hook each outage is logged once, by the logger of WithLogger.
func TestLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		r := new(remoteSwitch)
		s, err := killswitch.New(r.read, killswitch.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		require.NoError(t, err)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.Empty(t, text.String())
		r.fail(errors.New("no route to host"))
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, strings.Count(text.String(), "\n"), text.String())
		require.Contains(t, text.String(), "level=WARN")
		require.Contains(t, text.String(), "no route to host")
		r.err.Store(nil)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Equal(t, 2, strings.Count(text.String(), "\n"), text.String())
		require.Contains(t, text.String(), "can be read again")
		s.Close()
	})
}

// A hook may close its switch.
func TestHookCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s atomic.Pointer[killswitch.Switch]
		var away atomic.Bool
		closed := make(chan struct{})
		read := func(context.Context) (bool, error) {
			if away.Load() {
				return false, errors.New("away")
			}
			return true, nil
		}
		sw, err := killswitch.New(read, killswitch.WithHook(func(error) {
			s.Load().Close()
			close(closed)
		}))
		require.NoError(t, err)
		s.Store(sw)
		away.Store(true)
		select {
		case <-closed:
		case <-time.After(time.Minute):
			panic("Close of a hook hangs")
		}
	})
}
