package httplimit

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// NewMiddleware returns a function that wraps a handler in a limited one; nil stands for http.DefaultServeMux. It fails with
// tokenbucket.ErrInvalidConfig if the gate is nil or an option has a bad value.
//
// A request waits until its permit is due. Then next is called with the server's own ResponseWriter, so that streams,
// upgrades and http.ResponseController work as without the middleware. If the request's context ends during the wait, the
// permit is refunded and next is not called; the status is 503 with Retry-After: 1, if the client still reads it, and its text is the cause of the
// context's end, if the server has given one (context.Cause).
//
// The admission ends when next returns.
//
// A request without a key ([NoKey]) gets 400. A refused request gets 429 with Retry-After in whole seconds
// ([WithRefusalHandler]). If the gate fails, the request gets 503 with Retry-After: 1 ([WithOnError]).
//
// These header fields are added to those that are there, unless limiting is off. Several limits around one handler therefore
// appear side by side, each with its name ([WithPolicy]):
//
//	RateLimit-Policy: "default";q=5;w=1
//	RateLimit: "default";r=4;t=1
//
// The policy is q requests in w seconds. w is the time in which the bucket fills, in whole seconds, and long enough for one
// permit. q is the number of permits of the rate in that time, rounded down. So q/w never exceeds the rate, and is lower if
// the rate is not a whole number: 2.5/s is q=2;w=1, and one permit in ten seconds q=1;w=10. r permits could be used at once
// now, and the bucket is full in t seconds, rounded up, at least 1. For a refusal r is 0 and t is Retry-After. The fields are
// hints: other clients may share the bucket.
func NewMiddleware(g gate.Gate, opts ...MiddlewareOption) (func(http.Handler) http.Handler, error) {
	m := &middleware{settings{key: ByPath, policy: `"default"`, refuse: http.HandlerFunc(tooMany)}}
	m.begin(g)
	for _, opt := range opts {
		if opt == nil {
			m.fail("option", "nil", "no nil options")
			break
		}
		opt.middleware(&m.settings)
	}
	if m.err != nil {
		return nil, m.err
	}
	if m.onError == nil {
		m.onError = func(r *http.Request, err error) error {
			m.log().ErrorContext(r.Context(), "httplimit: the gate failed", "error", err)
			return err
		}
	}
	return func(next http.Handler) http.Handler {
		if next == nil {
			next = http.DefaultServeMux
		}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}, nil
}

// WithPolicy sets the name of the policy in the header fields, in printable ASCII. The default is "default".
func WithPolicy(name string) MiddlewareOption {
	return forMiddleware(func(s *settings) {
		if name == "" || strings.ContainsFunc(name, func(c rune) bool { return c < ' ' || c > '~' }) {
			s.fail("policy", fmt.Sprintf("%.40q", name), "printable ASCII")
		}
		s.policy = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(name) + `"`
	})
}

// WithRefusalHandler sets the handler of refused requests. The header fields are already set, Retry-After included; the
// handler writes the status. The default is 429 and a line of text.
func WithRefusalHandler(h http.Handler) MiddlewareOption {
	return forMiddleware(func(s *settings) {
		if isNil(h) {
			s.fail("refusal handler", "nil", "a handler")
		}
		s.refuse = h
	})
}

type middleware struct{ settings }

func (m *middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	key := m.key(r)
	if key == NoKey {
		http.Error(w, "the request has no key that limits it", http.StatusBadRequest)
		return
	}
	r = m.prioritized(r)
	admission, err := m.enter(r, key)
	switch {
	case err == nil:
		defer admission.Leave()
		m.announce(w.Header(), admission)
		next.ServeHTTP(w, admitted(r, admission))
	case refused(admission):
		m.announce(w.Header(), admission)
		m.refuse.ServeHTTP(w, r)
	case r.Context().Err() != nil: // without a status, a client that still reads would see a success
		why := "the request was cancelled"
		if cause := context.Cause(r.Context()); cause != r.Context().Err() { // of the server
			why = cause.Error()
		}
		w.Header().Set("Retry-After", "1")
		http.Error(w, why, http.StatusServiceUnavailable)
	case isCost(err):
		m.tooCostly(w, r, err)
	default:
		w.Header().Set("Retry-After", "1")
		http.Error(w, "the rate limiter is not available", http.StatusServiceUnavailable)
	}
}

func tooMany(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "too many requests: try again in "+w.Header().Get("Retry-After")+" s", http.StatusTooManyRequests)
}

// announce adds the header fields that describe the bucket.
func (m *middleware) announce(h http.Header, a *gate.Admission) {
	level := a.Level
	if level != nil {
		seconds := max(1, whole(math.Ceil(max(1, level.MaxPermits)/level.Rate-noise)))
		quota := max(1, whole(level.Rate*float64(seconds)+noise))
		h.Add("Ratelimit-Policy", m.item("q", quota, "w", seconds))
	}
	switch {
	case !a.OK: // a client waits for both fields, so they must agree
		after := wholeSeconds(a.RetryAfter)
		h.Set("Retry-After", strconv.FormatInt(after, 10))
		if level != nil || a.By == gate.ByLimit { // not of a window or a concurrency alone
			h.Add("Ratelimit", m.item("r", 0, "t", after))
		}
	case level != nil:
		h.Add("Ratelimit", m.item("r", whole(level.Remaining), "t", wholeSeconds(level.Full)))
	}
}

// noise bounds the difference of two float64 that mean the same.
const noise = 1e-9

// item returns the policy's name with two parameters, encoded by RFC 9651.
func (m *middleware) item(a string, x int64, b string, y int64) string {
	field := make([]byte, 0, len(m.policy)+24)
	field = append(append(append(append(field, m.policy...), ';'), a...), '=')
	field = strconv.AppendInt(field, x, 10)
	field = append(append(append(field, ';'), b...), '=')
	return string(strconv.AppendInt(field, y, 10))
}

// whole rounds down to an Integer of RFC 9651 that is not negative: at most 15 digits.
func whole(x float64) int64 { return int64(max(0, min(x, 999_999_999_999_999))) }
