package telemetry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetrytest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// Every kind is recognized, from the library's errors and from the errors of real connections to Redis.
func TestKinds(t *testing.T) {
	answering := func(handle func(net.Conn)) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		var open, accepting sync.WaitGroup
		var conns []net.Conn
		accepting.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				conns = append(conns, conn)
				open.Go(func() { handle(conn); _ = conn.Close() })
			}
		})
		t.Cleanup(func() {
			_ = l.Close()
			accepting.Wait()
			for _, conn := range conns { // some clients leave connections open
				_ = conn.Close()
			}
			open.Wait()
		})
		return l.Addr().String()
	}
	pingFor := func(patience time.Duration, addr string) error {
		client := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, ReadTimeout: patience,
			DialerRetries: 1, ContextTimeoutEnabled: true, Protocol: 2, DisableIdentity: true})
		defer func() { _ = client.Close() }()
		return client.Ping(context.Background()).Err()
	}
	ping := func(addr string) error { return pingFor(time.Minute, addr) } // a machine that stalls is no timeout
	mute := answering(func(c net.Conn) {
		buf := make([]byte, 1024)
		for _, err := c.Read(buf); err == nil; _, err = c.Read(buf) {
		}
	})
	says := func(line string) string {
		return answering(func(c net.Conn) {
			buf := make([]byte, 1024)
			for _, err := c.Read(buf); err == nil; _, err = c.Read(buf) {
				_, _ = c.Write([]byte(line))
			}
		})
	}
	late := &tokenbucket.WaitError{Bucket: "fares", Permits: 1, Wait: time.Second, Reason: context.DeadlineExceeded}
	never := &tokenbucket.WaitError{Bucket: "fares", Permits: 9, Wait: time.Second, Reason: tokenbucket.ErrNeverGranted}
	for _, c := range []struct {
		name        string
		err         error
		call, batch string
	}{
		{"store timeout", telemetrytest.Wrap(tokenbucket.ErrStoreTimeout), "timeout", "timeout"},
		{"store timeout by a deadline of its own", fmt.Errorf("%w: %w", tokenbucket.ErrStoreTimeout, context.DeadlineExceeded), "timeout", "timeout"},
		{"unavailable since a timeout", fmt.Errorf("%w: %w", tokenbucket.ErrStoreUnavailable, tokenbucket.ErrStoreTimeout), "unavailable", "unavailable"},
		{"lock", telemetrytest.Wrap(tokenbucket.ErrLockNotObtained), "lock", "lock"},
		{"corrupt", telemetrytest.Wrap(tokenbucket.ErrCorruptState), "corrupt", "corrupt"},
		{"permits", telemetrytest.Wrap(tokenbucket.ErrInvalidPermits), "invalid", "other"},
		{"configuration", telemetrytest.Wrap(tokenbucket.ErrInvalidConfig), "invalid", "other"},
		{"due after the deadline", late, "deadline", "timeout"},
		{"never due", never, "invalid", "other"},
		{"deadline", context.DeadlineExceeded, "deadline", "timeout"},
		{"canceled", telemetrytest.Wrap(context.Canceled), "canceled", "other"},
		{"too many", telemetrytest.Wrap(tokenbucket.ErrTooManyWaiters), "crowded", "other"},
		{"TLS alert", &net.OpError{Op: "remote error", Err: errors.New("tls: certificate required")}, "other", "other"},
		{"no sentinel", errors.New("redis: all sentinels specified in configuration are unreachable"), "unavailable", "unavailable"},
		{"no shard", errors.New("redis: all ring shards are down"), "unavailable", "unavailable"},
		{"other", telemetrytest.ErrOther, "other", "other"},
		{"nobody listens", ping("127.0.0.1:1"), "unavailable", "unavailable"},
		{"nobody answers", pingFor(50*time.Millisecond, mute), "timeout", "timeout"},
		{"hung up", ping(answering(func(net.Conn) {})), "unavailable", "unavailable"},
		{"loading", ping(says("-LOADING Redis is loading the dataset in memory\r\n")), "unavailable", "unavailable"},
		{"cluster down", ping(says("-CLUSTERDOWN The cluster is down\r\n")), "unavailable", "unavailable"},
		{"full", ping(says("-OOM command not allowed when used memory > 'maxmemory'.\r\n")), "unavailable", "unavailable"},
		{"a replica", fmt.Errorf("reply: %w", ping(says("-READONLY You can't write against a read only replica.\r\n"))), "unavailable", "unavailable"},
		{"pool", telemetrytest.Wrap(redis.ErrPoolTimeout), "timeout", "timeout"},
		{"no permission", ping(says("-NOPERM this user has no permissions\r\n")), "other", "other"},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Error(t, c.err)
			require.Equal(t, c.call, telemetry.KindOf(c.err).String(), "%v", c.err)
			require.Equal(t, c.batch, telemetry.StoreKindOf(c.err).String(), "%v", c.err)
			require.LessOrEqual(t, telemetry.StoreKindOf(c.err), telemetry.KindOther)
		})
	}
}

// Errors of sliding windows and semaphores have the same kinds as those of buckets.
func TestKindsOfPackages(t *testing.T) {
	for want, errs := range map[telemetry.Kind][]error{
		telemetry.KindTimeout:     {fmt.Errorf("%w: %w: %w", slidingwindow.ErrStoreUnavailable, slidingwindow.ErrStoreTimeout, context.DeadlineExceeded), semaphore.ErrStoreTimeout},
		telemetry.KindUnavailable: {fmt.Errorf("%w: %w", slidingwindow.ErrStoreUnavailable, io.EOF)},
		telemetry.KindCorrupt:     {slidingwindow.ErrCorruptState, slidingwindow.ErrOverflow, semaphore.ErrCorruptState},
		telemetry.KindInvalid:     {slidingwindow.ErrInvalidConfig, slidingwindow.ErrInvalidPermits, semaphore.ErrInvalidConfig, semaphore.ErrInvalidPermits, semaphore.ErrTooMany},
		telemetry.KindCrowded:     {slidingwindow.ErrTooManyWaiters, semaphore.ErrTooManyWaiters},
		telemetry.KindOther:       {slidingwindow.ErrStoreUnusable, slidingwindow.ErrClock, semaphore.ErrClosed},
	} {
		for _, err := range errs {
			require.Equal(t, want, telemetry.KindOf(err), "%v", err)
		}
	}
	for want, err := range map[telemetry.End]error{
		telemetry.EndReleased: nil, telemetry.EndExpired: semaphore.ErrExpired, telemetry.EndLost: semaphore.ErrLost, telemetry.EndClosed: semaphore.ErrClosed,
		telemetry.EndOther: io.EOF,
	} {
		require.Equal(t, want, telemetry.EndOf(err))
	}
}
