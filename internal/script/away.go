package script

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Away reports whether an error of a client means that Redis is temporarily unavailable: it cannot be reached, does not reply in time, or
// replies that it cannot serve now. A name unknown to DNS counts too, because it may return.
//
// Errors that an operator must repair do not count: a wrong password (NOAUTH, WRONGPASS), missing rights (NOPERM), a key of another server
// (MOVED), a failing script, an untrusted certificate, an invalid address, a socket without permission, a closed client.
func Away(err error) bool {
	var reply redis.Error
	switch {
	case err == nil, Lasting(err):
		return false
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, io.EOF),
		errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return true
	case errors.As(err, &reply):
		return CannotServe(reply.Error())
	}
	var network net.Error
	return errors.As(err, &network) || CannotServe(err.Error()) || Unreachable(err.Error())
}

// Lasting reports whether an error does not go away by itself, whatever else it wraps: the client is closed, the caller has given up, or the
// connection is misconfigured.
func Lasting(err error) bool {
	var remote *net.OpError
	var address *net.AddrError
	var kind net.UnknownNetworkError
	var certificate *tls.CertificateVerificationError
	var unknown x509.UnknownAuthorityError
	return errors.Is(err, redis.ErrClosed) || errors.Is(err, context.Canceled) ||
		errors.As(err, &certificate) || errors.As(err, &unknown) || errors.As(err, &address) || errors.As(err, &kind) ||
		errors.Is(err, fs.ErrPermission) || // of a socket
		errors.As(err, &remote) && remote.Op == "remote error" // a TLS alert: the server does not accept the client
}

// Unreachable reports whether the text of an error means that the client has no healthy server. go-redis has no value for these errors.
func Unreachable(text string) bool {
	for _, words := range []string{"all sentinels", "all ring shards are down", "cluster has no nodes"} {
		if strings.Contains(text, words) {
			return true
		}
	}
	return false
}

// Unauthenticated returns the error of a long command of a client without a password as that of a short one, NOAUTH. It returns any other error
// unchanged.
func Unauthenticated(err error) error {
	if redis.HasErrorPrefix(err, "Protocol error: unauthenticated") {
		return fmt.Errorf("NOAUTH Authentication required: %w", err)
	}
	return err
}

// Explain returns the cause of an unspecific error if it can be found: the right that is missing (see Lacking), the error of a ring (see
// ShardsError), or that of a closed connection. A server that requires a password replies NOAUTH to a short command only. It treats a long one as a protocol error and
// closes the connection, sometimes before the client has read the reply.
func Explain(ctx context.Context, client Client, err error) error {
	if closed(err) || redis.HasErrorPrefix(err, "Protocol error: unauthenticated") {
		if short := client.Process(ctx, redis.NewStatusCmd(ctx, "ping")); redis.HasErrorPrefix(short, "NOAUTH") {
			return short
		}
	}
	return ShardsError(ctx, client, Lacking(Unauthenticated(err)))
}

// closed reports whether an error means that the server has closed the connection. Systems have different numbers for that, so any failed read
// or write counts that has not reached its deadline.
func closed(err error) bool {
	var op *net.OpError
	return errors.Is(err, io.EOF) || errors.As(err, &op) && (op.Op == "read" || op.Op == "write") && !op.Timeout()
}

// Apart returns a client of the same server with a separate connection. The caller must close it.
func Apart(o *redis.Options) *redis.Client {
	return redis.NewClient(apart(&redis.Options{
		Network: o.Network, Addr: o.Addr, Dialer: o.Dialer, OnConnect: o.OnConnect, Protocol: o.Protocol, DB: o.DB, TLSConfig: o.TLSConfig,
		Username: o.Username, Password: o.Password, CredentialsProvider: o.CredentialsProvider,
		CredentialsProviderContext: o.CredentialsProviderContext, StreamingCredentialsProvider: o.StreamingCredentialsProvider,
		DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout,
	}))
}

// apart changes options to those of a client for one command, which returns when its context ends. The exception is a client that must not
// set deadlines: a timeout of −2, which the options of a client show as −1.
func apart(o *redis.Options) *redis.Options {
	if min(o.ReadTimeout, o.WriteTimeout) == -1 {
		o.ReadTimeout, o.WriteTimeout = -2, -2
	}
	o.PoolSize, o.MaxRetries, o.DialerRetries, o.DisableIdentity, o.ContextTimeoutEnabled = 1, -1, 1, true, true
	return o
}

// ShardsError returns the error of a shard in place of a ring's error that all shards are down. An error that an operator must repair takes
// precedence. For any other client or error, and if a shard replies, it returns err.
func ShardsError(ctx context.Context, client Client, err error) error {
	ring, ok := client.(*redis.Ring)
	if !ok || err == nil || !Unreachable(err.Error()) {
		return err
	}
	o := ring.Options()
	connect := o.NewClient
	if connect == nil {
		connect = redis.NewClient
	}
	found := err
	for _, addr := range o.Addrs {
		client := connect(apart(&redis.Options{
			Addr: addr, Dialer: o.Dialer, OnConnect: o.OnConnect, Protocol: o.Protocol, DB: o.DB, TLSConfig: o.TLSConfig,
			Username: o.Username, Password: o.Password, CredentialsProvider: o.CredentialsProvider,
			CredentialsProviderContext: o.CredentialsProviderContext, DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout,
			WriteTimeout: o.WriteTimeout,
		}))
		shard := client.Ping(ctx).Err()
		_ = client.Close()
		switch {
		case shard == nil:
			return err
		case !Away(shard):
			return shard
		}
		found = shard
	}
	return found
}
