package httplimit

import (
	"errors"
	"net/http"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// WithCost sets the function that returns how many permits a request costs. By default each costs one. A request that costs 0 passes, and the
// gate is not asked. The function must be safe for concurrent use, and must neither change the request nor read its body. If it panics, the
// request does not pass.
//
// A cost below 0, and a cost that the limits of the key can never grant, are a *gate.CostError: a Transport returns it, and [WithOnError] is
// not asked. A middleware responds to the former with 500 and logs it, and to the latter with 413 (Content Too Large) and without
// Retry-After, because no later attempt could pass.
//
// If the cost is known only afterwards, the function returns an estimate, at least 1. The code that runs the request settles it with
// gate.FromContext: a handler by its request's context, a caller of a Transport by that of the response's Request, once it has read the body.
// See also [WithActualCost].
//
// The constructor fails with tokenbucket.ErrInvalidConfig unless the gate is a gate.CostGate.
func WithCost(cost func(*http.Request) int) Option {
	return forBoth(func(s *settings) {
		if cost == nil {
			s.fail("cost function", "nil", "a function")
		}
		if _, ok := s.gate.(gate.CostGate); !ok {
			s.fail("cost function", "of a gate whose calls all cost one permit", "a gate.CostGate")
		}
		s.cost = cost
	})
}

// WithActualCost sets the function that returns how many permits a request has used, by the header of its response: its cost is settled in
// the background with that number (gate.Admission.SettleLater). A number below 0 means that it is not known, and the cost of [WithCost]
// stays. So it does for a request without a response. The function must be safe for concurrent use, and must neither change the response nor
// read its body.
func WithActualCost(used func(*http.Response) int) TransportOption {
	return forTransport(func(s *settings) {
		if used == nil {
			s.fail("actual cost function", "nil", "a function")
		}
		s.used = used
	})
}

// ask asks the gate about a request.
func (s *settings) ask(r *http.Request, key string) (*gate.Admission, error) {
	if s.cost == nil {
		return gate.Ask(r.Context(), s.gate, key)
	}
	return gate.AskN(r.Context(), s.gate, key, s.cost(r))
}

// admitted returns the request whose context has the admission.
func admitted(r *http.Request, a *gate.Admission) *http.Request {
	return r.WithContext(gate.NewContext(r.Context(), a))
}

// isCost reports whether an error is about the cost of a request, and not about the gate.
func isCost(err error) bool { return errors.As(err, new(*gate.CostError)) }

// tooCostly responds to a request with a *gate.CostError.
func (m *middleware) tooCostly(w http.ResponseWriter, r *http.Request, err error) {
	var wrong *gate.CostError
	if errors.As(err, &wrong) && wrong.Cost < 0 {
		m.log().ErrorContext(r.Context(), "httplimit: the cost function returned a number below 0, the request does not pass", "error", err)
		http.Error(w, "the cost of the request is not known", http.StatusInternalServerError)
		return
	}
	http.Error(w, "the request costs more than its limit can ever grant", http.StatusRequestEntityTooLarge)
}
