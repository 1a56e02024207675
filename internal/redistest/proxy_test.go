package redistest

import (
	"bufio"
	"context"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// The timeouts of clients. The short one is for tests that wait for it.
const (
	hasty   = 400 * time.Millisecond
	patient = 20 * time.Second
)

// through returns a client without retries, and the proxy between it and a server of its own.
func through(t *testing.T, patience time.Duration) (server *Server, p *Proxy, client *redis.Client) {
	server = Start(t)
	p = StartProxy(t, server.Addr)
	client = redis.NewClient(&redis.Options{
		Addr: p.Addr, MaxRetries: -1, DialerRetries: 1, DialTimeout: patience, ReadTimeout: patience,
	})
	t.Cleanup(func() { _ = client.Close() })
	return server, p, client
}

// A connection that is cut within a pipeline has delivered the replies before the cut.
func TestProxyCutsWithinAPipeline(t *testing.T) {
	t.Parallel()
	server, p, _ := through(t, patient)
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
	require.GreaterOrEqual(t, executed, 3, "the other commands may have been in flight")
}

// The delays of both directions add up, and a narrow link takes the time that its bytes need.
func TestProxySlow(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	_, p, client := through(t, patient)
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

// Connections stay on their server until they are cut. New ones go to the current server, or fail if there is none.
func TestProxyLeads(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	first, p, client := through(t, patient)
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

// Many clients at once, while the faults change and the proxy is closed.
func TestProxyLive(t *testing.T) {
	t.Parallel()
	_, p, client := through(t, hasty)
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

// Bytes that are no request or reply are an error, and every kind of reply is one frame.
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
