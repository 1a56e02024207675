package httplimit_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// The base of a Transport sends each call with the key that admitted it.
func TestTwoKeys(t *testing.T) {
	first, err := tb.NewSmoothBursty("key-a", 0.01)
	require.NoError(t, err)
	second, err := tb.NewSmoothBursty("key-b", 0.01)
	require.NoError(t, err)
	either, err := tb.Any(first, second)
	require.NoError(t, err)
	var sent []string
	client := transport(t, gate.One(either, 0), httplimit.WithBase(roundTrip(func(r *http.Request) (*http.Response, error) {
		sent = append(sent, gate.FromContext(r.Context()).Member)
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
	})))
	for range 3 {
		var r *http.Request
		r, err = http.NewRequestWithContext(t.Context(), http.MethodGet, "http://upstream/", nil)
		require.NoError(t, err)
		_, err = client.RoundTrip(r)
	}
	require.Equal(t, []string{"key-a", "key-b"}, sent)
	require.ErrorIs(t, err, httplimit.ErrRefused)
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A refusal names the bound that refused.
func TestRefusedErrorNamesItsBound(t *testing.T) {
	err := &httplimit.RefusedError{Key: "/", RetryAfter: time.Second, By: gate.ByConcurrency}
	require.EqualError(t, err, `httplimit: refused: key "/": by concurrency: try again in 1s`)
}

// A refusal for hours names the bound that causes it: the limit a day of several, a quota alone, the window of a row.
func TestRefusedErrorOfADay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits, err := tb.NewLimits("fares", tb.PerSecond(5), tb.PerDay(1))
		require.NoError(t, err)
		quota, err := tb.NewQuota("calls a day", 1, 24*time.Hour, 0)
		require.NoError(t, err)
		rows, err := registry.New(registry.Static{{Name: "/fares", Rate: 5, Window: 24 * time.Hour, WindowLimit: 1}}, tb.NewMemoryStore(), registry.WithLocalWindows())
		require.NoError(t, err)
		defer rows.Close()
		for _, c := range []struct {
			gate   gate.Gate
			by     gate.Decider
			member string
			text   string
		}{
			{gate.One(limits, 0), gate.ByLimit, "fares/day", `httplimit: refused: key "/fares": bucket "fares/day": try again in 23h59m58s`},
			{gate.One(quota, 0), gate.ByLimit, "calls a day", `httplimit: refused: key "/fares": bucket "calls a day": try again in 23h59m58s`},
			{rows, gate.ByWindow, "", `httplimit: refused: key "/fares": by window: try again in 23h59m5`},
		} {
			client := transport(t, c.gate, httplimit.WithBase(roundTrip(func(r *http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
			})))
			call := func() error {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://upstream/fares", nil)
				require.NoError(t, err)
				_, err = client.RoundTrip(r)
				return err
			}
			require.NoError(t, call())
			time.Sleep(2 * time.Second)
			err := call()
			require.ErrorContains(t, err, c.text)
			var refused *httplimit.RefusedError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, c.by, refused.By)
			require.Equal(t, c.member, refused.Member)
		}
	})
}

// Bookings pass before searches on the gate of a group, of a middleware and of a Transport, and searches get the rest. Few bookings all pass, and if
// bookings want more than the rate, they get nearly all of it.
func TestPriorityOfAGroup(t *testing.T) {
	const rate, lasts, timeout = 50, 10 * time.Second, 2 * time.Second
	for _, side := range []string{"middleware", "transport"} {
		for _, bookers := range []int{0, 2, 200} {
			t.Run(fmt.Sprint(side, "/bookers=", bookers), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					second, err := tb.NewSmoothBursty("second", rate, tb.WithMaxPermits(1))
					require.NoError(t, err)
					hour, err := tb.NewSmoothBursty("hour", 2*rate, tb.WithMaxPermits(100))
					require.NoError(t, err)
					all, err := tb.All(second, hour)
					require.NoError(t, err)
					byPath := httplimit.WithPriority(func(r *http.Request) tb.Priority {
						if r.URL.Path == "/search" {
							return tb.Low
						}
						return tb.Normal
					})
					passes := limited(t, gate.One(all, timeout), ok, byPath).ServeHTTP
					if side == "transport" {
						client := transport(t, gate.One(all, timeout), byPath, httplimit.WithRefusalResponse(),
							httplimit.WithBase(roundTrip(func(r *http.Request) (*http.Response, error) {
								return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
							})))
						passes = func(w http.ResponseWriter, r *http.Request) {
							response, err := client.RoundTrip(r)
							require.NoError(t, err)
							w.WriteHeader(response.StatusCode)
						}
					}
					var passed [2]atomic.Int64
					var refused atomic.Int64 // bookings
					end := time.Now().Add(lasts)
					caller := func(path string, of *atomic.Int64) {
						for time.Now().Before(end) {
							w := httptest.NewRecorder()
							passes(w, httptest.NewRequest(http.MethodGet, path, nil))
							if w.Code == http.StatusOK {
								of.Add(1)
							} else if path == "/book" {
								refused.Add(1)
							}
							time.Sleep(time.Duration(50+rand.IntN(100)) * time.Millisecond)
						}
					}
					var callers sync.WaitGroup
					for range bookers {
						callers.Go(func() { caller("/book", &passed[0]) })
					}
					for range 200 {
						callers.Go(func() { caller("/search", &passed[1]) })
					}
					callers.Wait()
					whole := rate * lasts.Seconds()
					books, searches := float64(passed[0].Load())/whole, float64(passed[1].Load())/whole
					t.Logf("%.0f %% of the rate for bookings, %.0f %% for searches", 100*books, 100*searches)
					if bookers == 200 {
						require.Greater(t, books, 0.85)
						return
					}
					require.InDelta(t, 1.1, books+searches, 0.2, "the last calls end after the time")
					require.Zero(t, refused.Load())
				})
			})
		}
	}
}
