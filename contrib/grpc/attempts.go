package grpclimit

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// attempts takes a permit for each attempt of a call after the first. gRPC retries below all interceptors: by a retry policy, and once, or as
// long as the call was not sent, transparently. The only code of an interceptor that gRPC calls in each attempt, and that can prevent it, are
// credentials. So attempts is credentials of the call, without metadata of its own. With [CountAttempts] the credentials of the connection call
// it instead, since those of a call are lost if an interceptor further in sets others.
//
// Credentials are asked for before the header is sent. So an attempt whose connection closes at that moment counts, although the server cannot
// have received it.
type attempts struct {
	call  *call
	req   any                           // of a call that is not a stream
	other credentials.PerRPCCredentials // those of the caller; nil without
	outer *attempts                     // of a Limiter further out; nil without

	mu        sync.Mutex
	dialed    bool            // the credentials of the connection begin the attempts
	began     bool            // the first attempt has begun
	admission *gate.Admission // of the last attempt
	ended     bool            // the call has ended
	err       error           // why no further attempt may begin
}

var errUncounted = errors.New("an interceptor further in has replaced the credentials of the call: dial with CountAttempts")

type attemptsKey struct{}

func attemptsOf(ctx context.Context) *attempts {
	a, _ := ctx.Value(attemptsKey{}).(*attempts)
	return a
}

// attempts returns the attempts of the call, and the context in which it is sent.
func (c *call) attempts(req any, a *gate.Admission) (*attempts, context.Context) {
	all := &attempts{call: c, req: req, admission: a, outer: attemptsOf(c.ctx)}
	return all, context.WithValue(admitted(c.ctx, a), attemptsKey{}, all)
}

// with returns the options of the call with its attempts as credentials.
func (a *attempts) with(opts []grpc.CallOption) []grpc.CallOption {
	for _, opt := range opts {
		if creds, ok := opt.(grpc.PerRPCCredsCallOption); ok {
			a.other = creds.Creds // the last one applies
		}
	}
	return append(opts[:len(opts):len(opts)], grpc.PerRPCCredentials(a))
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (a *attempts) GetRequestMetadata(ctx context.Context, uri ...string) (md map[string]string, err error) {
	if a.other != nil {
		if md, err = a.other.GetRequestMetadata(ctx, uri...); err != nil {
			return nil, err
		}
	}
	return md, a.begin(ctx, false)
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (a *attempts) RequireTransportSecurity() bool {
	return a.other != nil && a.other.RequireTransportSecurity()
}

// begin begins an attempt, whose context is ctx. The one before has ended, so it leaves first: with a concurrency of one it would be in the way.
func (a *attempts) begin(ctx context.Context, dialed bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.dialed = a.dialed || dialed; a.dialed != dialed {
		return nil // the credentials of the connection have begun it
	}
	if !a.began {
		a.began = true
		return nil
	}
	if a.err == nil && !a.ended {
		a.admission.Leave()
		attempt := *a.call
		attempt.ctx = ctx
		a.admission, a.err = attempt.enter(a.req)
	}
	if a.err != nil {
		return &final{a.err}
	}
	return nil
}

// last returns the admission of the last attempt.
func (a *attempts) last() *gate.Admission {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.admission
}

// result returns the error of the call, whose last attempt failed with err: that of the attempt that could not begin, if there is one.
func (a *attempts) result(err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil && !a.began && a.call.cc != nil {
		a.call.uncounted.Do(func() { a.call.warn("grpclimit: retries of calls take no permits", errUncounted) })
	}
	if err != nil && a.err != nil {
		return a.err
	}
	return err
}

// leave ends the admission of the last attempt, and with it the call.
func (a *attempts) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	a.admission.Leave()
}

// final is the error of an attempt that could not begin. Its status is that of a call that was cancelled, because a retry policy would retry
// ResourceExhausted or Unavailable. The call ends with the error within.
type final struct{ error }

// Unwrap returns the error within.
func (e *final) Unwrap() error { return e.error }

// GRPCStatus implements the interface of package status.
func (e *final) GRPCStatus() *status.Status { return status.New(codes.Canceled, e.Error()) }

// CountAttempts is for clients whose calls get credentials (grpc.PerRPCCredentials) from an interceptor further in than the Limiter's: these
// replace the credentials with which the Limiter counts the attempts of a call. With this option attempts are counted by credentials of the
// connection, which send nothing. It serves all Limiters of the client.
func CountAttempts() grpc.DialOption { return grpc.WithPerRPCCredentials(counting{}) }

type counting struct{}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (counting) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	return nil, attemptsOf(ctx).beginAll(ctx)
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (counting) RequireTransportSecurity() bool { return false }

// beginAll begins an attempt of a call at all its Limiters, the outermost first.
func (a *attempts) beginAll(ctx context.Context) error {
	if a == nil {
		return nil
	}
	if err := a.outer.beginAll(ctx); err != nil {
		return err
	}
	return a.begin(ctx, true)
}
