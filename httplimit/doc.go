// Package httplimit limits the rate of HTTP calls: a [Transport] limits those that a program makes, and the handler of
// [NewMiddleware] those that it serves. Both use a gate.Gate, with a key that a KeyFunc makes from the request.
//
//	transport, err := httplimit.NewTransport(gate.One(limiter, 500*time.Millisecond))
//	client := &http.Client{Transport: transport}
//
//	limit, err := httplimit.NewMiddleware(limits, httplimit.WithKey(httplimit.ByClient(proxies...)))
//	http.ListenAndServe(":8080", limit(mux))
//
// Both wait for a permit that falls due within the time that the gate allows, and refuse otherwise. A wait ends with the
// request's context, and its permit is refunded. A permit whose due time has passed is used, whatever happens to the request.
//
// The fields RateLimit and RateLimit-Policy of the middleware are those of draft-ietf-httpapi-ratelimit-headers-11, which
// is not a standard yet.
package httplimit
