package httplimit_test

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/gate/gatetest"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// byField is a cost function for tests: the field Cost of the request.
func byField(r *http.Request) int {
	n, err := strconv.Atoi(r.Header.Get("Cost"))
	if err != nil {
		panic("no cost")
	}
	return n
}

// onlyGate hides the other methods of a gate.
type onlyGate struct{ gate.Gate }

// stored returns how many permits a bucket has.
func stored(t *testing.T, l *tb.RateLimiter) float64 {
	t.Helper()
	b, err := l.State(t.Context())
	require.NoError(t, err)
	return b.StoredPermits
}

// A middleware takes the cost of a request, and its handler settles it.
func TestMiddlewareCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 10, tb.WithInitialPermits(10))
		begun, passedErrors := 0, 0
		h := limited(t, gate.One(l, 0), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			begun++
			if used, err := strconv.Atoi(r.Header.Get("Used")); err == nil {
				require.NoError(t, gate.FromContext(r.Context()).Settle(r.Context(), used))
			}
		}), httplimit.WithCost(byField), httplimit.WithLogger(slog.New(slog.DiscardHandler)),
			httplimit.WithOnError(func(_ *http.Request, err error) error { passedErrors++; return nil }))
		for _, c := range []struct {
			cost, used string
			status     int
			left       float64
			text       string
		}{
			{"4", "", 200, 6, ""},
			{"0", "", 200, 6, ""},
			{"7", "", 429, 6, "too many requests"},
			{"6", "2", 200, 4, ""},
			{"11", "", 413, 4, "costs more than its limit can ever grant"},
			{"-1", "", 500, 4, "cost of the request is not known"},
		} {
			before := begun
			w := httptest.NewRecorder()
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
			r.Header.Set("Cost", c.cost)
			r.Header.Set("Used", c.used)
			h.ServeHTTP(w, r)
			require.Equal(t, c.status, w.Code, c)
			require.Contains(t, w.Body.String(), c.text)
			require.Equal(t, c.status == 200, begun == before+1)
			require.Equal(t, c.left, stored(t, l), c)
			require.Equal(t, c.status == 429, w.Header().Get("Retry-After") != "", "a later attempt could pass: %v", c)
		}
		require.Zero(t, passedErrors, "the gate has not failed")
		before := begun
		require.PanicsWithValue(t, "no cost", func() { serve(t, h) })
		require.Equal(t, before, begun, "a request whose cost is not known does not pass")
	})
}

// A Transport takes the cost of a request, and settles what its response shows.
func TestTransportCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 10, tb.WithInitialPermits(10))
		sent := 0
		var body *closes
		tr := transport(t, gate.One(l, 0), httplimit.WithCost(byField), httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
			sent++
			if r.Header.Get("Fail") != "" {
				return nil, errors.New("down")
			}
			body = &closes{Reader: strings.NewReader("ok")}
			return &http.Response{StatusCode: 200, Header: http.Header{"Used": {r.Header.Get("Used")}}, Body: body, Request: r}, nil
		})), httplimit.WithActualCost(func(r *http.Response) int {
			if r.Header.Get("Used") == "panic" {
				panic("no number")
			}
			used, err := strconv.Atoi(r.Header.Get("Used"))
			if err != nil {
				return -1
			}
			return used
		}))
		request := func(cost, used, fail string) *http.Request {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
			r.Header = http.Header{"Cost": {cost}, "Used": {used}, "Fail": {fail}}
			return r
		}
		for _, c := range []struct {
			cost, used, fail string
			left             float64
			want             error
		}{
			{"3", "", "", 7, nil},
			{"4", "1", "", 6, nil},
			{"1", "4", "", 2, nil},
			{"1", "", "yes", 1, nil}, // it may have been processed
			{"2", "", "", 1, httplimit.ErrRefused},
			{"11", "", "", 1, tb.ErrNeverGranted},
			{"-2", "", "", 1, tb.ErrInvalidPermits},
			{"0", "5", "", 1, nil},
		} {
			before := sent
			response, err := tr.RoundTrip(request(c.cost, c.used, c.fail))
			require.NoError(t, l.Close(t.Context()), "it waits for settlements")
			switch {
			case c.want != nil:
				require.ErrorIs(t, err, c.want)
				require.Equal(t, before, sent)
				require.False(t, errors.As(err, new(*httplimit.GateError)), "the gate has not failed")
			case c.fail != "":
				require.Error(t, err)
			default:
				require.NoError(t, err)
				_ = response.Body.Close()
			}
			require.Equal(t, c.left, stored(t, l), c)
		}

		time.Sleep(time.Second)
		response, err := tr.RoundTrip(request("8", "", ""))
		require.NoError(t, err)
		_, err = io.ReadAll(response.Body)
		require.NoError(t, err)
		require.NoError(t, gate.FromContext(response.Request.Context()).Settle(t.Context(), 1), "known at the end of the body")
		require.Equal(t, 9.0, stored(t, l))

		before := sent
		require.PanicsWithValue(t, "no cost", func() { _, _ = tr.RoundTrip(request("", "", "")) })
		require.Equal(t, before, sent)
		require.PanicsWithValue(t, "no number", func() { _, _ = tr.RoundTrip(request("4", "panic", "")) })
		require.Equal(t, 5.0, stored(t, l), "the estimate counts")
		require.True(t, body.closed)
	})
}

// closes is a body that records its end.
type closes struct {
	io.Reader
	closed bool
}

func (b *closes) Close() error { b.closed = true; return nil }

// A place is free again after a panic of the function that reads the actual cost.
func TestPanicOfActualCostLeaves(t *testing.T) {
	g := new(gatetest.Holder)
	tr := transport(t, g, httplimit.WithBase(fine), httplimit.WithActualCost(func(*http.Response) int { panic("no number") }))
	r, _ := post(t)
	require.Panics(t, func() { _, _ = tr.RoundTrip(r) })
	require.Equal(t, 1, g.Released())
}

func TestCostOptions(t *testing.T) {
	l := bursty(t, 10)
	one := func(*http.Request) int { return 1 }
	for want, c := range map[string]struct {
		g   gate.Gate
		opt httplimit.TransportOption
	}{
		"cost function nil: want a function":                                            {gate.One(l, 0), httplimit.WithCost(nil)},
		"actual cost function nil: want a function":                                     {gate.One(l, 0), httplimit.WithActualCost(nil)},
		"cost function of a gate whose calls all cost one permit: want a gate.CostGate": {onlyGate{gate.One(l, 0)}, httplimit.WithCost(one)},
	} {
		_, err := httplimit.NewTransport(c.g, c.opt)
		require.ErrorIs(t, err, tb.ErrInvalidConfig)
		require.ErrorContains(t, err, want)
	}
	_, err := httplimit.NewMiddleware(onlyGate{gate.One(l, 0)}, httplimit.WithCost(one))
	require.ErrorContains(t, err, "want a gate.CostGate")
}

// closable is a body that records whether it was closed.
type closable struct {
	io.Reader
	closed bool
}

func (c *closable) Close() error {
	c.closed = true
	return nil
}

// A RoundTripper closes the body of every request, also if a function of its options panics before the request is sent.
func TestPanicClosesTheBody(t *testing.T) {
	l, err := tb.NewSmoothBursty("x", 10)
	require.NoError(t, err)
	boom := func(*http.Request) int { panic("boom") }
	for name, opt := range map[string]httplimit.TransportOption{
		"cost": httplimit.WithCost(boom), "key": httplimit.WithKey(func(*http.Request) string { panic("boom") }),
	} {
		transport, err := httplimit.NewTransport(gate.One(l, time.Second), opt)
		require.NoError(t, err)
		body := &closable{Reader: strings.NewReader("x")}
		r, err := http.NewRequest(http.MethodPost, "http://127.0.0.1/", body)
		require.NoError(t, err)
		require.PanicsWithValue(t, "boom", func() { _, _ = transport.RoundTrip(r) }, name)
		require.True(t, body.closed, name)
	}
	require.Equal(t, 1.0, stored(t, l), "nothing was taken")
}
