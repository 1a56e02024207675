package httplimit_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
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
