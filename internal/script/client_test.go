package script

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// A pipeline implements the interface of a client, but every call would fail.
func TestUsable(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer func() { _ = client.Close() }()
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer func() { _ = cluster.Close() }()
	auto, err := client.AutoPipeline()
	require.NoError(t, err)
	wrapped := struct{ *redis.Client }{client}
	for _, c := range []Client{client, client.Conn(), cluster, auto, wrapped} {
		require.NoError(t, Usable(c), "%T", c)
	}
	for want, c := range map[string]Client{"nil": nil, "pipeline": client.Pipeline()} {
		require.EqualError(t, Usable(c), want)
	}
	for _, c := range []Client{
		(*redis.Client)(nil), cluster.Pipeline(), client.TxPipeline(),
		struct{ *redis.Client }{}, struct{ *redis.ClusterClient }{}, struct{ *redis.Ring }{},
	} {
		require.Error(t, Usable(c), "%T", c)
	}
}

// Calls of a bounded client return at their deadline even if the server hangs, whatever the options of the given client, which stay unchanged.
func TestBounded(t *testing.T) {
	hangs, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = hangs.Close() }()
	go func() {
		for {
			conn, err := hangs.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, conn) }()
		}
	}()
	for _, read := range []time.Duration{0, time.Minute, -1} {
		for _, heeds := range []bool{false, true} {
			client := redis.NewClient(&redis.Options{Addr: hangs.Addr().String(), ReadTimeout: read, ContextTimeoutEnabled: heeds, MaxRetries: -1})
			defer func() { _ = client.Close() }()
			before := *client.Options()
			bounded := Bounded(client)
			require.Equal(t, heeds, bounded == client)
			require.Equal(t, before.ReadTimeout, client.Options().ReadTimeout)
			require.Equal(t, heeds, client.Options().ContextTimeoutEnabled)
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			began := time.Now()
			require.Error(t, bounded.Process(ctx, redis.NewStatusCmd(ctx, "ping")))
			require.Less(t, time.Since(began), 20*time.Second)
		}
	}
	for _, heeds := range []bool{false, true} { // connections of some clients refuse deadlines
		client := redis.NewClient(&redis.Options{Addr: hangs.Addr().String(), ReadTimeout: -2, ContextTimeoutEnabled: heeds})
		defer func() { _ = client.Close() }()
		require.Nil(t, Bounded(client))
	}
	require.Nil(t, Bounded(redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})))
}

// A connection that was closed has many errors, which differ between systems; one whose deadline has passed is not closed.
func TestClosed(t *testing.T) {
	for _, err := range []error{
		io.EOF, fmt.Errorf("read: %w", io.EOF), &net.OpError{Op: "read", Err: syscall.ECONNRESET}, &net.OpError{Op: "write", Err: syscall.EPIPE},
		&net.OpError{Op: "read", Err: syscall.Errno(10054)}, // WSAECONNRESET of Windows
	} {
		require.True(t, closed(err), "%v", err)
	}
	for _, err := range []error{
		nil, io.ErrUnexpectedEOF, &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED},
	} {
		require.False(t, closed(err), "%v", err)
	}
}
