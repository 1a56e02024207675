package httplimit

import (
	"net/http"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// WithPriority sets the function that returns a request's priority. It is put into the request's context (gate.WithPriority), and so applies
// to what the request causes, too: to calls by a Transport whose requests have that context. The priority of the limit counts if it is lower.
// By default the priority is that of the request's context, or else tokenbucket.Normal.
//
// The function must be safe for concurrent use. A middleware should trust a header field only if a proxy in front of it sets it, because a
// client would ask for the highest priority.
func WithPriority(priority func(*http.Request) tokenbucket.Priority) Option {
	return forBoth(func(s *settings) {
		if priority == nil {
			s.fail("priority function", "nil", "a function")
		}
		s.priority = priority
	})
}

// prioritized returns the request with its priority in its context.
func (s *settings) prioritized(r *http.Request) *http.Request {
	if s.priority == nil {
		return r
	}
	return r.WithContext(gate.WithPriority(r.Context(), s.priority(r)))
}
