package httplimit_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// BenchmarkTransport is what a permit costs beside a base that does nothing.
//
//	go test -run '^$' -bench . -benchmem ./httplimit
func BenchmarkTransport(b *testing.B) {
	response := &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}
	var nothing base = func(*http.Request) (*http.Response, error) { return response, nil }
	granting, refusing := gate.One(bursty(b, 1e7, tb.WithInitialPermits(1e7)), time.Minute), gate.One(bursty(b, 0.001, tb.WithInitialPermits(0)), 0)
	for _, c := range []struct {
		name string
		tr   http.RoundTripper
	}{
		{"bare", nothing},
		{"no bucket", transport(b, free{}, httplimit.WithBase(nothing))},
		{"granted", transport(b, granting, httplimit.WithBase(nothing))},
		{"refused", transport(b, refusing, httplimit.WithBase(nothing), httplimit.WithRefusalResponse())},
	} {
		b.Run(c.name, func(b *testing.B) {
			r := get(b, "http://upstream.test/fares")
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.tr.RoundTrip(r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkMiddleware is what a permit costs beside a handler that does nothing.
func BenchmarkMiddleware(b *testing.B) {
	nothing := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	granting, refusing := gate.One(bursty(b, 1e7, tb.WithInitialPermits(1e7)), time.Minute), gate.One(bursty(b, 0.001, tb.WithInitialPermits(0)), 0)
	for _, c := range []struct {
		name string
		h    http.Handler
	}{
		{"bare", nothing},
		{"no bucket", limited(b, free{}, nothing)},
		{"no bucket, by client", limited(b, free{}, nothing, httplimit.WithKey(httplimit.ByClient(proxies...)))},
		{"granted", limited(b, granting, nothing)},
		{"refused", limited(b, refusing, nothing)},
	} {
		b.Run(c.name, func(b *testing.B) {
			r := httptest.NewRequest(http.MethodGet, "/fares", nil)
			r.RemoteAddr = "10.0.0.1:80"
			r.Header.Set("X-Forwarded-For", "198.51.100.1, 203.0.113.7, 10.0.0.2")
			w := &discard{header: http.Header{}}
			b.ReportAllocs()
			for b.Loop() {
				clear(w.header)
				c.h.ServeHTTP(w, r)
			}
		})
	}
}

// free is a gate that costs nothing.
type free struct{ gate.Gate }

func (free) Enter(context.Context, string) (*gate.Admission, error) { return pass, nil }

var pass = &gate.Admission{OK: true}

type discard struct{ header http.Header }

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
func (d *discard) WriteHeader(int)             {}
