package httplimit_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"time"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// An upload costs a permit for each KiB, and its handler settles what it has kept.
func ExampleWithCost() {
	kib, err := tb.NewSmoothBursty("uploads", 1, tb.WithMaxPermits(100), tb.WithInitialPermits(100))
	if err != nil {
		panic(err)
	}
	limit, err := httplimit.NewMiddleware(gate.One(kib, 0), httplimit.WithCost(func(r *http.Request) int {
		return max(1, int(r.ContentLength/1024)) // the server refuses bodies without a length
	}))
	if err != nil {
		panic(err)
	}
	server := httptest.NewServer(limit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		kept, err := io.Copy(io.Discard, io.LimitReader(r.Body, 20*1024))
		if err == nil {
			err = gate.FromContext(r.Context()).Settle(r.Context(), int(kept/1024))
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})))
	defer server.Close()
	for _, size := range []int{60, 90, 200} {
		response, err := server.Client().Post(server.URL, "text/plain", strings.NewReader(strings.Repeat("x", size*1024)))
		if err != nil {
			panic(err)
		}
		response.Body.Close()
		fmt.Println(size, "KiB:", response.StatusCode, response.Header.Get("Ratelimit"))
	}
	// Output:
	// 60 KiB: 200 "default";r=40;t=60
	// 90 KiB: 429 "default";r=0;t=10
	// 200 KiB: 413
}

// The upstream's response says what its request has used.
func ExampleWithActualCost() {
	units, err := tb.NewSmoothBursty("units", 1, tb.WithMaxPermits(100), tb.WithInitialPermits(100))
	if err != nil {
		panic(err)
	}
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Units-Used", r.URL.Query().Get("units"))
	}))
	defer upstream.Close()
	transport, err := httplimit.NewTransport(gate.One(units, time.Second), httplimit.WithCost(func(*http.Request) int { return 50 }),
		httplimit.WithActualCost(func(r *http.Response) int {
			used, err := strconv.Atoi(r.Header.Get("Units-Used"))
			if err != nil {
				return -1 // the estimate stays
			}
			return used
		}))
	if err != nil {
		panic(err)
	}
	client := &http.Client{Transport: transport}
	response, err := client.Get(upstream.URL + "/search?units=30")
	if err != nil {
		panic(err)
	}
	response.Body.Close()
	if err := units.Close(response.Request.Context()); err != nil { // waits for the settlement
		panic(err)
	}
	bucket, err := units.State(response.Request.Context())
	if err != nil {
		panic(err)
	}
	fmt.Printf("%.0f left\n", bucket.StoredPermits)
	// Output: 70 left
}
