package httplimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// A client that keeps to the limit of its upstream, and calls nobody when no permit falls due in time.
func ExampleNewTransport() {
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer upstream.Close()

	limiter, err := tokenbucket.NewSmoothBursty("upstream", 0.001)
	if err != nil {
		panic(err)
	}
	transport, err := httplimit.NewTransport(gate.One(limiter, 500*time.Millisecond))
	if err != nil {
		panic(err)
	}
	client := &http.Client{Transport: transport}
	defer client.CloseIdleConnections()

	for range 2 {
		response, err := client.Get(upstream.URL + "/fares?from=FRA")
		var refused *httplimit.RefusedError
		switch {
		case errors.As(err, &refused):
			fmt.Printf("%s: again in about %v\n", refused.Key, refused.RetryAfter.Round(time.Minute))
		case err != nil:
			panic(err)
		default:
			response.Body.Close()
			fmt.Println(response.Status)
		}
	}
	// Output:
	// 200 OK
	// /fares: again in about 17m0s
}

// A server that is called once in ten seconds, with a second call saved up. With a gate that has a bucket for each key, that
// would be for each client, told apart behind a load balancer.
func ExampleNewMiddleware() {
	limiter, err := tokenbucket.NewSmoothBursty("server", 0.1, tokenbucket.WithMaxPermits(2), tokenbucket.WithInitialPermits(2))
	if err != nil {
		panic(err)
	}
	limit, err := httplimit.NewMiddleware(gate.One(limiter, 0),
		httplimit.WithKey(httplimit.ByClient(netip.MustParsePrefix("10.0.0.0/8"))))
	if err != nil {
		panic(err)
	}
	handler := limit(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))

	for range 3 {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		fmt.Println(w.Code, w.Header().Get("RateLimit-Policy"), w.Header().Get("RateLimit"))
		if w.Code == http.StatusTooManyRequests {
			fmt.Println("Retry-After:", w.Header().Get("Retry-After"))
		}
	}
	// Output:
	// 200 "default";q=2;w=20 "default";r=1;t=10
	// 200 "default";q=2;w=20 "default";r=0;t=20
	// 429 "default";q=2;w=20 "default";r=0;t=10
	// Retry-After: 10
}
