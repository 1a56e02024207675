package redistest

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Patience of clients: only calls that will not be answered are hasty, and for them there is time enough to be sent.
const (
	hasty   = time.Second
	patient = 20 * time.Second
)

// through is a client that sends nothing twice, of a proxy to a server of its own.
func through(t *testing.T) (server *redistest.Server, p *redistest.Proxy, client *redis.Client) {
	server = redistest.Start(t)
	p = redistest.StartProxy(t, server.Addr)
	client = redis.NewClient(&redis.Options{
		Addr: p.Addr, MaxRetries: -1, DialerRetries: 1, DialTimeout: patient, ReadTimeout: patient, ContextTimeoutEnabled: true,
	})
	t.Cleanup(func() { _ = client.Close() })
	return server, p, client
}

// Each fault hits the request that it is for and no other, and the server has executed as often as it should.
func TestProxyFaults(t *testing.T) {
	for name, c := range map[string]struct {
		fault    redistest.Fault
		executed string
		timeout  bool
		passes   bool
	}{
		"lost reply":  {redistest.LoseReply, "1", true, false},
		"cut after":   {redistest.CutAfter, "1", false, false},
		"cut before":  {redistest.CutBefore, "", false, false},
		"sent twice":  {redistest.Twice, "2", false, true},
		"passed only": {redistest.None, "1", false, true},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			patience := patient
			if c.timeout {
				patience = hasty
			}
			server, p, client := through(t)
			p.Match("incr", func(n int64, args []string) redistest.Fault {
				if n != 3 {
					return redistest.None
				}
				require.Equal(t, []string{"incr", "c"}, args)
				return c.fault
			})
			for _, key := range []string{"a", "b"} {
				require.NoError(t, client.Incr(ctx, key).Err())
			}
			limited, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			n, err := client.Incr(limited, "c").Result()
			var network net.Error
			if c.passes {
				require.NoError(t, err)
				require.EqualValues(t, 1, n)
			} else {
				require.Error(t, err)
				require.Equal(t, c.timeout, errors.As(err, &network) && network.Timeout(), err)
			}
			n, err = client.Incr(ctx, "d").Result()
			require.NoError(t, err)
			require.EqualValues(t, 1, n, "the connection is in step, or another")
			direct := server.Client(t)
			require.Eventually(t, func() bool { return direct.Get(ctx, "c").Val() == c.executed }, 10*time.Second, time.Millisecond)
			require.Equal(t, 4, p.Seen())
			require.Equal(t, c.fault != redistest.None, p.Bit() == 1)
			require.Equal(t, 1, p.Outstanding())
			require.Equal(t, 0, p.Outstanding())
		})
	}
}

// A proxy that stalls or cuts passes nothing on, and delivers the data afterwards, even if the sender has gone. While it cuts, new
// connections get no reply; while it is down, they are refused. Then all is as before, at the same address.
func TestProxyNetworks(t *testing.T) {
	for name, c := range map[string]struct {
		network redistest.Network
		dials   error // what who connects gets
		arrives string
	}{
		"stalled": {redistest.Stalled, nil, "3"},
		"cut":     {redistest.Cut, context.DeadlineExceeded, "3"},
		"down":    {redistest.Down, syscall.ECONNREFUSED, "2"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			server, p, client := through(t)
			for round := range 2 {
				direct := server.Client(t)
				require.NoError(t, direct.Set(ctx, "x", 1, 0).Err())
				require.Eventually(t, func() bool { return client.Ping(ctx).Err() == nil }, 10*time.Second, time.Millisecond)
				require.Positive(t, p.Accepted())
				p.Set(c.network)
				limited, cancel := context.WithTimeout(ctx, hasty)
				require.Error(t, client.Incr(limited, "x").Err())
				cancel()
				patience := patient
				if c.network == redistest.Cut {
					patience = 200 * time.Millisecond
				}
				conn, err := net.DialTimeout("tcp", p.Addr, patience)
				switch {
				case c.dials == nil:
					require.NoError(t, err)
					_ = conn.Close()
				case errors.Is(c.dials, context.DeadlineExceeded):
					var timeout net.Error
					require.ErrorAs(t, err, &timeout)
					require.True(t, timeout.Timeout(), err)
				default:
					require.ErrorIs(t, err, c.dials)
				}
				require.Equal(t, "1", direct.Get(ctx, "x").Val())
				p.Set(redistest.Up)
				require.Eventually(t, func() bool { return client.Ping(ctx).Err() == nil }, 10*time.Second, time.Millisecond)
				require.NoError(t, client.Incr(ctx, "x").Err(), round)
				require.Eventually(t, func() bool { return direct.Get(ctx, "x").Val() == c.arrives }, 10*time.Second, time.Millisecond)
			}
		})
	}
}
