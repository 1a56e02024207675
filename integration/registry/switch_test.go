// Package registry tests a switch on a real redis-server, which hangs and goes on.
package registry

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

func TestMain(m *testing.M) { redistest.Main(m) }

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

const (
	pollEvery   = 100 * time.Millisecond
	switchSlack = 20 * time.Second // of a busy machine; the measured times are logged
	readTimeout = time.Second      // of reads from a server that hangs at times: longer than one takes on a busy machine
)

func TestRedisSwitch(t *testing.T) {
	server := redistest.Start(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), goleak.IgnoreAnyFunction("github.com/go-tokenbucket/tokenbucket/postgres.(*listener).run")) // of the semaphores of an earlier test, which listen on for a while
	ctx := context.Background()
	client := redis.NewClient(&redis.Options{Addr: server.Addr})
	defer func() { require.NoError(t, client.Close()) }()
	var fleet []*killswitch.Switch
	outages := make(chan error, 100)
	for range 5 {
		s, err := killswitch.NewRedis(client, "limits", killswitch.WithInterval(pollEvery), killswitch.WithTimeout(10*time.Second),
			killswitch.WithHook(func(err error) { outages <- err }))
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
		slowest = max(slowest, faultlab.Soon(t, pollEvery+switchSlack, all(on)))
	}
	t.Log("slowest of 10 flips until 5 switches saw it:", slowest, "with an interval of", pollEvery)

	for value, on := range map[string]bool{"off": false, "ON": true, "0": false, "1": true, "False": false, "true": true} {
		require.NoError(t, client.Set(ctx, "limits", value, 0).Err())
		faultlab.Soon(t, pollEvery+switchSlack, all(on))
	}
	require.NoError(t, client.Set(ctx, "limits", "0", 0).Err())
	faultlab.Soon(t, pollEvery+switchSlack, all(false))
	require.NoError(t, client.Del(ctx, "limits").Err())
	faultlab.Soon(t, pollEvery+switchSlack, all(true))
	require.NoError(t, client.Set(ctx, "limits", "0", 0).Err())
	faultlab.Soon(t, pollEvery+switchSlack, all(false))
	require.Empty(t, outages)

	require.NoError(t, client.Set(ctx, "limits", "maybe\n", 0).Err())
	faultlab.Soon(t, pollEvery+switchSlack, func() bool { return len(outages) == 5 })
	require.ErrorContains(t, hookTold(t, outages), `value "maybe\n"`)
	require.True(t, all(false)(), "garbage is no value")
	require.NoError(t, client.Del(ctx, "limits").Err())
	require.NoError(t, client.LPush(ctx, "limits", "1").Err())
	faultlab.Soon(t, pollEvery+switchSlack, func() bool { return fleet[0].Err() != nil })
	require.NoError(t, fleet[0].Set(ctx, false), "SET replaces what is not a text")
}

// TestRedisAway: a server that hangs or has gone leaves the last value, is reported once, and is read again when it is back.
func TestRedisAway(t *testing.T) {
	server := redistest.Start(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), goleak.IgnoreAnyFunction("github.com/go-tokenbucket/tokenbucket/postgres.(*listener).run")) // of the semaphores of an earlier test, which listen on for a while
	ctx := context.Background()
	// A client as it comes, that heeds no deadlines of contexts, and one that has them.
	for _, heeds := range []bool{false, true} {
		client := redis.NewClient(&redis.Options{Addr: server.Addr, ContextTimeoutEnabled: heeds})
		outages := make(chan error, 100)
		s, err := killswitch.NewRedis(client, "limits", killswitch.WithInterval(pollEvery), killswitch.WithTimeout(readTimeout),
			killswitch.WithHook(func(err error) { outages <- err }))
		require.NoError(t, err)
		require.NoError(t, s.Set(ctx, false))

		require.NoError(t, server.Stop())
		faultlab.Soon(t, 4*switchSlack, func() bool { return s.Age() > 3*(pollEvery+readTimeout) }) // two reads have failed, or three
		require.False(t, s.Enabled())
		require.ErrorIs(t, s.Err(), context.DeadlineExceeded)
		require.Error(t, hookTold(t, outages))
		require.Empty(t, outages, "once, though several reads have failed")
		late := make(chan *killswitch.Switch, 1)
		go func() {
			other, err := killswitch.NewRedis(client, "limits", killswitch.WithHook(func(error) {}))
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
		faultlab.Soon(t, 4*switchSlack, func() bool { return s.Err() == nil })
		require.NoError(t, hookTold(t, outages))
		require.NoError(t, s.Set(ctx, true))
		s.Close()
		require.NoError(t, client.Close())
	}
}
