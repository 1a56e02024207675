// Package httplimit limits the rate of HTTP calls with the module's buckets: Transport those that a program makes,
// [NewMiddleware] those that it serves. Both ask a gate.Gate, by a key that a KeyFunc makes from the request.
//
//	transport, err := httplimit.NewTransport(gate.One(limiter, 500*time.Millisecond))
//	client := &http.Client{Transport: transport}
//
//	limit, err := httplimit.NewMiddleware(limits, httplimit.WithKey(httplimit.ByClient(proxies...)))
//	http.ListenAndServe(":8080", limit(mux))
//
// Both wait for a permit that falls due within what the gate allows, and refuse otherwise. A wait ends with the request's
// context, and its permit is given back. A permit whose time has come is used, whatever becomes of the request.
//
// The fields RateLimit and RateLimit-Policy of the middleware are those of draft-ietf-httpapi-ratelimit-headers-11, which
// is not a standard yet.
package httplimit
