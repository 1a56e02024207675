package grpclimit

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// attempts takes a permit for each attempt of a call after the first. gRPC retries below all interceptors: by a retry policy, and once, or as
// long as the call was not sent, transparently. The only code of an interceptor that gRPC calls in each attempt, and that can prevent it, are the
// credentials of the call, so attempts is such credentials, without metadata of its own.
//
// Credentials are asked for before the header is sent. So an attempt whose connection closes at that moment counts, although the server cannot
// have received it.
type attempts struct {
	call  *call
	req   any                           // of a call that is not a stream
	other credentials.PerRPCCredentials // those of the caller; nil without

	mu        sync.Mutex
	began     bool            // the first attempt has begun
	admission *gate.Admission // of the last attempt
	ended     bool            // the call has ended
	err       error           // why no further attempt may begin
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
	return md, a.begin()
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (a *attempts) RequireTransportSecurity() bool {
	return a.other != nil && a.other.RequireTransportSecurity()
}

// begin begins an attempt. The one before has ended, so it leaves first: with a concurrency of one it would be in the way.
func (a *attempts) begin() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.began {
		a.began = true
		return nil
	}
	if a.err == nil && !a.ended {
		a.admission.Leave()
		a.admission, a.err = a.call.enter(a.req)
	}
	return a.err
}

// last returns the admission of the last attempt.
func (a *attempts) last() *gate.Admission {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.admission
}

// leave ends the admission of the last attempt, and with it the call.
func (a *attempts) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	a.admission.Leave()
}
