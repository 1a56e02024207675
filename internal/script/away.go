package script

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/redis/go-redis/v9"
)

// Away tells whether an error of a client means that Redis cannot be asked now: it cannot be reached, does not answer in time,
// or says that it cannot serve now. A name that DNS does not know is one, too: it may come back. What somebody must repair is
// none: a wrong password (NOAUTH, WRONGPASS), missing rights (NOPERM), a key of another server (MOVED), a script that fails, a
// certificate that is not trusted, an address that is none, a socket that may not be opened, a client that was closed.
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

// Lasting tells whether an error is none that time mends, whatever else it wraps: the client or its caller has given up, or the
// way to Redis is wrong.
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

// Unreachable tells whether a client says, in words only, that it knows no server that is well.
func Unreachable(text string) bool {
	for _, words := range []string{"all sentinels", "all ring shards are down", "cluster has no nodes"} {
		if strings.Contains(text, words) {
			return true
		}
	}
	return false
}

// Explain asks what is behind an error that says little: that of a ring (see ShardsError), and a connection that was closed. A
// server that wants a password says so to a short command; a long one is a protocol error, upon which it closes the connection,
// at times before anybody has read that.
func Explain(ctx context.Context, client Client, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		redis.HasErrorPrefix(err, "Protocol error: unauthenticated") {
		if short := client.Process(ctx, redis.NewStatusCmd(ctx, "ping")); redis.HasErrorPrefix(short, "NOAUTH") {
			return short
		}
	}
	return ShardsError(ctx, client, err)
}

// ShardsError is what is wrong with the shards of a ring which only says that all are down: those that do not answer its
// heartbeats, and those that refuse them. Of any other client or error, and if a shard answers, it is the error itself.
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
		client := connect(&redis.Options{
			Addr: addr, Dialer: o.Dialer, OnConnect: o.OnConnect, Protocol: o.Protocol, DB: o.DB, TLSConfig: o.TLSConfig,
			Username: o.Username, Password: o.Password, CredentialsProvider: o.CredentialsProvider,
			CredentialsProviderContext: o.CredentialsProviderContext, DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout,
			WriteTimeout: o.WriteTimeout, MaxRetries: -1, DialerRetries: 1, DisableIdentity: true, ContextTimeoutEnabled: true,
		})
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
