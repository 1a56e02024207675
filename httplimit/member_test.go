package httplimit_test

import (
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

func member(t *testing.T, name string, rate, size float64) *tb.RateLimiter {
	t.Helper()
	l, err := tb.NewSmoothBursty(name, rate, tb.WithMaxPermits(size), tb.WithInitialPermits(size))
	require.NoError(t, err)
	return l
}

// The header fields of several limits are those of the one that decided.
func TestFieldsOfSeveral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		second, day := member(t, "second", 2, 2), member(t, "day", 0.1, 3)
		all, err := tb.All(second, day)
		require.NoError(t, err)
		h := limited(t, gate.One(all, 0), ok)
		for i, c := range []struct {
			status        int
			policy, limit string
		}{
			{200, `"default";q=2;w=1`, `"default";r=1;t=1`},
			{200, `"default";q=2;w=1`, `"default";r=0;t=1`},
			{429, `"default";q=2;w=1`, `"default";r=0;t=1`}, // by the second
			{200, `"default";q=3;w=30`, `"default";r=0;t=`}, // a second later, the third of the day
			{429, `"default";q=3;w=30`, `"default";r=0;t=`},
		} {
			if i == 3 {
				time.Sleep(time.Second)
			}
			r := serve(t, h)
			require.Equal(t, c.status, r.StatusCode, i)
			require.Equal(t, []string{c.policy}, r.Header["Ratelimit-Policy"], i)
			require.Contains(t, r.Header.Get("Ratelimit"), c.limit, i)
			require.Equal(t, c.status == 429, r.Header.Get("Retry-After") != "", i)
		}
	})
}

// A Transport tells which limit refused, and an upstream's pause holds back the key that the request has used.
func TestTransportOfSeveral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := member(t, "first", 1, 1), member(t, "second", 1, 1)
		keys, err := tb.Any(first, second)
		require.NoError(t, err)
		var used []string
		tr := transport(t, gate.One(keys, 0), httplimit.WithCost(func(*http.Request) int { return 1 }),
			httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
				used = append(used, gate.FromContext(r.Context()).Member)
				return &http.Response{StatusCode: 429, Header: http.Header{"Retry-After": {"30"}}, Body: http.NoBody, Request: r}, nil
			})))
		for range 2 {
			r, _ := post(t)
			_, err = tr.RoundTrip(r)
			require.NoError(t, err)
		}
		require.Equal(t, []string{"first", "second"}, used)
		r, _ := post(t)
		_, err = tr.RoundTrip(r)
		var refused *httplimit.RefusedError
		require.True(t, errors.As(err, &refused))
		require.NotEmpty(t, refused.Member)
		require.ErrorContains(t, err, `key "/fares": bucket "`)
		require.InDelta(t, 31*time.Second, refused.RetryAfter, float64(time.Second), "both keys are held back for as long as the upstream asked")
	})
}
