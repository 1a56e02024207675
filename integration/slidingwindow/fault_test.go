package slidingwindow

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

var ctx = context.Background()

// patient is the timeout of callers that must not mistake a slow machine for a fault.
var patient = slidingwindow.WithStoreTimeout(20 * time.Second)

// counted is how many permits of x are left by what the server has counted.
func counted(t *testing.T, server *redistest.Server, limit int, window, resolution time.Duration) int {
	t.Helper()
	l, err := slidingwindow.New("x", limit, window, resolution, slidingwindow.WithRedis(server.Client(t)), patient)
	require.NoError(t, err)
	left, err := l.Remaining(ctx)
	require.NoError(t, err)
	return left
}

// An error that needs a repair is returned under every policy, opens no gate and gives no local share, until the repair.
func TestUnusable(t *testing.T) {
	server := redistest.Start(t)
	admin := server.Client(t)
	for user, rights := range map[string]string{"poor": "+ping", "timeless": "+@all -time", "ring": "+@all"} {
		args := []any{"acl", "setuser", user, "on", ">right", "~*"}
		for _, r := range strings.Fields(rights) {
			args = append(args, r)
		}
		require.NoError(t, admin.Do(ctx, args...).Err())
	}
	as := func(user, password string) func(o *redis.Options) {
		return func(o *redis.Options) { o.Username, o.Password = user, password }
	}
	locked := redistest.Start(t)
	require.NoError(t, locked.Client(t).ConfigSet(ctx, "requirepass", "right").Err())
	closed := redis.NewClient(&redis.Options{Addr: server.Addr})
	require.NoError(t, closed.Close())
	foreign := httptest.NewTLSServer(nil)
	defer foreign.Close()
	foreign.Config.ErrorLog = log.New(io.Discard, "", 0)
	ring := redis.NewRing(&redis.RingOptions{
		Addrs: map[string]string{"one": server.Addr}, Username: "ring", Password: "wrong", HeartbeatFrequency: 20 * time.Millisecond,
	})
	defer func() { _ = ring.Close() }()
	require.Eventually(t, func() bool {
		err := ring.Ping(ctx).Err()
		return err != nil && script.Unreachable(err.Error())
	}, 20*time.Second, 10*time.Millisecond)
	for what, c := range map[string]struct {
		client slidingwindow.RedisClient
		says   string
	}{
		"wrong password": {server.Client(t, as("poor", "wrong")), "WRONGPASS"},
		"no password":    {locked.Client(t), "NOAUTH"},
		"no rights":      {server.Client(t, as("poor", "right")), "NOPERM"},
		"a script fails": {server.Client(t, as("timeless", "right")), "script"},
		"closed":         {closed, redis.ErrClosed.Error()},
		"no port":        {redis.NewClient(&redis.Options{Addr: "localhost", DialerRetries: 1}), "missing port"},
		"certificate": {
			redis.NewClient(&redis.Options{Addr: foreign.Listener.Addr().String(), TLSConfig: &tls.Config{}, DialerRetries: 1}), "certificate",
		},
		"ring": {ring, "WRONGPASS"},
	} {
		t.Run(what, func(t *testing.T) {
			if client, ok := c.client.(*redis.Client); ok {
				defer func() { _ = client.Close() }()
			}
			for _, policy := range []slidingwindow.Option{slidingwindow.WithFailurePolicy(slidingwindow.FailClosed), slidingwindow.WithFailurePolicy(slidingwindow.FailOpen), slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(5))} {
				l, err := slidingwindow.New(t.Name(), 5, time.Hour, time.Minute, slidingwindow.WithRedis(c.client), patient, policy)
				require.NoError(t, err)
				for range 10 {
					ok, err := l.Allow(ctx)
					require.False(t, ok)
					require.ErrorIs(t, err, slidingwindow.ErrStoreUnusable)
					require.NotErrorIs(t, err, slidingwindow.ErrStoreUnavailable)
					require.ErrorContains(t, err, c.says)
					require.ErrorContains(t, err, "limiter")
				}
				_, err = l.Remaining(ctx)
				require.ErrorIs(t, err, slidingwindow.ErrStoreUnusable)
			}
		})
	}
	l, err := slidingwindow.New("x", 5, time.Hour, time.Minute, slidingwindow.WithRedis(server.Client(t, as("poor", "right"))), patient, slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(5)))
	require.NoError(t, err)
	_, err = l.Allow(ctx)
	require.ErrorIs(t, err, slidingwindow.ErrStoreUnusable)
	require.NoError(t, admin.Do(ctx, "acl", "setuser", "poor", "+@all").Err())
	ok, err := l.Allow(ctx)
	require.NoError(t, err)
	require.True(t, ok, "as soon as it is repaired")
}

// The observer receives every failed trip, and the reply that ends the failures.
func TestFailedTrips(t *testing.T) {
	server := redistest.Start(t)
	told := make(chan error, 100)
	l, err := slidingwindow.New("x", 5, time.Hour, time.Minute, slidingwindow.WithRedis(server.Client(t)), patient, withFailures(func(err error) { told <- err }))
	require.NoError(t, err)
	const key = "slidingwindow:{x}:1h0m0s"
	hears := func(want error) {
		t.Helper()
		select {
		case err := <-told:
			require.ErrorIs(t, err, want)
		case <-time.After(20 * time.Second):
			require.Fail(t, "told nothing")
		}
	}
	allow := func() error {
		_, err := l.Allow(ctx)
		return err
	}
	client := server.Client(t)
	spoil := func() { require.NoError(t, client.Set(ctx, key, "spoiled", 0).Err()) }
	mend := func() { require.NoError(t, client.Del(ctx, key).Err()) }

	require.NoError(t, allow())
	spoil()
	require.ErrorIs(t, allow(), slidingwindow.ErrCorruptState)
	hears(slidingwindow.ErrCorruptState)
	mend()
	require.NoError(t, allow())
	hears(nil)

	require.NoError(t, server.Kill())
	require.ErrorIs(t, allow(), slidingwindow.ErrStoreUnavailable)
	hears(slidingwindow.ErrStoreUnavailable)
	require.NoError(t, server.Restart())
	spoil()
	require.Eventually(t, func() bool { return errors.Is(allow(), slidingwindow.ErrCorruptState) }, 20*time.Second, 10*time.Millisecond)
	for heard := error(nil); !errors.Is(heard, slidingwindow.ErrCorruptState); {
		select {
		case heard = <-told:
			require.Error(t, heard)
		case <-time.After(20 * time.Second):
			require.Fail(t, "told nothing")
		}
	}
	mend()
	require.NoError(t, allow())
	for heard := errors.New("nothing"); heard != nil; {
		select {
		case heard = <-told: // the errors of other calls, and at last that it is back
		case <-time.After(20 * time.Second):
			require.Fail(t, "told nothing")
		}
	}
	require.NoError(t, allow())
	time.Sleep(100 * time.Millisecond)
	require.Empty(t, told)
}

// A script is executed once even if its reply is lost, and the client sends again without a reply within its own timeout.
func TestLostReply(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		client, limiter time.Duration
		err             error
	}{
		"the limiter gives up": {20 * time.Second, 2 * time.Second, slidingwindow.ErrStoreTimeout},
		"the client gives up":  {2 * time.Second, 20 * time.Second, os.ErrDeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			l, err := slidingwindow.New("x", 5, time.Minute, time.Second, slidingwindow.WithRedis(server.Client(t)), patient)
			require.NoError(t, err)
			_, err = l.Allow(ctx)
			require.NoError(t, err)
			proxy := redistest.StartProxy(t, server.Addr)
			proxy.Match("evalsha", redistest.Only(1, redistest.LoseReply))
			lossy := redis.NewClient(&redis.Options{Addr: proxy.Addr, ReadTimeout: c.client})
			defer func() { _ = lossy.Close() }() // and with it the read that still waits
			m, err := slidingwindow.New("x", 5, time.Minute, time.Second, slidingwindow.WithRedis(lossy), slidingwindow.WithStoreTimeout(c.limiter))
			require.NoError(t, err)
			_, err = m.Allow(ctx)
			require.ErrorIs(t, err, slidingwindow.ErrStoreUnavailable)
			require.ErrorIs(t, err, c.err)
			require.Eventually(t, func() bool {
				return counted(t, server, 5, time.Minute, time.Second) == 3
			}, 20*time.Second, 10*time.Millisecond)
			require.Equal(t, 1, proxy.Seen())
		})
	}
}

// Redis hangs. Each caller returns by its own context or by the timeout, then the policy decides at once. When Redis goes on, it counts
// again, including the permits admitted meanwhile. The client ignores contexts and waits for longer than all of them.
func TestAway(t *testing.T) {
	const timeout = 3 * time.Second
	t.Parallel()
	for _, c := range []struct {
		name     string
		opt      slidingwindow.Option
		pass     int // of ten
		err      error
		retained int // of the limit of 10, when it is back
	}{
		{"refuse", slidingwindow.WithFailurePolicy(slidingwindow.FailClosed), 0, slidingwindow.ErrStoreUnavailable, 9},
		{"pass", slidingwindow.WithFailurePolicy(slidingwindow.FailOpen), 10, nil, 0},
		{"share", slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(4)), 3, nil, 6}, // one was admitted before
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			late := faultlab.MeasureLateness(t)
			server := redistest.Start(t)
			client := server.Client(t, func(o *redis.Options) { o.ReadTimeout = 20 * time.Second })
			var mu sync.Mutex
			var told []error
			l, err := slidingwindow.New("x", 10, time.Hour, time.Minute, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(timeout), c.opt, withFailures(func(err error) {
				mu.Lock()
				defer mu.Unlock()
				told = append(told, err)
			}))
			require.NoError(t, err)
			ok, err := l.Allow(ctx)
			require.NoError(t, err)
			require.True(t, ok)

			require.NoError(t, server.Stop())
			impatient, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			began := time.Now()
			_, err = l.Allow(impatient)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Less(t, time.Since(began), timeout/6+5*late.Most())
			// Its permit may have been taken, so that a share has one less, or has not been.
			passed := 0
			began = time.Now()
			for range 10 {
				ok, err := l.Allow(ctx)
				if c.err == nil {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, c.err)
				}
				if ok {
					passed++
				}
			}
			require.Less(t, time.Since(began), 3*timeout+5*late.Most(), "one timeout, not ten")
			require.InDelta(t, c.pass, passed, 1)
			_, err = l.Remaining(ctx)
			require.Equal(t, c.name == "share", err == nil)
			require.Eventually(t, func() bool { // it has looked in vain, and keeps what it owes
				_, _ = l.Allow(ctx)
				mu.Lock()
				defer mu.Unlock()
				return len(told) >= 2
			}, time.Minute, 10*time.Millisecond)

			require.NoError(t, server.Continue())
			require.Eventually(t, func() bool {
				_, _ = l.Remaining(ctx)
				mu.Lock()
				defer mu.Unlock()
				return told[len(told)-1] == nil
			}, time.Minute, 20*time.Millisecond)
			// Admitted permits are reported once more after a late reply: in doubt they count twice, which admits fewer.
			require.Eventually(t, func() bool { return counted(t, server, 10, time.Hour, time.Minute) <= c.retained }, time.Minute, 20*time.Millisecond)
			require.GreaterOrEqual(t, counted(t, server, 10, time.Hour, time.Minute), c.retained-passed-1)
			mu.Lock()
			require.ErrorIs(t, told[0], slidingwindow.ErrStoreUnavailable)
			mu.Unlock()
		})
	}
}

// A batch that Redis executes after its callers have returned takes nothing.
func TestTooLate(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := server.Client(t, func(o *redis.Options) { o.ReadTimeout = 20 * time.Second })
	l, err := slidingwindow.New("x", 10, time.Hour, time.Minute, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(3*time.Second))
	require.NoError(t, err)
	began := time.Now()
	_, err = l.Allow(ctx)
	require.NoError(t, err)
	took := time.Since(began)
	require.NoError(t, server.Stop())
	_, err = l.AllowN(ctx, 5)
	require.ErrorIs(t, err, slidingwindow.ErrStoreTimeout)
	time.Sleep(50*time.Millisecond + took) // the server's clock may lag behind its estimate by up to the duration of a round trip
	require.NoError(t, server.Continue())
	require.Equal(t, 9, counted(t, server, 10, time.Hour, time.Minute))
	require.Eventually(t, func() bool { // the late one has been executed by now, and is answered
		ok, err := l.Allow(ctx)
		return ok && err == nil
	}, 30*time.Second, 10*time.Millisecond)
	require.Equal(t, 8, counted(t, server, 10, time.Hour, time.Minute))
}

// withFailures returns an option that calls f with the error of each failed round trip, and with nil for the first one that succeeds after a
// failure.
func withFailures(f func(error)) slidingwindow.Option {
	var mu sync.Mutex
	failing := false
	return slidingwindow.WithObserver(slidingwindow.Observer{Trip: func(trip slidingwindow.Trip) {
		mu.Lock()
		defer mu.Unlock()
		if failing || trip.Err != nil {
			f(trip.Err)
		}
		failing = trip.Err != nil
	}})
}
