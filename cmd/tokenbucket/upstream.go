package main

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// upstream is the server that the gateways protect. It records when each call reaches it.
type upstream struct {
	url    string
	origin time.Time
	server *http.Server

	mu       sync.Mutex
	arrivals []time.Duration
}

func startUpstream(origin time.Time) (*upstream, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	u := &upstream{url: "http://" + listener.Addr().String() + bucketName, origin: origin}
	u.server = &http.Server{Handler: http.HandlerFunc(u.serve), ReadHeaderTimeout: 5 * time.Second}
	go u.server.Serve(listener)
	return u, nil
}

func (u *upstream) serve(w http.ResponseWriter, _ *http.Request) {
	now := time.Since(u.origin)
	u.mu.Lock()
	u.arrivals = append(u.arrivals, now)
	u.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
}

func (u *upstream) seen() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.arrivals)
}

func (u *upstream) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if u.server.Shutdown(ctx) != nil {
		u.server.Close()
	}
}
