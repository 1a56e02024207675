package httplimit

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

const (
	defaultMaxPenalty = time.Minute
	longestPenalty    = time.Hour // the longest time for which a bucket can be held back
)

var errNoResponse = errors.New("httplimit: the base returned neither a response nor an error")

var errZero = fmt.Errorf("httplimit: %w: transport the zero value: want one made by NewTransport", tokenbucket.ErrInvalidConfig)

// Transport is an http.RoundTripper that takes a permit for each request before sending it. [NewTransport] makes one.
//
// RoundTrip waits until the permit is due and then calls the base RoundTripper, which has the admission in the context of its
// request (gate.FromContext). That request is a copy, and so is Request of the response. RoundTrip returns a *RefusedError if the
// permit would not be due in time ([WithRefusalResponse]), a *GateError if no decision was possible ([WithOnError]), [ErrNoKey] if
// the key is NoKey, and the context's error if the context ends first. http.Client wraps them in a *url.Error; use errors.Is
// and errors.As. Only contexts end a wait, not the deprecated Request.Cancel.
//
// A wait that is cancelled refunds its permit. A permit whose due time has passed is used, even if the request then finds no
// connection.
//
// A response 429 or 503 with Retry-After holds the request's bucket back for the whole fleet, before RoundTrip returns it
// ([WithMaxPenalty]), unless the gate decides otherwise ([PenaltyPolicy]). Requests that already wait, wait that much longer.
// Responses are passed on unchanged.
//
// The admission ends with an error, or when the response's body is read to its end or closed, and so does the context of the
// base's request. An upgraded stream (status 101,
// a WebSocket) belongs to the caller: the request's context no longer ends it. Its admission ends when it is closed, when
// reading from it fails, and when both directions have ended. After the end of one direction the stream is closed unless a byte moves in the
// other every minute ([HalfClosed]). A stream of which neither direction ends holds its place.
//
// Each redirect that http.Client follows, and each retry by a caller, is a request with a permit of its own. So is each try of
// one request that http.Transport makes by itself: it repeats a request without a body, or with one that can be read again, if
// a kept connection ends before the response (HTTP/1) or the server refuses the stream (HTTP/2). If the upstream may have
// received the request, the Transport leaves the admission and asks the gate again before the next try, as for a new request. If that
// fails, the try does not happen, and RoundTrip returns a *RepeatError. A try is free if the header of the one before was not
// written, since the upstream cannot have received that one. A base that sends a request several times at once, or repeats
// requests with bodies, belongs above the Transport.
//
// A Transport may be used concurrently. It need not be closed.
type Transport struct{ settings }

// NewTransport returns a Transport with that gate. It fails with tokenbucket.ErrInvalidConfig if the gate is nil or an option
// has a bad value. A caller that upgrades a connection must close the stream, which holds its place until then.
func NewTransport(g gate.Gate, opts ...TransportOption) (*Transport, error) {
	t := &Transport{settings{key: ByPath, base: http.DefaultTransport, maxPenalty: defaultMaxPenalty}}
	t.begin(g)
	for _, opt := range opts {
		if opt == nil {
			t.fail("option", "nil", "no nil options")
			break
		}
		opt.transport(&t.settings)
	}
	if t.err != nil {
		return nil, t.err
	}
	return t, nil
}

// WithBase sets the RoundTripper that sends the requests. The default is http.DefaultTransport.
func WithBase(base http.RoundTripper) TransportOption {
	return forTransport(func(s *settings) {
		if isNil(base) {
			s.fail("base", "nil", "a RoundTripper")
		}
		s.base = base
	})
}

// WithRefusalResponse makes RoundTrip return a refusal as a response with status 429 and Retry-After, instead of an error. No
// server has sent that response. If several Transports wrap one another, use it for the outermost only: an outer one would
// take the response for the upstream's.
func WithRefusalResponse() TransportOption {
	return forTransport(func(s *settings) { s.respond = true })
}

// WithMaxPenalty bounds the time for which a Retry-After holds the bucket back; a longer one is clipped. 0 ignores
// Retry-After. The maximum is 1 hour, the default 1 minute.
func WithMaxPenalty(d time.Duration) TransportOption {
	return forTransport(func(s *settings) {
		if d < 0 || d > longestPenalty {
			s.fail("max penalty", d, "0 to 1h")
		}
		s.maxPenalty = d
	})
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	passed := false // to the base, which closes the body
	defer func() {
		if !passed { // not sent, or a function of the options has panicked
			closeBody(r)
		}
	}()
	if t.gate == nil {
		return nil, errZero
	}
	key := t.key(r)
	if key == NoKey {
		return nil, ErrNoKey
	}
	r = t.prioritized(r)
	admission, err := t.enter(r, key)
	if err != nil {
		if t.respond && refused(admission) {
			return refusal(r, admission.RetryAfter), nil
		}
		return nil, err
	}
	c := t.newCall(r, key, admission)
	var response *http.Response
	returned := false
	defer func() {
		if !returned { // an error, or a function of the caller has panicked
			if response != nil && response.Body != nil {
				_ = response.Body.Close()
			}
			c.end()
		}
	}()
	passed = true
	response, err = t.base.RoundTrip(c.request)
	switch {
	case err != nil:
		return nil, c.failure(err)
	case response == nil:
		return nil, errNoResponse
	}
	admission = c.answered(response)
	if t.used != nil {
		if used := t.used(response); used >= 0 {
			admission.SettleLater(used)
		}
	}
	if s := response.StatusCode; s == http.StatusTooManyRequests || s == http.StatusServiceUnavailable {
		if d := retryAfter(response.Header, time.Now(), t.maxPenalty); d > 0 && t.penalizes(key, s) {
			t.penalize(r.Context(), admission, key, d)
		}
	}
	c.endAfter(response)
	returned = true
	return response, nil
}

// penalizes reports whether a response with that status holds the key's bucket back.
func (t *Transport) penalizes(key string, status int) bool {
	policy, ok := t.gate.(PenaltyPolicy)
	return !ok || policy.Penalizes(key, status)
}

// CloseIdleConnections closes the idle connections of the base, if it has such a method.
func (t *Transport) CloseIdleConnections() {
	if c, ok := t.base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// retryAfter returns the delay that a response asks for, at most longest; 0 if it has none or only invalid ones. The first valid field counts. A
// date is relative to the response's own Date, so that clocks need not agree.
func retryAfter(h http.Header, now time.Time, longest time.Duration) time.Duration {
	for _, value := range h["Retry-After"] {
		if digits := strings.TrimLeft(value, "0123456789"); digits == "" && value != "" {
			seconds, err := strconv.ParseUint(value, 10, 32)
			if err != nil { // more digits than fit
				return longest
			}
			return min(time.Duration(seconds)*time.Second, longest)
		}
		until, err := http.ParseTime(value)
		if err != nil {
			continue
		}
		if date, err := http.ParseTime(h.Get("Date")); err == nil {
			now = date
		}
		return max(0, min(until.Sub(now), longest))
	}
	return 0
}

const refusedText = "Too Many Requests: the rate limit of this client\n"

// refusal returns a response like one of http.Transport.
func refusal(r *http.Request, after time.Duration) *http.Response {
	body := io.NopCloser(strings.NewReader(refusedText))
	if r.Method == http.MethodHead {
		body = http.NoBody
	}
	return &http.Response{
		Status:     strconv.Itoa(http.StatusTooManyRequests) + " " + http.StatusText(http.StatusTooManyRequests),
		StatusCode: http.StatusTooManyRequests,
		Proto:      "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{
			"Content-Length": {strconv.Itoa(len(refusedText))},
			"Content-Type":   {"text/plain; charset=utf-8"},
			"Date":           {time.Now().UTC().Format(http.TimeFormat)},
			"Retry-After":    {strconv.FormatInt(wholeSeconds(after), 10)},
		},
		Body:          body,
		ContentLength: int64(len(refusedText)),
		Request:       r,
	}
}

// wholeSeconds rounds up to whole seconds, at least 1, for Retry-After.
func wholeSeconds(d time.Duration) int64 {
	n := int64(d / time.Second)
	if d%time.Second > 0 {
		n++
	}
	return max(1, n)
}

func closeBody(r *http.Request) {
	if r.Body != nil {
		_ = r.Body.Close()
	}
}
