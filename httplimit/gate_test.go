package httplimit_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bursty is a limiter of the memory store.
func bursty(t testing.TB, rate float64, opts ...tb.Option) *tb.RateLimiter {
	t.Helper()
	l, err := tb.NewSmoothBursty("bucket", rate, opts...)
	require.NoError(t, err)
	return l
}

// single holds one permit, and no second one comes while a test runs: who takes it, keeps it.
func single(t testing.TB) *tb.RateLimiter { return bursty(t, 0.001) }

// take takes a permit that is due, and tells whether there was one.
func take(t testing.TB, l *tb.RateLimiter) bool {
	t.Helper()
	r, err := l.TryReserve(t.Context(), 1, 0)
	require.NoError(t, err)
	return r.OK()
}

func transport(t testing.TB, gate gate.Gate, opts ...httplimit.TransportOption) *httplimit.Transport {
	t.Helper()
	tr, err := httplimit.NewTransport(gate, opts...)
	require.NoError(t, err)
	return tr
}

func limited(t testing.TB, gate gate.Gate, next http.Handler, opts ...httplimit.MiddlewareOption) http.Handler {
	t.Helper()
	limit, err := httplimit.NewMiddleware(gate, opts...)
	require.NoError(t, err)
	return limit(next)
}

// spy is a gate that notes what it is asked. Enter and Penalize may be replaced.
type spy struct {
	gate.Gate
	enter    func(ctx context.Context, key string) (*gate.Admission, error)
	penalize func(ctx context.Context, key string, d time.Duration) error

	mu        sync.Mutex
	keys      []string
	penalties []time.Duration
}

func (g *spy) Enter(ctx context.Context, key string) (*gate.Admission, error) {
	g.mu.Lock()
	g.keys = append(g.keys, key)
	g.mu.Unlock()
	switch {
	case g.enter != nil:
		return g.enter(ctx, key)
	case g.Gate != nil:
		return g.Gate.Enter(ctx, key)
	}
	return &gate.Admission{OK: true}, nil
}

func (g *spy) Penalize(ctx context.Context, key string, d time.Duration) error {
	g.mu.Lock()
	g.penalties = append(g.penalties, d)
	g.mu.Unlock()
	switch {
	case g.penalize != nil:
		return g.penalize(ctx, key, d)
	case g.Gate != nil:
		return g.Gate.Penalize(ctx, key, d)
	}
	return nil
}

func (g *spy) asked() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]string{}, g.keys...)
}

func failing(err error) *spy {
	return &spy{enter: func(context.Context, string) (*gate.Admission, error) { return nil, err }}
}

// base is a RoundTripper that is a function.
type base func(*http.Request) (*http.Response, error)

func (f base) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func respond(r *http.Request, status int, header ...string) *http.Response {
	w := httptest.NewRecorder()
	for i := 0; i < len(header); i += 2 {
		w.Header().Set(header[i], header[i+1])
	}
	w.WriteHeader(status)
	response := w.Result()
	response.Request = r
	return response
}

var fine base = func(r *http.Request) (*http.Response, error) { return respond(r, http.StatusOK), nil }

func get(t testing.TB, url string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	return r
}

// body notes that it was closed.
type body struct {
	io.Reader
	closed atomic.Int32
}

func (b *body) Close() error { b.closed.Add(1); return nil }

func post(t testing.TB) (*http.Request, *body) {
	t.Helper()
	b := &body{Reader: strings.NewReader("question")}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://upstream.test/fares", b)
	require.NoError(t, err)
	return r, b
}

// logs is a logger and what was written to it.
func logs() (*slog.Logger, *lines) {
	l := &lines{}
	return slog.New(slog.NewTextHandler(l, nil)), l
}

type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

var errAway = errors.New("redis is away")

// Every bad argument fails in the constructor, with the field and the value in the message.
func TestBadConfiguration(t *testing.T) {
	good := gate.One(single(t), 0)
	for name, c := range map[string]struct {
		gate       gate.Gate
		transport  httplimit.TransportOption
		middleware httplimit.MiddlewareOption
		want       string
	}{
		"no gate":             {nil, httplimit.WithRefusalResponse(), httplimit.WithPolicy("p"), "gate nil"},
		"no limiter":          {gate.One((*tb.RateLimiter)(nil), 0), httplimit.WithRefusalResponse(), httplimit.WithPolicy("p"), "gate nil"},
		"no registry":         {(*registry.Registry)(nil), httplimit.WithRefusalResponse(), httplimit.WithPolicy("p"), "gate nil"},
		"typed nil base":      {good, httplimit.WithBase((*http.Transport)(nil)), nil, "base nil"},
		"nil option":          {good, nil, nil, "option nil"},
		"key":                 {good, httplimit.WithKey(nil), httplimit.WithKey(nil), "key nil"},
		"header":              {good, httplimit.WithKey(httplimit.ByHeader("")), httplimit.WithKey(httplimit.ByHeader("")), "key nil"},
		"prefix":              {good, httplimit.WithKey(httplimit.ByClient(netip.Prefix{})), nil, "key nil"},
		"network":             {good, httplimit.WithKey(httplimit.ByClientNetwork(33, 64)), httplimit.WithKey(httplimit.ByClientNetwork(32, 0)), "key nil"},
		"join":                {good, httplimit.WithKey(httplimit.Join()), httplimit.WithKey(httplimit.Join(httplimit.ByPath, nil)), "key nil"},
		"error function":      {good, httplimit.WithOnError(nil), httplimit.WithOnError(nil), "error function nil"},
		"logger":              {good, httplimit.WithLogger(nil), httplimit.WithLogger(nil), "logger nil"},
		"base":                {good, httplimit.WithBase(nil), nil, "base nil"},
		"negative":            {good, httplimit.WithMaxPenalty(-1), nil, "max penalty -1ns"},
		"too long":            {good, httplimit.WithMaxPenalty(time.Hour + 1), nil, "max penalty 1h0m0.000000001s"},
		"no policy":           {good, nil, httplimit.WithPolicy(""), `policy ""`},
		"policy not ASCII":    {good, nil, httplimit.WithPolicy("grün"), `policy "grün"`},
		"policy with newline": {good, nil, httplimit.WithPolicy("a\r\nb"), `policy "a\r\nb"`},
		"refusal handler":     {good, nil, httplimit.WithRefusalHandler(nil), "refusal handler nil"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.transport != nil || name == "nil option" {
				tr, err := httplimit.NewTransport(c.gate, c.transport)
				require.ErrorIs(t, err, tb.ErrInvalidConfig)
				require.ErrorContains(t, err, c.want)
				require.Nil(t, tr)
			}
			if c.middleware != nil || name == "nil option" {
				limit, err := httplimit.NewMiddleware(c.gate, c.middleware)
				require.ErrorIs(t, err, tb.ErrInvalidConfig)
				require.ErrorContains(t, err, c.want)
				require.Nil(t, limit)
			}
		})
	}

	r, b := post(t)
	_, err := new(httplimit.Transport).RoundTrip(r)
	require.ErrorIs(t, err, tb.ErrInvalidConfig)
	require.EqualValues(t, 1, b.closed.Load())
}
