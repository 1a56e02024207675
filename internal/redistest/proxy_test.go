package redistest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// through is a client that sends nothing twice and loses patience soon, of a proxy to a server of its own.
func through(t *testing.T) (server *Server, p *Proxy, client *redis.Client) {
	server = Start(t)
	p = StartProxy(t, server.Addr)
	client = redis.NewClient(&redis.Options{
		Addr: p.Addr, MaxRetries: -1, DialerRetries: 1, DialTimeout: 300 * time.Millisecond, ReadTimeout: 300 * time.Millisecond,
	})
	t.Cleanup(func() { _ = client.Close() })
	return server, p, client
}

// Each fault hits the request that it is for and no other, and the server has executed as often as it should.
func TestProxyFaults(t *testing.T) {
	for name, c := range map[string]struct {
		fault    Fault
		executed string
		timeout  bool
		passes   bool
	}{
		"lost reply":  {LoseReply, "1", true, false},
		"cut after":   {CutAfter, "1", false, false},
		"cut before":  {CutBefore, "", false, false},
		"sent twice":  {Twice, "2", false, true},
		"passed only": {None, "1", false, true},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			server, p, client := through(t)
			p.Match("incr", func(n int64, args []string) Fault {
				if n != 3 {
					return None
				}
				require.Equal(t, []string{"incr", "c"}, args)
				return c.fault
			})
			for _, key := range []string{"a", "b"} {
				require.NoError(t, client.Incr(ctx, key).Err())
			}
			n, err := client.Incr(ctx, "c").Result()
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
			require.Equal(t, c.executed, server.Client(t).Get(ctx, "c").Val())
			require.Equal(t, 4, p.Seen())
			require.Equal(t, c.fault != None, p.Bit() == 1)
			require.Equal(t, 1, p.Outstanding())
			require.Equal(t, 0, p.Outstanding())
		})
	}
}

// A connection that is cut in a pipeline has answered what was before.
func TestProxyCutsWithinAPipeline(t *testing.T) {
	server, p, _ := through(t)
	p.Match("incr", Only(3, CutAfter))
	conn, err := net.Dial("tcp", p.Addr)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = conn.Write([]byte(strings.Repeat("*2\r\n$4\r\nincr\r\n$1\r\nx\r\n", 5)))
	require.NoError(t, err)
	replies, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Equal(t, ":1\r\n:2\r\n", string(replies))
	executed, err := server.Client(t).Get(context.Background(), "x").Int()
	require.NoError(t, err)
	require.GreaterOrEqual(t, executed, 3, "the others may have been under way")
}

// Delays add up both ways, and a narrow link takes as long as its bytes need.
func TestProxySlow(t *testing.T) {
	ctx := context.Background()
	_, p, client := through(t)
	require.NoError(t, client.Ping(ctx).Err())
	p.Delay(30*time.Millisecond, 10*time.Millisecond, rand.New(rand.NewPCG(1, 1)))
	for range 3 {
		began := time.Now()
		require.NoError(t, client.Ping(ctx).Err())
		require.GreaterOrEqual(t, time.Since(began), 40*time.Millisecond)
	}
	p.Delay(0, 0, nil)
	p.Throttle(100_000)
	began := time.Now()
	require.NoError(t, client.Set(ctx, "x", strings.Repeat("x", 10_000), 0).Err())
	require.GreaterOrEqual(t, time.Since(began), 100*time.Millisecond)
}

// Stalled and cut, nothing comes through, and what was sent arrives afterwards, though its sender has gone; cut, no new
// connection is answered; down, it is refused. Then all is as before, at the same address.
func TestProxyNetworks(t *testing.T) {
	for name, c := range map[string]struct {
		network Network
		dials   error // what who connects gets
		arrives string
	}{
		"stalled": {Stalled, nil, "3"},
		"cut":     {Cut, context.DeadlineExceeded, "3"},
		"down":    {Down, syscall.ECONNREFUSED, "2"},
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
				require.Error(t, client.Incr(ctx, "x").Err())
				d := net.Dialer{Timeout: 200 * time.Millisecond}
				conn, err := d.Dial("tcp", p.Addr)
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
				p.Set(Up)
				require.Eventually(t, func() bool { return client.Ping(ctx).Err() == nil }, 10*time.Second, time.Millisecond)
				require.NoError(t, client.Incr(ctx, "x").Err(), round)
				require.Eventually(t, func() bool { return direct.Get(ctx, "x").Val() == c.arrives }, 10*time.Second, time.Millisecond)
			}
		})
	}
}

// Connections stay where they are until they are cut; new ones go where they are led to, or nowhere.
func TestProxyLeads(t *testing.T) {
	ctx := context.Background()
	first, p, client := through(t)
	second := Start(t)
	require.NoError(t, client.Incr(ctx, "x").Err())
	p.Lead("")
	require.EqualValues(t, 2, client.Incr(ctx, "x").Val())
	p.Reset()
	require.Error(t, client.Incr(ctx, "x").Err())
	p.Lead(second.Addr)
	require.Eventually(t, func() bool { return client.Ping(ctx).Err() == nil }, 10*time.Second, time.Millisecond)
	require.EqualValues(t, 1, client.Incr(ctx, "x").Val())
	require.Equal(t, "2", first.Client(t).Get(ctx, "x").Val())
	require.Equal(t, "1", second.Client(t).Get(ctx, "x").Val())
}

// Many clients at once, while the network changes and the proxy ends under them.
func TestProxyLive(t *testing.T) {
	_, p, client := through(t)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for range 20 {
		running.Go(func() {
			for ctx.Err() == nil {
				_ = client.Ping(ctx).Err()
			}
		})
	}
	for range 30 {
		p.Set(Network(rand.IntN(4)))
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
		if rand.IntN(4) == 0 {
			p.Reset()
		}
	}
	p.Set(Stalled)
	p.close()
	cancel()
	running.Wait()
	require.Empty(t, p.links)
}

// What is no request or reply is an error, and every kind of reply is one frame.
func TestFrames(t *testing.T) {
	for _, text := range []string{
		"+OK\r\n", "-ERR no\r\n", ":1\r\n", "$-1\r\n", "$3\r\na\r\n\r\n", "*-1\r\n", "*0\r\n", "*2\r\n:1\r\n$1\r\nx\r\n", "_\r\n", "#t\r\n",
		",1.5\r\n", "(123\r\n", "%1\r\n+a\r\n*1\r\n:1\r\n", "~1\r\n:1\r\n", ">2\r\n+a\r\n+b\r\n", "=5\r\ntxt:x\r\n", "!3\r\nERR\r\n",
	} {
		in := bufio.NewReader(strings.NewReader(text + "+next\r\n"))
		data, err := readReply(in, nil)
		require.NoError(t, err, "%q", text)
		require.Equal(t, text, string(data))
	}
	for _, text := range []string{"", "\n", "PING\r\n", "*x\r\n", "*1\r\n+x\r\n", "*1\r\n$-1\r\n", "*1\r\n$3\r\nx"} {
		_, _, err := readRequest(bufio.NewReader(strings.NewReader(text)))
		require.Error(t, err, "%q", text)
	}
}
