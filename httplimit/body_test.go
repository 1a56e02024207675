package httplimit_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/gate/gatetest"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// places is a gate with so many free places, of which each call holds one.
type places struct{ free, left int }

func (p *places) Enter(context.Context, string) (*gate.Admission, error) {
	if p.free == 0 {
		return &gate.Admission{RetryAfter: 3 * time.Second}, nil
	}
	p.free--
	return &gate.Admission{OK: true, Release: func() { p.free++; p.left++ }}, nil
}

func (p *places) Penalize(context.Context, string, time.Duration) error { return nil }

// stream is a body of an upgrade.
type stream struct {
	io.Reader
	io.Writer
	io.Closer
}

// A call holds its place until the body of its response is read or closed, or there is none, whatever becomes of it.
func TestTransportHoldsItsPlace(t *testing.T) {
	gate := &places{free: 1}
	var response *http.Response
	var failure error
	tr := transport(t, gate, httplimit.WithBase(base(func(*http.Request) (*http.Response, error) {
		if failure != nil && failure.Error() == "panic" {
			panic(failure)
		}
		return response, failure
	})))
	call := func() (*http.Response, error) {
		r, err := http.NewRequest(http.MethodGet, "http://upstream.test/fares", nil)
		require.NoError(t, err)
		return tr.RoundTrip(r)
	}
	text := func() io.ReadCloser { return io.NopCloser(strings.NewReader("fares")) }
	for name, c := range map[string]struct {
		body io.ReadCloser
		end  func(body io.ReadCloser)
	}{
		"closed":        {text(), func(b io.ReadCloser) { _ = b.Close() }},
		"closed twice":  {text(), func(b io.ReadCloser) { _, _ = b.Close(), b.Close() }},
		"read":          {text(), func(b io.ReadCloser) { _, _ = io.ReadAll(b) }},
		"read + closed": {text(), func(b io.ReadCloser) { _, _ = io.ReadAll(b); _ = b.Close() }},
		"read, fails":   {io.NopCloser(&cutOff{}), func(b io.ReadCloser) { _, _ = io.ReadAll(b) }},
		"upgraded": {stream{strings.NewReader("x"), io.Discard, io.NopCloser(nil)}, func(b io.ReadCloser) {
			_, err := b.(io.ReadWriteCloser).Write([]byte("y"))
			require.NoError(t, err)
			require.Equal(t, 0, gate.free)
			_ = b.Close()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			response, gate.left = &http.Response{StatusCode: 200, Body: c.body}, 0
			got, err := call()
			require.NoError(t, err)
			_, err = call()
			require.ErrorIs(t, err, httplimit.ErrRefused, "the first has not ended")
			one := make([]byte, 1)
			_, _ = got.Body.Read(one)
			if name != "read, fails" {
				require.Equal(t, 0, gate.free, "part of the body was read")
			}
			c.end(got.Body)
			require.Equal(t, 1, gate.free)
			require.Equal(t, 1, gate.left, "once")
		})
	}
	for _, body := range []io.ReadCloser{nil, http.NoBody} {
		response = &http.Response{StatusCode: 200, Body: body}
		_, err := call()
		require.NoError(t, err)
		require.Equal(t, 1, gate.free, "there is no body")
	}
	failure = errors.New("connection refused")
	_, err := call()
	require.ErrorIs(t, err, failure)
	require.Equal(t, 1, gate.free)
	failure = errors.New("panic")
	require.Panics(t, func() { _, _ = call() })
	require.Equal(t, 1, gate.free)
}

// panicking is a gate whose penalties panic.
type panicking struct{ places }

func (*panicking) Penalizes(string, int) bool { panic("policy") }

// A base that breaks its contract, and a policy that panics, keep no place.
func TestBrokenBasesAndPolicies(t *testing.T) {
	g := &panicking{places{free: 1}}
	tr := transport(t, g, httplimit.WithBase(base(func(*http.Request) (*http.Response, error) { return nil, nil })))
	_, err := tr.RoundTrip(get(t, "http://upstream.test/fares"))
	require.ErrorContains(t, err, "neither a response nor an error")
	require.Equal(t, 1, g.free)

	closed := &body{Reader: strings.NewReader("busy")}
	tr = transport(t, g, httplimit.WithBase(base(func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusServiceUnavailable, Header: http.Header{"Retry-After": {"7"}}, Body: closed}, nil
	})))
	require.PanicsWithValue(t, "policy", func() { _, _ = tr.RoundTrip(get(t, "http://upstream.test/fares")) })
	require.Equal(t, 1, g.free)
	require.EqualValues(t, 1, closed.closed.Load())
}

// leaver is a gate whose callers' contexts end while they are admitted.
type leaver struct {
	places
	cancel func()
}

func (l *leaver) Enter(ctx context.Context, key string) (*gate.Admission, error) {
	l.cancel()
	return l.places.Enter(ctx, key)
}

// A call whose context has ended holds nothing.
func TestEndedWhenAdmitted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	gate := &leaver{places{free: 1}, cancel}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://upstream.test/fares", nil)
	require.NoError(t, err)
	_, err = transport(t, gate, httplimit.WithBase(fine)).RoundTrip(r)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1, gate.left)
}

// A call that is not let through holds nothing.
func TestNotLetThrough(t *testing.T) {
	gatetest.TestNotLetThrough(t, func(ctx context.Context, t *testing.T, g gate.Gate) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://upstream.test/fares", nil)
		require.NoError(t, err)
		_, err = transport(t, g, httplimit.WithBase(fine)).RoundTrip(r)
		return err
	})
}

type cutOff struct{}

func (*cutOff) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// A handler's call holds its place until the handler returns, or panics, and who finds none is told when to try again.
func TestMiddlewareHoldsItsPlace(t *testing.T) {
	gate := &places{free: 1}
	var inside func()
	handler := limited(t, gate, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { inside() }))
	serve := func() *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/fares", nil))
		return w
	}
	inside = func() {
		w := serve()
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		require.Equal(t, "3", w.Header().Get("Retry-After"))
	}
	require.Equal(t, http.StatusOK, serve().Code)
	require.Equal(t, 1, gate.free)
	inside = func() { panic("handler") }
	require.Panics(t, func() { serve() })
	require.Equal(t, 1, gate.free)
	require.Equal(t, 2, gate.left)
}

// A row with a concurrency is limited through httplimit, also behind a gate that wraps the registry.
func TestRowWithConcurrency(t *testing.T) {
	quiet := registry.WithLogger(slog.New(slog.DiscardHandler))
	limits, err := registry.New(registry.Static{{Name: "/fares", NoRate: true, Concurrent: 1}}, tb.NewMemoryStore(), quiet, registry.WithLocalSemaphores())
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	tr := transport(t, struct{ gate.Gate }{limits}, httplimit.WithBase(fine))
	call := func(tr *httplimit.Transport) (*http.Response, error) {
		r, err := http.NewRequest(http.MethodGet, "http://upstream.test/fares", nil)
		require.NoError(t, err)
		return tr.RoundTrip(r)
	}
	first, err := call(tr)
	require.NoError(t, err)
	_, err = call(tr)
	var refused *httplimit.RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, time.Second, refused.RetryAfter)
	require.NoError(t, first.Body.Close())
	_, err = call(tr)
	require.NoError(t, err)
}

// A gate with a deadline of its own refuses, and says when to come again, whether or not the request has a deadline.
func TestGateWithDeadline(t *testing.T) {
	gate := &gatetest.Holder{Err: &tb.WaitError{Wait: 5 * time.Second, Reason: context.DeadlineExceeded}}
	long, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	for _, ctx := range []context.Context{context.Background(), long} {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://upstream.test/fares", nil)
		require.NoError(t, err)
		_, err = transport(t, gate, httplimit.WithBase(fine)).RoundTrip(r)
		var refused *httplimit.RefusedError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, 5*time.Second, refused.RetryAfter)
	}
}
