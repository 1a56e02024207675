package httplimit_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// side is an upgraded stream: it is silent until it is closed, or its upstream ends its direction.
type side struct {
	ends, closed chan struct{}
}

func (s *side) Read([]byte) (int, error) {
	select {
	case <-s.ends:
		return 0, io.EOF
	case <-s.closed:
		return 0, io.ErrClosedPipe
	}
}
func (s *side) Write(p []byte) (int, error) { return len(p), nil }
func (s *side) CloseWrite() error           { return nil }
func (s *side) Close() error                { close(s.closed); return nil }

// An upgraded stream keeps its place while one direction is open and used, and not for ever if one has ended and the other is silent.
func TestHalfClosedStreams(t *testing.T) {
	for name, end := range map[string]func(s *side, stream httpStream){
		"by the upstream": func(s *side, stream httpStream) {
			close(s.ends)
			_, err := stream.Read(nil)
			require.Equal(t, io.EOF, err)
		},
		"by the caller": func(_ *side, stream httpStream) { require.NoError(t, stream.CloseWrite()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &side{make(chan struct{}), make(chan struct{})}
				g := &counted{left: 1}
				inside := func() int {
					g.mu.Lock()
					defer g.mu.Unlock()
					return g.inside
				}
				var upgrades base = func(*http.Request) (*http.Response, error) {
					return &http.Response{StatusCode: http.StatusSwitchingProtocols, Body: s}, nil
				}
				response, err := transport(t, g, httplimit.WithBase(upgrades)).RoundTrip(get(t, "http://upstream.test/"))
				require.NoError(t, err)
				stream := response.Body.(httpStream)
				time.Sleep(time.Hour)
				require.Equal(t, 1, inside(), "both directions are open")
				end(s, stream)
				for range 5 {
					time.Sleep(httplimit.HalfClosed / 2)
					_, err := stream.Write([]byte("x"))
					require.NoError(t, err)
				}
				require.Equal(t, 1, inside(), "bytes move")
				time.Sleep(httplimit.HalfClosed + time.Second)
				require.Zero(t, inside())
				select {
				case <-s.closed:
				default:
					t.Error("the stream is open")
				}
			})
		})
	}
}

type httpStream interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// Once both directions have ended, the place is free at once.
func TestStreamsThatEnd(t *testing.T) {
	s := &side{make(chan struct{}), make(chan struct{})}
	g := &counted{left: 1}
	var upgrades base = func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusSwitchingProtocols, Body: s}, nil
	}
	response, err := transport(t, g, httplimit.WithBase(upgrades)).RoundTrip(get(t, "http://upstream.test/"))
	require.NoError(t, err)
	close(s.ends)
	_, _ = response.Body.Read(nil)
	require.Equal(t, 1, g.inside)
	require.NoError(t, response.Body.(httpStream).CloseWrite())
	require.Zero(t, g.inside)
	require.NoError(t, response.Body.Close())
}

// A base that fetches a token with the request's context, from another host, takes one permit, and its further tries take one each.
func TestTokensOfABase(t *testing.T) {
	tokens := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "token") }))
	defer tokens.Close()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	defer server.Close()
	inner := &http.Transport{}
	defer inner.CloseIdleConnections()
	tries := 1
	var authorized base = func(r *http.Request) (response *http.Response, err error) {
		r2, err := http.NewRequestWithContext(r.Context(), http.MethodGet, tokens.URL, nil)
		if err != nil {
			return nil, err
		}
		if response, err = inner.RoundTrip(r2); err != nil {
			return nil, err
		}
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		for range tries {
			if response, err = inner.RoundTrip(r); err != nil {
				return nil, err
			}
		}
		return response, nil
	}
	for tries = 1; tries <= 2; tries++ {
		g := &counted{left: 9}
		response, err := transport(t, g, httplimit.WithBase(authorized)).RoundTrip(get(t, server.URL))
		require.NoError(t, err)
		_ = response.Body.Close()
		require.Equal(t, tries, g.asked)
	}
}

// The refusal of a window alone has no RateLimit field, which describes a rate.
func TestRefusalsOfAWindowHaveNoRateLimit(t *testing.T) {
	w := httptest.NewRecorder()
	limited(t, &counted{}, nil).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, "3", w.Header().Get("Retry-After"))
	require.Empty(t, w.Header()["Ratelimit"])
}

// panicky is a gate whose policy of penalties panics.
type panicky struct{ *counted }

func (panicky) Penalizes(string, int) bool { panic("of a policy") }

// A policy that panics, and a base that returns neither response nor error, keep no place.
func TestPlacesOfFaultyBasesAndPolicies(t *testing.T) {
	g := &counted{left: 9}
	var nothing base = func(*http.Request) (*http.Response, error) { return nil, nil }
	_, err := transport(t, g, httplimit.WithBase(nothing)).RoundTrip(get(t, "http://upstream.test/"))
	require.Error(t, err)
	require.Zero(t, g.inside)
	var busy base = func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusServiceUnavailable, Header: http.Header{"Retry-After": {"1"}}, Body: http.NoBody}, nil
	}
	require.Panics(t, func() {
		_, _ = transport(t, panicky{g}, httplimit.WithBase(busy)).RoundTrip(get(t, "http://upstream.test/"))
	})
	require.Zero(t, g.inside)
}

// A request that waits when its server goes down is told so, and when to come again.
func TestCancelledRequestsAreToldWhy(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(io.ErrNoProgress)
	w := httptest.NewRecorder()
	limited(t, gateOf(func(ctx context.Context) (*gate.Admission, error) { return nil, ctx.Err() }), nil).
		ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil).WithContext(ctx))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Equal(t, "1", w.Header().Get("Retry-After"))
	require.Equal(t, io.ErrNoProgress.Error()+"\n", w.Body.String())
}
